"""What clients compute from their records: in the engine's own process, or in a worker's."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from timeit import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from coterie import __version__
from coterie.algorithms.protocol import TrainJob, Vector
from coterie.data import Task
from coterie.engines.memory import keep_freed_memory
from coterie.engines.workers import Call, WorkerPool, cores
from coterie.models import ModelSettings, build_model, network_task
from coterie.models.check import one_thread
from coterie.privacy import Charge, PrivacyPlan, RandomStream, RecordSums, SecretKey
from coterie.training.augmentation import Augmentation
from coterie.training.clipping import clipped_sum
from coterie.training.dpsgd import sketch_privately, train_privately
from coterie.training.learner import Batch, Learner, LearnerShape, on_device, precision, random_batch
from coterie.training.local_sgd import LocalSGD, balanced_gradient, train_one
from coterie.training.proof import NotProven, proven_apart
from coterie.training.scoring import score_sums
from coterie.training.sketch import Projection

log = logging.getLogger(__name__)

COINS = frozenset({"coins", "views", "shuffle", "route", "rebalance"})
"""Purposes of streams that are part of a simulation; all others hide something by being added to it."""
WORKERS_FROM_SECONDS = 20.0
"""Time that a plan would take one core from which starting workers pays."""
WORKERS_PER_CORE = 4
"""More than that only wait for each other, each with the memory and the start of a process of its own."""
WORKER_BYTES = 200 * 2**20
"""Memory that a process of the pool takes for itself before it has done anything."""


def build_learner(
    settings: ModelSettings,
    task: Task,
    seed: int,
    device: torch.device,
    *,
    additive: bool = False,
    max_memory: int | None = None,
    full_precision: bool = False,
) -> Learner:
    """The experiment's model, checked, with the fastest gradients that can be trusted for it."""
    model, task = build_model(settings, task, seed, additive=additive), network_task(settings.features, task)
    known = True
    # A user's own code may mix the records of a batch in ways that no probe finds. Layer rules, and any other
    # pass of a whole batch, would then break the sensitivity.
    if settings.own:
        try:
            model = proven_apart(model, lambda size: random_batch(task, size).features)
        except NotProven as reason:
            known = False
            unproven = "records go through the model apart; it could not be proven that it keeps them so: %s"
            log.info(unproven, reason)
    return Learner(model, task, device, fast=known, max_memory=max_memory, full_precision=full_precision)


