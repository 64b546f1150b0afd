"""Runs in this process: from an experiment to its records, its proof, its engine and its result.

Several runs go side by side, so that a GPU trains the clients of all of them as one program:

    python -m coterie.experiment.local FOLDER...

Each run's experiment stands beside its folder, in FOLDER.yaml. Every run keeps a folder, a ledger and a
checkpoint of its own, as if it ran alone, and resumes in any company. What stops a run is written to
FOLDER.log and stops no other.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from coterie.algorithms import find_algorithm
from coterie.algorithms.record.oracle import TOLD
from coterie.data import ClustersFederation, Federation, build_federation, load_dataset
from coterie.data.task_file import task_facts
from coterie.engines.clients import WORKER_BYTES, processes_for
from coterie.engines.driver import Outcomes, Work, answer_all, answer_together
from coterie.engines.local import LocalEngine, coin_key, randomness_caveat
from coterie.engines.secret import SEEDED
from coterie.errors import CoterieError, InputError, ModelError, check_memory
from coterie.experiment.calibrated import (
    HELD_OUT,
    OWN_CHOICE,
    PUBLIC_COUNT,
    REFERENCES,
    CalibratedRun,
    Population,
    calibrate_run,
    counts_clients,
    delta_caveat,
    reported_of,
)
from coterie.experiment.callbacks import Callbacks
from coterie.experiment.evaluator import Evaluator, LocalScores, wants_references
from coterie.experiment.experiment_file import (
    ExperimentSource,
    experiment_of,
    read_experiment,
    read_recorded,
)
from coterie.experiment.folder import RunFolder, check_out, default_folder
from coterie.experiment.loop import Run, open_folder
from coterie.experiment.own_code import in_own_code, own_caveats
from coterie.experiment.recipe import sized
from coterie.experiment.recorded import check_folder
from coterie.experiment.registered import Booking
from coterie.experiment.result import RunResult
from coterie.experiment.schema import EvaluationKind, Experiment
from coterie.experiment.seal import Seal
from coterie.files import beside, write_text
from coterie.models.features import public_data_caveats
from coterie.privacy import Budget, Custody, HeldOut, Unit
from coterie.training.learner import Learner

T = TypeVar("T")
PERSONAL = (
    "the run folder keeps the personal part of every client's model as it was learnt, without noise "
    "(checkpoint/*/personal.safetensors): it is not covered, and must not be given away"
)
SHARED_RECORDS = "a simulated federation: clusters hold the same records under different shifts"


def run(
    experiment: ExperimentSource = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    callbacks: Callbacks | None = None,
) -> RunResult:
    """Run an experiment (a file, sections, an object, or the built-in default) and return what it found."""
    chosen = experiment_of(experiment)

    def resumable(path: Path) -> bool:
        files = RunFolder(path)
        unfinished = resume and files.exists and not files.finished
        return unfinished and read_experiment(files.experiment) == as_begun(chosen, path)

    name = f"{chosen.algorithm.name}-{chosen.data.name}".replace(":", ".")
    target = InputError.path_of("out", out) if out is not None else default_folder(name, resumable)
    done = finished(chosen, target, resume=resume)
    return done or finish(calibrate(as_begun(chosen, target)), RunFolder(target), callbacks)


def as_begun(experiment: Experiment, target: Path) -> Experiment:
    """The experiment, in which what is auto has the numbers of the run that the folder holds, if it does."""
    files = RunFolder(target)
    return experiment.with_numbers_of(read_recorded(files.experiment)) if files.exists else experiment


def finish(calibrated: CalibratedRun, files: RunFolder, callbacks: Callbacks | None = None) -> RunResult:
    """Begin a run, or go on with it, to its end."""
    try:
        return answer_all(work(calibrated, files, callbacks))
    except ModelError as error:
        name = calibrated.experiment.model.name
        raise ModelError(f"model.name: {name}: {error}; --resume continues from the last round") from None
    except (Exception, SystemExit) as error:
        if (theirs := in_own_code(calibrated.experiment, error)) is not None:
            raise InputError(f"{theirs}; --resume continues from the last round") from None
        raise


def work(calibrated: CalibratedRun, files: RunFolder, callbacks: Callbacks | None = None) -> Work[RunResult]:
    """The same, asking whoever drives it to have the engine answer."""
    experiment, federation = calibrated.experiment, calibrated.federation
    told = callbacks or Callbacks()
    assert federation is not None
    featured = calibrated.featured  # before anything of the run is written
    booking = Booking.of(calibrated, files)
    with (
        told.ending() as end,
        open_folder(files, calibrated, federation.fingerprint(), booking=booking) as opened,
    ):
        engine = LocalEngine(
            featured.federation,
            calibrated.learner,
            experiment.schedule.lr,
            calibrated.plan,
            opened.ledger,
            noise_key=opened.key,
            coin_key=coin_key(opened.key, experiment.seeds.simulation),
            public_seed=experiment.seeds.simulation,
            context=calibrated.context(),
            augmentation=calibrated.augmentation,
            workers=experiment.engine.workers,
            max_memory=experiment.engine.max_bytes,
            table=featured.table(calibrated.learner.device),
        )
        engine.members.personal = opened.personal
        scores = LocalScores(featured.federation, engine)
        exact = scores.exact if experiment.evaluation_kind is EvaluationKind.EXACT else None
        run = Run(calibrated, opened, engine, Evaluator(calibrated, scores, exact, opened.metrics.bodies))
        result = run.result((yield from run.rounds(told)))
        if booking is not None:
            booking.settle(opened.ledger)
        opened.finish(result.to_json(), task_facts(federation))
        end(result)
    return result


# --- before anything is written -------------------------------------------------------------------------


def load_federation(experiment: Experiment, *, counted: bool = False) -> Federation:
    """The clients and their records, which data, federation, bounds of persons and simulation seed decide.

    Args:
        counted: how many records each client has is all that will be asked.
    """
    seed = experiment.seeds.simulation
    dataset = load_dataset(experiment.data, seed, counted=counted)
    return build_federation(dataset, experiment.federation, seed, experiment.privacy.persons)


def truth_of(federation: Federation) -> dict[str, int] | None:
    """The true cluster of each client, where it is known."""
    truth, names = federation.truth, (client.name for client in federation.clients)
    return None if truth is None else dict(zip(names, truth, strict=True))


def calibrate(
    experiment: Experiment, federation: Federation | None = None, *, counted: bool = False
) -> CalibratedRun:
    """Load data and model, let the algorithm declare its plan, and find the noise that keeps its budget.

    Args:
        federation: the experiment's own, when it is loaded already.
        counted: for the plan alone: what is drawn is counted only, and nothing can be run.
    """
    experiment.check_all_acts()
    if federation is None:
        federation = load_federation(experiment, counted=counted)
    known, unit, kind = federation, experiment.privacy.unit, experiment.evaluation_kind
    most = experiment.privacy.persons.records if experiment.privacy.persons else None
    assert known.records_per_person == most, "records that were dealt for another unit"
    records = {client.name: len(client.train) for client in known.clients}
    experiment = sized(experiment, known.task, records)
    tests = {client.name: len(client.test) for client in known.clients}
    all_of_them = {
        name: HeldOut(count, math.inf, experiment.schedule.rounds) for name, count in tests.items()
    }
    reported = reported_of(experiment, all_of_them) if kind is EvaluationKind.PRIVATE else {}
    labels = known.preprocessing.label.range if known.preprocessing else None
    told = (known.structure, truth_of(known), tests, reported, known.caveats, labels)
    population = Population(known.task, records, *told)

    exact = kind is EvaluationKind.EXACT
    shifted = isinstance(experiment.federation, ClustersFederation) and len(experiment.federation.sizes) > 1
    windows, algorithm = (
        experiment.data.windows_per_character,
        find_algorithm(unit, experiment.algorithm.name),
    )

    def caveats(learner: Learner, budgets: Mapping[str, Budget]) -> dict[str | None, bool]:
        return {
            HELD_OUT: exact,
            REFERENCES: wants_references(experiment, known, learner.layout.size),
            OWN_CHOICE: exact and unit is Unit.CLIENT,
            SHARED_RECORDS: shifted,
            delta_caveat(experiment, population, budgets): True,
            SEEDED: experiment.seeds.noise is not None,
            PERSONAL: algorithm.personal,
            TOLD: algorithm.needs_truth and experiment.own_algorithm,
            PUBLIC_COUNT: counts_clients(experiment),
            **dict.fromkeys(own_caveats(experiment), True),
            **dict.fromkeys(public_data_caveats(experiment.model.features, known.task), True),
            **dict.fromkeys(known.caveats, True),
            f"a record is a window of text, and a character is in up to {windows} of them": (
                unit is Unit.RECORD and windows > 1
            ),
            randomness_caveat(learner): unit.within_client,
        }

    processes = processes_for(experiment.engine.workers or 1, len(known.clients))
    check_memory(f"engine.workers: {processes} processes", WORKER_BYTES * processes)
    return calibrate_run(experiment, population, device_of(experiment), caveats, Custody.ONE_PROCESS, known)


def finished(experiment: Experiment, target: Path, *, resume: bool) -> RunResult | None:
    """The result that the folder holds already; None when there is work to do and the folder fits it."""
    check_out(target)
    files = RunFolder(target)
    if files.exists:
        if not resume:
            raise InputError(
                f"{target}: holds a run already; --resume continues it, --out names another folder"
            )
        Seal(files.path).check(files.experiment.name)
        _check_same_experiment(files, experiment)
        if files.finished:
            check_finished(files)
            return RunResult.load(target)
    elif target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target}: exists and is not a run folder; --out names another")
    return None


def check_finished(files: RunFolder) -> None:
    """Refuse a finished run whose files changed; nobody needs its noise key any more."""
    check_folder(files)
    files.secret.unlink(missing_ok=True)  # a crash may have come between result and deletion


def device_of(experiment: Experiment) -> torch.device:
    """Where it trains on this machine."""
    wanted = experiment.engine.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("engine.device: 'cuda' is not available on this machine; allowed here: auto, cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _check_same_experiment(files: RunFolder, experiment: Experiment) -> None:
    experiment = as_begun(experiment, files.path)
    before = read_recorded(files.experiment).model_dump(mode="json")
    for section, content in experiment.model_dump(mode="json").items():
        for key in {**before[section], **content}:
            if before[section].get(key) != content.get(key):
                raise InputError(
                    f"{section}.{key}: {content.get(key)!r} is not {before[section].get(key)!r}, with "
                    f"which {files.path} was begun; resume it as it was or start a new run"
                )


# --- several runs side by side --------------------------------------------------------------------------


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
            dealt = f"{experiment.federation!r} {experiment.seeds.simulation} {experiment.privacy.persons!r}"
            records = f"{experiment.data!r} {dealt}"
            if records not in federations:
                federations[records] = load_federation(experiment)
            begun = work(calibrate(as_begun(experiment, path), federations[records]), RunFolder(path))
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


def fit_together(experiment: Experiment) -> str:
    """Experiments for which this is the same train the same network on the same kind of data."""
    return f"{experiment.data!r} {experiment.model!r} {experiment.privacy.unit} {experiment.engine!r}"


def reason_of(failure: Exception) -> str:
    """What stopped a run, in one line."""
    parts = [str(failure) or type(failure).__name__, *getattr(failure, "__notes__", ())]
    text = " ".join("; ".join(parts).split())
    return text if isinstance(failure, CoterieError) else f"{type(failure).__name__}: {text}"


def log_failure(path: Path, reason: str) -> None:
    write_text(beside(path, ".log"), f"error: {reason}\n")


def main(folders: Sequence[str]) -> int:
    experiments = {path: read_experiment(beside(path, ".yaml")) for path in map(Path, folders)}
    failures = run_together(experiments).failures
    for path, failure in failures.items():
        log_failure(path, reason_of(failure))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
