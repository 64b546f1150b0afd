"""Files of computed features: one for each set of records and transform, for its owner alone, within a limit.

An entry is a file of float32 numbers, and one that says how many bytes it has and what their digest is. It
appears whole or not at all, one process computes it while others wait, and whoever uses it holds it locked:
what nobody holds goes, oldest first, when there is no more room.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from coterie.errors import InputError
from coterie.files import replacing, writing

FOLDER, LIMIT = "COTERIE_CACHE", "COTERIE_CACHE_GIB"
DEFAULT_GIB = 48.0
_NUMBERS, _ABOUT = ".f32", ".json"


@dataclass(frozen=True)
class CachedFeatures:
    """An entry in use: as long as `held` is open, it stays."""

    path: Path
    digest: str
    held: IO[bytes]


class Draft:
    """An entry that is being written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self.size = file, hashlib.sha256(), 0

    def write(self, numbers: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        data = np.ascontiguousarray(numbers, dtype=np.float32).reshape(-1).view(np.uint8).data
        self._digest.update(data)
        self._file.write(data)
        self.size += len(data)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


class FeatureCache:
    """A folder of entries."""

    def __init__(self, folder: Path | None = None, gib: float | None = None) -> None:
        """Args:
        folder: by default `features` in `$COTERIE_CACHE`, or in `~/.cache/coterie`.
        gib: most that all entries may take; by default `$COTERIE_CACHE_GIB`, or 48.
        """
        root = Path(os.environ.get(FOLDER) or Path.home() / ".cache" / "coterie")
        self.folder = folder or root / "features"
        self.limit = int((_limit() if gib is None else gib) * 2**30)

    def entry(self, key: str, size: int, fill: Callable[[Draft], None], asked_by: str) -> CachedFeatures:
        """The entry of this key; where there is none, `fill` writes it.

        Args:
            size: bytes that it has.
            asked_by: key of the experiment that begins a refusal.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked(key):
            found = self._open(key, size)
            if found is None:
                self._make_room(size, asked_by)
                self._write(key, size, fill)
                found = self._open(key, size)
            assert found is not None, "an entry that was just written is there"
            return found

    def _path(self, key: str, kind: str) -> Path:
        return self.folder / f"{key}{kind}"

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """One process at a time computes an entry, or looks for it."""
        path = self._path(key, ".lock")
        with writing(path):
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _open(self, key: str, size: int) -> CachedFeatures | None:
        path = self._path(key, _NUMBERS)
        try:
            about = json.loads(self._path(key, _ABOUT).read_text(encoding="utf-8"))
            held = path.open("rb")
        except (OSError, ValueError):
            return None
        fcntl.flock(held, fcntl.LOCK_SH)
        whole = os.fstat(held.fileno()).st_size == size and path.exists()
        if not whole or not isinstance(about, dict) or about.get("bytes") != size:
            held.close()
            return None
        os.utime(path)  # used last
        return CachedFeatures(path, str(about.get("sha256")), held)

    def _write(self, key: str, size: int, fill: Callable[[Draft], None]) -> None:
        self._path(key, _ABOUT).unlink(missing_ok=True)
        with replacing(self._path(key, _NUMBERS), mode=0o600) as path, path.open("wb") as file:
            draft = Draft(file)
            fill(draft)
        assert draft.size == size, f"{draft.size} bytes of features, not {size}"
        with replacing(self._path(key, _ABOUT), mode=0o600) as path:
            path.write_text(json.dumps({"bytes": size, "sha256": draft.digest}), encoding="utf-8")

    def _make_room(self, size: int, asked_by: str) -> None:
        """Drop what nobody uses, oldest first, until so many bytes more are within the limit."""
        entries = sorted(self.folder.glob(f"*{_NUMBERS}"), key=_used)
        taken = sum(_bytes(path) for path in entries)
        for path in entries:
            if taken + size <= self.limit:
                break
            gone = _bytes(path)
            if _dropped(path):
                taken -= gone
        gib, has = size / 2**30, f"{LIMIT} allows {self.limit / 2**30:g}"
        InputError.when(
            taken + size > self.limit,
            f"{asked_by} would take {gib:.1f} GiB in {self.folder}, where {taken / 2**30:.1f} are in use and "
            f"{has}; allowed: a larger {LIMIT}, or fewer records",
        )
        free = shutil.disk_usage(self.folder).free
        InputError.when(
            size > free,
            f"{asked_by} would take {gib:.1f} GiB in {self.folder}, where {free / 2**30:.1f} are free; "
            f"allowed: another folder ({FOLDER}), or fewer records",
        )


def _limit() -> float:
    said = os.environ.get(LIMIT, "")
    try:
        value = float(said) if said else DEFAULT_GIB
    except ValueError:
        value = 0.0
    InputError.when(not 0.0 < value < 2**30, f"{LIMIT}: {said!r}; allowed: a number of GiB above 0")
    return value


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process dropped it meanwhile
        return 0.0


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _dropped(path: Path) -> bool:
    """Remove an entry that nobody holds."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for kind in (_ABOUT, _NUMBERS):
                path.with_suffix(kind).unlink(missing_ok=True)
    except FileNotFoundError:
        return True
    except OSError:  # somebody holds it
        return False
    return True
