"""The in-process engine: all clients of a simulation on this machine.

Every answer goes the same way: look up the mechanism in the plan, charge the ledger, and only then
touch records. Noise and sampling coins come from streams keyed by client, round, release and a hash of what
the client was sent, so a round repeated after a crash repeats itself exactly (but for the last bits where a
GPU computes it in another program, since other runs share that), and anything else draws afresh.

How the clients are computed (one after the other, a core per client, or all as one program on a GPU) is a
matter of speed: it changes neither what is charged nor what is clipped, sampled and noised.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.algorithms.protocol import (
    Choices,
    Cohort,
    Count,
    Reply,
    Request,
    Select,
    Sum,
    Train,
    TrainJob,
    Updates,
    Vector,
)
from coterie.data import Federation
from coterie.engines.clients import Clients, TrainingFacts
from coterie.engines.cohorts import Cohorts
from coterie.engines.computing import Computing, PendingJobs, at_once
from coterie.engines.members import LocalMembers
from coterie.errors import PlanError
from coterie.privacy import Charge, Ledger, ModelSelection, PrivacyPlan, RecordSums, SecretKey
from coterie.privacy.released import Released
from coterie.privacy.wording import SIMULATION
from coterie.training.augmentation import Augmentation
from coterie.training.learner import Batch, Learner
from coterie.training.local_sgd import stacks
from coterie.training.scoring import join, score_sums
from coterie.training.stacked import StackedJob, StackedTrainer

FAST_RANDOMNESS = (
    f"{SIMULATION}: noise and coins are drawn on the GPU by Philox from the noise key, which is fast and not "
    "cryptographic"
)


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
        table: Batch | None = None,
    ) -> None:
        """Args:

        public_seed: of the random projection that sketches share.
        context: whatever else decides what a client computes from what it is sent (model, step size,
            device, library version); noise must not repeat when any of it differs.
        workers: processes that train on a CPU, a client each; by default one per core if that pays.
        max_memory: bytes that training may take on a GPU; by default, most of what is free. (On a CPU the
            learner's micro-batches bound it.)
        augmentation: views of each record whose gradients are averaged before the clip.
        table: what all clients train on, one client after the other, where that lies in a file.
        """
        self.learner, self.plan, self.ledger, self.context = learner, plan, ledger, context
        self.facts = TrainingFacts(
            names=tuple(client.name for client in federation.clients),
            sizes=tuple(len(client.train) for client in federation.clients),
            lr=lr,
            noise_key=noise_key,
            coin_key=coin_key,
            public_seed=public_seed,
            augmentation=augmentation,
        )
        if table is None:
            table = join([Batch.of(client.train, learner.device) for client in federation.clients])
        self.stacks = stacks(learner)
        """Whether clients train as one program here."""
        self.clients = Clients(self.facts, learner, table, 1 if self.stacks else workers)
        self.members = LocalMembers(self.clients)
        self.cohorts = Cohorts(self.facts, self.members, learner.layout.size, plan, ledger, context)
        planned = (release for unit in plan.units for release in unit.releases)
        self._gradients = sum(release.mechanism.gradients(release.times, learning=0) for release in planned)
        self._max_memory = max_memory
        self._trainer: StackedTrainer | None = None
        self._first_set = 0
        self.waited = 0.0
        """Seconds in which other runs were computed while this one waited."""

    def answer(self, request: Request, round: int) -> Reply:
        return at_once(self.begin(request, round))

    def begin(self, request: Request, round: int) -> Computing[Reply]:
        """Charge a request and answer it; that waits wherever it takes jobs of a stacked program."""
        match request:
            case Train():
                return (yield from self._train(request, round))
            case Select():
                return self._select(request, round)
            case Cohort() | Count() | Sum():
                return (yield from self.cohorts.begin(request, round))

    @property
    def personal(self) -> Mapping[str, Vector]:
        """What clients keep to themselves between rounds."""
        return self.members.personal

    def close(self) -> None:
        """End the workers, if there are any."""
        self.clients.close()

    def _charge(self, release: str, round: int, inputs: Mapping[str, str]) -> dict[str, Charge]:
        """Before anything is released."""
        charges = {client: Charge(client, round, release, hashed) for client, hashed in inputs.items()}
        self.ledger.charge(list(charges.values()))
        return charges

    # --- training -----------------------------------------------------------------------------------

    def _train(self, request: Train, round: int) -> Computing[Updates]:
        release = request.release
        mechanisms = {job.client: self.plan.planned(RecordSums, release, job.client) for job in request.jobs}
        if len(mechanisms) != len(request.jobs):
            raise PlanError(f"release '{request.release}' was asked of one client twice in one request")
        stds: dict[str, float] = {}
        norms: dict[str, float] = {}
        for job in request.jobs:
            if job.anchor is not None and mechanisms[job.client].projected:
                raise PlanError(
                    f"release '{request.release}' is a sketch: it takes no step, an anchor pulls at nothing"
                )
            # What cannot be released is not charged.
            mechanism, known = mechanisms[job.client], (self.facts.lr, job.anchor_weight)
            stds[job.client] = mechanism.noise_in_release(*known)
            norms[job.client] = mechanism.norm_in_release(*known, len(job.start))
        charges = self._charge(request.release, round, job_hashes(self.context, request.jobs))
        calls = {job.client: (job, mechanisms[job.client], charges[job.client]) for job in request.jobs}
        # All as one program, where there is one; sketches, one small release in a run, one after the other.
        apart = [client for client in calls if not self.stacks or mechanisms[client].projected is not None]
        together = [client for client in calls if self.stacks and mechanisms[client].projected is None]
        values = self.clients.run({client: ("train", calls[client]) for client in apart}, self._gradients)
        answers = {client: Released(values[client], stds[client], norms[client]) for client in apart}
        if together:
            updates = yield PendingJobs(self.trainer, [self._stacked(*calls[client]) for client in together])
            assert isinstance(updates, torch.Tensor)
            # Rounded where they lie: torch would send float64 and round it here.
            found = zip(together, updates.to(torch.float32).cpu().numpy(), strict=True)
            answers |= {client: Released(value, stds[client], norms[client]) for client, value in found}
        return Updates(answers)

    def _stacked(self, job: TrainJob, mechanism: RecordSums, charge: Charge) -> StackedJob:
        """The same job in a program of many."""
        return StackedJob(
            records=self._first_set + self.facts.names.index(job.client),
            start=torch.from_numpy(job.start),
            mechanism=mechanism,
            lr=self.facts.lr,
            noise_key=self.facts.stream("noise", charge).integers(64),
            coin_key=self.facts.stream("coins", charge).integers(64),
            anchor=None if job.anchor is None else torch.from_numpy(job.anchor),
            anchor_weight=job.anchor_weight,
            view_key=self.facts.view_key(charge),
        )

    @property
    def network(self) -> str:
        """What two engines have in common when one program can train for both, in the memory of either."""
        records = f"{self.learner.task!r} {self.facts.augmentation!r} {self.clients.table.places}"
        precise = self.learner.full_precision
        trained = f"{self.plan.unit.within_client} {self.learner.layout.shapes!r} {precise}"
        return f"{self.learner.fingerprint()} {records} {trained} {self._max_memory}"

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
        charges = self._charge(request.release, round, dict.fromkeys(request.clients, hashed))
        sums = self._score(request)
        choices = {}
        for client, mechanism in mechanisms.items():
            scores, losses = sums[client].T
            noise = self.facts.stream("noise", charges[client])
            choices[client] = Released(mechanism.choose(scores, losses, noise), 0.0)
        return Choices(choices)

    def _score(self, request: Select) -> Mapping[str, NDArray[np.float64]]:
        """Sums of scores and losses of every model, (models, 2), for each client."""
        if not self.stacks:
            return self.clients.run(
                {client: ("score", (client, request.models)) for client in request.clients}, self._gradients
            )
        # The records of all clients go through a model together.
        batches = [self.clients.records[client] for client in request.clients]
        table = self.clients.table if request.clients == self.facts.names else join(batches)
        sizes = [len(batch) for batch in batches]
        models = torch.from_numpy(request.models).to(self.learner.device)
        sums = np.array([score_sums(self.learner, model, table, sizes) for model in models])
        return {client: sums[:, :, position] for position, client in enumerate(request.clients)}


def share_trainer(engines: Sequence[LocalEngine]) -> None:
    """Let engines that train the same network train in the same programs.

    Their clients are more clients, nothing else: plans, ledgers, keys and records stay each engine's own.
    """
    first = engines[0]
    if not first.plan.unit.within_client:
        for engine in engines:
            engine.members.trainer = first.members.trainer
        return
    trainer = StackedTrainer(
        first.learner,
        join([engine.clients.table for engine in engines]),
        [size for engine in engines for size in engine.facts.sizes],
        max_memory=first._max_memory,
        tf32=not first.learner.full_precision,
        augmentation=first.facts.augmentation,
    )
    places = accumulate((len(engine.facts.sizes) for engine in engines), initial=0)
    for engine, place in zip(engines, places, strict=False):
        engine._trainer, engine._first_set = trainer, place


def input_hash(context: str, array: NDArray[np.float32]) -> str:
    """Digest of what a client is sent and of what else decides its answer; shapes and bits count."""
    digest = hashlib.sha256(repr((context, array.shape, array.dtype.str)).encode())
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def job_hash(context: str, job: TrainJob) -> str:
    """Digest of everything a training client is sent."""
    if job.anchor is None:
        return input_hash(context, job.start)
    return input_hash(f"{context} anchor {job.anchor_weight!r}", np.stack([job.start, job.anchor]))


def job_hashes(context: str, jobs: Sequence[TrainJob]) -> dict[str, str]:
    """The digest of each client's job; where clients are sent the very same arrays, they are read once."""
    sent = {job.client: (_place(job.start), _place(job.anchor), job.anchor_weight) for job in jobs}
    first = {sent[job.client]: job for job in jobs}
    found = {arrays: job_hash(context, job) for arrays, job in first.items()}
    return {client: found[arrays] for client, arrays in sent.items()}


def _place(array: Vector | None) -> tuple[object, ...] | None:
    """Where an array lies: a row of a cluster's models is another object for every client, and one row."""
    return None if array is None else (array.ctypes.data, array.shape, array.strides, array.dtype.str)


def coin_key(noise_key: SecretKey, simulation_seed: int) -> SecretKey:
    """The key of sampling coins: part of the simulation when noise is seeded, else as secret as the noise."""
    return SecretKey.from_seed(simulation_seed) if noise_key.simulation else noise_key