@dataclass(frozen=True)
class TrainingFacts:
    """What clients need beside model and records.

    Args:
        names, sizes: of the clients whose records, or persons, stand one after the other in the table.
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

    def view_key(self, charge: Charge) -> int:
        """Of the views that a client draws of its records."""
        return self.stream("views", charge).integers(63) if self.augmentation else 0

    def stream(self, purpose: str, charge: Charge) -> RandomStream:
        """Whatever is charged again draws the same again, and anything else draws afresh."""
        key = self.coin_key if purpose in COINS else self.noise_key
        return key.stream(purpose, **asdict(charge))

    def uniforms(
        self, purpose: str, subjects: Sequence[str], round: int, release: str, hashed: str
    ) -> NDArray[np.float64]:
        """One coin in (0, 1) of each subject, from a stream of its own."""
        return self.coin_key.uniforms(
            purpose, subjects=subjects, round=round, release=release, input_hash=hashed
        )


_projection = lru_cache(maxsize=1)(Projection)
"""The public projection, the same for every client: sketches must be comparable."""


class Clients:
    """All clients of a simulation: one after the other on request, or, where that pays, a core each."""

    def __init__(self, facts: TrainingFacts, learner: Learner, table: Batch, workers: int | None = 1) -> None:
        """Args:

        table: the records of all clients, one client after the other; or their persons.
        workers: processes that compute on a CPU, a client each; None for one per core if that pays, 1 for
            none.
        """
        self.facts, self.learner, self.table = facts, learner, table
        self.pool: WorkerPool | None = None
        self._workers = workers
        parts = [torch.split(tensor, list(facts.sizes)) for tensor in table.tensors]
        self.records = {name: Batch(*own) for name, *own in zip(facts.names, *parts, strict=True)}

    def run(self, calls: Mapping[str, Call], gradients: float) -> dict[str, Any]:
        """Answers to calls of `train`, `learn` or `score`, by client.

        Args:
            gradients: of records that the whole run will ask for, in expectation: they may repay workers.
        """
        if self.pool is None and (count := self._workers or self._useful_workers(gradients)) > 1:
            self._start_workers(processes_for(count, len(self.records)))
        if self.pool is not None:
            return self.pool.run(calls)
        return {client: getattr(self, method)(*arguments) for client, (method, arguments) in calls.items()}

    def close(self) -> None:
        """End the workers, if there are any."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def train(self, job: TrainJob, mechanism: RecordSums, charge: Charge) -> Vector:
        """The vector to release: an update, or a sketch of a gradient."""
        keep_freed_memory()
        learner, device = self.learner, self.learner.device
        records = self.records[job.client]
        start = on_device(job.start, device)
        noise = self.facts.stream("noise", charge)
        views = (self.facts.augmentation, self.facts.view_key(charge))
        with self._computing():
            if mechanism.projected is not None:
                shape = (learner.layout.size, mechanism.projected)
                projection = _projection(*shape, self.facts.public_seed, device)
                # What is clipped and summed is what was projected, however a GPU rounded it.
                with precision(tf32=not learner.full_precision):
                    value = sketch_privately(learner, start, records, mechanism, projection, noise, *views)
            else:
                coins = self.facts.stream("coins", charge)
                pull = (None if job.anchor is None else on_device(job.anchor, device), job.anchor_weight)
                value = train_privately(
                    learner, start, records, mechanism, self.facts.lr, noise, coins, *pull, *views
                )
        return np.asarray(value.to("cpu", torch.float32))

    def learn(
        self, client: str, start: NDArray[np.float32], rule: LocalSGD, seed: int
    ) -> NDArray[np.float32]:
        """The raw update of a client that learns without noise: for whoever is trusted with it."""
        keep_freed_memory()
        records = self.records[client]
        with self._computing():
            order = rule.batches(len(records), seed)
            update = train_one(self.learner, on_device(start, self.learner.device), records, order, rule)
        return np.asarray(update.cpu())

    def sketch(self, client: str, start: NDArray[np.float32], dimensions: int) -> NDArray[np.float64]:
        """A public projection of the client's gradient, at length 1; it stays with the client."""
        learner = self.learner
        with self._computing():
            gradient = balanced_gradient(learner, on_device(start, learner.device), self.records[client])
            projection = _projection(learner.layout.size, dimensions, self.facts.public_seed, learner.device)
            point = projection(gradient[None])[0].double().cpu().numpy()
        length = float(np.linalg.norm(point))
        return point / length if 0 < length < np.inf else np.zeros(dimensions)

    def score(self, client: str, models: NDArray[np.float32]) -> NDArray[np.float64]:
        """Sum of scores and sum of losses of each model on the client's records: (models, 2)."""
        records = self.records[client]
        stacked = torch.from_numpy(models).to(self.learner.device)
        with self._computing():
            sums = [score_sums(self.learner, model, records, [len(records)]) for model in stacked]
        return np.array([(scores[0], losses[0]) for scores, losses in sums])

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """As every client's records are computed on: one thread, and as precisely as was asked for."""
        with one_thread(), self.learner.precisely():
            yield

    def _useful_workers(self, gradients: float) -> int:
        """As many as there are cores for them, if there is enough to do to repay their start."""
        # The number of threads, not of cores: who runs several experiments at once lowers it.
        count = min(torch.get_num_threads(), len(self.records))
        if count == 1 or self.learner.device.type != "cpu" or os.name != "posix":
            return 1
        return count if gradients * self._seconds_per_gradient >= WORKERS_FROM_SECONDS else 1

    @cached_property
    def _seconds_per_gradient(self) -> float:
        return seconds_per_gradient(self.learner, next(iter(self.records.values())))

    def _start_workers(self, count: int) -> None:
        learner = self.learner
        make = partial(_in_worker, self.facts, learner.model, learner.task, learner.shape)
        try:
            log.info("starting %d processes to train clients", count)
            self.pool = WorkerPool(count, make, self.table)
            log.info("clients train in %d processes", count)
        except Exception as reason:  # a user's model may refuse to travel in its own way
            self._workers = 1
            log.warning("clients train in one process, one after the other: %s", reason)


def processes_for(workers: int, clients: int) -> int:
    """How many processes so many workers are: each has a client at a time, and shares a core with few."""
    return min(workers, clients, WORKERS_PER_CORE * cores())


def seconds_per_gradient(learner: Learner, records: Batch) -> float:
    """What the clipped gradient of one record takes one core, measured on a few."""
    few, start = records.take(slice(0, 8)), torch.zeros(learner.layout.size)
    with one_thread():
        seconds = repeat(lambda: clipped_sum(learner, start, few, 1.0), repeat=2, number=1)
    return min(seconds) / max(1, len(few))


def _in_worker(
    facts: TrainingFacts, model: nn.Module, task: Task, shape: LearnerShape, table: Batch
) -> Clients:
    """The clients again, in a worker: they compute what the engine would."""
    return Clients(facts, Learner.from_shape(model, task, shape), table)


def behaviour(
    model: ModelSettings,
    lr: float,
    augmentation: Augmentation | None,
    plan: PrivacyPlan,
    learner: Learner,
    features: str = "",
) -> str:
    """What decides, beside the message and the data, what a client computes: noise is bound to all of it.

    Args:
        features: digest of what a transform made of the records, where there is one.
    """
    # The sizes of micro-batches too: they decide the last bits of a sum.
    versions = f"{__version__} {torch.__version__} {learner.device.type} {learner.shape!r}"
    made = f" {features}" if features else ""
    return f"{model!r} {lr!r} {augmentation!r} {plan.computed()} {learner.fingerprint()} {versions}{made}"
