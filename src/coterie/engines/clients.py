"""What clients compute from their records: in the engine's own process, or in a worker's."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from coterie import __version__
from coterie.algorithms.protocol import TrainJob, Vector
from coterie.data import Task
from coterie.engines.memory import keep_freed_memory
from coterie.models import ModelSettings, build_model
from coterie.models.check import one_thread
from coterie.privacy import PrivacyPlan, RandomStream, RecordSums, SecretKey
from coterie.training.augmentation import Augmentation
from coterie.training.dpsgd import sketch_privately, train_privately
from coterie.training.learner import Batch, Learner, on_device, random_batch
from coterie.training.local_sgd import LocalSGD, train_one
from coterie.training.proof import NotProven, proven_apart
from coterie.training.scoring import score_sums
from coterie.training.sketch import Projection

log = logging.getLogger(__name__)

COINS = frozenset({"coins", "views", "shuffle", "route", "rebalance"})
"""Purposes of streams that are part of a simulation; all others hide something by being added to it."""


def build_learner(
    settings: ModelSettings,
    task: Task,
    seed: int,
    device: torch.device,
    *,
    additive: bool = False,
    max_memory: int | None = None,
) -> Learner:
    """The experiment's model, checked, with the fastest gradients that can be trusted for it."""
    model = build_model(settings, task, seed, additive=additive)
    if not settings.own:
        return Learner(model, task, device, max_memory=max_memory)
    # A user's own code may mix the records of a batch in ways that no probe finds. Layer rules, and any other
    # pass of a whole batch, would then break the sensitivity.
    try:
        model, known = proven_apart(model, lambda size: random_batch(task, size).features), True
    except NotProven as reason:
        log.info(
            "records go through the model apart; it could not be proven that it keeps them so: %s", reason
        )
        known = False
    return Learner(model, task, device, fast=known, max_memory=max_memory)


@dataclass(frozen=True)
class Occasion:
    """Which release of which round is computed, and on what: the address of its random streams."""

    client: str
    round: int
    release: str
    input_hash: str


@dataclass(frozen=True)
class TrainingFacts:
    """What clients need beside model and records.

    Args:
        names, sizes: of the clients whose records stand one after the other in the table.
        public_seed: of the random projection that sketches share.
        augmentation: views of each record whose gradients are averaged before the clip.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    lr: float
    noise_key: SecretKey
    coin_key: SecretKey
    public_seed: int
    augmentation: Augmentation | None = None

    def view_key(self, occasion: Occasion) -> int:
        """Of the views that a client draws of its records."""
        return self.stream("views", occasion).integers(63) if self.augmentation else 0

    def stream(self, purpose: str, occasion: Occasion) -> RandomStream:
        key = self.coin_key if purpose in COINS else self.noise_key
        return key.stream(
            purpose,
            subject=occasion.client,
            round=occasion.round,
            release=occasion.release,
            input_hash=occasion.input_hash,
        )

    def uniforms(
        self, purpose: str, subjects: Sequence[str], round: int, release: str, hashed: str
    ) -> NDArray[np.float64]:
        """One coin in (0, 1) of each subject, from a stream of its own."""
        return self.coin_key.uniforms(
            purpose, subjects=subjects, round=round, release=release, input_hash=hashed
        )


class Clients:
    """All clients of a simulation, one after the other on request."""

    def __init__(self, facts: TrainingFacts, learner: Learner, table: Batch) -> None:
        self.facts = facts
        self.learner = learner
        self._projections: dict[int, Projection] = {}
        features = torch.split(table.features, list(facts.sizes))
        targets = torch.split(table.targets, list(facts.sizes))
        self.records = {
            name: Batch(*part) for name, *part in zip(facts.names, features, targets, strict=True)
        }

    def train(self, job: TrainJob, mechanism: RecordSums, occasion: Occasion) -> Vector:
        """The vector to release: an update, or a sketch of a gradient."""
        keep_freed_memory()
        learner, device = self.learner, self.learner.device
        records = self.records[job.client]
        start = on_device(job.start, device)
        noise = self.facts.stream("noise", occasion)
        views = (self.facts.augmentation, self.facts.view_key(occasion))
        with one_thread():
            if mechanism.projected is not None:
                projection = self._projection(mechanism.projected)
                value = sketch_privately(learner, start, records, mechanism, projection, noise, *views)
            else:
                coins = self.facts.stream("coins", occasion)
                anchor = None if job.anchor is None else on_device(job.anchor, device)
                pull = (anchor, job.anchor_weight)
                value = train_privately(
                    learner, start, records, mechanism, self.facts.lr, noise, coins, *pull, *views
                )
        released: Vector = value.to("cpu", torch.float32).numpy()
        return released

    def learn(
        self, client: str, start: NDArray[np.float32], rule: LocalSGD, seed: int
    ) -> NDArray[np.float32]:
        """The raw update of a client that learns without noise: for whoever is trusted with it."""
        keep_freed_memory()
        records = self.records[client]
        with one_thread():
            order = rule.batches(len(records), seed)
            update = train_one(self.learner, on_device(start, self.learner.device), records, order, rule)
        learnt: NDArray[np.float32] = update.cpu().numpy()
        return learnt

    def score(self, client: str, models: NDArray[np.float32]) -> NDArray[np.float64]:
        """Sum of scores and sum of losses of each model on the client's records: (models, 2)."""
        records = self.records[client]
        stacked = torch.from_numpy(models).to(self.learner.device)
        with one_thread():
            sums = [score_sums(self.learner, model, records, [len(records)]) for model in stacked]
        return np.array([(scores[0], losses[0]) for scores, losses in sums])

    def _projection(self, dimensions: int) -> Projection:
        """The public projection, the same for every client: sketches must be comparable."""
        if dimensions not in self._projections:
            self._projections[dimensions] = Projection(
                self.learner.layout.size, dimensions, self.facts.public_seed, self.learner.device
            )
        return self._projections[dimensions]


def behaviour(
    model: ModelSettings, lr: float, augmentation: Augmentation | None, plan: PrivacyPlan, learner: Learner
) -> str:
    """What decides, beside the message and the data, what a client computes: noise is bound to all of it."""
    # The sizes of micro-batches too: they decide the last bits of a sum.
    versions = f"{__version__} {torch.__version__} {learner.device.type} {learner.shape!r}"
    return f"{model!r} {lr!r} {augmentation!r} {plan.digest()} {learner.fingerprint()} {versions}"
