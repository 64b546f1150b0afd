"""Run folders that arrive from other machines: packed, unpacked, and put in their place in one step.

Imports nothing that is slow to load: the process that keeps the folders of a sweep does nothing else.
"""

import io
import shutil
import tarfile
from pathlib import Path

from coterie.errors import CoterieError
from coterie.files import beside, copy_file

ARRIVED = ".arrived"
"""What is complete, beside the folder whose place it takes."""


class Keeper:
    """Keeps the run folders of a sweep, on the machine that has them."""

    def __init__(self) -> None:
        self._attempts: dict[str, int] = {}

    def begin(self, path: str) -> tuple[bytes | None, int]:
        """What there is of a run, and the number of this attempt to go on with it."""
        self._attempts[path] = self._attempts.get(path, 0) + 1
        return (pack(Path(path)) if Path(path).exists() else None), self._attempts[path]

    def keep(self, path: str, attempt: int, packed: bytes) -> None:
        """Put a run's folder in the place of what was there before."""
        if attempt != self._attempts[path]:
            raise CoterieError("the run goes on elsewhere")  # this machine was taken for lost
        arriving = beside(Path(path), ".arriving")
        shutil.rmtree(arriving, ignore_errors=True)
        unpack(packed, arriving)
        arriving.rename(beside(Path(path), ARRIVED))
        settle(Path(path))


def settle(path: Path) -> None:
    """Let what has arrived of a run take its place, file by file; after a crash, again."""
    arrived = beside(path, ARRIVED)
    if not arrived.exists():
        return
    if not path.exists():
        arrived.rename(path)
        return
    for source in arrived.rglob("*"):
        target = path / source.relative_to(arrived)
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            copy_file(source, target)
    for old in sorted(path.rglob("*"), reverse=True):
        if not (arrived / old.relative_to(path)).exists():
            old.rmdir() if old.is_dir() else old.unlink()
    shutil.rmtree(arrived)


def pack(folder: Path) -> bytes:
    """A folder with all its files as they are now."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.add(folder, arcname=".")
    return content.getvalue()


def unpack(packed: bytes, folder: Path) -> None:
    folder.mkdir(mode=0o700)  # files get their modes once they are written, the folder last of all
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
