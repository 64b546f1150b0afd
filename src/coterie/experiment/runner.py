"""One run from experiment to result: prepare, prove the budget, open the ledger, rounds, evaluate, report."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.algorithms import AnyAlgorithm, find_algorithm
from coterie.algorithms.protocol import Assignment, PublicFacts, State
from coterie.data import (
    ClustersFederation,
    Federation,
    build_federation,
    check_federation,
    load_dataset,
    whole_test,
)
from coterie.engines.clients import behaviour
from coterie.engines.driver import Work, asks, finish
from coterie.engines.local import LocalEngine, coin_key, randomness_caveat
from coterie.engines.secret import SEEDED
from coterie.errors import InputError, ModelError
from coterie.experiment import checkpoint, evaluation, folder, integrity, references
from coterie.experiment.checkpoint import Checkpoint
from coterie.experiment.evaluation import Evaluation, Evaluator
from coterie.experiment.files import read_experiment, to_yaml
from coterie.experiment.folder import RunFolder, RunSecret
from coterie.experiment.metrics import (
    Fairness,
    Groups,
    Scores,
    Spread,
    cluster_means,
    clustering_accuracy,
    fairness,
    groups,
    live_clusters,
    minority_found,
    round_line,
    same_partition,
)
from coterie.experiment.promises import Promise
from coterie.experiment.proposal import Population, Proposal, count_caveats, delta_caveats, propose
from coterie.experiment.schema import EvaluationKind, Experiment
from coterie.experiment.seal import ChainedLines, Seal
from coterie.models import code_caveats
from coterie.privacy import (
    POPULATION,
    Budget,
    Custody,
    FullBatchSketch,
    FullBatchSteps,
    Guarantee,
    Ledger,
    PoissonSteps,
    PrivacyPlan,
    RebalancedSums,
    RoutedSums,
    SampledSum,
    SecretKey,
    Unit,
)
from coterie.privacy.units import number_from_json, number_to_json
from coterie.training.augmentation import Augmentation
from coterie.training.learner import Batch, Learner
from coterie.training.scoring import evaluate

PERSONAL = (
    "the run folder keeps the personal part of every client's model as it was learnt, without noise "
    "(checkpoint/*/personal.safetensors): it is not covered, and must not be given away"
)
SHARED_RECORDS = "a simulated federation: clusters hold the same records under different shifts"


@dataclass(frozen=True)
class RoundReport:
    """What a run tells while it goes on."""

    round: int
    rounds: int
    accuracy: float | None
    epsilon: float
    seconds: float


@dataclass(frozen=True)
class RunResult:
    """What a finished run found, as stored in `result.json`."""

    folder: Path
    algorithm: str
    accuracy: Spread | None
    """None where nothing was evaluated."""
    cluster_accuracy: Mapping[str, float] | None
    """Mean accuracy of each true cluster, where it is known."""
    loss: Spread | None
    """As fairness and accuracies of clusters: where evaluation is exact."""
    fairness: Fairness | None
    clusters: Mapping[str, int]
    """Empty where which model a client uses is known to itself alone."""
    clusters_found: bool | None
    guarantee: str
    """The line."""
    guarantee_text: str
    """The paragraph."""
    epsilon: float
    delta: float
    noise_multiplier: float
    rounds: int
    seconds: float
    sample_gradients_per_second: float
    warnings: tuple[str, ...]
    groups: Groups | None = None
    """Majority, minority and worst client, where the true clusters are known."""
    minority_found: bool | None = None
    """Whether the smallest true cluster was found, where there is one."""
    clustering_accuracy: float | None = None
    """Share of clients in the right cluster under the best matching, where the truth is known."""
    live_clusters: int = 1
    """Models that at least one client in a hundred uses."""
    models: tuple[tuple[float, ...], ...] | None = None
    """The models themselves, where they are small enough to be looked at."""
    whole_tests: Mapping[str, float] | None = None
    """Accuracy, on the whole test set under each true cluster's shift, of the model that most of it uses."""
    per_worker: Mapping[str, float | None] | None = None
    """Epsilon of each worker against the one that learns most about it, where workers watch each other."""
    per_client: Mapping[str, object] = field(default_factory=dict)
    """Epsilon, delta and records of every client, or of the population."""

    @property
    def report(self) -> Path:
        return RunFolder(self.folder).report

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        content["epsilon"] = number_to_json(self.epsilon)
        content["folder"] = str(self.folder)
        content["report"] = str(self.report)
        content["warnings"] = list(self.warnings)
        return content

    @classmethod
    def load(cls, path: Path) -> "RunResult":
        content = folder.read_json(RunFolder(path).result)
        content.pop("report", None)
        try:
            return cls(
                **{
                    **content,
                    "folder": path,
                    "epsilon": number_from_json(content["epsilon"]),
                    "accuracy": Spread.from_json(content["accuracy"]) if content["accuracy"] else None,
                    "loss": Spread.from_json(content["loss"]) if content["loss"] else None,
                    "fairness": Fairness(**content["fairness"]) if content["fairness"] else None,
                    "groups": Groups(**content["groups"]) if content.get("groups") else None,
                    "warnings": tuple(content["warnings"]),
                    "models": tuple(map(tuple, content["models"])) if content.get("models") else None,
                }
            )
        except (KeyError, TypeError) as error:
            raise InputError(f"{RunFolder(path).result}: not a result of this version ({error})") from None

    def __repr__(self) -> str:
        found = {True: ", clusters found", False: ", clusters not found", None: ""}[self.clusters_found]
        reached = "not evaluated" if self.accuracy is None else f"mean accuracy {self.accuracy.mean:.1%}"
        return f"RunResult({self.algorithm}: {reached}{found}; {self.guarantee})"


