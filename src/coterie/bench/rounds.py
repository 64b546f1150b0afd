"""A round of client-level learning: some clients sampled of many, a few local epochs of plain SGD each.

Ours samples, trains, clips and adds noise, with a ledger; the peers train every client of an equally large
sample and add up the updates.
"""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from coterie.algorithms.protocol import Choice, Cohort, CohortJob, LocalTraining, Opened, Sum
from coterie.bench.peers import installed_round_peers
from coterie.bench.timing import OURS, Timing, Watch, Way, take_turns
from coterie.data import Client, Federation, Records, Task
from coterie.engines.local import LocalEngine, coin_key
from coterie.models import ModelSettings, build_model
from coterie.privacy import (
    POPULATION,
    Adjacency,
    Budget,
    CohortSums,
    Ledger,
    PlannedRelease,
    PoissonSample,
    PrivacyPlan,
    SecretKey,
    ThreatModel,
    Unit,
    UnitPlan,
)
from coterie.training.learner import Learner
from coterie.training.parameters import flatten

ROUNDS = 100_000
"""Rounds that are planned: the engine decides as for a long run; only a few are timed."""


@dataclass(frozen=True)
class RoundWork:
    """One round that everybody does."""

    clients: int
    sampled: int
    records: int = 60
    epochs: int = 5
    batch: int = 10
    lr: float = 0.05
    model: str = "cnn"
    shape: tuple[int, ...] = (1, 28, 28)

    @property
    def task(self) -> Task:
        return Task(kind="classification", shape=self.shape, classes=10)

    @property
    def name(self) -> str:
        return f"{self.model}, {self.sampled} of {self.clients} clients, client-level"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"client-{index}" for index in range(self.clients))

    def samples(self, clients: int) -> int:
        """Records that go through a model when so many clients train."""
        return clients * self.epochs * self.records

    def federation(self) -> Federation:
        rng = np.random.default_rng(0)
        clients = []
        for name in self.names:
            features = rng.normal(size=(self.records, *self.shape)).astype(np.float32)
            records = Records(features, rng.integers(10, size=self.records))
            clients.append(Client(name, records, records.take(slice(0, 0)), records.take(slice(0, 1))))
        return Federation(tuple(clients), self.task)


def compare_rounds(
    work: RoundWork, device: torch.device, repeats: int, warm_up: int, watch: Watch
) -> list[Timing]:
    """Ours and every installed peer on the same round."""
    federation = work.federation()
    with our_round(work, federation, device) as ours:
        ways: dict[str, Way] = {OURS: ours}
        for name, peer in installed_round_peers().items():
            model = build_model(ModelSettings(name=work.model), work.task, seed=0).to(device)
            records = {
                client.name: (client.train.features, client.train.targets) for client in federation.clients
            }
            run = peer(model, records, work.sampled, work.lr, work.epochs, work.batch)
            ways[name] = lambda run=run: work.samples(run())  # type: ignore[misc]
        return take_turns(work.name, ways, device, repeats, watch, warm_up)


@contextmanager
def our_round(work: RoundWork, federation: Federation, device: torch.device) -> Iterator[Way]:
    """Our own round: sampled, charged, trained, clipped and noised."""
    model = build_model(ModelSettings(name=work.model), work.task, seed=0)
    start = flatten(model)
    plan, key = _plan(work), SecretKey.from_os()
    training = LocalTraining(work.epochs, work.batch, work.lr)
    job = CohortJob(work.names, start[None], training, Choice.GIVEN)
    rounds = iter(range(1, ROUNDS))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        with Ledger.open(path, plan, budget=Budget(math.inf, 1e-5), accountant="rdp") as ledger:
            learner = Learner(model, work.task, device)
            keys = (key, coin_key(key, 0))
            engine = LocalEngine(federation, learner, work.lr, plan, ledger, *keys, public_seed=0)

            def run() -> int:
                number = next(rounds)
                cohort = engine.answer(Cohort("sums", job), number)
                assert isinstance(cohort, Opened)
                # How many came is a secret that no answer tells; a benchmark must know.
                came = len(engine.cohorts._open[cohort.number].sampled)
                engine.answer(Sum(cohort), number)
                return work.samples(came)

            try:
                yield run
            finally:
                engine.close()


def _plan(work: RoundWork) -> PrivacyPlan:
    rate = work.sampled / work.clients
    mechanism = CohortSums(1.0, 1.0, PoissonSample(rate), Adjacency.ADD_REMOVE)
    return PrivacyPlan(
        unit=Unit.CLIENT,
        adjacency=Adjacency.ADD_REMOVE,
        threat=ThreatModel("nobody", "timings of random records"),
        units=(UnitPlan(POPULATION, (PlannedRelease("sums", mechanism, ROUNDS),)),),
    )
