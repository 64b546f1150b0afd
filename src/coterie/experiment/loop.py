"""The run loop, the same on every engine, in the folder that it works in.

A folder is written, or checked and gone on with; then rounds, evaluation, metrics, checkpoint, result.
"""

import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from coterie.algorithms import AnyAlgorithm
from coterie.algorithms.protocol import Assignment, State
from coterie.engines.driver import Engine, Work, addressed
from coterie.engines.secret import RunSecret
from coterie.errors import InputError
from coterie.experiment import checkpoint, folder
from coterie.experiment.calibrated import CalibratedRun
from coterie.experiment.callbacks import Callbacks, ReleaseReport, RoundReport, RunStart
from coterie.experiment.checkpoint import Checkpoint, Personal
from coterie.experiment.evaluator import Evaluation, Evaluator, exact_figures
from coterie.experiment.experiment_file import to_yaml
from coterie.experiment.folder import RunFolder
from coterie.experiment.own_code import check_code, code_of
from coterie.experiment.recorded import check_folder
from coterie.experiment.registered import Booking
from coterie.experiment.result import (
    RunResult,
    clustering_accuracy,
    live_clusters,
    minority_found,
    same_partition,
)
from coterie.experiment.schema import refuse
from coterie.experiment.scores import scores_to_json
from coterie.experiment.seal import DROPPED, METRICS, ChainedLines, Seal
from coterie.files import Json, append_line, json_text, read_json, write_json, write_text
from coterie.privacy import POPULATION, Charge, Guarantee, Ledger, PrivacyPlan, SecretKey
from coterie.privacy.units import number_to_json

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenRunFolder:
    """A folder whose ledger is open and locked.

    Args:
        state: what the run goes on from.
        personal: what clients have kept to themselves so far.
        guarantee: with everything that must be said from now on.
        secret: None where the noise keys are those of sites.
    """

    files: RunFolder
    ledger: Ledger
    seal: Seal
    metrics: ChainedLines
    state: State
    personal: Personal
    guarantee: Guarantee
    secret: RunSecret | None

    @property
    def key(self) -> SecretKey:
        """The noise key of a run that has one here."""
        assert self.secret is not None
        return self.secret.key

    def save(self, state: State, personal: Personal) -> None:
        """Keep what the rounds so far have led to."""
        heads = {"ledger": self.ledger.head, "metrics": self.metrics.head, "seal": self.seal.lines.head}
        checkpoint.save(self.files.checkpoint, Checkpoint(state, heads, personal))

    def finish(self, result: Json, task: Json | None = None) -> None:
        """Write the result, sealed with all that it tells of; then nobody needs the noise key any more.

        Args:
            task: what the models are for, and how raw values become what they see, where that is known.
        """
        if task is not None:
            self.seal.write_text(self.files.task, json_text(task))
        heads = {"ledger": self.ledger.head.to_json(), "metrics": self.metrics.head.to_json()}
        if (saved := checkpoint.stored(self.files.checkpoint)) is not None:
            heads["checkpoint"] = {"digest": saved.digest}
        self.seal.write_text(self.files.result, json_text(result), **heads)
        self.files.secret.unlink(missing_ok=True)


def drop_models(files: RunFolder) -> None:
    """Remove the models of a finished run, on purpose: that they are gone is sealed before they go."""
    if not files.checkpoint.exists():
        return
    seal = Seal(files.path)
    if not seal.models_dropped:
        seal.lines.append({DROPPED: files.checkpoint.name})
    for saved in files.checkpoint.glob("round-*"):
        saved.rename(saved.with_name(f".{saved.name}"))  # a crash leaves a whole checkpoint, or none
    shutil.rmtree(files.checkpoint)


@contextmanager
def open_folder(
    files: RunFolder,
    calibrated: CalibratedRun,
    data: str | None,
    sites: Json | None = None,
    booking: Booking | None = None,
) -> Iterator[OpenRunFolder]:
    """Write down what will be run, or check that it is what was being run, and open the ledger.

    Args:
        data: what the noise key of this run is for; None where noise keys are those of sites.
        sites: public facts of the sites, where clients are sites.
        booking: of records that the register counts.
    """
    if files.timing.exists():
        folder.check_times(files.timing)
    if files.exists:
        secret = _check(files, calibrated, data)
    else:
        if booking is not None:
            booking.check()
        entered = booking.facts() if booking is not None else None
        secret = create_folder(files, calibrated, data, sites, entered)
    start = calibrated.start()
    saved = checkpoint.load(files.checkpoint, calibrated.algorithm.state_type, start)
    state = saved.state if saved else start
    with Ledger.open(
        files.ledger,
        calibrated.plan,
        budget=calibrated.budgets,
        accountant=calibrated.accountant,
        anchor=saved.heads["ledger"] if saved else Seal(files.path).ledger(),
    ) as ledger:
        # Only now: the ledger's lock says that no other process works in this folder.
        seal = Seal(files.path)
        seal.settle()
        if seal.ledger() is None:  # from now on, a ledger without this line is not this folder's
            seal.lines.append({"ledger": ledger.head.to_json()})
        if booking is not None:
            booking.begin(files, seal)
        said, metrics = _keep_caveats(files, seal, calibrated.guarantee), _metrics_of(files, state.round)
        folder.keep_rounds(files.timing, state.round)
        checkpoint.sweep(files.checkpoint)
        personal = saved.personal if saved else {}
        yield OpenRunFolder(files, ledger, seal, metrics, state, personal, said, secret)


