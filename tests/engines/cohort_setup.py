"""A tiny population of clients, a plan and an engine on it; and the same releases computed the slow way."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from coterie.algorithms.protocol import Choice, CohortJob, LocalTraining
from coterie.data import Client, Federation, Records, Task
from coterie.engines.clients import Clients, TrainingFacts
from coterie.engines.cohorts import Cohorts, cohort_hash
from coterie.engines.members import LocalMembers
from coterie.models import ModelSettings, build_model
from coterie.privacy import (
    POPULATION,
    Adjacency,
    Budget,
    Charge,
    CohortSums,
    FixedSample,
    Ledger,
    Mechanism,
    PlannedRelease,
    PoissonSample,
    PrivacyPlan,
    SecretKey,
    ThreatModel,
    Unit,
    UnitPlan,
)
from coterie.training.learner import Batch, Learner
from coterie.training.local_sgd import LocalSGD, train_one
from coterie.training.scoring import join

TASK = Task(kind="classification", shape=(5,), classes=3)
TRAINING = LocalTraining(epochs=2, batch=4, lr=0.2)
CLIP = 0.3
SIZE = 5 * 3 + 3
ADD_REMOVE = Adjacency.ADD_REMOVE

SUM = CohortSums(CLIP, 1.5, PoissonSample(0.5), ADD_REMOVE)
ROUTED = CohortSums(CLIP, 1.5, PoissonSample(0.5), ADD_REMOVE, histogram_ratio=2.0)


def rebalanced(clients: int, cohort: int) -> CohortSums:
    return CohortSums(CLIP, 3.0, FixedSample(clients, cohort), ADD_REMOVE, identifier_ratio=1.0)


def names_of(clients: int) -> tuple[str, ...]:
    return tuple(f"client-{index:02d}" for index in range(clients))


def federation(clients: Sequence[str]) -> Federation:
    """Everyone's records depend on its own name alone."""
    made = []
    for name in clients:
        number = int(name[-2:])
        rng = np.random.default_rng(number)
        size = 9 + number % 4
        centre = np.eye(5)[number % 3]
        features = (rng.normal(size=(size, 5)) + 2 * centre).astype(np.float32)
        records = Records(features, rng.integers(3, size=size))
        made.append(Client(name, records, records.take(slice(0, 0)), records.take(slice(0, 3))))
    return Federation(tuple(made), TASK)


def population_plan(mechanism: Mechanism, times: int = 50) -> PrivacyPlan:
    unit = UnitPlan(POPULATION, (PlannedRelease("sums", mechanism, times),))
    return PrivacyPlan(Unit.CLIENT, ADD_REMOVE, ThreatModel("whoever", "everything"), (unit,))


def learner_of() -> Learner:
    return Learner(build_model(ModelSettings(name="softmax"), TASK, seed=0), TASK, torch.device("cpu"))


class Engine:
    """Cohorts with their ledger, on a folder."""

    def __init__(
        self,
        path: Path,
        plan: PrivacyPlan,
        clients: Sequence[str],
        seed: int = 3,
        learner: Learner | None = None,
    ) -> None:
        self.path = path / "ledger.jsonl"
        self.learner = learner or learner_of()
        people = federation(clients).clients
        table = join([Batch.of(client.train, self.learner.device) for client in people])
        key = SecretKey.from_seed(seed)
        sizes = tuple(len(client.train) for client in people)
        self.facts = TrainingFacts(tuple(clients), sizes, 0.1, noise_key=key, coin_key=key, public_seed=0)
        self.clients = Clients(self.facts, self.learner, table)
        self.records = self.clients.records
        self.ledger = Ledger.open(self.path, plan, budget=Budget(1e6, 1e-3), accountant="rdp")
        self.members = LocalMembers(self.clients)
        size = self.learner.layout.size
        self.cohorts = Cohorts(self.facts, self.members, size, plan, self.ledger, "context")

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.ledger.close()

    def lines(self) -> int:
        return len(self.path.read_text().splitlines())


def models_of(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (0.5 * rng.normal(size=(count, SIZE))).astype(np.float32)


def job_of(
    members: Sequence[str], clusters: int = 3, choice: Choice = Choice.LOWEST_LOSS, seed: int = 0
) -> CohortJob:
    return CohortJob(tuple(members), models_of(clusters, seed), TRAINING, choice)


class Twin:
    """One member at a time, from the same streams: what the engine's cohort must contain."""

    def __init__(self, engine: Engine, job: CohortJob, round: int, release: str = "sums") -> None:
        self.engine, self.job, self.round, self.release = engine, job, round, release
        self.hash = cohort_hash("context", job)

    def charge(self, member: str) -> Charge:
        return Charge(member, self.round, self.release, self.hash)

    def sampled(self, rate: float) -> list[str]:
        facts = self.engine.facts
        return [
            member
            for member in self.job.members
            if facts.stream("coins", self.charge(member)).uniform(1)[0] < rate
        ]

    def choice(self, member: str) -> int:
        if self.job.choice is Choice.GIVEN:
            return (self.job.start_of or {}).get(member, 0)
        records, learner = self.engine.records[member], self.engine.learner
        losses = [
            float(learner.client_losses(torch.from_numpy(model), records).double().sum())
            for model in self.job.models
        ]
        return int(np.argmin(losses))

    def update(self, member: str) -> np.ndarray:
        training = self.job.training
        rule = LocalSGD(training.epochs, training.batch, training.lr, training.momentum, training.proximal)
        records = self.engine.records[member]
        seed = self.engine.facts.stream("shuffle", self.charge(member)).integers(64)
        start = torch.from_numpy(self.job.models[self.choice(member)])
        order = rule.batches(len(records), seed)
        return train_one(self.engine.learner, start, records, order, rule).double().numpy()


def same_streams(engine: Engine):  # type: ignore[no-untyped-def]
    """The hash binds who is named, and one world names one less: for neighbours, streams are tied."""

    class Tied(type(engine.facts)):  # type: ignore[misc]
        def stream(self, purpose, charge):  # type: ignore[no-untyped-def]
            return super().stream(purpose, replace(charge, input_hash="tied"))

        def uniforms(self, purpose, subjects, round, release, hashed):  # type: ignore[no-untyped-def]
            return super().uniforms(purpose, subjects, round, release, "tied")

    return Tied(**vars(engine.facts))
