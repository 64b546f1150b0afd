"""What benchmarks work on: clients with random records, a model for them, and our engine with its ledger."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from coterie.algorithms import protocol
from coterie.bench.timing import Way
from coterie.data import Client, Federation, Records, Task
from coterie.engines.local import LocalEngine, coin_key
from coterie.models import ModelSettings, build_model
from coterie.privacy import Adjacency, Budget, Ledger, PrivacyPlan, SecretKey, Unit, plans
from coterie.training.learner import Learner
from coterie.training.parameters import flatten

LR, CLIP, NOISE = 0.1, 1.0, 1.0
ROUNDS = 100_000
"""Rounds that are planned: the engine decides as for a long run; only a few are timed."""


@dataclass(frozen=True, kw_only=True)
class RandomClients:
    """So many clients with so many records each, for one model."""

    model: str = "cnn"
    clients: int
    records: int
    shape: tuple[int, ...] = (1, 28, 28)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"client-{index}" for index in range(self.clients))

    @property
    def task(self) -> Task:
        return Task(kind="classification", shape=self.shape, classes=10)

    def federation(self) -> Federation:
        rng = np.random.default_rng(0)
        clients = []
        for name in self.names:
            features = rng.normal(size=(self.records, *self.shape)).astype(np.float32)
            records = Records(features, rng.integers(10, size=self.records))
            clients.append(Client(name, records, records.take(slice(0, 0)), records.take(slice(0, 1))))
        return Federation(tuple(clients), self.task)

    def build(self) -> nn.Module:
        return build_model(ModelSettings(name=self.model), self.task, seed=0)

    def start(self) -> NDArray[np.float32]:
        """The model's initial parameters, as one vector."""
        return flatten(self.build())

    @contextmanager
    def engine(self, plan: PrivacyPlan, lr: float, device: torch.device) -> Iterator[LocalEngine]:
        """The engine of a run, with ledger and everything."""
        key = SecretKey.from_os()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ledger.jsonl"
            with Ledger.open(path, plan, budget=Budget(math.inf, 1e-5), accountant="rdp") as ledger:
                learner = Learner(self.build(), self.task, device)
                keys = (key, coin_key(key, 0))
                engine = LocalEngine(self.federation(), learner, lr, plan, ledger, *keys, public_seed=0)
                try:
                    yield engine
                finally:
                    engine.close()


@dataclass(frozen=True, kw_only=True)
class Work(RandomClients):
    """One round that everybody does: a pass over all records."""

    batch: int = 32

    @property
    def samples(self) -> int:
        return self.clients * self.records

    def private_engine(self, device: torch.device) -> AbstractContextManager[LocalEngine]:
        own = plans.RecordReleases(self.records, clip=CLIP)
        releases = [own.steps(plans.TRAINING, ROUNDS, self.batch, NOISE), *own.selections(1.0, ROUNDS)]
        plan = plans.plan_of(Unit.RECORD, Adjacency.ZERO_OUT, dict.fromkeys(self.names, releases))
        return self.engine(plan, LR, device)

    def request(self) -> protocol.Train:
        """Every client trains once, from the same start."""
        start = self.start()
        return protocol.Train(plans.TRAINING, tuple(protocol.TrainJob(name, start) for name in self.names))

    def choice(self, models: int) -> protocol.Select:
        """Every client chooses between so many models."""
        return protocol.Select(plans.SELECTION, self.names, np.stack([self.start()] * models))


@dataclass(frozen=True, kw_only=True)
class RoundWork(RandomClients):
    """A round of client-level learning: some clients sampled of many, a few local epochs of plain SGD each.

    Ours samples, trains, clips and adds noise, with a ledger; the peers train every client of an equally
    large sample and add up the updates.
    """

    records: int = 60
    sampled: int
    epochs: int = 5
    batch: int = 10
    lr: float = 0.05

    def samples(self, clients: int) -> int:
        """Records that go through a model when so many clients train."""
        return clients * self.epochs * self.records


@contextmanager
def our_round(work: RoundWork, device: torch.device) -> Iterator[Way]:
    """Our own round: sampled, charged, trained, clipped and noised."""
    plan = plans.client_plan(plans.CohortReleases(work.sampled / work.clients).sums(noise=1.0), ROUNDS)
    training = protocol.LocalTraining(work.epochs, work.batch, work.lr)
    job = protocol.CohortJob(work.names, work.start()[None], training, protocol.Choice.GIVEN)
    rounds = iter(range(1, ROUNDS))
    with work.engine(plan, work.lr, device) as engine:

        def run() -> int:
            number = next(rounds)
            cohort = engine.answer(protocol.Cohort(plans.SUMS, job), number)
            assert isinstance(cohort, protocol.Opened)
            # How many came is a secret that no answer tells; a benchmark must know.
            came = len(engine.cohorts._open[cohort.number].sampled)
            engine.answer(protocol.Sum(cohort), number)
            return work.samples(came)

        yield run