def create_folder(
    files: RunFolder,
    calibrated: CalibratedRun,
    data: str | None,
    sites: Json | None,
    entered: Json | None = None,
) -> RunSecret | None:
    """Write down what will be run, before anything is charged."""
    secret, seed = None, calibrated.experiment.seeds.noise
    if data is not None:
        key = SecretKey.from_os() if seed is None else SecretKey.from_seed(seed)
        secret = RunSecret(key, data, calibrated.plan.digest())
    with folder.new_folder(files.path) as scratch:
        new = RunFolder(scratch)
        if secret is not None:
            secret.save(new.secret)
        contents = {
            new.sites: sites,
            new.register: entered,
            new.federation: calibrated.population.facts(calibrated.facts.parameters),
            new.code: code_of(calibrated.experiment, served=sites is not None),
            new.plan: calibrated.plan.to_json(),
            new.guarantee: calibrated.guarantee.to_json(),
            new.leakage: calibrated.leakage_facts(),
        }
        for path, content in contents.items():
            if content is not None:
                write_json(path, content)
        write_text(new.experiment, to_yaml(calibrated.experiment))
        Seal.create(scratch, key=secret.key.fingerprint if secret else None)
    return secret


def _check(files: RunFolder, calibrated: CalibratedRun, data: str | None) -> RunSecret | None:
    secret = None
    check_code(files.code, code_of(calibrated.experiment, served=files.sites.exists()))
    if data is not None:
        secret = RunSecret.load(files.secret, Seal(files.path).key)
        planned = calibrated.plan.digest(), calibrated.experiment.seeds.noise is not None
        refuse(
            {
                f"{files.path}: the data changed since this run began, or its noise key belongs to another "
                "run; start a new run": secret.data != data,
                f"{files.path}: the plan changed since this run began; start a new run": (
                    (secret.plan, secret.key.simulation) != planned
                ),
            }
        )
    log.info("checking what was done so far")
    check_folder(files)
    return secret


def _keep_caveats(files: RunFolder, seal: Seal, promised: Guarantee) -> Guarantee:
    """What was true of the rounds so far (noise of a GPU, say) stays said, wherever the run goes on."""
    stored = Guarantee.from_json(read_json(files.guarantee)).caveats
    both = replace(promised, caveats=tuple(dict.fromkeys((*stored, *promised.caveats))))
    if both.caveats != stored:
        seal.write_text(files.guarantee, json_text(both.to_json()))
    return both


def _metrics_of(files: RunFolder, rounds: int) -> ChainedLines:
    """The metrics of so many rounds, to be gone on with: later ones will run again."""
    lines = ChainedLines(files.metrics, METRICS)
    try:
        lines.cut(sum(int(body["round"]) <= rounds for body in lines.bodies))
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{files.metrics}: a line without the number of its round") from None
    return lines