@dataclass(frozen=True)
class Prepared:
    """A run that is known to be possible, before anything is written or released."""

    experiment: Experiment
    federation: Federation
    proposal: Proposal

    @property
    def learner(self) -> Learner:
        return self.proposal.learner

    @property
    def algorithm(self) -> AnyAlgorithm:
        return self.proposal.algorithm

    @property
    def facts(self) -> PublicFacts:
        return self.proposal.facts

    @property
    def promise(self) -> Promise:
        return self.proposal.promise

    @property
    def augmentation(self) -> Augmentation | None:
        return self.proposal.augmentation

    @property
    def plan(self) -> PrivacyPlan:
        return self.promise.plan

    @property
    def budgets(self) -> Mapping[str, Budget]:
        return self.promise.budgets

    @property
    def guarantee(self) -> Guarantee:
        return self.promise.guarantee


def load_federation(experiment: Experiment) -> Federation:
    """The clients and their records, which data, federation and simulation seed alone decide."""
    seed = experiment.seeds.simulation
    federation = build_federation(load_dataset(experiment.data, seed), experiment.federation, seed)
    check_federation(federation)
    return federation


def prepare(experiment: Experiment, federation: Federation | None = None) -> Prepared:
    """Load data and model, let the algorithm declare its plan, and find the noise that keeps the promise.

    Args:
        federation: the experiment's own, when it is loaded already.
    """
    if federation is None:
        federation = load_federation(experiment)
    population = population_of(experiment, federation)

    def caveats(learner: Learner, budgets: Mapping[str, Budget]) -> Iterator[str]:
        return _caveats(experiment, federation, population, learner, budgets)

    found = propose(experiment, population, _device(experiment), caveats, Custody.ONE_PROCESS)
    return Prepared(experiment, federation, found)


def population_of(experiment: Experiment, federation: Federation) -> Population:
    """What is public about the clients of a simulated federation."""
    tests = {client.name: len(client.test) for client in federation.clients}
    return Population(
        federation.task,
        {client.name: len(client.train) for client in federation.clients},
        federation.structure,
        truth_of(federation),
        tests,
        evaluation.held_out_records(experiment, experiment.evaluation_kind, tests),
    )


