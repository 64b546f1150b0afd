"""The in-process engine: all clients of a simulation on this machine.

Every answer goes the same way: look up the mechanism in the plan, charge the ledger, and only then
touch records. Noise and sampling coins come from streams keyed by client, round, release and a hash of what
the client was sent, so a round repeated after a crash repeats itself exactly, and anything else draws afresh.

How the clients are computed (one after the other, or all as one program on a GPU) is a matter of speed: it
changes neither what is charged nor what is clipped, sampled and noised.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.algorithms.protocol import (
    Choices,
    Reply,
    Request,
    Select,
    Train,
    TrainJob,
    Updates,
    Vector,
)
from coterie.data import Federation
from coterie.errors import PlanError
from coterie.privacy import (
    Charge,
    FullBatchSketch,
    FullBatchSteps,
    Ledger,
    LowestLoss,
    Mechanism,
    PoissonSteps,
    PrivacyPlan,
    PrivateSelection,
    RandomStream,
    SecretKey,
)
from coterie.privacy.released import Released
from coterie.training.dpsgd import sketch_privately, train_privately
from coterie.training.learner import Batch, Learner
from coterie.training.scoring import join, score_sums, select_by_scores, select_lowest
from coterie.training.sketch import Projection
from coterie.training.stacked import StackedJob, StackedTrainer

Trainable: TypeAlias = PoissonSteps | FullBatchSteps | FullBatchSketch

FAST_RANDOMNESS = (
    "noise and coins are drawn on the GPU by Philox from the noise key: fast, not cryptographic, a simulation"
)
COMPILE_FROM = 3_000_000
"""Sample gradients in a plan from which compiling the step on a GPU pays."""


def randomness_caveat(learner: Learner) -> str | None:
    """What a guarantee must add about the noise, given how this engine will draw it."""
    return FAST_RANDOMNESS if _stackable(learner) else None


def _stackable(learner: Learner) -> bool:
    return learner.device.type == "cuda" and learner.book is not None


class LocalEngine:
    """Answers `Train` and `Select` for all clients on this machine."""

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
        max_memory: int | None = None,
    ) -> None:
        """Args beside the obvious:

        public_seed: of the random projection that sketches share.
        context: whatever else decides what a client computes from what it is sent (model, step size,
            device, library version); noise must not repeat when any of it differs.
        max_memory: bytes that training may take on a GPU; by default, most of what is free.
        """
        self.learner = learner
        self.lr = lr
        self.plan = plan
        self.ledger = ledger
        self._noise_key = noise_key
        self._coin_key = coin_key
        self._public_seed = public_seed
        self._context = context
        self._projections: dict[int, Projection] = {}
        self._names = [client.name for client in federation.clients]
        self._table = join([Batch.of(client.train, learner.device) for client in federation.clients])
        self._sizes = [len(client.train) for client in federation.clients]
        parts = zip(
            torch.split(self._table.features, self._sizes),
            torch.split(self._table.targets, self._sizes),
            strict=True,
        )
        self._records: Mapping[str, Batch] = dict(
            zip(self._names, (Batch(*part) for part in parts), strict=True)
        )
        self._together: StackedTrainer | None = None
        if _stackable(learner):
            self._together = StackedTrainer(
                learner,
                self._table,
                self._sizes,
                lr,
                compiled=sample_gradients(plan) >= COMPILE_FROM,
                max_memory=max_memory,
            )

    def answer(self, request: Request, round: int) -> Reply:
        if isinstance(request, Train):
            return self._train(request, round)
        return self._select(request, round)

    # --- training -----------------------------------------------------------------------------------

    def _train(self, request: Train, round: int) -> Updates:
        mechanisms = {job.client: self._trainable(job.client, request.release) for job in request.jobs}
        if len(mechanisms) != len(request.jobs):
            raise PlanError(f"release '{request.release}' was asked of one client twice in one request")
        if any(
            job.anchor is not None and isinstance(mechanisms[job.client], FullBatchSketch)
            for job in request.jobs
        ):
            raise PlanError(
                f"release '{request.release}' is a sketch: it takes no step, an anchor pulls at nothing"
            )
        inputs = {job.client: job_hash(self._context, job) for job in request.jobs}
        self._charge(request.release, round, inputs)
        if self._together is not None:
            return self._train_together(request, mechanisms, round, inputs)
        return Updates(
            {
                job.client: self._train_one(
                    job, mechanisms[job.client], request.release, round, inputs[job.client]
                )
                for job in request.jobs
            }
        )

    def _train_together(
        self, request: Train, mechanisms: Mapping[str, Trainable], round: int, inputs: Mapping[str, str]
    ) -> Updates:
        """All clients as one program; sketches, one small release in a run, one after the other."""
        assert self._together is not None
        answers: dict[str, Released[Vector]] = {}
        stacked: list[tuple[TrainJob, StackedJob]] = []
        for job in request.jobs:
            mechanism, hashed = mechanisms[job.client], inputs[job.client]
            if isinstance(mechanism, FullBatchSketch):
                answers[job.client] = self._train_one(job, mechanism, request.release, round, hashed)
                continue
            noise, coins = (
                self._stream(purpose, job.client, round, request.release, hashed).integers(64)
                for purpose in ("noise", "coins")
            )
            twin = StackedJob(
                records=self._names.index(job.client),
                start=torch.from_numpy(job.start),
                mechanism=mechanism,
                noise_key=noise,
                coin_key=coins,
                anchor=None if job.anchor is None else torch.from_numpy(job.anchor),
                anchor_weight=job.anchor_weight,
            )
            stacked.append((job, twin))
        if stacked:
            values = self._together.train([twin for _, twin in stacked]).to("cpu", torch.float32).numpy()
            for (job, twin), value in zip(stacked, values, strict=True):
                answers[job.client] = Released(value, self._noise_std(job, twin.mechanism))
        return Updates(answers)

    def _trainable(self, client: str, release: str) -> Trainable:
        mechanism = self._mechanism(client, release)
        if not isinstance(mechanism, PoissonSteps | FullBatchSteps | FullBatchSketch):
            raise PlanError(f"release '{release}' is planned as {mechanism.name}: not trainable")
        return mechanism

    def _train_one(
        self, job: TrainJob, mechanism: Trainable, release: str, round: int, hashed: str
    ) -> Released[Vector]:
        records = self._records[job.client]
        start = torch.from_numpy(job.start).to(self.learner.device)
        noise = self._stream("noise", job.client, round, release, hashed)
        if isinstance(mechanism, FullBatchSketch):
            projection = self._projection(mechanism.dimensions)
            value = sketch_privately(self.learner, start, records, mechanism, projection, noise)
        else:
            coins = self._stream("coins", job.client, round, release, hashed)
            anchor = None if job.anchor is None else torch.from_numpy(job.anchor).to(self.learner.device)
            value = train_privately(
                self.learner, start, records, mechanism, self.lr, noise, coins, anchor, job.anchor_weight
            )
        return Released(value.to("cpu", torch.float32).numpy(), self._noise_std(job, mechanism))

    def _noise_std(self, job: TrainJob, mechanism: Trainable) -> float:
        """Standard deviation of the noise in what is released."""
        each_step = mechanism.noise_std / mechanism.denominator
        if isinstance(mechanism, FullBatchSketch):
            return each_step
        # A pull towards the anchor shrinks, in each step, the noise of the steps before.
        kept = 1.0 - self.lr * job.anchor_weight
        growth = sum(kept ** (2 * later) for later in range(mechanism.steps))
        return each_step * self.lr * math.sqrt(growth)

    def _projection(self, dimensions: int) -> Projection:
        """The public projection, the same for every client: sketches must be comparable."""
        if dimensions not in self._projections:
            size = self.learner.layout.size
            self._projections[dimensions] = Projection(
                size, dimensions, self._public_seed, self.learner.device
            )
        return self._projections[dimensions]

    # --- selection ----------------------------------------------------------------------------------

    def _select(self, request: Select, round: int) -> Choices:
        mechanisms = {client: self._selection(client, request.release) for client in request.clients}
        hashed = input_hash(self._context, request.models)
        self._charge(request.release, round, dict.fromkeys(request.clients, hashed))
        models = torch.from_numpy(request.models).to(self.learner.device)
        batches = [self._records[client] for client in request.clients]
        table = self._table if list(request.clients) == self._names else join(batches)
        sizes = [len(batch) for batch in batches]
        sums = np.array([score_sums(self.learner, model, table, sizes) for model in models])
        choices = {}
        for position, (client, mechanism) in enumerate(mechanisms.items()):
            scores, losses = sums[:, 0, position], sums[:, 1, position]
            if isinstance(mechanism, LowestLoss):
                chosen = select_lowest(losses)
            else:
                noise = self._stream("noise", client, round, request.release, hashed)
                chosen = select_by_scores(scores, mechanism, noise)
            choices[client] = Released(chosen, 0.0)
        return Choices(choices)

    def _selection(self, client: str, release: str) -> PrivateSelection | LowestLoss:
        mechanism = self._mechanism(client, release)
        if not isinstance(mechanism, PrivateSelection | LowestLoss):
            raise PlanError(f"release '{release}' is planned as {mechanism.name}: not a selection")
        return mechanism

    # --- before anything is released ----------------------------------------------------------------

    def _charge(self, release: str, round: int, inputs: Mapping[str, str]) -> None:
        self.ledger.charge([Charge(client, round, release, hashed) for client, hashed in inputs.items()])

    def _mechanism(self, client: str, release: str) -> Mechanism:
        return self.plan.for_subject(client).release(release).mechanism

    def _stream(self, purpose: str, client: str, round: int, release: str, hashed: str) -> RandomStream:
        key = self._coin_key if purpose == "coins" else self._noise_key
        return key.stream(purpose, subject=client, round=round, release=release, input_hash=hashed)


def sample_gradients(plan: PrivacyPlan) -> int:
    """How many per-record gradients the plan asks for, in expectation."""
    total = 0
    for unit in plan.units:
        for release in unit.releases:
            if isinstance(release.mechanism, PoissonSteps | FullBatchSteps):
                total += release.times * release.mechanism.steps * release.mechanism.denominator
    return total


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


def coin_key(noise_key: SecretKey, simulation_seed: int) -> SecretKey:
    """The key of sampling coins: part of the simulation when noise is seeded, else as secret as the noise."""
    return SecretKey.from_seed(simulation_seed) if noise_key.simulation else noise_key
