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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.algorithms.protocol import (
    Choice,
    Cohort,
    CohortJob,
    Count,
    Histogram,
    Opened,
    Parts,
    Reply,
    Sum,
    Sums,
)
from coterie.engines.clients import TrainingFacts
from coterie.engines.computing import Computing, at_once
from coterie.engines.members import NO_ANSWER, Members, OpenCohort
from coterie.errors import PlanError
from coterie.privacy import Charge, CohortSums, Ledger, PrivacyPlan, RandomStream, Released, SketchSums
from coterie.privacy.cohort_sums import COUNT_REACH
from coterie.privacy.ranges import gaussian
from coterie.training.clipping import clip_rows

_TOLERANCE = 1e-9


@dataclass
class Cohorts:
    """Answers for a population whose members compute wherever they are.

    Args:
        parameters: of the model.
        context: whatever else decides what members compute from what they are sent.
    """

    facts: TrainingFacts
    members: Members
    parameters: int
    plan: PrivacyPlan
    ledger: Ledger
    context: str
    _round: int = 0
    _open: dict[int, OpenCohort] = field(default_factory=dict)
    _seen: set[tuple[str, str]] = field(default_factory=set)

    # --- requests -----------------------------------------------------------------------------------

    def begin(self, request: Cohort | Count | Sum, round: int) -> Computing[Reply]:
        """The answer to a request, which waits wherever members wait for a trainer."""
        match request:
            case Cohort():
                return (yield from self._opened(request, round))
            case Count():
                return self.count(request)
            case Sum():
                return (yield from self._added_up(request))

    def open(self, request: Cohort, round: int) -> Opened:
        """Charge the whole release, then flip everyone's coins."""
        return at_once(self._opened(request, round))

    def add_up(self, request: Sum) -> Sums:
        """The planned noisy sums; the cohort is closed by it."""
        return at_once(self._added_up(request))

    def _opened(self, request: Cohort, round: int) -> Computing[Opened]:
        job = request.job
        mechanism = self._mechanism(request)
        if round != self._round:  # handles live for one round
            self._round = round
            self._open.clear()
            self._seen.clear()
        hashed = cohort_hash(self.context, job)
        if (request.release, hashed) in self._seen:
            raise PlanError(f"release '{request.release}': this cohort was opened already in round {round}")
        self._seen.add((request.release, hashed))
        subjects = self.plan.subjects_of(job.members)
        self.ledger.charge([Charge(subject, round, request.release, hashed) for subject in subjects])
        coins = self.facts.uniforms("coins", job.members, round, request.release, hashed)
        cohort = OpenCohort(
            release=request.release,
            job=job,
            mechanism=mechanism,
            times=self.plan.for_subject(subjects[0]).release(request.release).times,
            round=round,
            input_hash=hashed,
            sampled=tuple(job.members[place] for place in mechanism.sampling.drawn(coins)),
            order=lambda member, turn: self._order(member, cohort, turn),
            choices=np.zeros(0, dtype=np.int64),
        )
        cohort.choices = (yield from self.members.choose(cohort)) if cohort.chooses else cohort.told()
        number = len(self._seen)
        self._open[number] = cohort
        return Opened(request.release, number)

    def count(self, request: Count) -> Histogram:
        """The planned noisy histogram of the sampled members' choices."""
        cohort = self._find(request.cohort)
        ratio, std = cohort.mechanism.histogram_ratio, cohort.mechanism.histogram_multiplier
        if ratio is None or not cohort.chooses or cohort.counted:
            why = "was counted already" if cohort.counted else "plans no histogram of choices"
            raise PlanError(f"release '{cohort.release}' {why}")
        cohort.counted = True
        chosen = cohort.choices[cohort.choices != NO_ANSWER]
        counts = np.bincount(chosen, minlength=cohort.job.sums).astype(np.float64)
        stream = self._stream("histogram", cohort, cohort.input_hash)
        noise = gaussian(stream, cohort.job.sums, std, multiplier=ratio * cohort.mechanism.multiplier)
        return Histogram(Released(counts + noise, std))

    def _added_up(self, request: Sum) -> Computing[Sums]:
        cohort = self._find(request.cohort)
        goes_to, sizes = self._destinations(cohort, request)
        if cohort.updates is None:
            waiting = [other for other in self._open.values() if other.updates is None]
            cohort.updates = yield from self.members.learn(cohort, waiting)
        updates = cohort.updates
        del self._open[request.cohort.number]
        job, mechanism = cohort.job, cohort.mechanism
        length = mechanism.length(self.parameters)
        shared, personal = _masks(job.parts, length, updates.device)
        # Masked copies of all updates take longer than the rest, so they are made where there is a mask.
        some_shared, some_personal = bool(shared.any()), bool(personal.any())
        released = (updates[:, ~personal] if some_personal else updates).to(torch.float64)
        kept = clip_rows(released, mechanism.clip)
        if some_personal:
            clipped, kept = kept, kept.new_zeros(len(kept), length)
            kept[:, ~personal] = clipped
        sums = kept.new_zeros(job.sums, length)
        for row, destination in zip(kept, goes_to, strict=True):
            sums[destination] += row
        values = sums.cpu().numpy()
        hashed = _digest(cohort.input_hash, repr(request.minimum).encode(), _bytes(request.route))
        std, planned = mechanism.noise_std, {"multiplier": mechanism.multiplier, "clip": mechanism.clip}
        values += gaussian(self._stream("noise", cohort, hashed), values.shape, std, **planned)
        if some_shared:
            # One sum of all members for what they share: a part of the release with noise of its own.
            columns = shared.cpu().numpy()
            common = torch.where(shared, kept, 0.0).sum(dim=0).cpu().numpy()
            common += gaussian(self._stream("shared noise", cohort, hashed), common.shape, std, **planned)
            values[:, columns] = common[columns]
        values[:, personal.cpu().numpy()] = 0.0
        within = None
        if mechanism.tracking_ratio is not None:
            stream, spread = self._stream("within", cohort, hashed), mechanism.count_std
            tracked = mechanism.tracking_ratio * mechanism.multiplier
            noise = gaussian(stream, 1, spread, multiplier=tracked, clip=COUNT_REACH)
            half = halves(released, cohort.choices != NO_ANSWER, mechanism.clip)
            within = Released(half + float(noise[0]), spread)
        return Sums(Released(values, std), sizes, within)

    # --- opening ------------------------------------------------------------------------------------

    def _mechanism(self, request: Cohort) -> CohortSums:
        job, release = request.job, request.release
        unknown = set(job.members) - set(self.facts.names)
        if unknown:
            raise PlanError(f"release '{release}': nobody is called '{min(unknown)}'")
        if job.models.shape[1] != self.parameters:
            raise PlanError(f"release '{release}': models of {job.models.shape[1]} parameters")
        mechanism = self.plan.planned(CohortSums, release, *job.members)
        follows = mechanism.tracking_ratio is not None
        clients, members = mechanism.sampling.clients, len(job.members)
        problems = {
            "plans drafts; the job is another": mechanism.drafted and job.drafts is None,
            "plans no drafts without noise; the job is another": bool(job.drafts) and not mechanism.drafted,
            "plans a clip that follows a count; the job is another": follows and job.clip is None,
            "plans a fixed clip; the job is another": job.clip is not None and not follows,
            f"is planned for {clients} clients, not {members}": clients not in (None, members),
            "is planned for another contribution than the job's": (
                mechanism.length(self.parameters) != job.length
                or isinstance(mechanism, SketchSums) != (job.sketch is not None and not job.chooses)
            ),
        }
        _refuse(release, problems)
        return mechanism if job.clip is None else mechanism.at(job.clip)

    def _find(self, handle: Opened) -> OpenCohort:
        if handle.number not in self._open or self._open[handle.number].release != handle.release:
            raise PlanError(f"release '{handle.release}': this cohort is not open (any more)")
        return self._open[handle.number]

    # --- where updates go -------------------------------------------------------------------------------

    def _destinations(
        self, cohort: OpenCohort, request: Sum
    ) -> tuple[NDArray[np.int64], tuple[int, ...] | None]:
        """The sum that each sampled member's update is added to; and sizes, where they are public."""
        mechanism, route = cohort.mechanism, request.route
        counts, rebalanced = mechanism.histogram_ratio is not None, mechanism.identifier_ratio is not None
        problems = {
            "plans identifiers of choices, and nobody chooses": rebalanced and not cohort.chooses,
            "plans a histogram: ask for it before the sums": counts and not cohort.counted,
            "plans no histogram that a route could follow from": (
                # Those who choose by their sketch were counted once, before.
                route is not None and not counts and cohort.job.choice is not Choice.SKETCH
            ),
            "plans no identifiers to fill clusters by": bool(request.minimum) and not rebalanced,
        }
        _refuse(cohort.release, problems)
        if cohort.job.choice is Choice.GIVEN:
            return np.zeros(len(cohort.sampled), dtype=np.int64), None
        if rebalanced:
            return self._rebalanced(cohort, request.minimum)
        # Who did not answer adds zeros, wherever they go.
        choices = np.maximum(cohort.choices, 0)
        if route is None:
            return choices, None
        check_route(route, cohort.job.sums)
        hashed = _digest(cohort.input_hash, _bytes(route))
        coins = self.facts.uniforms("route", cohort.sampled, cohort.round, cohort.release, hashed)
        return routed(choices, route, coins), None

    def _rebalanced(
        self, cohort: OpenCohort, minimum: int
    ) -> tuple[NDArray[np.int64], tuple[int, ...] | None]:
        """The published rule: clusters by noisy identifiers, small ones filled from the large."""
        mechanism, clusters = cohort.mechanism, cohort.job.sums
        std, ratio = mechanism.identifier_multiplier, mechanism.identifier_ratio or 0.0
        # A slot whose member did not answer stays a slot, of zeros and noise: cohorts that differ in one slot
        # then differ by no more than two choices do, and their number of slots tells nothing.
        identifiers = np.vstack([np.eye(clusters), np.zeros(clusters)])[cohort.choices]
        for member, own in zip(cohort.sampled, identifiers, strict=True):
            noise = self._stream("identifier", cohort, cohort.input_hash, member)
            # In units of half the sums' multiplier, which the publication calls sigma_theta.
            own += gaussian(noise, clusters, std, multiplier=ratio * mechanism.multiplier, clip=0.5)
        draw = self._stream("rebalance", cohort, cohort.input_hash)
        filled = refilled(identifiers.argmax(axis=1), clusters, minimum, draw.uniform(len(identifiers)))
        return filled, tuple(np.bincount(filled, minlength=clusters).tolist())

    def _order(self, member: str, cohort: OpenCohort, turn: int) -> int:
        """Seed of the order in which a member goes through its records."""
        hashed = _digest(cohort.input_hash, repr(turn).encode()) if turn else cohort.input_hash
        return self._stream("shuffle", cohort, hashed, member).integers(64)

    def _stream(self, purpose: str, cohort: OpenCohort, hashed: str, subject: str = "cohort") -> RandomStream:
        return self.facts.stream(purpose, Charge(subject, cohort.round, cohort.release, hashed))


