"""Clients with random records, a model for them, and our engine with its ledger: what benchmarks work on."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from coterie.data import Client, Federation, Records, Task
from coterie.engines.local import LocalEngine, coin_key
from coterie.models import ModelSettings, build_model
from coterie.privacy import Budget, Ledger, PrivacyPlan, SecretKey
from coterie.training.learner import Learner
from coterie.training.parameters import flatten

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
