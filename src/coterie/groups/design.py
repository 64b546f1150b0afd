"""From what workers demand to a schedule that grants it: which period, how much noise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from coterie.errors import BudgetError, InputError
from coterie.groups.leakage import Leakage
from coterie.groups.pairs import Exposure
from coterie.groups.schedule import GroupSchedule
from coterie.groups.structures import Bools, Structure
from coterie.privacy.calibration import smallest_noise
from coterie.privacy.ranges import EPSILON, GROUPS
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
    """The most that observers at least so many hops away may learn about targets; None: every worker."""

    epsilon: float
    target: int | None = None
    observer: int | None = None
    relation: Relation = Relation.ANY
    distance: int = 0

    def __post_init__(self) -> None:
        replace(EPSILON, least=0.0).check("epsilon", self.epsilon)
        replace(GROUPS, least=0).check("distance", self.distance)

    def pairs(self, structure: Structure) -> Bools:
        """[target, observer]: whom it is about."""
        apart = structure.class_hops[1][np.ix_(structure.class_of, structure.class_of)]
        chosen: Bools = ~np.eye(structure.workers, dtype=np.bool_) & (apart >= self.distance)
        if self.relation is not Relation.ANY:
            chosen &= (apart == 0) == (self.relation is Relation.IN_GROUP)
        if self.target is not None:
            chosen &= (np.arange(structure.workers) == self.target)[:, None]
        if self.observer is not None:
            chosen &= np.arange(structure.workers) == self.observer
        return chosen

    def text(self, structure: Structure) -> str:
        """The requirement in words."""
        target = "any worker" if self.target is None else f"worker {structure.name(self.target)}"
        kind = "other" if self.relation is Relation.ANY else self.relation
        observer = (
            f"any {kind} worker" if self.observer is None else f"worker {structure.name(self.observer)}"
        )
        far = f" at least {self.distance} hops away" if self.distance else ""
        return f"{target} against {observer}{far}: epsilon at most {self.epsilon:g}"


@dataclass(frozen=True)
class Verdict:
    """Whether a structure and schedule meet a requirement, and the pair that decides.

    Args:
        pair: None where the requirement is about no pair at all.
        trusted: pairs that it speaks of and that were not looked at: the threat model trusts members of one
            group.
    """

    requirement: Requirement
    met: bool
    epsilon: float
    pair: tuple[int, int] | None
    trusted: int = 0


@dataclass(frozen=True)
class Design:
    """A period and the least noise, as a multiple of the given one, that meets all requirements.

    With `any_noise` nothing arrives where a requirement looks, so that the noise does not matter.
    """

    period: int
    factor: float
    schedule: GroupSchedule
    any_noise: bool = False


def check(found: Leakage, requirements: Sequence[Requirement]) -> list[Verdict]:
    """What each requirement says about a known leakage.

    Raises:
        InputError: a requirement is about nobody but observers that the threat model trusts.
    """
    return [_verdict(found, requirement, _looked_at(requirement, found)) for requirement in requirements]


def _looked_at(requirement: Requirement, found: Leakage) -> tuple[Bools, int]:
    """The pairs that it is about, less those of one group where these are trusted; how many these are."""
    asked = requirement.pairs(found.structure)
    pairs = asked & found.defined
    if asked.any() and not pairs.any():
        raise InputError(
            f"requirement: {requirement.text(found.structure)}: threat model {int(found.threat)} trusts "
            "members of a common group and says nothing about them, 1 does"
        )
    return pairs, int(asked.sum() - pairs.sum())


def _verdict(found: Leakage, requirement: Requirement, looked_at: tuple[Bools, int]) -> Verdict:
    pairs, trusted = looked_at
    if not pairs.any():
        return Verdict(requirement, True, 0.0, None)
    values = np.where(pairs, found.epsilon, -1.0)
    target, observer = np.unravel_index(int(np.argmax(values)), values.shape)
    worst = float(values[target, observer])
    return Verdict(requirement, worst <= requirement.epsilon, worst, (int(target), int(observer)), trusted)


def search(
    asked: Leakage, requirements: Sequence[Requirement], periods: Sequence[int] = _PERIODS
) -> list[Design]:
    """For each period the least noise that meets all requirements, least noisy first.

    Where two need equal noise the shorter period is better: models mix more often.

    Raises:
        BudgetError: no period and noise does.
    """
    if not requirements:
        raise InputError("requirements: none were given, at least 1 is needed")
    last = max(1, asked.epoch - 1)
    # Whom they are about is the same for every schedule.
    concerned = [(requirement, _looked_at(requirement, asked)) for requirement in requirements]
    found = []
    for period in sorted({min(period, last) for period in periods} | {asked.schedule.period}):
        candidate = replace(asked.schedule, period=period)

        def excess(factor: float, candidate: GroupSchedule = candidate) -> float:
            louder = replace(asked, schedule=candidate.louder(factor))
            verdicts = (_verdict(louder, *both) for both in concerned)
            # A demand of 0 is met by 0 alone.
            return max(
                np.inf
                if 0 == verdict.requirement.epsilon < verdict.epsilon
                else verdict.epsilon / (verdict.requirement.epsilon or 1.0)
                for verdict in verdicts
            )

        factor = smallest_noise(excess, 1.0, _TOLERANCE)
        if factor is not None:
            found.append(Design(period, factor, candidate.louder(factor), any_noise=excess(1.0) == 0))
    if not found:
        strictest = min(requirements, key=lambda requirement: requirement.epsilon)
        raise BudgetError(
            f"requirements: no noise and no period meets them at delta {short_number(asked.delta)} "
            f"(the strictest: {strictest.text(asked.structure)})"
        )
    return sorted(found, key=lambda design: (round(design.factor / _TOLERANCE / 4), design.period))


def solve_pair(
    asked: Exposure, target: int, observer: int, epsilon: float
) -> tuple[float | None, int | None]:
    """What brings one pair under a target epsilon: at the given period the least noise, as a multiple of the
    given one, and at the given noise the shortest period; None for what does not.

    Raises:
        BudgetError: neither more noise nor another period does.
    """
    EPSILON.check("epsilon", epsilon)

    def cost(candidate: GroupSchedule) -> float:
        return replace(asked, schedule=candidate).pair_epsilon(target, observer)

    schedule, name = asked.schedule, asked.structure.name
    factor = smallest_noise(lambda factor: cost(schedule.louder(factor)), epsilon, _TOLERANCE)
    # The count is no monotone function of the period, so all are tried.
    periods = range(1, max(2, asked.epoch))
    period = next((p for p in periods if cost(replace(schedule, period=p)) <= epsilon), None)
    if factor is None and period is None:
        raise BudgetError(
            f"epsilon: {epsilon:g} at delta {short_number(asked.delta)} cannot be met for worker "
            f"{name(target)} against worker {name(observer)}, by no noise and no period"
        )
    return factor, period
