"""One run over Flower, from the server's side: facts, plan, contracts, rounds, result.

The server has no data. It learns names, record counts and the task from the sites, proves the plan before it
proposes it, and keeps a run folder like any other: what it asked for is in its ledger, what it concluded in
its checkpoint. Sites keep their own books.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie import __version__
from coterie.algorithms.protocol import Assignment, PublicFacts, State, Vector
from coterie.data import NaturalFederation
from coterie.data.records import Task
from coterie.engines.clients import behaviour, build_learner
from coterie.engines.driver import drive
from coterie.engines.flower import server
from coterie.engines.flower.contract import Contract
from coterie.engines.flower.messages import SiteFacts, Split, task_from_json
from coterie.engines.flower.server import FlowerEngine, Journal, Participation, Post
from coterie.engines.secret import SEEDED
from coterie.errors import InputError
from coterie.experiment import checkpoint, folder
from coterie.experiment.checkpoint import Checkpoint
from coterie.experiment.files import to_yaml
from coterie.experiment.folder import RunFolder
from coterie.experiment.metrics import Spread, accuracy, round_line, same_partition
from coterie.experiment.runner import augmentation_of, build_algorithm, default_delta
from coterie.experiment.schema import Experiment
from coterie.models import build_model
from coterie.privacy import Budget, Ledger, Unit, calibrate, guarantee
from coterie.privacy.units import number_to_json
from coterie.training.parameters import flatten
from coterie.training.scoring import Score

REPORTED = "sites report accuracy on held-out records, outside the guarantee"
SITES_SPLIT = NaturalFederation()
"""How sites divide their records where the experiment does not say: a fifth is held out."""


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
class Watcher:
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
    epsilon: float
    delta: float
    rounds: int
    seconds: float
    participation: Mapping[str, Mapping[str, int]]
    """Of each client: requests answered and missed."""
    asked: Mapping[str, float]
    """Epsilon of what each client was asked for."""
    warnings: tuple[str, ...] = ()

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
    simulation: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment,
            "task": {**asdict(self.task), "shape": list(self.task.shape)},
            "records": dict(self.records),
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
                bool(content["simulation"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InputError(f"{path}: not the sites of a run of this version") from None


def check_servable(experiment: Experiment) -> None:
    """Refuse, before anybody is asked, what sites that trust nobody cannot take part in."""
    if experiment.privacy.unit is not Unit.RECORD:
        raise InputError(
            f"privacy.unit: {experiment.privacy.unit.value} trusts the server with raw updates; allowed over "
            "Flower: record"
        )


class ServedRun:
    """A run whose clients are sites."""

    def __init__(
        self,
        experiment: Experiment,
        files: RunFolder,
        post: Post,
        *,
        truth: Mapping[str, int] | None = None,
        watch: Watcher | None = None,
    ) -> None:
        check_servable(experiment)
        self.experiment = experiment
        self.files = files
        self.post = post
        self.truth = truth
        self.watch = watch or Watcher()
        self._tally: dict[str, dict[str, int]] = {}
        self._latest: list[Participation] = []
        self._sites = self._open_folder()
        self._prepare()

    # --- facts, plan, contracts ---------------------------------------------------------------------

    def _open_folder(self) -> Sites:
        path = self.files.path / "sites.json"
        if self.files.exists:
            return Sites.load(path)
        names = sorted(self.post.nodes)
        found = server.gather_facts(self.post, {name: self._split(names, name) for name in names})
        for name, reason in found.missing.items():
            raise InputError(f"client {name}: no facts ({reason}); all are needed before the first round")
        self.watch.joined(found.by_client)
        tasks = {name: facts.task for name, facts in found.by_client.items()}
        for name, task in tasks.items():
            if task != tasks[names[0]]:
                raise InputError(
                    f"client {name}: its task is {task}, that of {names[0]} is {tasks[names[0]]}"
                )
        sites = Sites(
            secrets.token_hex(16),
            tasks[names[0]],
            {name: facts.records for name, facts in found.by_client.items()},
            any(facts.simulation for facts in found.by_client.values()),
        )
        with folder.new_folder(self.files.path) as scratch:
            folder.write_json(scratch / path.name, sites.to_json())
            folder.write_text(RunFolder(scratch).experiment, to_yaml(self.experiment))
        return sites

    def _split(self, names: list[str], name: str) -> Split:
        federation = self.experiment.federation
        split = federation if isinstance(federation, NaturalFederation) else SITES_SPLIT
        seed = self.experiment.seeds.simulation
        return Split(seed, names.index(name), split.test_share, split.validation_share)

    def _prepare(self) -> None:
        experiment, sites = self.experiment, self._sites
        seed, privacy = experiment.seeds.simulation, experiment.privacy
        learner = build_learner(experiment.model, sites.task, seed, torch.device("cpu"))
        self.algorithm = build_algorithm(experiment, self.truth)

        def initialise(seed: int) -> Vector:
            return flatten(build_model(experiment.model, sites.task, seed))

        self.facts = PublicFacts(
            clients=tuple(sites.records),
            records=sites.records,
            parameters=learner.layout.size,
            initialise=initialise,
            layout={name: shape.numel() for name, shape in learner.layout.shapes.items()},
        )
        self.budgets = {
            client: Budget(privacy.epsilon_of(client), privacy.delta_of(client) or default_delta(records))
            for client, records in sites.records.items()
        }
        self.plan = calibrate(
            self.algorithm.plan(self.facts), self.budgets, accountant=privacy.accountant, mode=privacy.mode
        )
        views = augmentation_of(experiment, sites.task)
        self.context = behaviour(experiment.model, experiment.schedule.lr, views, self.plan, learner)
        caveats = [
            *([SEEDED] if sites.simulation else []),
            *([REPORTED] if experiment.evaluation.ask_sites else []),
        ]
        self.guarantee = guarantee(
            self.plan, budget=self.budgets, caveats=caveats, accountant=privacy.accountant, mode=privacy.mode
        )
        names = sorted(sites.records)
        self.contracts = {
            client: Contract(
                experiment=sites.experiment,
                algorithm=experiment.algorithm.name,
                client=client,
                records=sites.records[client],
                task=sites.task,
                split=self._split(names, client),
                model=experiment.model,
                lr=experiment.schedule.lr,
                augmentation=views,
                public_seed=seed,
                rounds=experiment.schedule.rounds,
                plan=self.plan,
                accountant=privacy.accountant,
                delta=self.budgets[client].delta,
                evaluate=experiment.evaluation.ask_sites,
            )
            for client in names
        }

    def _agree(self, resumed: bool) -> None:
        """Propose the contracts; before the first release everybody must have agreed."""
        there = set(self.post.present(list(self.contracts))) if resumed else set(self.contracts)
        wanted = {name: contract for name, contract in self.contracts.items() if name in there}
        answers = server.offer(self.post, wanted)
        if answers.missing and not resumed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in answers.missing.items())
            raise InputError(
                f"not all clients agree to the plan ({self.guarantee}): {reasons}. Nothing was released; "
                "once they do, --resume goes on"
            )
        self.watch.agreed(str(self.guarantee))

    # --- rounds -------------------------------------------------------------------------------------

    def finish(self) -> ServedResult:
        """Do the rounds that are still to be done, tell the sites, and write the result."""
        rounds = self.experiment.schedule.rounds
        folder.write_json(self.files.plan, self.plan.to_json())
        folder.write_json(self.files.guarantee, self.guarantee.to_json())
        folder.write_json(self.files.federation, self._federation_facts())
        saved = checkpoint.load(self.files.checkpoint, self.algorithm.state_type)
        state: State = saved.state if saved else self._start()
        with Ledger.open(
            self.files.ledger,
            self.plan,
            budget=self.budgets,
            accountant=self.experiment.privacy.accountant,
            anchor=saved.ledger if saved else None,
        ) as ledger:
            self._agree(resumed=saved is not None)
            for path in (self.files.metrics, self.files.timing, self._participation_file):
                folder.keep_rounds(path, state.round)
            for line in folder.read_lines(self._participation_file):
                self._count(line["answered"], line["missing"])
            engine = FlowerEngine(
                self.post,
                self.contracts,
                self.plan,
                ledger,
                self.experiment.schedule.lr,
                self.facts.parameters,
                self.context,
                Journal(self.files.path / "journal"),
                self._note,
            )
            while state.round < rounds:
                began = time.perf_counter()
                self._latest = []
                state = drive(self.algorithm.round(state), engine, state.round + 1)
                scores = self._evaluate_if_due(state)
                seconds = time.perf_counter() - began
                self._log(state, scores, ledger, seconds)
                checkpoint.save(self.files.checkpoint, Checkpoint(state, ledger.head))
                self.watch.round(self._report(state, scores, ledger, seconds))
            result = self._result(state, ledger)
        server.finish(self.post, self.contracts)
        folder.write_json(self.files.result, result.to_json())
        return result

    def _start(self) -> State:
        rng = np.random.default_rng(self.experiment.seeds.simulation)
        state: State = self.algorithm.start(self.facts, rng)
        return state

    def _assignment(self, state: State) -> Assignment:
        """The model of each site; record-level algorithms assign one to everybody."""
        assignment = self.algorithm.models(state)
        assert isinstance(assignment, Assignment)
        return assignment

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

    def _evaluate_if_due(self, state: State) -> Mapping[str, Score] | None:
        settings = self.experiment.evaluation
        last = state.round == self.experiment.schedule.rounds
        if not settings.ask_sites or (state.round % settings.every and not last):
            return None
        assignment = self._assignment(state)
        models = {client: assignment.model_of(client) for client in self.contracts}
        found = server.evaluate(self.post, self.contracts, models, state.round)
        return {name: Score(*score) for name, score in found.by_client.items()} or None

    def _log(self, state: State, scores: Mapping[str, Score] | None, ledger: Ledger, seconds: float) -> None:
        line = round_line(state.round, scores, self._assignment(state).cluster_of, ledger.spent())
        folder.append_line(self.files.metrics, line)
        folder.append_line(self.files.timing, {"round": state.round, "train": seconds, "evaluate": 0.0})
        findings = self.algorithm.findings(state)
        if findings is not None:
            folder.write_json(self.files.findings, asdict(findings))

    def _report(
        self, state: State, scores: Mapping[str, Score] | None, ledger: Ledger, seconds: float
    ) -> ServedRound:
        missing = {name: why for request in self._latest for name, why in request.missing.items()}
        answered = {name for request in self._latest for name in request.answered} - set(missing)
        return ServedRound(
            round=state.round,
            rounds=self.experiment.schedule.rounds,
            answered=tuple(sorted(answered)),
            missing=missing,
            epsilon={client: ledger.spent(client) for client in self.contracts},
            budget={client: budget.epsilon for client, budget in self.budgets.items()},
            accuracy=accuracy(scores).mean if scores else None,
            seconds=seconds,
        )

    # --- the result ---------------------------------------------------------------------------------

    def _federation_facts(self) -> dict[str, Any]:
        return {
            "coterie": __version__,
            "task": self._sites.task.kind,
            "classes": self._sites.task.classes,
            "parameters": self.facts.parameters,
            "clients": [
                {
                    "name": name,
                    "records": count,
                    "test_records": None,
                    "true_cluster": self.truth[name] if self.truth else None,
                }
                for name, count in self._sites.records.items()
            ],
        }

    def _result(self, state: State, ledger: Ledger) -> ServedResult:
        assignment = self._assignment(state)
        lines = list(folder.read_lines(self.files.metrics))
        last = lines[-1] if lines else {}
        found = None
        if self.truth is not None:
            found = same_partition(
                [assignment.cluster_of[client] for client in self.truth], list(self.truth.values())
            )
        findings = self.algorithm.findings(state)
        return ServedResult(
            folder=self.files.path,
            algorithm=self.algorithm.name,
            clusters=dict(assignment.cluster_of),
            clusters_found=found,
            accuracy=Spread(**last["accuracy"]) if last.get("accuracy") else None,
            loss=Spread(**last["loss"]) if last.get("loss") else None,
            guarantee=str(self.guarantee),
            epsilon=self.guarantee.epsilon,
            delta=self.guarantee.delta,
            rounds=state.round,
            seconds=sum(line["train"] for line in folder.read_lines(self.files.timing)),
            participation=dict(self._tally),
            asked={client: ledger.spent(client) for client in self.contracts},
            warnings=findings.warnings if findings else (),
        )