# --- the rounds -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A calibrated run in its folder, with those who answer its requests and judge its models."""

    calibrated: CalibratedRun
    opened: OpenRunFolder
    engine: Engine
    evaluator: Evaluator

    def rounds(self, callbacks: Callbacks) -> Work[State]:
        """Do the rounds that are still to be done; whoever drives this has the engine answer."""
        opened, engine, algorithm = self.opened, self.engine, self.calibrated.algorithm
        state, experiment = opened.state, self.calibrated.experiment
        rounds = experiment.schedule.rounds
        start = RunStart(opened.files.path, experiment, opened.guarantee.line, state.round)
        callbacks.tell("on_start", start)
        if callbacks.on_release is not None:
            opened.ledger.listener = lambda charged: self._tell_releases(charged, callbacks)
        log.info("round %d of %d begins", min(state.round + 1, rounds), rounds)
        while state.round < rounds:
            began, waited = time.perf_counter(), engine.waited
            number = state.round + 1
            state = yield from addressed(algorithm.round(state), engine, number)
            self._check_next(state, number)
            trained = time.perf_counter()
            began += engine.waited - waited
            judged = self.evaluator.after(state)
            self._log(state, judged)
            seconds = {"train": trained - began, "evaluate": time.perf_counter() - trained}
            append_line(opened.files.timing, {"round": state.round, **seconds})
            opened.save(state, engine.personal)
            report = RoundReport(
                round=state.round,
                rounds=rounds,
                accuracy=judged.reached.mean if judged and self._by_share else None,
                epsilon=self.calibrated.spent(opened.ledger),
                seconds=sum(seconds.values()),
                is_exact=judged is not None and not judged.reached.is_private,
            )
            callbacks.tell("on_round", report)
        return state

    def _check_next(self, state: object, number: int) -> None:
        """Refuse what a round of own code must not return: a run would not end, or not be resumed."""
        if not isinstance(state, State) or state.round != number:
            told = f"round {state.round}" if isinstance(state, State) else f"a {type(state).__name__}"
            raise InputError(
                f"algorithm.name: {self.calibrated.experiment.algorithm.name}: its round {number} returned "
                f"{told}; allowed: a State of round {number}"
            )

    def _tell_releases(self, charged: Sequence[Charge], callbacks: Callbacks) -> None:
        epsilon, unit = self.calibrated.spent(self.opened.ledger), self.calibrated.plan.unit
        asked: dict[tuple[int, str], list[str]] = {}
        for charge in charged:
            asked.setdefault((charge.round, charge.release), []).append(charge.subject)
        for (round, name), subjects in asked.items():
            callbacks.tell("on_release", ReleaseReport(round, name, unit, tuple(subjects), epsilon))

    def _log(self, state: State, judged: Evaluation | None) -> None:
        opened, reached = self.opened, asdict(judged.reached) if judged else None
        opened.metrics.append(
            {
                "round": state.round,
                "accuracy": reached if self._by_share else None,
                **({} if self._by_share else {"bounded_score": reached}),
                **({"scores": scores_to_json(judged.pooled)} if judged and judged.pooled else {}),
                "loss": asdict(judged.loss) if judged and judged.loss else None,
                "clusters": dict(self._clusters(state, judged)),
                "epsilon": number_to_json(self.calibrated.spent(opened.ledger)),
            }
        )
        findings = self.calibrated.algorithm.findings(state)
        if findings is not None:
            opened.seal.write_text(opened.files.findings, json_text(asdict(findings)))

    @property
    def _by_share(self) -> bool:
        """Whether models are judged by the share of records that they get right."""
        return self.calibrated.population.task.kind == "classification"

    def _clusters(self, state: State, judged: Evaluation | None) -> Mapping[str, int]:
        """Who uses which model; nothing where that is known to the clients alone."""
        known = judged.assignment if judged else None
        served = self.calibrated.algorithm.models(state) if known is None else known
        return served.cluster_of if isinstance(served, Assignment) else {}

    def result(self, state: State) -> RunResult:
        """What was found, after the last round."""
        calibrated, opened, judged = self.calibrated, self.opened, self.evaluator.after(state)
        clusters, truth = self._clusters(state, judged), calibrated.population.truth
        findings = calibrated.algorithm.findings(state)
        trained = folder.seconds_in(opened.files.timing, "train")
        gradients = sample_gradients(calibrated, opened.ledger)
        known = truth if truth and clusters else None
        return RunResult(
            folder=opened.files.path,
            algorithm=calibrated.experiment.algorithm.name,
            accuracy=judged.reached if judged and self._by_share else None,
            bounded_score=judged.reached if judged and not self._by_share else None,
            loss=judged.loss if judged else None,
            clusters=dict(clusters),
            clusters_found=same_partition([clusters[client] for client in known], list(known.values()))
            if known
            else None,
            guarantee=opened.guarantee.line,
            guarantee_text=opened.guarantee.text,
            epsilon=opened.guarantee.epsilon,
            delta=opened.guarantee.delta,
            noise_multiplier=training_noise(calibrated.plan),
            rounds=state.round,
            seconds=trained + folder.seconds_in(opened.files.timing, "evaluate"),
            sample_gradients_per_second=gradients / trained if trained > 0 else 0.0,
            warnings=findings.warnings if findings else (),
            minority_found=minority_found(clusters, known) if known else None,
            clustering_accuracy=clustering_accuracy(clusters, known) if known else None,
            live_clusters=live_clusters(clusters),
            per_worker=calibrated.per_worker(),
            per_client=opened.guarantee.per_client_json(),
            clusters_shown=findings.clustered if findings else None,
            **({"scores": judged.pooled} | exact_figures(calibrated, judged, clusters) if judged else {}),
        )


def training_noise(plan: PrivacyPlan) -> float:
    """The largest noise multiplier that any unit trains with."""
    mechanisms = (release.mechanism for unit in plan.units for release in unit.releases)
    return max(each.multiplier for each in mechanisms if each.sampled and each.multiplier is not None)


def sample_gradients(calibrated: CalibratedRun, ledger: Ledger) -> int:
    """Per-record gradients computed so far (in expectation, where samples are drawn)."""
    executed = {unit.subject: ledger.executed(unit.subject) for unit in calibrated.plan.units}
    return count_gradients(calibrated.algorithm, calibrated.plan, calibrated.facts.records, executed)


def count_gradients(
    algorithm: AnyAlgorithm,
    plan: PrivacyPlan,
    records: Mapping[str, int],
    times: Mapping[str, Mapping[str, int]],
) -> int:
    """Per-record gradients of so many releases of each unit's, by their names."""
    total = 0
    for unit in plan.units:
        for name, count in times[unit.subject].items():
            members = records.values() if unit.subject == POPULATION else [records[unit.owner]]
            learning = sum(algorithm.local_gradients(own) for own in members)
            total += unit.release(name).mechanism.gradients(count, learning)
    return total
