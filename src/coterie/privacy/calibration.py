"""From a budget to the least noise that meets it, always on the safe side."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from scipy.optimize import brentq

from coterie.privacy import accounting, paper
from coterie.privacy.errors import BudgetError, PrivacyInputError
from coterie.privacy.mechanisms import NoiseRule
from coterie.privacy.plan import PlannedRelease, PrivacyPlan, UnitPlan
from coterie.privacy.record_sums import FullBatchSketch
from coterie.privacy.sketch_sums import SketchSums
from coterie.privacy.units import Adjacency, Budget, Mode, round_up, short_number

FIRST_ROUND_SHARE = 0.02
"""`AUTO` lets the first round raise the training noise by this much over a plan without it."""
SKETCHES_SHARE = 0.05
"""The same where all clients release sums of sketches."""
LARGEST_FIRST_ROUND_SHARE = 0.15
"""By how much it may where records (or clients) are few, if that makes sketches tell clusters apart."""
TELLING_NOISE = 0.1
"""Length of the noise on a mean sketch, in clips, at which clusters of usual data are found: they begin to be
lost at 0.12 (`benchmarks/few_records.py`)."""

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


def with_shared_noise(plan: PrivacyPlan, noise: float) -> PrivacyPlan:
    """The plan with this for its one free multiplier, in every unit; for searches over many units at once."""
    units = (_with_noise(unit, _names(unit, NoiseRule.SHARED), noise) for unit in plan.units)
    return replace(plan, units=tuple(units))


def has_free_noise(plan: PrivacyPlan) -> bool:
    """Is there a multiplier left to find?"""
    return any(_names(unit, NoiseRule.SHARED) for unit in plan.units)


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
    method = accounting.accountant_named(accountant)

    def cost(candidate: UnitPlan, name: str = accountant) -> float:
        if mode is Mode.PAPER:
            return paper.epsilon(candidate, budget.delta)
        return accounting.epsilon_of(candidate.event, budget.delta, name, adjacency)

    def least(candidate: UnitPlan, free: list[str]) -> float:
        # Before any search: where it begins, losses may be too large for a grid.
        if cost(_with_noise(candidate, free, _MOST_NOISE)) > budget.epsilon:
            raise BudgetError(_explain(candidate, budget, free, cost, mode))

        def noise_by(name: str, tolerance: float, start: float = 1.0) -> float | None:
            return smallest_noise(
                lambda z: cost(_with_noise(candidate, free, z), name), budget.epsilon, tolerance, start
            )

        # RDP is fast and never below: its answer, roughly, is where a slower search begins.
        slower = accountant != "rdp" and mode is Mode.SOUND
        start = (noise_by("rdp", 1e-2) if slower else None) or 1.0
        noise = noise_by(accountant, method.tolerance, start)
        if noise is None:
            raise BudgetError(_explain(candidate, budget, free, cost, mode))
        return noise

    sketches = [release.mechanism for release in unit.releases if isinstance(release.mechanism, SketchSums)]
    if shared and auto and sketches:
        reference, enough = least(unit.without(*auto), shared), sketches[0].telling_noise

        def for_share(share: float) -> float:
            return least(_with_noise(unit, shared, (1.0 + share) * reference), auto)

        noise = for_share(SKETCHES_SHARE)
        if noise > enough:
            noise = max(enough, for_share(LARGEST_FIRST_ROUND_SHARE))
        unit = _with_noise(unit, auto, noise)
        unit = _with_noise(unit, shared, least(unit, shared))
    elif shared and auto:
        reference = least(unit.without(*auto), shared)
        unit = _with_noise(unit, shared, (1.0 + FIRST_ROUND_SHARE) * reference)
        unit = _with_noise(unit, auto, least(unit, auto))
        telling = _with_less_noise(unit, auto, TELLING_NOISE)
        most = (1.0 + LARGEST_FIRST_ROUND_SHARE) * reference
        if telling is not unit and cost(_with_noise(telling, shared, most)) <= budget.epsilon:
            unit = _with_noise(telling, shared, least(telling, shared))
    elif shared or auto:
        # Alone, the first round has nothing to be traded against: it is the one free multiplier.
        unit = _with_noise(unit, shared + auto, least(unit, shared + auto))
    if cost(unit) > budget.epsilon:
        raise BudgetError(_explain(unit, budget, [], cost, mode))
    return unit


def smallest_noise(
    cost: Callable[[float], float], target: float, tolerance: float = 1e-7, start: float = 1.0
) -> float | None:
    """The upper end of a bracket, relative width `tolerance`, of the least noise with cost(noise) <= target.

    `cost` falls as the noise grows. None when even enormous noise costs too much.
    """
    high, factor = start, 1.1
    while cost(high) > target:
        high *= factor
        factor = min(factor**2, 4.0)
        if high > _MOST_NOISE:
            return None
    low, factor = high / 1.1, 1.1
    while cost(low) <= target:
        factor = min(factor**2, 4.0)
        high, low = low, low / factor
        if low < _LEAST_NOISE:
            return high

    def distance(log_noise: float) -> float:
        return math.log(max(cost(math.exp(log_noise)), 1e-300) / target)

    found = math.exp(brentq(distance, math.log(low), math.log(high), xtol=tolerance / 2, rtol=1e-15))
    # The root may lie a hair on the wrong side.
    margin = tolerance / 2
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


def _with_less_noise(unit: UnitPlan, names: list[str], length: float) -> UnitPlan:
    """The unit with no more noise than of this length on each sketch among these; itself if that holds."""
    for release in unit.releases:
        sketch = release.mechanism
        if release.name in names and isinstance(sketch, FullBatchSketch):
            enough = sketch.multiplier_for(length)
            unit = _with_noise(unit, [release.name], enough) if enough < sketch.multiplier else unit
    return unit


def _explain(
    unit: UnitPlan, budget: Budget, free: list[str], cost: Callable[[UnitPlan], float], mode: Mode
) -> str:
    """Which part costs what, for a budget that cannot be met."""
    parts = [
        f"{release.name} alone {round_up(cost(replace(unit, releases=(release,))))}"
        for release in unit.releases
        if release.name not in free
    ]
    if free:
        limit = cost(_with_noise(unit, free, _MOST_NOISE))
        parts.append(f"all with unlimited noise in {' and '.join(free)} {round_up(limit)}")
    else:
        parts.append(f"all together {round_up(cost(unit))}")
    asked = f"epsilon: {budget.epsilon:g} at delta {short_number(budget.delta)}"
    by = " by the published bound" if mode is Mode.PAPER else ""
    return f"{asked} cannot be met for {unit.subject}{by}; the parts cost: {', '.join(parts)}"