# --- plain functions ------------------------------------------------------------------------------------


def _refuse(release: str, problems: Mapping[str, object]) -> None:
    """Raise the first problem that was found."""
    for problem in (said for said, found in problems.items() if found):
        raise PlanError(f"release '{release}' {problem}")


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


def halves(updates: Tensor, answered: NDArray[np.bool_], clip: float) -> float:
    """1/2 for every update within the clip, -1/2 for every other; nothing for who did not answer."""
    # Each by itself: of several rows at a time, a GPU rounds by how many there are, and who is near the clip
    # would change sides with another's coming.
    own = [torch.linalg.vector_norm(update) for update in updates]
    norms = torch.stack(own).cpu().numpy() if own else np.zeros(0)
    return float(np.where(answered, np.where(norms <= clip, 0.5, -0.5), 0.0).sum())


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


def cohort_hash(context: str, job: CohortJob) -> str:
    """Digest of everything that members are sent; shapes and bits count."""
    starts = sorted(job.start_of.items()) if job.start_of is not None else None
    header = repr((context, job.members, job.training, job.choice, starts, job.models.shape))
    parts = [] if job.parts is None else [_bytes(job.parts.shared), _bytes(job.parts.personal)]
    if job.drafts is not None:
        parts += [repr((job.drafts.trainings, job.drafts.divisor)).encode(), _bytes(job.drafts.model)]
    if job.sketch is not None:
        told = (job.sketch.dimensions, job.sketch.statistic, [part.shape for part in job.sketch.arrays])
        parts += [repr(told).encode(), *(_bytes(part) for part in job.sketch.arrays)]
    if job.clip is not None:
        parts.append(repr(("clip", job.clip)).encode())
    return _digest(header, _bytes(job.models), *parts)


def _digest(first: str, *rest: bytes) -> str:
    digest = hashlib.sha256(first.encode())
    for part in rest:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _bytes(array: NDArray[np.generic] | None) -> bytes:
    return b"" if array is None else np.ascontiguousarray(array).tobytes()


def _masks(parts: Parts | None, size: int, device: torch.device) -> Iterable[Tensor]:
    """Which parameters are shared and which personal."""
    masks = np.zeros((2, size), np.bool_) if parts is None else (parts.shared, parts.personal)
    return [torch.from_numpy(mask).to(device) for mask in masks]