def _caveats(
    experiment: Experiment,
    federation: Federation,
    population: Population,
    learner: Learner,
    budgets: Mapping[str, Budget],
) -> Iterator[str]:
    """What the guarantee must add because of how this run is set up."""
    references = _wants_references(experiment, federation, learner.layout.size)
    yield from evaluation.caveats_of(experiment, experiment.evaluation_kind, references)
    if isinstance(experiment.federation, ClustersFederation) and len(experiment.federation.sizes) > 1:
        yield SHARED_RECORDS
    yield from delta_caveats(experiment, population, budgets)
    if experiment.seeds.noise is not None:
        yield SEEDED
    if find_algorithm(experiment.privacy.unit, experiment.algorithm.name).personal:
        yield PERSONAL
    yield from count_caveats(experiment)
    yield from code_caveats(experiment.model)
    windows = experiment.data.windows_per_character
    if experiment.privacy.unit is Unit.RECORD and windows > 1:
        yield f"a record is a window of text, and a character is in up to {windows} of them"
    if experiment.privacy.unit is Unit.RECORD and (drawn := randomness_caveat(learner)) is not None:
        yield drawn


def _wants_references(experiment: Experiment, federation: Federation, parameters: int) -> bool:
    wanted = experiment.evaluation.references
    if experiment.evaluation_kind is not EvaluationKind.EXACT:
        return False
    if wanted == "auto" and (experiment.privacy.unit is Unit.WORKER or experiment.own_records):
        return False  # workers in the same groups have nothing else in common; own records are not published
    return references.affordable(federation, parameters) if wanted == "auto" else wanted


def run(
    experiment: Experiment | str | Path | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    watch: Callable[[RoundReport], None] | None = None,
) -> RunResult:
    """Run an experiment (a file, an object, or the built-in default) and return what it found.

    Example:
        >>> import coterie as ct
        >>> result = ct.run("experiment.yaml", out="runs/mine")
    """
    if not isinstance(experiment, Experiment):
        experiment = read_experiment(Path(experiment) if experiment is not None else None)
    target = Path(out) if out is not None else _folder_for(experiment, resume)
    done = finished(experiment, target, resume=resume)
    return done or Run(prepare(experiment), RunFolder(target)).finish(watch)


def finished(experiment: Experiment, target: Path, *, resume: bool) -> RunResult | None:
    """The result that the folder holds already; None when there is work to do and the folder fits it."""
    files = RunFolder(target)
    if files.exists:
        if not resume:
            raise InputError(
                f"{target}: holds a run already; --resume continues it, --out names another folder"
            )
        integrity.check_experiment(files)
        check_same_experiment(files, experiment)
        if files.finished:
            integrity.check_folder(files)
            files.secret.unlink(missing_ok=True)  # a crash may have come between result and deletion
            return RunResult.load(target)
    elif target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target}: exists and is not a run folder; --out names another")
    return None


