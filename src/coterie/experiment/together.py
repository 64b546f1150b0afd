"""Several runs in one process, side by side, so that a GPU trains the clients of all of them as one program.

    python -m coterie.experiment.together FOLDER...

Each run's experiment stands beside its folder, in FOLDER.yaml. Every run keeps a folder, a ledger and a
checkpoint of its own, as if it ran alone, and resumes in any company. What stops a run is written to
FOLDER.log and stops no other.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from coterie.data import Federation
from coterie.engines.driver import Outcomes, Work, answer_together
from coterie.errors import CoterieError
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.folder import RunFolder
from coterie.experiment.local import calibrate, finished, load_federation, work
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.files import beside

T = TypeVar("T")


def run_together(
    experiments: Mapping[Path, Experiment], keep: Callable[[Path], None] = lambda path: None
) -> Outcomes[Path, RunResult]:
    """Begin or resume the run of every folder, and finish all of them.

    Args:
        keep: is called with a run's folder before anything of a round is released, and at the run's end.
    """
    federations: dict[str, Federation] = {}
    works: dict[Path, Work[RunResult]] = {}
    done: dict[Path, RunResult] = {}
    failures: dict[Path, Exception] = {}
    for path, experiment in experiments.items():
        try:
            if (result := finished(experiment, path, resume=True)) is not None:
                done[path] = result
                continue
            records = _records_of(experiment)
            if records not in federations:
                federations[records] = load_federation(experiment)
            begun = work(calibrate(experiment, federations[records]), RunFolder(path))
            works[path] = _kept(begun, partial(keep, path))
        except Exception as failure:
            failures[path] = failure
    ended = answer_together(works)
    return Outcomes({**done, **ended.results}, {**failures, **ended.failures})


def _kept(work: Work[T], keep: Callable[[], None]) -> Work[T]:
    """The same work; what it has on disk is kept whenever a round begins, and at the end."""
    round = 0
    try:
        ask = next(work)
        while True:
            if ask.round != round:
                keep()
                round = ask.round
            ask = work.send((yield ask))
    except StopIteration as done:
        result: T = done.value
    keep()
    return result


def _records_of(experiment: Experiment) -> str:
    """What decides a federation's records."""
    return f"{experiment.data!r} {experiment.federation!r} {experiment.seeds.simulation}"


def fit_together(experiment: Experiment) -> str:
    """Experiments for which this is the same train the same network on the same kind of data."""
    return f"{experiment.data!r} {experiment.model!r} {experiment.privacy.unit} {experiment.engine!r}"


def reason_of(failure: Exception) -> str:
    """What stopped a run, in one line."""
    text = " ".join(str(failure).split()) or type(failure).__name__
    return text if isinstance(failure, CoterieError) else f"{type(failure).__name__}: {text}"


def log_failure(path: Path, reason: str) -> None:
    beside(path, ".log").write_text(f"error: {reason}\n", encoding="utf-8")


def main(folders: Sequence[str]) -> int:
    paths = [Path(folder) for folder in folders]
    outcomes = run_together({path: read_experiment(beside(path, ".yaml")) for path in paths})
    for path, failure in outcomes.failures.items():
        log_failure(path, reason_of(failure))
    return 1 if outcomes.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
