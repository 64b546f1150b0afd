"""One attempt to get something strange through: files in an empty folder, and a command over them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

Content = bytes | str | None
"""What stands under a name: bytes make a file, None a folder, a text a symbolic link to it."""
FIFO = "fifo:"
"""In place of a link: a pipe with a name, which nobody writes to."""


@dataclass(frozen=True)
class Case:
    """A command line over a folder.

    Args:
        kind: which of the fuzzers made it.
        arguments: what follows `coterie`; bytes that are no text as surrogates, as Python has them.
        files: contents by path.
        base: a folder that is copied first, such as that of a finished run.
        option: the one key that was changed, where that is all there is.
        without: the same case without that change, whose answer must be another.
        broken: whether a claim was changed, so that no command may accept it.
        room: bytes that a file may grow to, as on a disk that is nearly full; None: as many as it likes.
    """

    kind: str
    arguments: tuple[str, ...]
    files: Mapping[str, Content] = field(default_factory=dict)
    base: Path | None = None
    option: str | None = None
    without: Case | None = None
    broken: bool = False
    room: int | None = None

    def lay_out(self, folder: Path) -> None:
        """Write the files into an empty folder."""
        if self.base is not None:
            shutil.copytree(self.base, folder, dirs_exist_ok=True, symlinks=True)
        for name, content in self.files.items():
            _put(folder / name, content)


def _put(path: Path, content: Content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    elif content == FIFO:
        os.mkfifo(path)
    elif isinstance(content, str):
        path.symlink_to(content)
    else:
        path.write_bytes(content)


class Outcome(StrEnum):
    """What became of a case; the first three are as they should be."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    FAILED = "exit 1"
    HANG = "hang"
    TRACEBACK = "traceback"
    BARE_NAME = "bare exception name"
    HALF_WRITTEN = "half-written"
    IGNORED = "ignored option"
    UNSEEN = "unseen change"
    NOT_ONE_LINE = "not one line"
    NOT_JSON = "not one JSON object"
    OTHER_CODE = "another exit code"

    @property
    def is_fault(self) -> bool:
        return self not in (Outcome.ACCEPTED, Outcome.REFUSED, Outcome.FAILED)
