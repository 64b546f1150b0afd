"""Where the register of this user is, and the key that its fingerprints are made with."""

import hashlib
import os
import secrets
import time
from io import FileIO
from pathlib import Path

from coterie.errors import LedgerError
from coterie.privacy.locked_file import create, open_locked

VARIABLE = "COTERIE_REGISTER"
"""Names another folder."""
CHAIN, KEY, RECORDS = "register.jsonl", "key", "records"
OWNER_ALONE = 0o600
_PATIENCE = 60.0
"""Seconds to wait for another process, which holds the register for a moment only."""


def place() -> Path:
    """The folder of the register: that of the variable, or in the user's own place for state."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "coterie" / "register"


def read_key(folder: Path) -> bytes:
    """The secret key of a register."""
    try:
        return bytes.fromhex((folder / KEY).read_text(encoding="ascii"))
    except FileNotFoundError:
        lost = "without it no record is known again; put it back"
    except ValueError:
        lost = "damaged: without it no record is known again; put it back"
    except OSError as problem:
        lost = f"cannot be read ({problem.strerror})"
    raise LedgerError(f"{folder / KEY}: the key of the register: {lost}")


def make_key(folder: Path) -> None:
    """A key of the operating system's, unless there is one."""
    file = create(folder / KEY, secrets.token_hex(32).encode(), mode=OWNER_ALONE)
    if file is not None:
        file.close()


def fingerprint(key: bytes) -> str:
    """By which a key is recognised that is not told."""
    return hashlib.sha256(b"key of a register" + key).hexdigest()


def open_waiting(path: Path) -> FileIO:
    """The file for this process alone, as soon as no other has it."""
    latest = time.monotonic() + _PATIENCE
    while True:
        try:
            return open_locked(path)
        except LedgerError:
            if time.monotonic() > latest:
                raise
        time.sleep(0.02)
