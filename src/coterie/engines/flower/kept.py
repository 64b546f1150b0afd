"""What a site keeps for one experiment: where each file is, and what is written about a session.

Reading it loads no torch: that comes with the session itself, which computes.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from coterie.engines.flower.contract import Contract
from coterie.errors import CoterieError, InputError
from coterie.files import json_text, read_json, sync, write_json
from coterie.privacy import Budget, ChainHead, Ledger
from coterie.privacy.plain import Plain


class SiteFolder:
    """Paths inside a site's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.contract = path / "contract.json"
        self.consent = path / "consent.json"
        self.secret = path / "noise.key"
        self.ledger = path / "ledger.jsonl"
        self.answers = path / "answers"
        self.features = path / "features"
        self.finished = path / "finished.json"


class Kept(Plain):
    """What a site writes into its folder about a session, one file each."""

    @classmethod
    def load(cls, path: Path) -> Self:
        stored = read_json(path)
        try:
            return cls.from_json(stored)
        except CoterieError:
            raise InputError(f"{path}: not {cls.called} of this version") from None

    def as_read(self) -> Self:
        """What a file that is written now will say to whoever reads it."""
        return self.from_json(json.loads(json_text(self.to_json())))

    def save(self, path: Path) -> None:
        write_json(path, self.to_json())
        sync(path.parent)


@dataclass(frozen=True)
class Signed(Kept):
    """What a site agreed to.

    Args:
        epsilon, evaluation_epsilon: what its operator then allowed.
        key: fingerprint of its noise key.
        ledger: its head, when this was last written: the file may be ahead of it, never behind.
    """

    called = "a contract"
    contract: Contract
    epsilon: float
    evaluation_epsilon: float | None
    key: str
    ledger: ChainHead

    def open_ledger(self, files: SiteFolder, anchor: ChainHead | None) -> Ledger:
        """The ledger that enforces it: of the records that are learnt from, and of those held out."""
        contract, delta = self.contract, self.contract.delta
        budgets = {contract.client: Budget(self.epsilon, delta)}
        if contract.scored is not None:
            budgets[contract.scored.subject] = Budget(self.evaluation_epsilon or 0.0, delta)
        return Ledger.open(
            files.ledger,
            contract.own_plan,
            budget=budgets,
            accountant=contract.accountant,
            anchor=anchor,
            seen_by=files.contract.name,
        )


@dataclass(frozen=True)
class Finished(Kept):
    """How a session ended: under which contract, what it spent, and the head of its ledger."""

    called = "the end of a session"
    contract: str
    epsilon: float
    ledger: ChainHead
