"""Releases of a secret sample of members: what `Cohort`, `Count` and `Sum` are answered with.

Whoever runs this is trusted with raw updates (a server for clients, a master for the workers of its group).
What leaves is one composed release for each cohort: a noisy histogram of choices where one is planned, and
noisy sums of clipped updates. The release is charged when the cohort is opened, before any coin is flipped.

A member adds to what is released by its own coins alone. Whether it is sampled, how it shuffles its records
and where it is routed come from streams keyed by its name, and its update has the same bits whoever else was
sampled. So two populations that differ in one member differ, given everyone's coins, in that member's own
contribution: one in one count, and one vector of norm at most the clip in one sum.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.algorithms.protocol import (
    Assignment,
    Choice,
    Cohort,
    CohortJob,
    Count,
    Drafts,
    Histogram,
    LocalTraining,
    Opened,
    OwnChoice,
    Parts,
    Sum,
    Sums,
    Vector,
)
from coterie.engines.clients import ClientFacts, Occasion, one_thread
from coterie.engines.memory import keep_freed_memory
from coterie.engines.workers import Call, WorkerPool
from coterie.errors import PlanError
from coterie.privacy import (
    Charge,
    DraftedSum,
    Ledger,
    PrivacyPlan,
    RandomStream,
    RebalancedSums,
    Released,
    RoutedSums,
    SampledSum,
)
from coterie.training.clipping import clip_rows
from coterie.training.learner import Batch, Learner, on_device
from coterie.training.local_sgd import LocalSGD, LocalTrainer, stacks
from coterie.training.scoring import join, padded_loss_sums, score_sums, select_lowest

CohortMechanism: TypeAlias = SampledSum | RoutedSums | RebalancedSums
WAVES_SPREAD = 3.0
"""Standard deviations of a sample's size that one wave on a GPU leaves room for."""
_TOLERANCE = 1e-9


@dataclass
class _OpenCohort:
    """What the engine keeps of a cohort until its sums are released."""

    release: str
    job: CohortJob
    mechanism: CohortMechanism
    round: int
    input_hash: str
    sampled: tuple[str, ...]
    choices: NDArray[np.int64]
    """The row that each sampled member chose, or was told."""
    counted: bool = False
    updates: Tensor | None = None
    """What the sampled members learnt, once they have."""

    @property
    def chooses(self) -> bool:
        return self.job.choice is not Choice.GIVEN


