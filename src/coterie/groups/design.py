"""From what workers demand to a schedule that grants it: which period, how much noise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from coterie.errors import BudgetError, InputError
from coterie.groups.leakage import Leakage, Threat, leakage, pair_epsilon
from coterie.groups.schedule import Noise, Schedule
from coterie.groups.structures import Bools, Floats, Structure
from coterie.privacy.calibration import smallest_noise
from coterie.privacy.units import short_number

_PERIODS = (1, 2, 3, 4, 5, 8, 10, 15, 20, 25, 30, 40, 50, 75, 100, 150, 200, 300, 400, 500)
_TOLERANCE = 1e-4


class Relation(StrEnum):
    """How an observer stands to its target."""

    ANY = "any"
    IN_GROUP = "in-group"
    OUT_OF_GROUP = "out-of-group"


@dataclass(frozen=True)
class Requirement:
    """The most that some observers may learn about some targets; None means every worker."""

    epsilon: float
    target: int | None = None
    observer: int | None = None
    relation: Relation = Relation.ANY
    distance: int = 0
    """Only observers at least so many hops from the target's groups."""

    def pairs(self, structure: Structure) -> Bools:
        """[target, observer]: whom it is about."""
        member = structure.membership.astype(np.float64)
        chosen: Bools = ~np.eye(structure.workers, dtype=np.bool_)
        together: Bools = member @ member.T > 0
        if self.relation is Relation.IN_GROUP:
            chosen &= together
        elif self.relation is Relation.OUT_OF_GROUP:
            chosen &= ~together
        if self.distance:
            chosen &= _worker_distances(structure) >= self.distance
        if self.target is not None:
            chosen &= (np.arange(structure.workers) == self.target)[:, None]
        if self.observer is not None:
            chosen &= np.arange(structure.workers) == self.observer
        return chosen

    def text(self, structure: Structure) -> str:
        """The requirement in words."""
        target = "any worker" if self.target is None else f"worker {structure.name(self.target)}"
        if self.observer is not None:
            observer = f"worker {structure.name(self.observer)}"
        else:
            kind = {
                Relation.ANY: "any other",
                Relation.IN_GROUP: "any in-group",
                Relation.OUT_OF_GROUP: "any out-of-group",
            }
            observer = f"{kind[self.relation]} worker"
        far = f" at least {self.distance} hops away" if self.distance else ""
        return f"{target} against {observer}{far}: epsilon at most {self.epsilon:g}"


@dataclass(frozen=True)
class Verdict:
    """Whether a structure and schedule meet a requirement, and the pair that decides."""

    requirement: Requirement
    met: bool
    epsilon: float
    pair: tuple[int, int] | None
    """None where the requirement is about no pair at all."""


@dataclass(frozen=True)
class Design:
    """A period and the least noise, as a multiple of the given one, that meets all requirements."""

    period: int
    factor: float
    schedule: Schedule


@dataclass(frozen=True)
class PairAnswer:
    """What would bring one pair under a target: noise at the given period, or a period at the given noise."""

    epsilon: float
    factor: float | None
    """The least noise as a multiple of the given one; None when no noise does."""
    period: int | None
    """The shortest period that does; None when none does."""


def check(found: Leakage, requirements: Sequence[Requirement]) -> list[Verdict]:
    """What each requirement says about a known leakage; pairs outside the threat model are no concern."""
    verdicts = []
    for requirement in requirements:
        concerned = requirement.pairs(found.structure) & found.defined
        if not concerned.any():
            verdicts.append(Verdict(requirement, True, 0.0, None))
            continue
        values = np.where(concerned, found.epsilon, -1.0)
        target, observer = np.unravel_index(int(np.argmax(values)), values.shape)
        worst = float(values[target, observer])
        verdicts.append(
            Verdict(requirement, worst <= requirement.epsilon, worst, (int(target), int(observer)))
        )
    return verdicts


def search(
    structure: Structure,
    schedule: Schedule,
    requirements: Sequence[Requirement],
    *,
    epoch: int,
    delta: float,
    threat: Threat | None = None,
    periods: Sequence[int] | None = None,
) -> list[Design]:
    """For each period the least noise that meets all requirements, least noisy first.

    Where two need equal noise the shorter period is better: models mix more often.

    Raises:
        BudgetError: no period and noise does.
    """
    if not requirements:
        raise InputError("requirements: none were given, at least 1 is needed")
    tried = _PERIODS if periods is None else periods
    allowed = sorted({min(period, max(1, epoch - 1)) for period in tried} | {schedule.period})
    found = []
    for period in allowed:
        candidate = replace(schedule, period=period)

        def excess(factor: float, candidate: Schedule = candidate) -> float:
            louder = with_noise_factor(candidate, factor)
            verdicts = check(
                leakage(structure, louder, epoch=epoch, delta=delta, threat=threat), requirements
            )
            return max(_ratio(verdict.epsilon, verdict.requirement.epsilon) for verdict in verdicts)

        factor = smallest_noise(excess, 1.0, _TOLERANCE)
        if factor is not None:
            found.append(Design(period, factor, with_noise_factor(candidate, factor)))
    if not found:
        strictest = min(requirements, key=lambda requirement: requirement.epsilon)
        raise BudgetError(
            f"requirements: no noise and no period meets them at delta {short_number(delta)} "
            f"(the strictest: {strictest.text(structure)})"
        )
    return sorted(found, key=lambda design: (round(design.factor / _TOLERANCE / 4), design.period))


def solve_pair(
    structure: Structure,
    schedule: Schedule,
    target: int,
    observer: int,
    *,
    epoch: int,
    delta: float,
    epsilon: float,
) -> PairAnswer:
    """What brings one pair under a target epsilon.

    Raises:
        BudgetError: neither more noise nor another period does.
    """
    if not epsilon > 0:
        raise InputError(f"epsilon: {epsilon:g} is not allowed, a number above 0 is")

    def cost(candidate: Schedule) -> float:
        return pair_epsilon(structure, candidate, target, [observer], epoch, delta)

    factor = smallest_noise(lambda factor: cost(with_noise_factor(schedule, factor)), epsilon, _TOLERANCE)
    # The count is no monotone function of the period, so all are tried.
    periods = range(1, max(2, epoch))
    period = next((p for p in periods if cost(replace(schedule, period=p)) <= epsilon), None)
    if factor is None and period is None:
        raise BudgetError(
            f"epsilon: {epsilon:g} at delta {short_number(delta)} cannot be met for worker "
            f"{structure.name(target)} against worker {structure.name(observer)}, by no noise and no period"
        )
    return PairAnswer(cost(schedule), factor, period)


def with_noise_factor(schedule: Schedule, factor: float) -> Schedule:
    """The schedule with so many times the noise in every group."""
    noises = tuple(Noise(noise.rate, factor * noise.multiplier) for noise in schedule.noises)
    return replace(schedule, noises=noises)


def _ratio(epsilon: float, limit: float) -> float:
    if limit > 0:
        return epsilon / limit
    return 0.0 if epsilon == 0 else float("inf")


def _worker_distances(structure: Structure) -> Floats:
    """[worker, worker]: hops between their nearest groups."""
    nearest = np.stack([structure.distances[groups].min(axis=0) for groups in structure.class_groups])
    between = np.stack([nearest[:, groups].min(axis=1) for groups in structure.class_groups])
    return between[np.ix_(structure.class_of, structure.class_of)]
