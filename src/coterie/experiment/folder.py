"""The run folder: which file holds what, written so that a crash leaves nothing half-done."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from coterie.errors import InputError
from coterie.files import check_place, read_lines, replacing, write_text

_MOST_SECONDS = 1e12
"""No round takes longer."""


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
    task = _Named("task.json")  # what is predicted, and from which raw values
    sites = _Named("sites.json")  # public facts of the sites, where clients are sites
    plan = _Named("plan.json")
    guarantee = _Named("guarantee.json")
    code = _Named("code.json")  # which code of the user's own, where there is any
    leakage = _Named("leakage.json")  # who learns how much about whom, where workers observe each other
    ledger = _Named("ledger.jsonl")
    metrics = _Named("metrics.jsonl")
    timing = _Named("timing.jsonl")  # wall-clock seconds, apart from the metrics, which repeat exactly
    participation = _Named("participation.jsonl")  # of sites, where that is no secret
    handed = _Named("handed.jsonl")  # sites that took their models home
    findings = _Named("findings.json")
    checkpoint = _Named("checkpoint")
    result = _Named("result.json")
    register = _Named("register.json")  # where the records of the run are entered, if they are the user's
    report = _Named("report.html")
    public = _Named("public.html")  # the report without any figure outside the guarantee
    secret = _Named("noise.key")

    @property
    def exists(self) -> bool:
        """Whether a run was begun here; an experiment alone still waits to be run."""
        begun = (self.plan, self.guarantee, self.ledger, self.federation, self.task)
        return os.path.exists(self.experiment) and any(map(os.path.exists, begun))

    @property
    def finished(self) -> bool:
        return self.result.exists()


def default_folder(name: str, resumable: Callable[[Path], bool] = lambda path: False) -> Path:
    """The newest of `runs/name-*` that can be resumed; else the first of these numbers that is not taken."""
    base = Path("runs")
    for path in sorted(base.glob(f"{name}-*"), key=lambda path: path.stat().st_mtime, reverse=True):
        if resumable(path):
            return path
    return next(path for number in count(1) if not os.path.lexists(path := base / f"{name}-{number}"))


def check_out(path: Path) -> None:
    """Refuse a folder in which nothing could be run to its end, before anything is read or spent."""
    check_place(path, "--out")
    whole = Path(os.path.realpath(path))
    if whole.is_dir() and not any(whole.iterdir()) and (whole == Path.cwd() or os.path.ismount(whole)):
        raise InputError(f"--out: '{path}' is where we are, or a disk of its own; name a folder inside it")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that appears under its name with all its first files in it, or not at all.

    Where the name is a symbolic link, the folder appears where it points to.
    """
    path = Path(os.path.realpath(path))
    made = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path, folder=True) as draft:
            yield draft
    except BaseException:
        with suppress(OSError):
            for parent in made:
                parent.rmdir()
        raise


def keep_rounds(path: Path, last: int) -> None:
    """Drop lines of rounds after `last`: those will run again."""
    if path.exists():
        try:
            kept = [json.dumps(line) + "\n" for line in read_lines(path) if line["round"] <= last]
        except (KeyError, TypeError):
            raise InputError(f"{path}: a line without the number of its round") from None
        write_text(path, "".join(kept))


def check_times(path: Path) -> None:
    """Refuse a file of times that could not be added up when all rounds are done."""
    for phase in ("train", "evaluate"):
        seconds_in(path, phase)


def seconds_in(path: Path, phase: str) -> float:
    """Wall-clock seconds of one phase over all rounds, from the file of times."""
    found: list[Any] = [line.get(phase) for line in read_lines(path)]
    if not all(type(each) in (int, float) and 0.0 <= each <= _MOST_SECONDS for each in found):
        raise InputError(f"{path}: a line without the seconds of '{phase}'")
    return math.fsum(found)
