"""The run folder: which file holds what, written so that a crash leaves nothing half-done."""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from coterie.errors import InputError
from coterie.files import beside, read_lines, write_text


class _Named:
    """A path inside a folder, by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", kind: type) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """Paths inside `runs/<name>/`."""

    path: Path
    experiment = _Named("experiment.yaml")
    federation = _Named("federation.json")
    sites = _Named("sites.json")  # public facts of the sites, where clients are sites
    plan = _Named("plan.json")
    guarantee = _Named("guarantee.json")
    leakage = _Named("leakage.json")  # who learns how much about whom, where workers observe each other
    ledger = _Named("ledger.jsonl")
    metrics = _Named("metrics.jsonl")
    timing = _Named("timing.jsonl")  # wall-clock seconds, apart from the metrics, which repeat exactly
    participation = _Named("participation.jsonl")  # of sites, where that is no secret
    findings = _Named("findings.json")
    checkpoint = _Named("checkpoint")
    result = _Named("result.json")
    report = _Named("report.html")
    public = _Named("public.html")  # the report without any figure outside the guarantee
    secret = _Named("noise.key")

    @property
    def exists(self) -> bool:
        return self.experiment.exists()

    @property
    def finished(self) -> bool:
        return self.result.exists()


def default_folder(name: str, resumable: Callable[[Path], bool] = lambda path: False) -> Path:
    """The newest of `runs/name-*` that can be resumed; else the first of these numbers that is not taken."""
    base = Path("runs")
    for path in sorted(base.glob(f"{name}-*"), key=lambda path: path.stat().st_mtime, reverse=True):
        if resumable(path):
            return path
    return next(path for number in count(1) if not (path := base / f"{name}-{number}").exists())


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that appears under its name with all its first files in it, or not at all.

    Where the name is a symbolic link, the folder appears where it points to.
    """
    path = Path(os.path.realpath(path))
    if path.is_symlink():
        raise InputError(f"{path}: a symbolic link that leads back to itself; --out names another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = beside(path.with_name(f".{path.name}"), f".{secrets.token_hex(4)}")
    scratch.mkdir()
    try:
        yield scratch
        scratch.rename(path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def keep_rounds(path: Path, last: int) -> None:
    """Drop lines of rounds after `last`: those will run again."""
    if path.exists():
        kept = (json.dumps(line) + "\n" for line in read_lines(path) if line["round"] <= last)
        write_text(path, "".join(kept))
