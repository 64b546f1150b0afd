"""What an attacker gains at best, in two figures that a person can picture, never smaller than the truth.

Somebody sees everything that is released and guesses whether one unit was used. A test of that kind has a
true positive rate t and a false positive rate f, and whatever bounds the divergence of the two worlds bounds
the divergence of the two coins (t, f), because a test is post-processing. From a Renyi curve follows, at each
order, the largest t; from a profile delta(epsilon) follows t <= e^epsilon f + delta(epsilon).

At even odds the best guess is right with probability (1 + T) / 2, where T is the total variation, delta(0).
The pairs (t, f) that a Renyi divergence allows in both directions form a convex set (the divergence is
jointly quasi-convex: van Erven, Harremoes 2014, Thm 13) which (t, f) -> (1 - f, 1 - t) maps to itself without
changing t - f. The largest t - f is therefore found at f = 1 - t.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from coterie.privacy.divergences import Floats
from coterie.privacy.errors import PlanError
from coterie.privacy.plain import Key, Plain
from coterie.privacy.units import decimals_up

FALSE_POSITIVES = 0.01
"""Share of those who were not used that the attacker of the second figure accuses."""

_HALVINGS = 50
# Rounding errors of the divergence of two coins, with room to spare.
_SLACK = 1e-12
_EPSILONS: Floats = np.concatenate([[0.0], np.geomspace(1e-3, 60.0, 400)])


@dataclass(frozen=True)
class Meaning(Plain):
    """Two bounds on any attack on one unit.

    Args:
        guess: how often someone who guesses at even odds whether it was used is right at best.
        found: how many of those that were used someone finds at best who accuses 1 % of the others.
    """

    called = "meaning"
    guess: Annotated[float, Key("guess_at_even_odds")]
    found: Annotated[float, Key("true_positive_rate")]
    accused: Annotated[float, Key("false_positive_rate")] = FALSE_POSITIVES

    def __post_init__(self) -> None:
        if self.accused != FALSE_POSITIVES:
            raise PlanError(f"meaning: a false positive rate of {self.accused}, not {FALSE_POSITIVES}")


def sharpest(*bounds: Meaning) -> Meaning:
    """Several proven bounds on one thing: the smallest of each figure holds."""
    return Meaning(min(each.guess for each in bounds), min(each.found for each in bounds))


def weakest(*bounds: Meaning) -> Meaning:
    """One bound for several units: the largest of each figure holds for all."""
    return Meaning(max(each.guess for each in bounds), max(each.found for each in bounds))


def from_bound(epsilon: float, delta: float) -> Meaning:
    """What one pair (epsilon, delta) proves."""
    return _from_points(np.array([epsilon]), np.array([delta]))


def from_profile(delta_at: Callable[[Floats], Floats]) -> Meaning:
    """What a profile proves: delta as a function of epsilon, over both directions."""
    return _from_points(_EPSILONS, delta_at(_EPSILONS))


def _from_points(epsilons: Floats, deltas: Floats) -> Meaning:
    shrink, rate = np.exp(-epsilons), FALSE_POSITIVES
    variation = 1.0 - 2.0 * (1.0 - deltas) * shrink / (1.0 + shrink)
    with np.errstate(over="ignore"):
        few = np.exp(epsilons) * rate + deltas
    many = 1.0 - shrink * (1.0 - deltas - rate)  # by exchanging the worlds and what is accused
    return Meaning(
        min(1.0, float(1.0 + np.min(variation)) / 2.0), min(1.0, float(min(np.min(few), np.min(many))))
    )


def from_divergences(orders: Floats, divergences: Floats) -> Meaning:
    """What a Renyi curve over both directions proves; an order whose value is no number proves nothing."""
    known = ~np.isnan(divergences)
    orders, bounds = orders[known], divergences[known] * (1.0 + 1e-9) + _SLACK / (orders[known] - 1.0)

    def largest(least: float, other: Callable[[Floats], Floats]) -> float:
        """The upper end of a bracket around the largest share that every order allows beside the other."""
        low, high = np.full_like(orders, least), np.ones_like(orders)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            forth, back = _coins(orders, middle, other(middle)), _coins(orders, other(middle), middle)
            fits = np.maximum(forth, back) <= bounds
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return float(np.min(high, initial=1.0))

    found = largest(FALSE_POSITIVES, lambda share: np.full_like(share, FALSE_POSITIVES))
    return Meaning(largest(0.5, lambda share: 1.0 - share), found)


def _coins(orders: Floats, one: Floats, other: Floats) -> Floats:
    """The Renyi divergence of a coin with this share of heads from another."""
    with np.errstate(divide="ignore"):
        heads = orders * np.log(one) + (1.0 - orders) * np.log(other)
        tails = orders * np.log1p(-one) + (1.0 - orders) * np.log1p(-other)
    return np.logaddexp(heads, tails) / (orders - 1.0)


def percent_up(share: float) -> str:
    """A share in percent, never less than it is: one decimal, two close to 100."""
    shown = decimals_up(100.0 * share, 2 if share > 0.99 else 1)
    return f"{shown} %" if float(shown) < 100.0 else "100 %"
