"""The noise key of a run, and what it is for."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coterie.errors import InputError
from coterie.files import hashed_text, read_hashed, writing
from coterie.privacy import SecretKey
from coterie.privacy.wording import SIMULATION

SEEDED = f"{SIMULATION}: noise comes from a seed, private against nobody who knows it"
"""What a guarantee must add where the key comes from a seed."""


@dataclass(frozen=True)
class RunSecret:
    """What must not leave the machine while a run can still be resumed: its noise key, and what it is for.

    The same noise on other data, or at another scale, would cancel in the difference: a run resumes on the
    same data and under the same plan, or never. The file carries a hash of itself: a changed key would put
    other noise on what was charged already.
    """

    key: SecretKey
    data: str
    plan: str

    def save(self, path: Path) -> None:
        content = hashed_text({"key": self.key.to_hex(), "data": self.data, "plan": self.plan})
        # One handle from first to last: what takes the file's place meanwhile is never written to.
        with writing(path), open(path, "x", opener=partial(os.open, mode=0o600)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, path: Path, known: str | None) -> "RunSecret":
        """The secret in a file.

        Args:
            known: fingerprint of the key that the books beside it were begun with. Another key would put
                other noise on what was charged already: a second sample for one charge.
        """
        if not path.exists():
            raise InputError(f"{path}: the noise key is gone, so the run cannot be resumed; start a new one")
        content = read_hashed(path)
        key = SecretKey.from_hex(str(content.get("key")))
        if key.fingerprint != known:
            raise InputError(
                f"{path}: not the noise key that the books beside it were begun with; restore that one, or "
                "begin anew in another folder"
            )
        return cls(key, str(content.get("data")), str(content.get("plan")))