class Run:
    """A prepared run and its folder."""

    def __init__(self, prepared: Prepared, files: RunFolder) -> None:
        self.prepared = prepared
        self.files = files

    def finish(self, watch: Callable[[RoundReport], None] | None = None) -> RunResult:
        """Do the rounds that are still to be done, then evaluate and write the result."""
        try:
            return finish(self.work(watch))
        except ModelError as error:
            name = self.prepared.experiment.model.name
            raise ModelError(f"model.name: {name}: {error}; --resume continues from the last round") from None

    def work(self, watch: Callable[[RoundReport], None] | None = None) -> Work[RunResult]:
        """The same, asking whoever drives it to have the engine answer."""
        prepared = self.prepared
        secret = self._open_folder()
        algorithm = prepared.algorithm
        saved = checkpoint.load(self.files.checkpoint, algorithm.state_type)
        state: State = saved.state if saved else self._start()
        with Ledger.open(
            self.files.ledger,
            prepared.plan,
            budget=prepared.budgets,
            accountant=prepared.experiment.privacy.accountant,
            anchor=saved.ledger if saved else Seal(self.files.path).ledger(),
        ) as ledger:
            # Only now: the ledger's lock says that no other process works in this folder.
            seal = self._open_seal(ledger)
            metrics = integrity.keep_metrics(self.files, state.round)
            folder.keep_rounds(self.files.timing, state.round)
            engine = LocalEngine(
                prepared.federation,
                prepared.learner,
                prepared.experiment.schedule.lr,
                prepared.plan,
                ledger,
                noise_key=secret.key,
                coin_key=coin_key(secret.key, prepared.experiment.seeds.simulation),
                public_seed=prepared.experiment.seeds.simulation,
                context=self._context(),
                augmentation=prepared.augmentation,
                workers=prepared.experiment.engine.workers,
                max_memory=prepared.experiment.engine.max_bytes,
            )
            if saved is not None:
                engine.members.personal = saved.personal
            evaluator = Evaluator(
                prepared.experiment, prepared.federation, prepared.learner, algorithm, engine
            )
            while state.round < prepared.experiment.schedule.rounds:
                began, waited = time.perf_counter(), engine.waited
                state = yield from asks(algorithm.round(state), engine, state.round + 1)
                trained = time.perf_counter()
                began += engine.waited - waited
                found = evaluator.after(state)
                self._log(state, found, ledger, metrics, seal)
                seconds = {"train": trained - began, "evaluate": time.perf_counter() - trained}
                folder.append_line(self.files.timing, {"round": state.round, **seconds})
                checkpoint.save(
                    self.files.checkpoint,
                    Checkpoint(
                        state, ledger.head, engine.members.personal, metrics=metrics.head, seal=seal.head
                    ),
                )
                if watch is not None:
                    watch(
                        RoundReport(
                            round=state.round,
                            rounds=prepared.experiment.schedule.rounds,
                            accuracy=found.accuracy.mean if found else None,
                            epsilon=prepared.promise.spent(ledger),
                            seconds=sum(seconds.values()),
                        )
                    )
            result = self._result(state, ledger, evaluator.after(state))
            integrity.seal_result(self.files, seal, result.to_json(), ledger.head, metrics.head)
        self.files.secret.unlink()
        return result

    # --- the folder ---------------------------------------------------------------------------------

    def _open_folder(self) -> RunSecret:
        """Write down what will be run, or check that it is what was being run."""
        data, plan = self.prepared.federation.fingerprint(), self.prepared.plan.digest()
        seed = self.prepared.experiment.seeds.noise
        if self.files.exists:
            secret = RunSecret.load(self.files.secret, Seal(self.files.path).key)
            if secret.data != data:
                raise InputError(f"{self.files.path}: the data changed since this run began; start a new run")
            if (secret.plan, secret.key.simulation) != (plan, seed is not None):
                raise InputError(f"{self.files.path}: the plan changed since this run began; start a new run")
            integrity.check_folder(self.files)
            return secret
        key = SecretKey.from_os() if seed is None else SecretKey.from_seed(seed)
        secret, proposal = RunSecret(key, data, plan), self.prepared.proposal
        with folder.new_folder(self.files.path) as scratch:
            files = RunFolder(scratch)
            secret.save(files.secret)
            folder.write_json(files.federation, proposal.population.facts(proposal.facts.parameters))
            folder.write_json(files.plan, self.prepared.plan.to_json())
            folder.write_json(files.guarantee, self.prepared.guarantee.to_json())
            if (leakage := self.prepared.promise.leakage_facts()) is not None:
                folder.write_json(files.leakage, leakage)
            folder.write_text(files.experiment, to_yaml(self.prepared.experiment))
            Seal.create(scratch, key=key.fingerprint)
        return secret

    def _open_seal(self, ledger: Ledger) -> Seal:
        """The seal of the folder, with the ledger and what must be said from now on in it."""
        seal = Seal(self.files.path)
        seal.settle()
        seal.keep_ledger(ledger.head)
        self._keep_caveats(seal)
        return seal

    def _keep_caveats(self, seal: Seal) -> None:
        """What was true of the rounds so far (noise of a GPU, say) stays said, wherever the run goes on."""
        promise = self.prepared.promise
        stored = Guarantee.from_json(folder.read_json(self.files.guarantee)).caveats
        both = tuple(dict.fromkeys((*stored, *promise.guarantee.caveats)))
        promise = replace(promise, guarantee=replace(promise.guarantee, caveats=both))
        self.prepared = replace(self.prepared, proposal=replace(self.prepared.proposal, promise=promise))
        if both != stored:
            seal.write_json(self.files.guarantee, promise.guarantee.to_json())

    def _context(self) -> str:
        prepared, experiment = self.prepared, self.prepared.experiment
        schedule = experiment.schedule
        return behaviour(
            experiment.model, schedule.lr, prepared.augmentation, prepared.plan, prepared.learner
        )

    # --- rounds -------------------------------------------------------------------------------------

    def _start(self) -> State:
        rng = np.random.default_rng(self.prepared.experiment.seeds.simulation)
        state: State = self.prepared.algorithm.start(self.prepared.facts, rng)
        return state

    def _log(
        self,
        state: State,
        found: Evaluation | None,
        ledger: Ledger,
        metrics: ChainedLines,
        seal: Seal,
    ) -> None:
        cluster_of = self._clusters(state, found)
        judged = (found.accuracy, found.loss) if found else None
        line = round_line(state.round, judged, cluster_of, self.prepared.promise.spent(ledger))
        metrics.append(line)
        findings = self.prepared.algorithm.findings(state)
        if findings is not None:
            seal.write_json(self.files.findings, asdict(findings))

    def _clusters(self, state: State, found: Evaluation | None) -> Mapping[str, int]:
        """Who uses which model; nothing where that is known to the clients alone."""
        assignment = found.assignment if found else self.prepared.algorithm.models(state)
        return assignment.cluster_of if isinstance(assignment, Assignment) else {}

    # --- the result ---------------------------------------------------------------------------------

    def _truth(self) -> dict[str, int] | None:
        return truth_of(self.prepared.federation)

    def _result(self, state: State, ledger: Ledger, judged: Evaluation | None) -> RunResult:
        prepared, truth = self.prepared, self._truth()
        clusters = self._clusters(state, judged)
        findings = prepared.algorithm.findings(state)
        timing = list(folder.read_lines(self.files.timing))
        trained = sum(line["train"] for line in timing)
        gradients = sample_gradients(prepared, ledger)
        result = RunResult(
            folder=self.files.path,
            algorithm=prepared.algorithm.name,
            accuracy=judged.accuracy if judged else None,
            cluster_accuracy=None,
            loss=judged.loss if judged else None,
            fairness=None,
            clusters=dict(clusters),
            clusters_found=None,
            guarantee=prepared.guarantee.line,
            guarantee_text=prepared.guarantee.text,
            epsilon=prepared.guarantee.epsilon,
            delta=prepared.guarantee.delta,
            noise_multiplier=training_noise(prepared.plan),
            rounds=state.round,
            seconds=trained + sum(line["evaluate"] for line in timing),
            sample_gradients_per_second=gradients / trained if trained > 0 else 0.0,
            warnings=findings.warnings if findings else (),
            live_clusters=live_clusters(clusters),
            per_worker=prepared.promise.per_worker(),
            per_client=prepared.guarantee.per_client_json(),
        )
        if truth and clusters:
            result = replace(
                result,
                clusters_found=same_partition([clusters[client] for client in truth], list(truth.values())),
                minority_found=minority_found(clusters, truth),
                clustering_accuracy=clustering_accuracy(clusters, truth),
            )
        if judged is None or judged.scores is None or judged.assignment is None:
            return result
        scores, assignment = judged.scores, judged.assignment
        result = replace(
            result,
            fairness=fairness(scores, self._references(truth or clusters)),
            models=tuple(map(tuple, assignment.models.tolist())) if assignment.models.size <= 64 else None,
        )
        if truth is None:
            return result
        return replace(
            result,
            cluster_accuracy={str(k): v for k, v in cluster_means(scores, truth).items()},
            groups=groups(scores, truth),
            whole_tests=self._whole_tests(assignment, truth),
        )

    def _whole_tests(self, assignment: Assignment, truth: Mapping[str, int]) -> dict[str, float] | None:
        """Every true cluster's own model on all test records under that cluster's shift.

        A client of a large federation has few test records, and its cluster together perhaps not all. Where
        clients keep parts of their own, a cluster has no model to be tested.
        """
        experiment, learner = self.prepared.experiment, self.prepared.learner
        whole = experiment.privacy.unit is Unit.CLIENT and not self.prepared.algorithm.personal
        if not whole or not isinstance(experiment.federation, ClustersFederation):
            return None
        dataset = load_dataset(experiment.data, experiment.seeds.simulation)
        found = {}
        for cluster in sorted(set(truth.values())):
            users = Counter(assignment.cluster_of[client] for client, own in truth.items() if own == cluster)
            records = whole_test(dataset, experiment.federation, cluster, experiment.seeds.simulation)
            model = torch.from_numpy(assignment.models[users.most_common(1)[0][0]]).to(learner.device)
            found[str(cluster)] = evaluate(learner, model, Batch.of(records, learner.device)).accuracy
        return found

    def _references(self, cluster_of: Mapping[str, int]) -> Scores | None:
        prepared = self.prepared
        if not _wants_references(prepared.experiment, prepared.federation, prepared.facts.parameters):
            return None
        seed = prepared.experiment.seeds.simulation
        start = torch.from_numpy(prepared.facts.initialise(seed)).to(prepared.learner.device)
        return references.train_references(prepared.federation, prepared.learner, start, cluster_of, seed)


