"""A budget that several plans share, each chosen after what the ones before it released was seen.

Renyi divergences of releases add up, also where later ones are chosen by what earlier ones showed. A bound on
their sum at one order, fixed before the first of them, bounds the divergence of everything until the sum
would pass it (Feldman, Zrnic 2021): that is a filter. Which of several orders will turn out to be the best
depends on what is chosen, and so on what was released: taking the best afterwards would claim too much.
Therefore each of the fixed orders has a share of delta of its own. A history lies below the bound of at least
one order; over all histories whose first such order is a given one, delta is at most the share of that order,
and the shares add up to delta. Nine tenths of it belong to one main order, where this costs little: epsilon
grows by log(1/0.9) / (order - 1). It is the order at which the budget admits the first plan most often, which
is known before anything is released, or, where nobody knows a plan yet, Gaussian noise.
"""

import math

import numpy as np

from coterie.privacy.divergences import INTEGER_ORDERS, Floats
from coterie.privacy.errors import RangeError
from coterie.privacy.rdp import epsilon_from_rdp
from coterie.privacy.units import Budget

_MAIN = 0.9
"""Share of delta of the order that the budget buys the most at."""


def composed_epsilon(divergences: Floats, delta: float) -> float:
    """Epsilon of divergences at `INTEGER_ORDERS`, for plans that were all fixed in advance."""
    return epsilon_from_rdp(INTEGER_ORDERS, divergences, delta) if divergences.any() else 0.0


class RdpFilter:
    """Says whether one more plan fits into a budget beside all that was spent before."""

    def __init__(self, budget: Budget, order: int | None = None) -> None:
        """Args:
        order: the main one, fixed before the first release; by default that of Gaussian noise.
        """
        if not budget.is_private:
            raise RangeError(f"epsilon: {budget.epsilon} is not allowed, a finite number is")
        self.budget = budget
        main = main_order(budget) if order is None else order
        if main not in INTEGER_ORDERS:
            raise RangeError(f"order: {main} is not allowed, one of the orders of this version is")
        shares = np.full_like(INTEGER_ORDERS, (1.0 - _MAIN) / (len(INTEGER_ORDERS) - 1))
        shares[main == INTEGER_ORDERS] = _MAIN
        self._deltas = budget.delta * shares

    def admits(self, divergences: Floats) -> bool:
        """Whether everything together, at `INTEGER_ORDERS`, stays within the budget."""
        return self.epsilon(divergences) <= self.budget.epsilon

    def epsilon(self, divergences: Floats) -> float:
        """The smallest epsilon of a budget with this delta, and these shares of it, that would admit it."""
        candidates = divergences - _bounds(0.0, self._deltas)
        return max(0.0, float(np.min(candidates, where=~np.isnan(candidates), initial=math.inf)))


def main_order(budget: Budget, divergences: Floats | None = None) -> int:
    """The order at which the budget admits most copies of a plan; by default, of Gaussian noise."""
    plan = INTEGER_ORDERS if divergences is None else divergences
    bounds = _bounds(budget.epsilon, np.full_like(INTEGER_ORDERS, _MAIN * budget.delta))
    with np.errstate(divide="ignore", invalid="ignore"):
        copies = np.where((bounds > 0) & (plan > 0), bounds / plan, 0.0)
    if not copies.any():  # nothing is spent, or nothing can be
        return main_order(budget) if divergences is not None else int(INTEGER_ORDERS[-1])
    return int(INTEGER_ORDERS[int(np.argmax(copies))])


def _bounds(epsilon: float, deltas: Floats) -> Floats:
    """The largest divergence at each order that proves epsilon with these deltas."""
    tails = (np.log(deltas) + np.log(INTEGER_ORDERS)) / (INTEGER_ORDERS - 1.0)
    found: Floats = epsilon - np.log1p(-1.0 / INTEGER_ORDERS) + tails
    return found
