"""Training in groups with the real engine on tiny workers, with every coin and all noise repeatable."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.algorithms import AnyAlgorithm, find_algorithm
from coterie.algorithms.protocol import Opened, PublicFacts, Sums, Vector
from coterie.algorithms.settings import PrivacySettings, Schedule
from coterie.data import Client, Federation, Records, Task
from coterie.engines.driver import drive
from coterie.engines.local import LocalEngine
from coterie.groups import Structure
from coterie.models import ModelSettings, build_model
from coterie.privacy import Budget, Ledger, Mode, PrivacyPlan, SecretKey, Unit
from coterie.training.learner import Learner
from coterie.training.parameters import flatten

TASK = Task(kind="classification", shape=(3,), classes=2)
MODEL = ModelSettings(name="softmax")
LEARNER = Learner(build_model(MODEL, TASK, seed=0), TASK, torch.device("cpu"))
CLIP = 0.25


def workers(structure: Structure, *, changed: int | None = None, scale: float = 1.0) -> Federation:
    """A federation in these groups; the records of `changed` are others, `scale` times as large."""
    clients = []
    for number in range(structure.workers):
        other = number == changed
        rng = np.random.default_rng((number, 77 if other else 0))
        features = ((scale if other else 1.0) * rng.normal(size=(6, 3))).astype(np.float32)
        records = Records(features, rng.integers(2, size=6))
        clients.append(Client(f"w{number}", records, records.take(slice(0, 0)), records))
    names = tuple(client.name for client in clients)
    return Federation(tuple(clients), TASK, structure=replace(structure, names=names))


def build(
    name: str,
    epochs: int,
    *,
    mode: Mode = Mode.SOUND,
    clip: float = CLIP,
    lr: float = 0.5,
    batch: int = 3,
    **settings: Any,
) -> AnyAlgorithm:
    algorithm = find_algorithm(Unit.WORKER, name)
    privacy = PrivacySettings(unit=Unit.WORKER, epsilon=float("inf"), delta=1e-5, clip=clip, mode=mode)
    options = {"rate": 1.0, "noise": 1.0, **settings}
    return algorithm(
        algorithm.settings_type(name=name, **options),
        Schedule(rounds=epochs, batch=batch, lr=lr),
        privacy,
    )


def facts_of(federation: Federation) -> PublicFacts:
    return PublicFacts(
        clients=tuple(client.name for client in federation.clients),
        records={client.name: len(client.train) for client in federation.clients},
        parameters=LEARNER.layout.size,
        initialise=lambda seed: flatten(build_model(MODEL, TASK, seed)),
        structure=federation.structure,
    )


@contextmanager
def engine_for(
    plan: PrivacyPlan, federation: Federation, learner: Learner = LEARNER, lr: float = 0.5
) -> Iterator[tuple[LocalEngine, Ledger]]:
    """An engine that has answered nothing yet, and its ledger."""
    key = SecretKey.from_seed(3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        with Ledger.open(path, plan, budget=Budget(np.inf, 1e-5), accountant="rdp") as ledger:
            yield LocalEngine(federation, learner, lr, plan, ledger, key, key, public_seed=0), ledger


class Training:
    """A run without a folder: states after every epoch, what was asked and answered, what was charged."""

    waited = 0.0
    personal: Mapping[str, Vector] = {}

    def __init__(
        self, algorithm: AnyAlgorithm, federation: Federation, *, learner: Learner = LEARNER
    ) -> None:
        facts = facts_of(federation)
        self.plan = algorithm.plan(facts)
        self.states = [algorithm.start(facts, np.random.default_rng(0))]
        self.jobs: dict[tuple[int, str], Any] = {}
        self.sums: dict[tuple[int, str], Any] = {}
        self.sampled: dict[tuple[int, str], Any] = {}
        with engine_for(self.plan, federation, learner, algorithm.schedule.lr) as (self.engine, ledger):
            for epoch in range(1, algorithm.schedule.rounds + 1):
                self.states.append(drive(algorithm.round(self.states[-1]), self, epoch))
            self.executed = {unit.subject: ledger.executed(unit.subject) for unit in self.plan.units}

    def answer(self, request: Any, round: int) -> Any:
        """Pass a request on to the engine and keep it with its answer, by epoch and release."""
        reply = self.engine.answer(request, round)
        if isinstance(reply, Opened):
            self.jobs[round, reply.release] = request
            self.sampled[round, reply.release] = self.engine.cohorts._open[reply.number].sampled
        else:
            assert isinstance(reply, Sums)
            self.sums[round, request.cohort.release] = reply.rows
        return reply

    @property
    def models(self) -> dict[int, Any]:
        """The models of every group, by their index from 1."""
        return {index: state.models for index, state in enumerate(self.states, start=1)}
