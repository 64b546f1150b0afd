"""From a budget to the least noise that meets it, always on the safe side."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from scipy.optimize import brentq

from coterie.privacy import accounting
from coterie.privacy.errors import BudgetError, PrivacyInputError
from coterie.privacy.mechanisms import NoiseRule
from coterie.privacy.plan import PlannedRelease, PrivacyPlan, UnitPlan
from coterie.privacy.units import Adjacency, Budget, Mode

FIRST_ROUND_SHARE = 0.02
"""`AUTO` lets the first round raise the training noise by this much over a plan without it."""

# The found multiplier is at most this much (relative) above the least one that would do.
_TOLERANCE = 1e-7
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e8


def calibrate(
    plan: PrivacyPlan,
    budget: Budget | Mapping[str, Budget],
    *,
    accountant: str = "rdp",
    mode: Mode = Mode.SOUND,
) -> PrivacyPlan:
    """The plan with every noise multiplier found, so that each unit stays within its own budget.

    Units with equal releases and budgets are solved once. An infinite epsilon means no noise.

    Raises:
        BudgetError: no noise meets the budget; the message says what each part costs.
    """
    solved: dict[tuple[tuple[PlannedRelease, ...], Budget], tuple[PlannedRelease, ...]] = {}
    units = []
    for unit in plan.units:
        allowed = budget_of(budget, unit.subject)
        key = unit.releases, allowed
        if key not in solved:
            solved[key] = _calibrate_unit(unit, allowed, plan.adjacency, accountant, mode).releases
        units.append(replace(unit, releases=solved[key]))
    return replace(plan, units=tuple(units))


def budget_of(budget: Budget | Mapping[str, Budget], subject: str) -> Budget:
    """One subject's own budget."""
    if isinstance(budget, Budget):
        return budget
    if subject not in budget:
        raise PrivacyInputError(f"budget: {subject!r} has none, one for each subject is needed")
    return budget[subject]


def _calibrate_unit(
    unit: UnitPlan, budget: Budget, adjacency: Adjacency, accountant: str, mode: Mode
) -> UnitPlan:
    shared = _names(unit, NoiseRule.SHARED)
    auto = _names(unit, NoiseRule.AUTO)
    if not budget.is_private:
        return _with_noise(unit, shared + auto, 0.0)

    def cost(candidate: UnitPlan) -> float:
        return accounting.epsilon_of(candidate.event, budget.delta, accountant, adjacency)

    def least(candidate: UnitPlan, free: list[str]) -> float:
        if cost(candidate.without(*free)) >= budget.epsilon:
            raise BudgetError(_explain(unit, budget, free, cost))
        noise = smallest_noise(lambda z: cost(_with_noise(candidate, free, z)), budget.epsilon)
        if noise is None:
            raise BudgetError(_explain(unit, budget, free, cost))
        return noise

    if shared and auto:
        reference = least(unit.without(*auto), shared)
        unit = _with_noise(unit, shared, (1.0 + FIRST_ROUND_SHARE) * reference)
        unit = _with_noise(unit, auto, least(unit, auto))
    elif shared or auto:
        # Alone, the first round has nothing to be traded against: it is the one free multiplier.
        unit = _with_noise(unit, shared + auto, least(unit, shared + auto))
    if cost(unit) > budget.epsilon:
        raise BudgetError(_explain(unit, budget, [], cost))
    return unit


def smallest_noise(cost: Callable[[float], float], target: float) -> float | None:
    """The upper end of a tight bracket around the least noise with cost(noise) <= target.

    `cost` falls as the noise grows. None when even enormous noise costs too much.
    """
    high = 1.0
    while cost(high) > target:
        high *= 2.0
        if high > _MOST_NOISE:
            return None
    low = high / 2.0
    while cost(low) <= target:
        high, low = low, low / 2.0
        if low < _LEAST_NOISE:
            return high

    def distance(log_noise: float) -> float:
        return math.log(max(cost(math.exp(log_noise)), 1e-300) / target)

    found = math.exp(brentq(distance, math.log(low), math.log(high), xtol=_TOLERANCE / 4, rtol=1e-15))
    margin = _TOLERANCE / 4
    while cost(found) > target:
        found *= 1.0 + margin
        margin *= 2.0
    return min(found, high)


def _names(unit: UnitPlan, rule: NoiseRule) -> list[str]:
    return [release.name for release in unit.releases if release.mechanism.rule is rule]


def _with_noise(unit: UnitPlan, names: list[str], noise: float) -> UnitPlan:
    releases = tuple(
        replace(release, mechanism=release.mechanism.with_noise(noise)) if release.name in names else release
        for release in unit.releases
    )
    return replace(unit, releases=releases)


def _explain(unit: UnitPlan, budget: Budget, free: list[str], cost: Callable[[UnitPlan], float]) -> str:
    """Which part costs what, for a budget that cannot be met."""
    fixed = [release for release in unit.releases if release.mechanism.rule is None]
    costs = [f"{release.name} alone {cost(replace(unit, releases=(release,))):.4g}" for release in fixed]
    together = cost(replace(unit, releases=tuple(fixed)))
    parts = [f"{', '.join(costs)}; together {together:.4g}"] if costs else ["nothing is fixed"]
    parts += [f"{name} needs its share on top" for name in free]
    return (
        f"budget of {unit.subject}: epsilon {budget.epsilon:g} at delta {budget.delta:g} "
        f"cannot be met by any noise: {'; '.join(parts)}"
    )
