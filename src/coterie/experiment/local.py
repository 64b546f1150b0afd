"""One run in this process: from an experiment to its records, its proof, its engine and its result."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from coterie.algorithms import find_algorithm
from coterie.data import ClustersFederation, Federation, build_federation, load_dataset
from coterie.engines.driver import Work, answer_all
from coterie.engines.local import LocalEngine, coin_key, randomness_caveat
from coterie.engines.secret import SEEDED
from coterie.errors import InputError, ModelError
from coterie.experiment import references
from coterie.experiment.calibrated import (
    HELD_OUT,
    OWN_CHOICE,
    REFERENCES,
    CalibratedRun,
    Population,
    calibrate_run,
    count_caveats,
    delta_caveats,
    reported_of,
)
from coterie.experiment.evaluator import Evaluator, LocalScores
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.folder import RunFolder, default_folder
from coterie.experiment.loop import Run
from coterie.experiment.opened import open_folder
from coterie.experiment.recorded import check_folder
from coterie.experiment.result import Callbacks, RunResult
from coterie.experiment.schema import EvaluationKind, Experiment
from coterie.experiment.seal import Seal
from coterie.models import code_caveats
from coterie.privacy import Budget, Custody, HeldOut, Unit
from coterie.training.learner import Learner

PERSONAL = (
    "the run folder keeps the personal part of every client's model as it was learnt, without noise "
    "(checkpoint/*/personal.safetensors): it is not covered, and must not be given away"
)
SHARED_RECORDS = "a simulated federation: clusters hold the same records under different shifts"


def run(
    experiment: Experiment | str | Path | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    callbacks: Callbacks | None = None,
) -> RunResult:
    """Run an experiment (a file, an object, or the built-in default) and return what it found."""
    if not isinstance(experiment, Experiment):
        experiment = read_experiment(Path(experiment) if experiment is not None else None)
    chosen = experiment

    def resumable(path: Path) -> bool:
        files = RunFolder(path)
        unfinished = resume and files.exists and not files.finished
        return unfinished and read_experiment(files.experiment) == chosen

    name = f"{experiment.algorithm.name}-{experiment.data.name}"
    target = Path(out) if out is not None else default_folder(name, resumable)
    done = finished(experiment, target, resume=resume)
    return done or finish(calibrate(experiment), RunFolder(target), callbacks)


def finish(calibrated: CalibratedRun, files: RunFolder, callbacks: Callbacks | None = None) -> RunResult:
    """Begin a run, or go on with it, to its end."""
    try:
        return answer_all(work(calibrated, files, callbacks))
    except ModelError as error:
        name = calibrated.experiment.model.name
        raise ModelError(f"model.name: {name}: {error}; --resume continues from the last round") from None


def work(calibrated: CalibratedRun, files: RunFolder, callbacks: Callbacks | None = None) -> Work[RunResult]:
    """The same, asking whoever drives it to have the engine answer."""
    experiment, federation = calibrated.experiment, calibrated.federation
    assert federation is not None
    with open_folder(files, calibrated, federation.fingerprint()) as opened:
        engine = LocalEngine(
            federation,
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
        )
        engine.members.personal = opened.personal
        scores = LocalScores(calibrated, engine)
        exact = scores.exact if experiment.evaluation_kind is EvaluationKind.EXACT else None
        run = Run(calibrated, opened, engine, Evaluator(calibrated, scores, exact, opened.metrics.bodies))
        state = yield from run.rounds((callbacks or Callbacks()).round)
        result = run.result(state)
        opened.finish(result.to_json())
    return result


# --- before anything is written -------------------------------------------------------------------------


def load_federation(experiment: Experiment) -> Federation:
    """The clients and their records, which data, federation and simulation seed alone decide."""
    seed = experiment.seeds.simulation
    return build_federation(load_dataset(experiment.data, seed), experiment.federation, seed)


def truth_of(federation: Federation) -> dict[str, int] | None:
    """The true cluster of each client, where it is known."""
    if federation.truth is None:
        return None
    return {client.name: own for client, own in zip(federation.clients, federation.truth, strict=True)}


def calibrate(experiment: Experiment, federation: Federation | None = None) -> CalibratedRun:
    """Load data and model, let the algorithm declare its plan, and find the noise that keeps its budget.

    Args:
        federation: the experiment's own, when it is loaded already.
    """
    if federation is None:
        federation = load_federation(experiment)
    known, unit, kind = federation, experiment.privacy.unit, experiment.evaluation_kind
    records = {client.name: len(client.train) for client in known.clients}
    tests = {client.name: len(client.test) for client in known.clients}
    all_of_them = {
        name: HeldOut(count, math.inf, experiment.schedule.rounds) for name, count in tests.items()
    }
    reported = reported_of(experiment, all_of_them) if kind is EvaluationKind.PRIVATE else {}
    population = Population(known.task, records, known.structure, truth_of(known), tests, reported)

    def caveats(learner: Learner, budgets: Mapping[str, Budget]) -> Iterator[str]:
        if kind is EvaluationKind.EXACT:
            yield HELD_OUT
            if references.wanted(experiment, known, learner.layout.size):
                yield REFERENCES
            if unit is Unit.CLIENT:
                yield OWN_CHOICE
        if isinstance(experiment.federation, ClustersFederation) and len(experiment.federation.sizes) > 1:
            yield SHARED_RECORDS
        yield from delta_caveats(experiment, population, budgets)
        if experiment.seeds.noise is not None:
            yield SEEDED
        if find_algorithm(unit, experiment.algorithm.name).personal:
            yield PERSONAL
        yield from count_caveats(experiment)
        yield from code_caveats(experiment.model)
        windows = experiment.data.windows_per_character
        if unit is Unit.RECORD and windows > 1:
            yield f"a record is a window of text, and a character is in up to {windows} of them"
        if unit is Unit.RECORD and (drawn := randomness_caveat(learner)) is not None:
            yield drawn

    return calibrate_run(experiment, population, _device(experiment), caveats, Custody.ONE_PROCESS, known)


def finished(experiment: Experiment, target: Path, *, resume: bool) -> RunResult | None:
    """The result that the folder holds already; None when there is work to do and the folder fits it."""
    files = RunFolder(target)
    if files.exists:
        if not resume:
            raise InputError(
                f"{target}: holds a run already; --resume continues it, --out names another folder"
            )
        Seal(files.path).check(files.experiment.name)
        _check_same_experiment(files, experiment)
        if files.finished:
            check_folder(files)
            files.secret.unlink(missing_ok=True)  # a crash may have come between result and deletion
            return RunResult.load(target)
    elif target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target}: exists and is not a run folder; --out names another")
    return None


def _device(experiment: Experiment) -> torch.device:
    wanted = experiment.engine.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("engine.device: 'cuda' is not available on this machine; allowed here: auto, cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _check_same_experiment(files: RunFolder, experiment: Experiment) -> None:
    stored = read_experiment(files.experiment)
    if stored == experiment:
        return
    before, now = stored.model_dump(mode="json"), experiment.model_dump(mode="json")
    for section, content in now.items():
        for key in {**before[section], **content}:
            if before[section].get(key) != content.get(key):
                raise InputError(
                    f"{section}.{key}: {content.get(key)!r} is not {before[section].get(key)!r}, with "
                    f"which {files.path} was begun; resume it as it was or start a new run"
                )
