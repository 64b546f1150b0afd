"""The in-process engine: all clients of a simulation on this machine.

Every answer goes the same way: look up the mechanism in the plan, charge the ledger, and only then
touch records. Noise and sampling coins come from streams keyed by client, round, release and a hash of what
the client was sent, so a round repeated after a crash repeats itself exactly, and anything else draws afresh.

How the clients are computed (one after the other, a core per client, or all as one program on a GPU) is a
matter of speed: it changes neither what is charged nor what is clipped, sampled and noised.
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.algorithms.protocol import (
    Choices,
    Cohort,
    Count,
    Reply,
    Request,
    Select,
    Train,
    TrainJob,
    Updates,
    Vector,
)
from coterie.data import Federation
from coterie.engines.clients import Clients, Occasion, TrainingFacts
from coterie.engines.cohorts import Cohorts
from coterie.engines.members import LocalMembers
from coterie.engines.workers import WorkerPool, WorkerSetup
from coterie.errors import PlanError
from coterie.models.check import one_thread
from coterie.privacy import Charge, Ledger, ModelSelection, PrivacyPlan, RecordSums, SecretKey
from coterie.privacy.released import Released
from coterie.privacy.wording import SIMULATION
from coterie.training.augmentation import Augmentation
from coterie.training.clipping import clipped_sum
from coterie.training.learner import Batch, Learner
from coterie.training.local_sgd import stacks
from coterie.training.scoring import join, score_sums
from coterie.training.stacked import StackedJob, StackedTrainer

log = logging.getLogger(__name__)

FAST_RANDOMNESS = (
    f"{SIMULATION}: noise and coins are drawn on the GPU by Philox from the noise key, which is fast and not "
    "cryptographic"
)
WORKERS_FROM_SECONDS = 20.0
"""Time that a plan would take one core from which starting workers pays."""


def randomness_caveat(learner: Learner) -> str | None:
    """What a guarantee must add about the noise, given how this engine will draw it."""
    return FAST_RANDOMNESS if stacks(learner) else None


class LocalEngine:
    """Answers for all clients on this machine: `Train` and `Select` itself, the rest through its cohorts."""

    def __init__(
        self,
        federation: Federation,
        learner: Learner,
        lr: float,
        plan: PrivacyPlan,
        ledger: Ledger,
        noise_key: SecretKey,
        coin_key: SecretKey,
        public_seed: int,
        context: str = "",
        *,
        workers: int | None = None,
        max_memory: int | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        """Args:

        public_seed: of the random projection that sketches share.
        context: whatever else decides what a client computes from what it is sent (model, step size,
            device, library version); noise must not repeat when any of it differs.
        workers: processes that train on a CPU, a client each; by default one per core if that pays, else
            none (1 means none, too).
        max_memory: bytes that training may take on a GPU; by default, most of what is free. (On a CPU the
            learner's micro-batches bound it.)
        augmentation: views of each record whose gradients are averaged before the clip.
        """
        self.learner = learner
        self.plan = plan
        self.ledger = ledger
        self.context = context
        self._table = join([Batch.of(client.train, learner.device) for client in federation.clients])
        self.facts = TrainingFacts(
            names=tuple(client.name for client in federation.clients),
            sizes=tuple(len(client.train) for client in federation.clients),
            lr=lr,
            noise_key=noise_key,
            coin_key=coin_key,
            public_seed=public_seed,
            augmentation=augmentation,
        )
        self._clients = Clients(self.facts, learner, self._table)
        self.members = LocalMembers(learner, self._clients.records, self._workers)
        self.cohorts = Cohorts(self.facts, self.members, learner.layout.size, plan, ledger, context)
        self._wanted_workers = workers
        self._seconds_per_gradient: float | None = None
        self._max_memory = max_memory
        self._pool: WorkerPool | None = None
        self._trainer: StackedTrainer | None = None
        self._first_set = 0
        self.waited = 0.0
        """Seconds in which other runs were computed while this one waited."""

    def answer(self, request: Request, round: int) -> Reply:
        begun = self.begin(request, round)
        return begun.finish(begun.trainer.train(begun.jobs)) if isinstance(begun, Begun) else begun

    def begin(self, request: Request, round: int) -> "Begun | Reply":
        """Charge a request, and answer it or say which jobs of a stacked program its answer takes."""
        if isinstance(request, Train):
            return self._train(request, round)
        if isinstance(request, Select):
            return self._select(request, round)
        if isinstance(request, Cohort):
            return self.cohorts.open(request, round)
        return self.cohorts.count(request) if isinstance(request, Count) else self.cohorts.add_up(request)

    @property
    def personal(self) -> Mapping[str, Vector]:
        """What clients keep to themselves between rounds."""
        return self.members.personal

    def close(self) -> None:
        """End the workers, if there are any."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # --- training -----------------------------------------------------------------------------------

    def _train(self, request: Train, round: int) -> "Begun | Updates":
        release = request.release
        mechanisms = {job.client: self.plan.planned(RecordSums, release, job.client) for job in request.jobs}
        if len(mechanisms) != len(request.jobs):
            raise PlanError(f"release '{request.release}' was asked of one client twice in one request")
        if any(job.anchor is not None and mechanisms[job.client].projected for job in request.jobs):
            raise PlanError(
                f"release '{request.release}' is a sketch: it takes no step, an anchor pulls at nothing"
            )
        for job in request.jobs:
            if job.anchor is not None:  # what cannot be released is not charged
                mechanisms[job.client].noise_in_release(self.facts.lr, job.anchor_weight)
        inputs = job_hashes(self.context, request.jobs)
        self._charge(request.release, round, inputs)
        calls = {
            job.client: (
                job,
                mechanisms[job.client],
                Occasion(job.client, round, request.release, inputs[job.client]),
            )
            for job in request.jobs
        }
        if self.stacks:
            return self._train_together(calls)
        pool = self._workers()
        if pool is None:
            return Updates({client: self._train_one(*call) for client, call in calls.items()})
        values = pool.run({client: ("train", call) for client, call in calls.items()})
        return Updates({client: self._released(values[client], *call) for client, call in calls.items()})

    def _train_one(self, job: TrainJob, mechanism: RecordSums, occasion: Occasion) -> Released[Vector]:
        return self._released(self._clients.train(job, mechanism, occasion), job, mechanism)

    def _released(self, value: Vector, job: TrainJob, mechanism: RecordSums, *_: object) -> Released[Vector]:
        return Released(value, mechanism.noise_in_release(self.facts.lr, job.anchor_weight))

    def _train_together(
        self, calls: Mapping[str, tuple[TrainJob, RecordSums, Occasion]]
    ) -> "Begun | Updates":
        """All clients as one program; sketches, one small release in a run, one after the other."""
        answers: dict[str, Released[Vector]] = {}
        stacked: list[tuple[TrainJob, StackedJob]] = []
        for client, (job, mechanism, occasion) in calls.items():
            if mechanism.projected is not None:
                answers[client] = self._train_one(job, mechanism, occasion)
                continue
            twin = StackedJob(
                records=self._first_set + self.facts.names.index(client),
                start=torch.from_numpy(job.start),
                mechanism=mechanism,
                lr=self.facts.lr,
                noise_key=self.facts.stream("noise", occasion).integers(64),
                coin_key=self.facts.stream("coins", occasion).integers(64),
                anchor=None if job.anchor is None else torch.from_numpy(job.anchor),
                anchor_weight=job.anchor_weight,
                view_key=self.facts.view_key(occasion),
            )
            stacked.append((job, twin))
        if not stacked:
            return Updates(answers)

        def finish(values: Tensor) -> Updates:
            for (job, twin), value in zip(stacked, values.to("cpu", torch.float32).numpy(), strict=True):
                answers[job.client] = self._released(value, job, twin.mechanism)
            return Updates(answers)

        return Begun(self.trainer, tuple(twin for _, twin in stacked), finish)

    @property
    def stacks(self) -> bool:
        """Whether clients train as one program here."""
        return stacks(self.learner)

    @property
    def network(self) -> str:
        """What two engines have in common when one program can train for both."""
        records = f"{self.learner.task!r} {self.facts.augmentation!r}"
        return f"{self.learner.fingerprint()} {records} {self.learner.layout.shapes!r}"

    @property
    def trainer(self) -> StackedTrainer:
        """The program's trainer: shared with other engines, or made when first needed."""
        if self._trainer is None:
            share_trainer([self])
        assert self._trainer is not None
        return self._trainer

    # --- selection ----------------------------------------------------------------------------------

    def _select(self, request: Select, round: int) -> Choices:
        mechanisms = {
            client: self.plan.planned(ModelSelection, request.release, client)  # type: ignore[type-abstract]
            for client in request.clients
        }
        hashed = input_hash(self.context, request.models)
        self._charge(request.release, round, dict.fromkeys(request.clients, hashed))
        sums = self._score(request)
        choices = {}
        for client, mechanism in mechanisms.items():
            scores, losses = sums[client].T
            noise = self.facts.stream("noise", Occasion(client, round, request.release, hashed))
            choices[client] = Released(mechanism.choose(scores, losses, noise), 0.0)
        return Choices(choices)

    def _score(self, request: Select) -> Mapping[str, NDArray[np.float64]]:
        """Sums of scores and losses of every model, (models, 2), for each client."""
        if self.stacks:
            return self._score_together(request)
        pool = self._workers()
        if pool is not None:
            return pool.run({client: ("score", (client, request.models)) for client in request.clients})
        return {client: self._clients.score(client, request.models) for client in request.clients}

    def _score_together(self, request: Select) -> Mapping[str, NDArray[np.float64]]:
        """The records of all clients go through a model together."""
        batches = [self._clients.records[client] for client in request.clients]
        table = self._table if request.clients == self.facts.names else join(batches)
        sizes = [len(batch) for batch in batches]
        models = torch.from_numpy(request.models).to(self.learner.device)
        sums = np.array([score_sums(self.learner, model, table, sizes) for model in models])
        return {client: sums[:, :, position] for position, client in enumerate(request.clients)}

    # --- workers ------------------------------------------------------------------------------------

    def _workers(self, gradients: float | None = None) -> WorkerPool | None:
        """The worker processes, started when first needed; None where one process is enough.

        Args:
            gradients: of records that a run will ask for, in expectation; by default, those of the plan.
        """
        if self._pool is None and self._wanted_workers != 1:
            count = self._wanted_workers or self._useful_workers(gradients)
            if count > 1:
                self._pool = self._start_workers(count)
                if self._pool is None:
                    self._wanted_workers = 1
        return self._pool

    def _useful_workers(self, gradients: float | None = None) -> int:
        """As many as there are cores for them, if there is enough to do to repay their start."""
        # The number of threads, not of cores: who runs several experiments at once lowers it.
        count = min(torch.get_num_threads(), len(self.facts.names))
        if count == 1 or self.learner.device.type != "cpu" or os.name != "posix":
            return 1
        if self._seconds_per_gradient is None:
            self._seconds_per_gradient = self._measure_gradient()
        wanted = sample_gradients(self.plan) if gradients is None else gradients
        return count if wanted * self._seconds_per_gradient >= WORKERS_FROM_SECONDS else 1

    def _measure_gradient(self) -> float:
        records = next(iter(self._clients.records.values())).take(slice(0, 8))
        start = torch.zeros(self.learner.layout.size)
        times = []
        with one_thread():
            for _ in range(2):
                began = time.perf_counter()
                clipped_sum(self.learner, start, records, 1.0)
                times.append(time.perf_counter() - began)
        return min(times) / max(1, len(records))

    def _start_workers(self, count: int) -> WorkerPool | None:
        learner = self.learner
        setup = WorkerSetup(learner.model, learner.task, learner.shape, make=partial(Clients, self.facts))
        try:
            pool = WorkerPool(count, setup, self._table)
        except Exception as reason:  # a user's model may refuse to travel in its own way
            log.warning("clients train in one process, one after the other: %s", reason)
            return None
        log.info("clients train in %d processes", count)
        return pool

    # --- before anything is released ----------------------------------------------------------------

    def _charge(self, release: str, round: int, inputs: Mapping[str, str]) -> None:
        self.ledger.charge([Charge(client, round, release, hashed) for client, hashed in inputs.items()])


@dataclass(frozen=True)
class Begun:
    """A request that is charged but not yet computed: jobs for a trainer, and how they become its answer."""

    trainer: StackedTrainer
    jobs: tuple[StackedJob, ...]
    finish: Callable[[Tensor], Updates]


def share_trainer(engines: Sequence[LocalEngine]) -> None:
    """Let engines that train the same network train in the same programs.

    Their clients are more clients, nothing else: plans, ledgers, keys and records stay each engine's own.
    """
    first = engines[0]
    tables: list[Batch] = []
    sizes: list[int] = []
    for engine in engines:
        engine._first_set = len(sizes)
        tables.append(engine._table)
        sizes.extend(engine.facts.sizes)
    trainer = StackedTrainer(
        first.learner,
        join(tables),
        sizes,
        max_memory=first._max_memory,
        augmentation=first.facts.augmentation,
    )
    for engine in engines:
        engine._trainer = trainer


def sample_gradients(plan: PrivacyPlan) -> int:
    """How many per-record gradients the plan asks for, in expectation."""
    releases = (release for unit in plan.units for release in unit.releases)
    return sum(release.mechanism.gradients(release.times, learning=0) for release in releases)


def input_hash(context: str, array: NDArray[np.float32]) -> str:
    """Digest of what a client is sent and of what else decides its answer; shapes and bits count."""
    digest = hashlib.sha256(repr((context, array.shape, array.dtype.str)).encode())
    digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def job_hash(context: str, job: TrainJob) -> str:
    """Digest of everything a training client is sent."""
    if job.anchor is None:
        return input_hash(context, job.start)
    return input_hash(f"{context} anchor {job.anchor_weight!r}", np.stack([job.start, job.anchor]))


def job_hashes(context: str, jobs: Sequence[TrainJob]) -> dict[str, str]:
    """The digest of each client's job; where clients are sent the very same arrays, they are read once."""
    known: dict[tuple[int, int, float], str] = {}
    found = {}
    for job in jobs:
        sent = (id(job.start), id(job.anchor), job.anchor_weight)
        if sent not in known:
            known[sent] = job_hash(context, job)
        found[job.client] = known[sent]
    return found


def coin_key(noise_key: SecretKey, simulation_seed: int) -> SecretKey:
    """The key of sampling coins: part of the simulation when noise is seeded, else as secret as the noise."""
    return SecretKey.from_seed(simulation_seed) if noise_key.simulation else noise_key
