"""An append-only file that one process at a time may write, and in which a line is whole or gone."""

import contextlib
import fcntl
import io
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from coterie.privacy.errors import LedgerError


class LedgerDiskError(LedgerError):
    """A disk that is full, or fails: nothing is broken, and the run can go on later."""

    exit_code = 1


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn a failure of the file system into one line that names the ledger; a pipe is never opened."""
    if path.exists() and not path.is_file():
        raise LedgerError(f"{path}: the ledger cannot be used: it is no file")
    try:
        yield
    except OSError as mistake:
        raise LedgerDiskError(f"{path}: the ledger cannot be used: {mistake.strerror}") from mistake


def create(path: Path, first: bytes, *, mode: int = 0o666) -> io.FileIO | None:
    """A new, locked ledger with its first line, or None when the file exists.

    The file appears under its name complete, by a link that fails if the name is taken: there is no moment
    in which a crash leaves an empty ledger, or a second process an unlocked one.
    """
    for left in (each for each in path.parent.iterdir() if each.name.startswith(f".{path.name}.draft-")):
        with contextlib.suppress(OSError, LedgerError), open_locked(left):
            left.unlink()  # of a process that was killed: nobody holds it
    if path.exists():
        return None
    draft = path.with_name(f".{path.name}.draft-{secrets.token_hex(8)}")
    file = io.FileIO(os.open(draft, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, mode), "r+")
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            append(file, first)
            os.link(draft, path)
        finally:
            draft.unlink()
        _sync_directory(path.parent)
    except BaseException as mistake:
        file.close()
        if isinstance(mistake, FileExistsError):
            return None
        raise
    return file


def open_locked(path: Path) -> io.FileIO:
    """The file for this process alone."""
    file = io.FileIO(os.open(path, os.O_RDWR | os.O_APPEND), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise LedgerError(f"{path}: another run has this ledger open; only one may spend at a time") from None
    return file


def append(file: io.FileIO, data: bytes) -> None:
    """Write a line; when this returns, it survives any crash."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file.fileno(), rest) :]
    os.fsync(file.fileno())


def contents(file: io.FileIO) -> bytes:
    """Everything in the file."""
    file.seek(0)
    return file.readall()


def cut_torn_line(file: io.FileIO, size: int) -> None:
    """Drop what follows the last complete line: its writer died inside `charge`, so nothing was released."""
    if os.fstat(file.fileno()).st_size > size:
        os.ftruncate(file.fileno(), size)
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
