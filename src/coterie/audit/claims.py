"""What is claimed of a release: epsilon at every delta, which is a curve that no attack may cross."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from dp_accounting import DpEvent
from numpy.typing import NDArray

from coterie.privacy.accounting import accountant_named
from coterie.privacy.pld import GridError, PldAccountant
from coterie.privacy.units import Adjacency

Floats = NDArray[np.float64]
DELTAS: tuple[float, ...] = (*np.geomspace(1e-8, 1e-2, 13).tolist(), *np.linspace(0.02, 0.98, 49).tolist())
"""Where the curve is looked at."""


@dataclass(frozen=True)
class Claim:
    """A curve, by the epsilon that is claimed at each delta.

    Args:
        epsilon: at a delta; infinite where nothing is claimed.
        adjacency: between which neighbours.
        accountant: by which it was computed.
    """

    epsilon: Callable[[float], float]
    adjacency: Adjacency
    accountant: str

    @classmethod
    def of(cls, event: DpEvent, adjacency: Adjacency, fallback: str = "rdp") -> "Claim":
        """By privacy loss distributions, the sharpest there is; by the plan's accountant where they fail."""
        try:
            account = PldAccountant(event, adjacency)
            account.epsilon(0.1)
            return cls(account.epsilon, adjacency, "pld")
        except GridError:
            return cls(accountant_named(fallback)(event, adjacency).epsilon, adjacency, fallback)

    @cached_property
    def by_delta(self) -> dict[float, float]:
        """Epsilon where the curve is looked at."""
        return {delta: self.epsilon(delta) for delta in DELTAS}

    @cached_property
    def points(self) -> tuple[Floats, Floats]:
        """Pairs (epsilon, delta) of the curve."""
        epsilons = np.array(list(self.by_delta.values()))
        known = np.isfinite(epsilons)
        return epsilons[known], np.array(DELTAS)[known]

    def false_negatives(self, false_positives: Floats | float) -> Floats:
        """The trade-off curve: the least share that a test misses which accuses so many wrongly."""
        epsilons, deltas = self.points
        rates = np.atleast_1d(np.asarray(false_positives, dtype=np.float64))[:, None]
        if not len(epsilons):
            return np.zeros(len(rates))
        few = 1.0 - deltas - np.exp(np.minimum(epsilons, 700.0)) * rates
        many = np.exp(-epsilons) * (1.0 - deltas - rates)
        return np.asarray(np.maximum(np.max(np.maximum(few, many), axis=1), 0.0))

    def broken_at(self, lower: Callable[[float], float]) -> float | None:
        """The delta at which a lower bound is furthest above what is claimed; None where it never is."""
        excess = {delta: lower(delta) - epsilon for delta, epsilon in self.by_delta.items()}
        worst = max(excess, key=lambda delta: excess[delta])
        return worst if excess[worst] > 0 else None