def training_noise(plan: PrivacyPlan) -> float:
    """The largest noise multiplier that any unit trains with."""
    trained = PoissonSteps | SampledSum | RoutedSums | RebalancedSums
    mechanisms = (release.mechanism for unit in plan.units for release in unit.releases)
    return max(mechanism.multiplier for mechanism in mechanisms if isinstance(mechanism, trained))


def sample_gradients(prepared: Prepared, ledger: Ledger) -> int:
    """Per-record gradients computed so far (in expectation, where samples are drawn)."""
    plan, total, records = prepared.plan, 0, prepared.facts.records
    for unit in plan.units:
        for name, times in ledger.executed(unit.subject).items():
            mechanism = unit.release(name).mechanism
            if isinstance(mechanism, PoissonSteps | FullBatchSteps):
                total += times * mechanism.steps * mechanism.denominator
            elif isinstance(mechanism, FullBatchSketch):
                total += times * mechanism.denominator
            elif isinstance(mechanism, SampledSum | RoutedSums | RebalancedSums):
                members = list(records.values()) if unit.subject == POPULATION else [records[unit.subject]]
                each = sum(prepared.algorithm.local_gradients(own) for own in members)
                total += round(times * mechanism.rate * each)
    return total


def truth_of(federation: Federation) -> dict[str, int] | None:
    """The true cluster of each client, where it is known."""
    if federation.truth is None:
        return None
    return {client.name: own for client, own in zip(federation.clients, federation.truth, strict=True)}


def _device(experiment: Experiment) -> torch.device:
    wanted = experiment.engine.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("engine.device: 'cuda' is not available on this machine; allowed here: auto, cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _folder_for(experiment: Experiment, resume: bool) -> Path:
    base, name = Path("runs"), f"{experiment.algorithm.name}-{experiment.data.name}"
    if resume:
        for candidate in folder.newest_first(base.glob(f"{name}-*")):
            files = RunFolder(candidate)
            if files.exists and not files.finished and read_experiment(files.experiment) == experiment:
                return candidate
    return folder.next_free(base, name)


def check_same_experiment(files: RunFolder, experiment: Experiment) -> None:
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
