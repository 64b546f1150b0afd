"""One run over Flower, from the server's side: facts, plan, contracts, rounds, result.

The server has no data. It learns names, record counts and the task from the sites, proves the plan before it
proposes it, and keeps a run folder like any other: what it asked for is in its ledger, what it concluded in
its checkpoint. Sites keep their own books.

Where a unit is a client or a worker, the server is trusted with clipped updates: it keeps the noise key of
the run and the books of the whole population. Who was sampled is a secret that the noise counts on, so
nothing that stays in the folder tells who answered.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.algorithms import find_algorithm
from coterie.algorithms.protocol import Assignment, OwnChoice, State
from coterie.data import GroupsFederation
from coterie.data.records import Task
from coterie.engines.clients import ClientFacts, behaviour
from coterie.engines.cohorts import Cohorts
from coterie.engines.driver import drive
from coterie.engines.evaluation import PrivateScores
from coterie.engines.flower import server
from coterie.engines.flower.contract import IN_THE_CLEAR, WHO_IS_ASKED, Contract, TrustedWork, ranges_of
from coterie.engines.flower.members import RemoteMembers
from coterie.engines.flower.messages import SiteFacts, task_from_json
from coterie.engines.flower.server import FlowerEngine, Participation
from coterie.engines.flower.transport import Journal, NobodyAnswered, Transport
from coterie.engines.local import coin_key
from coterie.engines.secret import SEEDED, RunSecret
from coterie.errors import InputError
from coterie.experiment import checkpoint, folder, integrity
from coterie.experiment.checkpoint import Checkpoint
from coterie.experiment.evaluation import evaluation_epsilon, private_accuracy, private_mean, rows_of
from coterie.experiment.files import to_yaml
from coterie.experiment.folder import RunFolder
from coterie.experiment.metrics import Spread, round_line, same_partition
from coterie.experiment.proposal import Population, Proposal, count_caveats, delta_caveats, propose
from coterie.experiment.schema import EvaluationKind, Experiment
from coterie.experiment.seal import ChainedLines, Seal
from coterie.groups import Shape, Structure, is_file, named_structure
from coterie.models import code_caveats
from coterie.privacy import Budget, Custody, HeldOut, Ledger, Mode, Released, SecretKey, Unit
from coterie.privacy.units import number_to_json
from coterie.training.learner import Learner

EVERYONE = "everyone"
"""In place of a client's name, where what was spent is the same for all."""


@dataclass(frozen=True)
class ServedRound:
    """What the server tells after each round."""

    round: int
    rounds: int
    answered: tuple[str, ...]
    missing: Mapping[str, str]
    epsilon: Mapping[str, float]
    """Asked of each client so far; a client that was missing may have spent less."""
    budget: Mapping[str, float]
    accuracy: float | None
    seconds: float


@dataclass(frozen=True)
class Callbacks:
    """Whom to tell, and what about."""

    joined: Callable[[Mapping[str, SiteFacts]], None] = lambda sites: None
    agreed: Callable[[str], None] = lambda guarantee: None
    round: Callable[[ServedRound], None] = lambda report: None


@dataclass(frozen=True)
class ServedResult:
    """What a finished run over Flower found, as stored in `result.json`."""

    folder: Path
    algorithm: str
    clusters: Mapping[str, int]
    clusters_found: bool | None
    accuracy: Spread | None
    """As the sites reported it, where they were asked."""
    loss: Spread | None
    guarantee: str
    """The line."""
    guarantee_text: str
    """The paragraph."""
    epsilon: float
    delta: float
    rounds: int
    seconds: float
    participation: Mapping[str, Mapping[str, int]]
    """Of each client: requests answered and missed. Empty where who was asked is a secret."""
    asked: Mapping[str, float]
    """Epsilon of what each client was asked for."""
    warnings: tuple[str, ...] = ()
    per_client: Mapping[str, object] = field(default_factory=dict)
    """Epsilon, delta and records of every client, or of the population."""

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        content["folder"] = str(self.folder)
        content["epsilon"] = number_to_json(self.epsilon)
        content["asked"] = {name: number_to_json(value) for name, value in self.asked.items()}
        content["warnings"] = list(self.warnings)
        content["engine"] = "flower"
        return content


