"""A data set by its name, and what its folder remembers of the registers that it was entered in."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import CoterieError, InputError, LedgerError
from coterie.files import json_text, read_json, write_text
from coterie.privacy import ChainHead
from coterie.register.lines import RegisterLine

MARK = ".coterie-register.json"
"""In a folder of records: whoever copies the folder copies it, too."""


@dataclass(frozen=True)
class Mark(RegisterLine):
    """What a folder remembers of one register: as what it was entered, and how long the register was then."""

    called = "mark"
    data: str
    head: ChainHead


@dataclass(frozen=True)
class DataSet:
    """What a user calls one data set: a folder, or a function that makes records.

    Args:
        key: by which it is found again.
        folder: where its mark is, if it is a folder.
    """

    key: str
    folder: Path | None = None

    @classmethod
    def of_folder(cls, path: Path) -> "DataSet":
        """The records of a folder, whatever they are at the time."""
        whole = path.resolve()
        return cls(f"folder {whole}", whole)

    @classmethod
    def of_function(cls, name: str, options: Mapping[str, object]) -> "DataSet":
        """The records that a user's own function makes with these options."""
        return cls(f"function {name} {json.dumps(options, sort_keys=True, default=str)}")

    def __str__(self) -> str:
        return str(self.folder) if self.folder is not None else self.key.removeprefix("function ")

    def marks(self) -> dict[str, Mark]:
        """What the folder remembers, by register."""
        path = None if self.folder is None else self.folder / MARK
        if path is None or not path.exists():
            return {}
        try:
            return {str(name): Mark.from_json(mark) for name, mark in read_json(path).items()}
        except (LedgerError, InputError, AttributeError):
            raise LedgerError(
                f"{path}: says in which registers these records were entered, and is damaged; put it back"
            ) from None

    def mark(self, register: str, mark: Mark) -> None:
        """Let the folder remember; one that cannot be written is known by its path and its records."""
        if self.folder is not None:
            kept = {**self.marks(), register: mark}
            content = {name: each.to_json() for name, each in sorted(kept.items())}
            with suppress(CoterieError, OSError):
                write_text(self.folder / MARK, json_text(content))