class Cohorts:
    """Answers for all members on this machine."""

    def __init__(
        self,
        facts: ClientFacts,
        learner: Learner,
        records: Mapping[str, Batch],
        plan: PrivacyPlan,
        ledger: Ledger,
        context: str,
        workers: Callable[[float], WorkerPool | None] = lambda gradients: None,
    ) -> None:
        """Args beside the obvious:

        workers: processes that compute on a CPU, a member each, if so many gradients repay their start.
        """
        self._facts = facts
        self._learner = learner
        self._records = records
        self._plan = plan
        self._ledger = ledger
        self._context = context
        self._workers = workers
        self._local = LocalTrainer(learner)
        self._round = 0
        self._open: dict[int, _OpenCohort] = {}
        self._seen: set[tuple[str, str]] = set()
        self._personal: dict[str, Tensor] = {}

    # --- requests -----------------------------------------------------------------------------------

    def open(self, request: Cohort, round: int) -> Opened:
        """Charge the whole release, then flip everyone's coins."""
        job = request.job
        mechanism = self._mechanism(request)
        self._begin(round)
        hashed = cohort_hash(self._context, job)
        if (request.release, hashed) in self._seen:
            raise PlanError(f"release '{request.release}': this cohort was opened already in round {round}")
        self._seen.add((request.release, hashed))
        charges = (
            Charge(subject, round, request.release, hashed) for subject in self._plan.subjects_of(job.members)
        )
        self._ledger.charge(list(charges))
        sampled = self._sample(request.release, job, mechanism, round, hashed)
        cohort = _OpenCohort(
            request.release, job, mechanism, round, hashed, sampled, np.zeros(len(sampled), np.int64)
        )
        cohort.choices = self._choices(cohort)
        number = len(self._seen)
        self._open[number] = cohort
        return Opened(request.release, number)

    def count(self, request: Count) -> Histogram:
        """The planned noisy histogram of the sampled members' choices."""
        cohort = self._find(request.cohort)
        mechanism = cohort.mechanism
        if not isinstance(mechanism, RoutedSums) or not cohort.chooses or cohort.counted:
            why = "was counted already" if cohort.counted else "plans no histogram of choices"
            raise PlanError(f"release '{cohort.release}' {why}")
        cohort.counted = True
        counts = np.bincount(cohort.choices, minlength=cohort.job.sums).astype(np.float64)
        noise = self._stream("histogram", "cohort", cohort, cohort.input_hash)
        std = mechanism.histogram_multiplier
        return Histogram(Released(counts + noise.normal(cohort.job.sums, std=std), std))

    def add_up(self, request: Sum) -> Sums:
        """The planned noisy sums; the cohort is closed by it."""
        cohort = self._find(request.cohort)
        goes_to, sizes = self._destinations(cohort, request)
        updates = self._updates(cohort)
        del self._open[request.cohort.number]
        job, mechanism = cohort.job, cohort.mechanism
        shared, personal = _masks(job.parts, self._learner.layout.size, updates.device)
        clipped = clip_rows(updates[:, ~personal].to(torch.float64), mechanism.clip)
        sums = torch.zeros(job.sums, self._learner.layout.size, dtype=torch.float64, device=updates.device)
        kept = torch.zeros(len(clipped), sums.shape[1], dtype=torch.float64, device=updates.device)
        kept[:, ~personal] = clipped
        for row, destination in zip(torch.where(shared, 0.0, kept), goes_to, strict=True):
            sums[destination] += row
        values = sums.cpu().numpy()
        common = torch.where(shared, kept, 0.0).sum(dim=0).cpu().numpy()
        hashed = _digest(cohort.input_hash, repr(request.minimum).encode(), _bytes(request.route))
        noise = self._stream("noise", "cohort", cohort, hashed)
        values += noise.normal(values.shape, std=mechanism.noise_std)
        if bool(shared.any()):
            # One sum of all members for what they share: a part of the release with noise of its own.
            columns = shared.cpu().numpy()
            total = common + self._stream("shared noise", "cohort", cohort, hashed).normal(
                common.shape, std=mechanism.noise_std
            )
            values[:, columns] = total[columns]
        values[:, personal.cpu().numpy()] = 0.0
        return Sums(Released(values, mechanism.noise_std), sizes)

    def serve(self, models: OwnChoice) -> Assignment:
        """The model that each client would choose for itself; for evaluation, outside any guarantee."""
        names = self._facts.names
        rows = self._choose(names, models.models, models.choice, models.training, models.parts)
        cluster_of = dict(zip(names, rows.tolist(), strict=True))
        own: dict[str, Vector] = {}
        if models.parts is not None:
            for name, part in self.personal.items():
                own[name] = models.models[cluster_of[name]].copy()
                own[name][models.parts.personal] = part
        return Assignment(models.models, cluster_of, own)

    # --- what members keep --------------------------------------------------------------------------

    @property
    def personal(self) -> dict[str, NDArray[np.float32]]:
        """The personal parts of those who have any; to be kept apart from everything released."""
        return {name: part.cpu().numpy() for name, part in self._personal.items()}

    @personal.setter
    def personal(self, parts: Mapping[str, NDArray[np.float32]]) -> None:
        self._personal = {name: on_device(part, self._learner.device) for name, part in parts.items()}

    def _with_personal(self, member: str, model: Tensor, parts: Parts | None) -> Tensor:
        own = self._personal.get(member)
        if parts is None or own is None:
            return model
        model = model.clone()
        model[torch.from_numpy(parts.personal).to(model.device)] = own
        return model

    # --- opening ------------------------------------------------------------------------------------

    def _mechanism(self, request: Cohort) -> CohortMechanism:
        job, release = request.job, request.release
        unknown = set(job.members) - set(self._facts.names)
        if unknown:
            raise PlanError(f"release '{release}': nobody is called '{min(unknown)}'")
        if job.models.shape[1] != self._learner.layout.size:
            raise PlanError(f"release '{release}': models of {job.models.shape[1]} parameters")
        mechanism = self._plan.release_of(job.members, release)
        if not isinstance(mechanism, SampledSum | RoutedSums | RebalancedSums):
            raise PlanError(f"release '{release}' is planned as {mechanism.name}: not one of a cohort")
        if isinstance(mechanism, DraftedSum) != (job.drafts is not None):
            planned = "plans drafts" if job.drafts is None else "plans no drafts without noise"
            raise PlanError(f"release '{release}' {planned}; the job is another")
        if isinstance(mechanism, RebalancedSums) and len(job.members) != mechanism.clients:
            raise PlanError(
                f"release '{release}' is planned for {mechanism.clients} clients, not {len(job.members)}"
            )
        return mechanism

    def _begin(self, round: int) -> None:
        """Handles live for one round."""
        if round != self._round:
            self._round = round
            self._open.clear()
            self._seen.clear()

    def _sample(
        self, release: str, job: CohortJob, mechanism: CohortMechanism, round: int, hashed: str
    ) -> tuple[str, ...]:
        """Who takes part: a coin for each member at the planned rate, or so many of them as planned."""
        coins = self._facts.uniforms("coins", job.members, round, release, hashed)
        if isinstance(mechanism, RebalancedSums):
            drawn = np.sort(np.argsort(coins, kind="stable")[: mechanism.cohort])
        else:
            drawn = np.flatnonzero(coins < mechanism.rate)
        return tuple(job.members[position] for position in drawn)

    def _choices(self, cohort: _OpenCohort) -> NDArray[np.int64]:
        job = cohort.job
        if job.choice is Choice.GIVEN:
            start_of = job.start_of or dict.fromkeys(cohort.sampled, 0)
            return np.array([start_of[member] for member in cohort.sampled], dtype=np.int64)
        return self._choose(cohort.sampled, job.models, job.choice, job.training, job.parts, cohort)

    def _find(self, handle: Opened) -> _OpenCohort:
        if handle.number not in self._open or self._open[handle.number].release != handle.release:
            raise PlanError(f"release '{handle.release}': this cohort is not open (any more)")
        return self._open[handle.number]

    # --- members' choices -----------------------------------------------------------------------------

    def _choose(
        self,
        members: Sequence[str],
        models: NDArray[np.float32],
        choice: Choice,
        training: LocalTraining,
        parts: Parts | None,
        cohort: _OpenCohort | None = None,
    ) -> NDArray[np.int64]:
        """The row that each member chooses."""
        if choice is Choice.GIVEN or not members:
            return np.zeros(len(members), dtype=np.int64)
        stacked = on_device(models, self._learner.device)
        if choice is Choice.LOWEST_LOSS:
            wave = None if cohort is None else self._wave(cohort, len(members))
            losses = self._losses(members, stacked, parts, wave)
            return np.array([select_lowest(own) for own in losses], dtype=np.int64)
        middle = stacked.mean(dim=0)
        each = [(member, cohort) for member in members]
        wave = self._wave(cohort, len(members))
        trained = self._train(each, middle.expand(len(members), -1), training, wave)
        return nearest(trained, stacked - middle)

    def _losses(
        self, members: Sequence[str], models: Tensor, parts: Parts | None, wave: int | None
    ) -> NDArray[np.float64]:
        """Sum of the losses of every model on each member's records: (members, models).

        Args:
            wave: members that a GPU computes at a time, so that what one finds has the same bits whoever
                else was sampled; on a processor each goes through the models alone. None for evaluation.
        """
        batches = [self._records[member] for member in members]
        personal = parts is not None and bool(parts.personal.any())
        with one_thread():
            if wave is None and not personal:
                table, sizes = join(batches), [len(batch) for batch in batches]
                return np.stack([score_sums(self._learner, model, table, sizes)[1] for model in models], 1)
            if wave is not None and not personal and stacks(self._learner):
                longest = max(self._facts.sizes)
                return padded_loss_sums(self._learner, models, batches, wave, longest)
            pool = None if personal else self._workers(0.0)
            if pool is not None:
                apart = pool.run({member: ("score", (member, models.numpy())) for member in members})
                return np.stack([apart[member][:, 1] for member in members])
            found = np.empty((len(members), len(models)))
            for position, (member, batch) in enumerate(zip(members, batches, strict=True)):
                for row, model in enumerate(models):
                    own = self._with_personal(member, model, parts)
                    found[position, row] = score_sums(self._learner, own, batch, [len(batch)])[1][0]
        return found

    # --- updates --------------------------------------------------------------------------------------

    def _updates(self, asked: _OpenCohort) -> Tensor:
        """What every sampled member of a cohort learnt.

        A GPU trains the members of all open cohorts that learn alike in one program: the groups of an epoch.
        """
        if asked.job.drafts is not None:
            return self._drafted(asked, asked.job.drafts)
        if asked.updates is None:
            cohorts = [asked]
            if stacks(self._learner):
                waiting = (cohort for cohort in self._open.values() if cohort.updates is None)
                cohorts = [cohort for cohort in waiting if _alike(cohort.job, asked.job)]
            starts = [self._starts(cohort) for cohort in cohorts]
            members = [(member, cohort) for cohort in cohorts for member in cohort.sampled]
            # Also for a group that nobody was sampled of: the shape must not tell.
            wave = sum(self._wave(cohort, len(cohort.sampled)) for cohort in cohorts)
            updates = self._train(members, torch.cat(starts), asked.job.training, wave)
            parts = torch.split(updates, [len(own) for own in starts])
            for cohort, own, learnt in zip(cohorts, starts, parts, strict=True):
                cohort.updates = learnt
                self._keep_personal(cohort, own + learnt)
        assert asked.updates is not None
        return asked.updates

    def _drafted(self, cohort: _OpenCohort, drafts: Drafts) -> Tensor:
        """What members learnt in all, each training but the first from a mean of raw updates."""
        starts, group = self._starts(cohort), on_device(drafts.model, self._learner.device)
        members, wave = [(member, cohort) for member in cohort.sampled], self._wave(cohort, 0)
        total = torch.zeros_like(starts)
        for turn in range(drafts.trainings):
            learnt = self._train(members, starts, cohort.job.training, wave, turn)
            total += learnt
            group = group + learnt.sum(dim=0) / drafts.divisor
            starts = group.expand(len(starts), -1)
        return total

    def _starts(self, cohort: _OpenCohort) -> Tensor:
        """Where each sampled member starts, (members, parameters)."""
        models = on_device(cohort.job.models, self._learner.device)
        starts = [
            self._with_personal(member, models[row], cohort.job.parts)
            for member, row in zip(cohort.sampled, cohort.choices.tolist(), strict=True)
        ]
        return torch.stack(starts) if starts else models.new_zeros(0, models.shape[1])

    def _keep_personal(self, cohort: _OpenCohort, learnt: Tensor) -> None:
        """Personal parts stay with their members."""
        job = cohort.job
        if job.parts is not None and bool(job.parts.personal.any()):
            personal = torch.from_numpy(job.parts.personal).to(learnt.device)
            for member, part in zip(cohort.sampled, learnt[:, personal], strict=True):
                if bool(torch.isfinite(part).all()):
                    self._personal[member] = part.clone()

    def _train(
        self,
        members: Sequence[tuple[str, _OpenCohort | None]],
        starts: Tensor,
        training: LocalTraining,
        wave: int,
        turn: int = 0,
    ) -> Tensor:
        """The update of every member, each in the cohort that it was sampled for."""
        rule = LocalSGD(
            training.epochs,
            training.batch,
            training.lr,
            training.momentum,
            training.proximal,
            training.iterations,
        )
        seeds = [self._shuffle_seed(member, cohort, turn) for member, cohort in members]
        pool = self._workers(self._gradients(members, rule, wave))
        if pool is not None:
            return self._train_apart(pool, members, starts, rule, seeds)
        records = [self._records[member] for member, _ in members]
        batches = [rule.batches(len(own), seed) for own, seed in zip(records, seeds, strict=True)]
        keep_freed_memory()
        with one_thread():
            return self._local.train(starts, records, batches, rule, wave=wave)

    def _train_apart(
        self,
        pool: WorkerPool,
        members: Sequence[tuple[str, _OpenCohort | None]],
        starts: Tensor,
        rule: LocalSGD,
        seeds: Sequence[int],
    ) -> Tensor:
        """A core per member."""
        calls: dict[str, Call] = {
            member: ("learn", (member, start, rule, seed))
            for (member, _), start, seed in zip(members, starts.numpy(), seeds, strict=True)
        }
        if len(calls) != len(members):
            raise PlanError("a member was asked to train twice at a time")
        learnt = pool.run(calls)
        updates = [torch.from_numpy(learnt[member]) for member, _ in members]
        return torch.stack(updates) if updates else torch.zeros_like(starts)

    def _gradients(
        self, members: Sequence[tuple[str, _OpenCohort | None]], rule: LocalSGD, wave: int
    ) -> float:
        """Gradients of records in a whole run, in expectation; without a cohort, in this training."""
        cohort = members[0][1] if members else None
        population = self._facts.names if cohort is None else cohort.job.members
        sizes = [len(self._records[member]) for member in population]
        each = rule.batch * rule.steps(round(sum(sizes) / max(1, len(sizes))))
        if cohort is None:
            return each * wave
        subject = self._plan.subjects_of(cohort.job.members)[0]
        return each * wave * self._plan.for_subject(subject).release(cohort.release).times

    def _shuffle_seed(self, member: str, cohort: _OpenCohort | None, turn: int) -> int:
        """Of the order in which a member goes through its records; nothing rests on it being secret."""
        if cohort is None:
            return 0
        hashed = _digest(cohort.input_hash, repr(turn).encode()) if turn else cohort.input_hash
        return self._stream("shuffle", member, cohort, hashed).integers(64)

    def _wave(self, cohort: _OpenCohort | None, members: int) -> int:
        """Clients to compute at once: a function of public numbers, not of how many were sampled."""
        if cohort is None:
            return members
        if isinstance(cohort.mechanism, RebalancedSums):
            return cohort.mechanism.cohort
        population, rate = len(cohort.job.members), cohort.mechanism.rate
        spread = (population * rate * (1.0 - rate)) ** 0.5
        return min(population, max(1, int(np.ceil(population * rate + WAVES_SPREAD * spread))))

    # --- where updates go -------------------------------------------------------------------------------

    def _destinations(
        self, cohort: _OpenCohort, request: Sum
    ) -> tuple[NDArray[np.int64], tuple[int, ...] | None]:
        """The sum that each sampled member's update is added to; and sizes, where they are public."""
        mechanism, route = cohort.mechanism, request.route
        rebalanced = isinstance(mechanism, RebalancedSums)
        if rebalanced and not cohort.chooses:
            raise PlanError(f"release '{cohort.release}' plans identifiers of choices, and nobody chooses")
        if isinstance(mechanism, RoutedSums) and not cohort.counted:
            raise PlanError(f"release '{cohort.release}' plans a histogram: ask for it before the sums")
        if route is not None and not isinstance(mechanism, RoutedSums):
            raise PlanError(f"release '{cohort.release}' plans no histogram that a route could follow from")
        if request.minimum and not rebalanced:
            raise PlanError(f"release '{cohort.release}' plans no identifiers to fill clusters by")
        if not cohort.chooses:
            return np.zeros(len(cohort.sampled), dtype=np.int64), None
        if rebalanced:
            return self._rebalanced(cohort, request.minimum)
        if route is None:
            return cohort.choices, None
        check_route(route, cohort.job.sums)
        hashed = _digest(cohort.input_hash, _bytes(route))
        coins = self._facts.uniforms("route", cohort.sampled, cohort.round, cohort.release, hashed)
        return routed(cohort.choices, route, coins), None

    def _rebalanced(
        self, cohort: _OpenCohort, minimum: int
    ) -> tuple[NDArray[np.int64], tuple[int, ...] | None]:
        """The published rule: clusters by noisy identifiers, small ones filled from the large."""
        assert isinstance(cohort.mechanism, RebalancedSums)
        clusters, std = cohort.job.sums, cohort.mechanism.identifier_multiplier
        identifiers = np.eye(clusters)[cohort.choices]
        for member, own in zip(cohort.sampled, identifiers, strict=True):
            own += self._stream("identifier", member, cohort, cohort.input_hash).normal(clusters, std=std)
        draw = self._stream("rebalance", "cohort", cohort, cohort.input_hash)
        filled = refilled(identifiers.argmax(axis=1), clusters, minimum, draw.uniform(len(identifiers)))
        return filled, tuple(np.bincount(filled, minlength=clusters).tolist())

    def _stream(self, purpose: str, subject: str, cohort: _OpenCohort, hashed: str) -> RandomStream:
        return self._facts.stream(purpose, Occasion(subject, cohort.round, cohort.release, hashed))