@dataclass(frozen=True)
class Sites:
    """The public facts of all sites, and the name under which they will know this run."""

    experiment: str
    task: Task
    records: Mapping[str, int]
    held_out: Mapping[str, int]
    reported: Mapping[str, HeldOut]
    """What those sites allow whose operators let held-out records score models."""
    simulation: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment,
            "task": {**asdict(self.task), "shape": list(self.task.shape)},
            "records": dict(self.records),
            "held_out": dict(self.held_out),
            "reported": {name: asdict(own) for name, own in self.reported.items()},
            "simulation": self.simulation,
        }

    @classmethod
    def load(cls, path: Path) -> "Sites":
        content = folder.read_json(path)
        try:
            return cls(
                str(content["experiment"]),
                task_from_json(content["task"]),
                {str(name): int(count) for name, count in content["records"].items()},
                {str(name): int(count) for name, count in content["held_out"].items()},
                {str(name): HeldOut(**own) for name, own in content["reported"].items()},
                bool(content["simulation"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InputError(f"{path}: not the sites of a run of this version") from None


def trusts_server(experiment: Experiment) -> bool:
    """Whether the server is trusted with updates, because a unit is more than a record."""
    return experiment.privacy.unit is not Unit.RECORD


def check_servable(experiment: Experiment) -> None:
    """Refuse, before anybody is asked, what cannot be done between sites."""
    privacy, federation = experiment.privacy, experiment.federation
    if experiment.evaluation.kind == "exact":
        raise InputError(
            "evaluation.kind: exact; a site's records are its own, and no score of them leaves it without "
            "noise; allowed between sites: auto, private, none"
        )
    if privacy.unit is Unit.WORKER and privacy.mode is Mode.PAPER:
        raise InputError(
            "privacy.mode: paper lets workers see each other's updates without noise; allowed between sites: "
            "sound"
        )
    if getattr(experiment.algorithm, "adaptive_clip", None) is not None:
        raise InputError(
            "algorithm.adaptive_clip: sites sign one clip before the first round, and clip to "
            "that; allowed between sites: null"
        )
    if isinstance(federation, GroupsFederation) and federation.structure == Shape.LABEL:
        raise InputError(
            "federation.structure: label is made from the workers' labels, which the server does not have; "
            "allowed over Flower: global, ring, string, clustered or a file of groups"
        )


def structure_of(experiment: Experiment, names: tuple[str, ...]) -> Structure | None:
    """Who is in which group: the sites in the order of their names, or as the file of groups names them."""
    settings = experiment.federation
    if not isinstance(settings, GroupsFederation):
        return None
    workers = settings.workers if is_file(settings.structure) else len(names)
    found = named_structure(settings.structure, workers, settings.groups, prefix="federation.")
    if found.workers != len(names) or set(found.names or names) != set(names):
        raise InputError(
            f"federation.structure: {settings.structure} is about {found.workers} workers, the sites are "
            f"{', '.join(names)}; allowed: the same names"
        )
    return found if found.names else replace(found, names=names)


class ServedRun:
    """A run whose clients are sites."""

    def __init__(
        self,
        experiment: Experiment,
        files: RunFolder,
        transport: Transport,
        *,
        truth: Mapping[str, int] | None = None,
        watch: Callbacks | None = None,
        simulated: bool = False,
    ) -> None:
        """Args beside the obvious:

        simulated: whether all sites are virtual, their records and noise keys on this machine.
        """
        check_servable(experiment)
        self._simulated = simulated
        self.experiment = experiment
        self.files = files
        self.transport = transport
        self.truth = truth
        self.watch = watch or Callbacks()
        self._tally: dict[str, dict[str, int]] = {}
        self._latest: list[Participation] = []
        self._share_sum: Callable[
            [NDArray[np.float32], Mapping[str, NDArray[np.float32]], int], Released[float]
        ]
        self._journal = Journal(files.path / "journal")
        if files.exists:
            integrity.check_folder(files)
        self._sites = Sites.load(files.sites) if files.exists else self._gather()
        self.proposal = self._propose()
        self.contracts = self._draw_up()
        if not files.exists:
            self._write_folder()

    @property
    def _trusted(self) -> bool:
        return trusts_server(self.experiment)

    # --- facts, plan, contracts ---------------------------------------------------------------------

    def _gather(self) -> Sites:
        """The public facts of all sites."""
        names = sorted(self.transport.nodes)
        found = server.gather_facts(self.transport)
        for name, reason in found.missing.items():
            raise InputError(f"client {name}: no facts ({reason}); all are needed before the first round")
        self.watch.joined(found.by_client)
        tasks = {name: facts.task for name, facts in found.by_client.items()}
        for name, task in tasks.items():
            if task != tasks[names[0]]:
                raise InputError(
                    f"client {name}: its task is {task}, that of {names[0]} is {tasks[names[0]]}"
                )
        return Sites(
            secrets.token_hex(16),
            tasks[names[0]],
            {name: facts.records for name, facts in found.by_client.items()},
            {name: facts.held_out for name, facts in found.by_client.items()},
            {name: facts.reported for name, facts in found.by_client.items() if facts.reported is not None},
            any(facts.simulation for facts in found.by_client.values()),
        )

    def _reported(self) -> dict[str, HeldOut]:
        """What is asked of held-out records: no more than each site's operator allows, nor than is wanted.

        At unit client it is the mean over all sites: without all of them there is none.
        """
        experiment, sites = self.experiment, self._sites
        wanted, unit = experiment.evaluation, experiment.privacy.unit
        everyone = sites.reported.keys() == sites.records.keys()
        if wanted.kind == "none" or unit is Unit.WORKER or (unit is Unit.CLIENT and not everyone):
            return {}
        reports = wanted.times(EvaluationKind.PRIVATE, experiment.schedule.rounds)
        return {
            name: HeldOut(
                own.units,
                min(own.epsilon, evaluation_epsilon(experiment, experiment.privacy.epsilon_of(name))),
                min(own.reports, reports),
            )
            for name, own in sites.reported.items()
        }

    def _propose(self) -> Proposal:
        structure = structure_of(self.experiment, tuple(self._sites.records))
        records = self._sites.records
        if structure is not None:
            records = {name: records[name] for name in structure.names}
        held_out = {name: self._sites.held_out[name] for name in records}
        population = Population(self._sites.task, records, structure, self.truth, held_out, self._reported())

        def caveats(learner: Learner, budgets: Mapping[str, Budget]) -> Iterator[str]:
            return self._caveats(population, budgets)

        return propose(self.experiment, population, torch.device("cpu"), caveats, self._held_by())

    def _held_by(self) -> Custody:
        if self._simulated:
            return Custody.ONE_PROCESS
        return Custody.TRUSTED_SERVER if self._trusted else Custody.EACH_SITE

    def _caveats(self, population: Population, budgets: Mapping[str, Budget]) -> Iterator[str]:
        """What the guarantee must add because of how this run is set up."""
        yield from delta_caveats(self.experiment, population, budgets)
        yield from count_caveats(self.experiment)
        yield from code_caveats(self.experiment.model)
        if self._trusted:
            yield IN_THE_CLEAR
            yield WHO_IS_ASKED
        if self.experiment.seeds.noise is not None if self._trusted else self._sites.simulation:
            yield SEEDED

    def _draw_up(self) -> dict[str, Contract]:
        """What each site is asked to sign."""
        experiment, sites, proposal = self.experiment, self._sites, self.proposal
        names = sorted(sites.records)
        budgets, work = proposal.promise.budgets, self._work()
        return {
            client: Contract(
                experiment=sites.experiment,
                algorithm=experiment.algorithm.name,
                client=client,
                records=sites.records[client],
                task=sites.task,
                held_out=sites.held_out[client],
                model=experiment.model,
                lr=experiment.schedule.lr,
                augmentation=proposal.augmentation,
                public_seed=experiment.seeds.simulation,
                rounds=experiment.schedule.rounds,
                plan=proposal.plan,
                accountant=experiment.privacy.accountant,
                delta=budgets[proposal.plan.subjects_of((client,))[0]].delta,
                additive=find_algorithm(experiment.privacy.unit, experiment.algorithm.name).additive,
                trusted=work,
            )
            for client in names
        }

    def _work(self) -> TrustedWork | None:
        """What sites do for a server that they trust."""
        training = self.proposal.algorithm.local_training()
        if not self._trusted:
            return None
        assert training is not None
        served = self.proposal.algorithm.models(self._start())
        watched = self.proposal.promise.watched
        if not isinstance(served, OwnChoice):
            return TrustedWork(training, watched=watched)
        personal = () if served.parts is None else ranges_of(served.parts.personal)
        return TrustedWork(training, served.choice, personal, watched)

    def _write_folder(self) -> None:
        proposal, promise = self.proposal, self.proposal.promise
        with folder.new_folder(self.files.path) as scratch:
            files = RunFolder(scratch)
            key: SecretKey | None = None
            if self._trusted:
                seed = self.experiment.seeds.noise
                key = SecretKey.from_os() if seed is None else SecretKey.from_seed(seed)
                RunSecret(key, self._sites.experiment, proposal.plan.digest()).save(files.secret)
            folder.write_json(files.sites, self._sites.to_json())
            folder.write_json(files.federation, proposal.population.facts(proposal.facts.parameters))
            folder.write_json(files.plan, proposal.plan.to_json())
            folder.write_json(files.guarantee, promise.guarantee.to_json())
            if (leakage := promise.leakage_facts()) is not None:
                folder.write_json(files.leakage, leakage)
            folder.write_text(files.experiment, to_yaml(self.experiment))
            Seal.create(scratch, key=None if key is None else key.fingerprint)

    def _agree(self, resumed: bool) -> None:
        """Propose the contracts; before the first release everybody must have agreed."""
        there = set(self.transport.present(list(self.contracts))) if resumed else set(self.contracts)
        wanted = {name: contract for name, contract in self.contracts.items() if name in there}
        answers, promised = server.offer(self.transport, wanted), self.proposal.promise.guarantee.line
        if answers.missing and not resumed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in answers.missing.items())
            raise InputError(
                f"not all clients agree to the plan ({promised}): {reasons}. Nothing was released; "
                "once they do, --resume goes on"
            )
        self.watch.agreed(promised)

    # --- rounds -------------------------------------------------------------------------------------

    def finish(self) -> ServedResult:
        """Do the rounds that are still to be done, tell the sites, and write the result."""
        rounds, proposal = self.experiment.schedule.rounds, self.proposal
        algorithm = proposal.algorithm
        saved = checkpoint.load(self.files.checkpoint, algorithm.state_type)
        state: State = saved.state if saved else self._start()
        with Ledger.open(
            self.files.ledger,
            proposal.plan,
            budget=proposal.promise.budgets,
            accountant=self.experiment.privacy.accountant,
            anchor=saved.ledger if saved else Seal(self.files.path).ledger(),
        ) as ledger:
            # Nothing is charged before all have agreed.
            self._agree(resumed=ledger.head.count > 1)
            seal = Seal(self.files.path)
            seal.settle()
            seal.keep_ledger(ledger.head)
            metrics = integrity.keep_metrics(self.files, state.round)
            for path in (self.files.timing, self._participation_file):
                folder.keep_rounds(path, state.round)
            for line in folder.read_lines(self._participation_file):
                self._count(line["answered"], line["missing"])
            engine = self._engine(ledger)
            while state.round < rounds:
                began = time.perf_counter()
                self._latest = []
                state = drive(algorithm.round(state), engine, state.round + 1)
                judged = self._evaluate_if_due(state, engine)
                seconds = time.perf_counter() - began
                self._log(state, judged, ledger, seconds, metrics, seal)
                checkpoint.save(
                    self.files.checkpoint,
                    Checkpoint(state, ledger.head, metrics=metrics.head, seal=seal.head),
                )
                self._journal.forget(before=state.round + 1)
                self.watch.round(self._report(state, judged, ledger, seconds))
            result = self._result(state, ledger)
            server.finish(self.transport, self.contracts)
            integrity.seal_result(self.files, seal, result.to_json(), ledger.head, metrics.head)
        self.files.secret.unlink(missing_ok=True)
        return result

    def _engine(self, ledger: Ledger) -> FlowerEngine:
        proposal, schedule = self.proposal, self.experiment.schedule
        context = behaviour(
            self.experiment.model, schedule.lr, proposal.augmentation, proposal.plan, proposal.learner
        )
        parameters = proposal.facts.parameters
        return FlowerEngine(
            self.transport,
            self.contracts,
            proposal.plan,
            ledger,
            schedule.lr,
            parameters,
            context,
            self._journal,
            self._note,
            self._cohorts(ledger, context) if self._trusted else None,
        )

    def _cohorts(self, ledger: Ledger, context: str) -> Cohorts:
        """What a trusted server does itself: coins, sums, noise."""
        secret, proposal = RunSecret.load(self.files.secret, Seal(self.files.path).key), self.proposal
        if (secret.data, secret.plan) != (self._sites.experiment, proposal.plan.digest()):
            raise InputError(f"{self.files.path}: its noise key belongs to another run; start a new one")
        seed, records = self.experiment.seeds.simulation, proposal.facts.records
        facts = ClientFacts(
            names=tuple(records),
            sizes=tuple(records.values()),
            lr=self.experiment.schedule.lr,
            noise_key=secret.key,
            coin_key=coin_key(secret.key, seed),
            public_seed=seed,
        )
        parameters = proposal.facts.parameters
        members = RemoteMembers(self.transport, self.contracts, parameters, self._journal)
        scores = PrivateScores(facts, proposal.plan, ledger, context)
        self._share_sum = lambda models, rows, round: scores.of_clients(
            models, round, lambda: members.shares(rows, round)
        )
        return Cohorts(facts, members, parameters, proposal.plan, ledger, context)

    def _start(self) -> State:
        rng = np.random.default_rng(self.experiment.seeds.simulation)
        state: State = self.proposal.algorithm.start(self.proposal.facts, rng)
        return state

    def _clusters(self, state: State) -> Mapping[str, int]:
        """The model of each site, as far as the server knows: where sites choose, they tell nobody."""
        served = self.proposal.algorithm.models(state)
        return served.cluster_of if isinstance(served, Assignment) else {}

    @property
    def _participation_file(self) -> Path:
        return self.files.path / "participation.jsonl"

    def _note(self, participation: Participation) -> None:
        """Keep who answered a request, and why the others did not."""
        folder.append_line(self._participation_file, asdict(participation))
        self._latest.append(participation)
        self._count(participation.answered, participation.missing)

    def _count(self, answered: "tuple[str, ...] | list[str]", missing: Mapping[str, str]) -> None:
        for name in answered:
            self._tally.setdefault(name, {"answered": 0, "missed": 0})["answered"] += 1
        for name in missing:
            self._tally.setdefault(name, {"answered": 0, "missed": 0})["missed"] += 1

    def _evaluate_if_due(self, state: State, engine: FlowerEngine) -> Spread | None:
        """What held-out records at the sites say, where their operators and the experiment agree on it."""
        reported, rounds = self.proposal.population.reported, self.experiment.schedule.rounds
        # Operators may allow fewer reports than are wanted: then the last ones are made.
        due = [
            round
            for round in range(1, rounds + 1)
            if self.experiment.evaluation.due(EvaluationKind.PRIVATE, round, rounds)
        ]
        asked = {name for name, own in reported.items() if state.round in due[-own.reports :]}
        if not asked:
            return None
        served = self.proposal.algorithm.models(state)
        if self._trusted:
            rows = {
                client: served.models if isinstance(served, OwnChoice) else served.model_of(client)[None]
                for client in self.contracts
            }
            return private_mean(self._share_sum(rows_of(served), rows, state.round), len(rows))
        assert isinstance(served, Assignment)
        models = {client: served.model_of(client) for client in self.contracts if client in asked}
        try:
            counts = engine.evaluate(models, state.round)
        except NobodyAnswered:
            return None
        return private_accuracy(counts, {client: reported[client].units for client in counts})

    def _log(
        self,
        state: State,
        judged: Spread | None,
        ledger: Ledger,
        seconds: float,
        metrics: ChainedLines,
        seal: Seal,
    ) -> None:
        spent = self.proposal.promise.spent(ledger)
        scores = None if judged is None else (judged, None)
        line = round_line(state.round, scores, self._clusters(state), spent)
        metrics.append(line)
        folder.append_line(self.files.timing, {"round": state.round, "train": seconds, "evaluate": 0.0})
        findings = self.proposal.algorithm.findings(state)
        if findings is not None:
            seal.write_json(self.files.findings, asdict(findings))

    def _report(self, state: State, judged: Spread | None, ledger: Ledger, seconds: float) -> ServedRound:
        missing = {name: why for request in self._latest for name, why in request.missing.items()}
        answered = {name for request in self._latest for name in request.answered} - set(missing)
        return ServedRound(
            round=state.round,
            rounds=self.experiment.schedule.rounds,
            answered=tuple(sorted(answered)),
            missing=missing,
            epsilon=self._spent(ledger),
            budget=self._budgets(),
            accuracy=judged.mean if judged else None,
            seconds=seconds,
        )

    def _spent(self, ledger: Ledger) -> dict[str, float]:
        """Epsilon by client; of a population, or of workers who watch each other, the largest of all."""
        promise = self.proposal.promise
        if self._trusted:
            return {EVERYONE: promise.spent(ledger)}
        subjects = {unit.subject: unit.owner for unit in self.proposal.plan.units}
        return {
            client: max(ledger.spent(subject) for subject, owner in subjects.items() if owner == client)
            for client in self.contracts
        }

    def _budgets(self) -> dict[str, float]:
        budgets = {subject: budget.epsilon for subject, budget in self.proposal.promise.budgets.items()}
        if self._trusted:
            return {EVERYONE: min(budgets.values())}
        return {client: budgets[client] for client in self.contracts}

    # --- the result ---------------------------------------------------------------------------------

    def _result(self, state: State, ledger: Ledger) -> ServedResult:
        clusters, promise = self._clusters(state), self.proposal.promise
        lines = list(folder.read_lines(self.files.metrics))
        last = lines[-1] if lines else {}
        found = None
        if self.truth is not None and clusters:
            found = same_partition([clusters[client] for client in self.truth], list(self.truth.values()))
        findings = self.proposal.algorithm.findings(state)
        spent = self._spent(ledger)
        return ServedResult(
            folder=self.files.path,
            algorithm=self.proposal.algorithm.name,
            clusters=dict(clusters),
            clusters_found=found,
            accuracy=Spread.from_json(last["accuracy"]) if last.get("accuracy") else None,
            loss=None,
            guarantee=promise.guarantee.line,
            guarantee_text=promise.guarantee.text,
            epsilon=promise.guarantee.epsilon,
            delta=promise.guarantee.delta,
            rounds=state.round,
            seconds=sum(line["train"] for line in folder.read_lines(self.files.timing)),
            participation=dict(self._tally),
            asked=dict.fromkeys(self.contracts, spent[EVERYONE]) if self._trusted else spent,
            warnings=findings.warnings if findings else (),
            per_client=promise.guarantee.per_client_json(),
        )