# --- plain functions ------------------------------------------------------------------------------------


def check_route(route: NDArray[np.float64], clusters: int) -> None:
    """Refuse a matrix whose rows are not probabilities: a member's weight would not be bounded by one."""
    if route.shape != (clusters, clusters):
        raise PlanError(f"route: a matrix of shape {route.shape} for {clusters} clusters")
    if not (np.isfinite(route).all() and (route >= 0).all()):
        raise PlanError("route: an entry is negative or not a number; allowed are probabilities")
    if not np.allclose(route.sum(axis=1), 1.0, rtol=0.0, atol=_TOLERANCE):
        raise PlanError("route: a row does not add up to 1")


def routed(
    choices: NDArray[np.int64], route: NDArray[np.float64], coins: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Each member's destination, by its own coin in (0, 1)."""
    edges = np.cumsum(route, axis=1)
    edges[:, -1] = 1.0
    return np.asarray((coins[:, None] >= edges[choices]).sum(axis=1), dtype=np.int64)


def refilled(
    assigned: NDArray[np.int64], clusters: int, minimum: int, coins: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Clusters below `minimum` filled up with members drawn uniformly from those that are not below it.

    Members are moved, not copied, and a cluster that gives may fall below the minimum itself: the published
    rule as it is written.
    """
    sizes = np.bincount(assigned, minlength=clusters)
    small = np.flatnonzero(sizes < minimum)
    needed = np.repeat(small, minimum - sizes[small])
    pool = np.flatnonzero(sizes[assigned] >= minimum)
    if len(needed) > len(pool):
        raise PlanError(
            f"minimum: {minimum} for each of {clusters} clusters is more than a cohort of {len(assigned)} has"
        )
    moved = pool[np.argsort(coins[pool], kind="stable")[: len(needed)]]
    filled = assigned.copy()
    filled[moved] = needed
    return filled


def nearest(updates: Tensor, directions: Tensor) -> NDArray[np.int64]:
    """The centre in whose direction each update from the mean of the centres points most.

    A client's model after one round is the mean plus a short step, while centres drift apart round by round:
    by plain distance the centre that moved least would win everybody. By angle no centre wins for being near.
    """
    lengths = torch.linalg.vector_norm(directions.double(), dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    cosines = (updates.double() @ directions.double().T) / lengths
    found: NDArray[np.int64] = np.argmax(np.nan_to_num(cosines.cpu().numpy(), nan=-np.inf), axis=1)
    return found


def cohort_hash(context: str, job: CohortJob) -> str:
    """Digest of everything that members are sent; shapes and bits count."""
    starts = sorted(job.start_of.items()) if job.start_of is not None else None
    header = repr((context, job.members, job.training, job.choice, starts, job.models.shape))
    parts = [] if job.parts is None else [_bytes(job.parts.shared), _bytes(job.parts.personal)]
    if job.drafts is not None:
        parts += [repr((job.drafts.trainings, job.drafts.divisor)).encode(), _bytes(job.drafts.model)]
    return _digest(header, _bytes(job.models), *parts)


def _alike(one: CohortJob, other: CohortJob) -> bool:
    """May their members train as one program?"""
    return one.training == other.training and one.drafts is None and other.drafts is None


def _digest(first: str, *rest: bytes) -> str:
    digest = hashlib.sha256(first.encode())
    for part in rest:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _bytes(array: NDArray[np.generic] | None) -> bytes:
    return b"" if array is None else np.ascontiguousarray(array).tobytes()


def _masks(parts: Parts | None, size: int, device: torch.device) -> Iterable[Tensor]:
    """Which parameters are shared and which personal."""
    if parts is None:
        return [torch.zeros(size, dtype=torch.bool, device=device) for _ in range(2)]
    return [torch.from_numpy(mask).to(device) for mask in (parts.shared, parts.personal)]
