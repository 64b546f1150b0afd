"""Bounds on epsilon from below, from what an attacker found in two worlds.

Scores rise with the belief that the canary was there. A threshold makes them a test; its error rates in both
worlds are bounded by Clopper and Pearson's intervals, and what bounds the error rates bounds epsilon. The
threshold is chosen on other trials than the bound is computed on: chosen on the same, the bound would be
optimistic. Where many canaries are in or out of one run by a coin each, what counts is how many coins are
guessed right (Steinke, Nasr, Jagielski 2023; for trade-off curves Mahloujifar, Melis, Chaudhuri 2024).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import betaincinv, expit, ndtr, ndtri
from scipy.stats import binom

Floats = NDArray[np.float64]
_MOST_EPSILON = 60.0
_CUTS = 200
"""Thresholds that are looked at in the tail and in the middle of what was scored."""


def upper_rates(found: NDArray[np.int64], trials: int, significance: float) -> Floats:
    """The largest rates at which so few would be found with this probability (Clopper and Pearson 1934)."""
    with np.errstate(invalid="ignore"):
        bounds = betaincinv(found + 1, trials - found, 1.0 - significance)
    return np.where(found >= trials, 1.0, bounds)


@dataclass(frozen=True)
class Rates:
    """Upper bounds on the two error rates of tests, together at the confidence that was asked for.

    One number each, or an array with one for each of several thresholds.
    """

    false_positive: Floats
    false_negative: Floats

    def epsilons(self, delta: float) -> Floats:
        """The largest epsilon that these errors rule out at this delta, from either side of the test."""
        with np.errstate(divide="ignore", invalid="ignore"):
            forth = np.log((1.0 - self.false_negative - delta) / self.false_positive)
            back = np.log((1.0 - self.false_positive - delta) / self.false_negative)
        return np.maximum(np.fmax(np.fmax(forth, back), 0.0), 0.0)

    def epsilon(self, delta: float) -> float:
        """The same of one test."""
        return float(self.epsilons(delta))

    @property
    def mu(self) -> float:
        """The largest mu of Gaussian differential privacy that these errors rule out."""
        return float(max(0.0, -ndtri(self.false_positive) - ndtri(self.false_negative)))


@dataclass(frozen=True)
class Scores:
    """What an attacker scored with the canary there, and without it."""

    present: Floats
    absent: Floats

    @property
    def trials(self) -> int:
        return len(self.present) + len(self.absent)

    def with_more(self, other: "Scores") -> "Scores":
        """These trials and others."""
        return Scores(
            np.concatenate([self.present, other.present]), np.concatenate([self.absent, other.absent])
        )

    def rates(self, thresholds: Floats | float, significance: float) -> Rates:
        """Error rates of tests that accuse from these scores on, each at half of the significance."""
        accused = len(self.absent) - np.searchsorted(np.sort(self.absent), thresholds, side="left")
        missed = np.searchsorted(np.sort(self.present), thresholds, side="left")
        half = significance / 2.0
        return Rates(
            upper_rates(np.asarray(accused), len(self.absent), half),
            upper_rates(np.asarray(missed), len(self.present), half),
        )

    def best_threshold(self, value: Callable[[Rates], Floats], significance: float) -> tuple[float, float]:
        """The threshold whose bound would be the best here, and that bound: for other trials than these."""
        cuts = self._cuts()
        values = value(self.rates(cuts, significance))
        # Of several that are as good the one in the middle.
        places = np.flatnonzero(values == values.max())
        return float(cuts[places[len(places) // 2]]), float(values.max())

    def _cuts(self) -> Floats:
        """Scores at which to cut: all of few, quantiles of many, as fine in the tails as in the middle."""
        every = np.unique(np.concatenate([self.present, self.absent]))
        if len(every) > _CUTS:
            shares = ndtr(np.linspace(-4.5, 4.5, _CUTS))
            worlds = [np.quantile(world, shares) for world in (self.present, self.absent)]
            every = np.unique(np.concatenate(worlds))
        return np.append((every[1:] + every[:-1]) / 2.0, every[0])

    def receiver_curve(self) -> tuple[Floats, Floats]:
        """False and true positive rates over all thresholds, as they were seen."""
        every = np.sort(np.concatenate([self.present, self.absent]))[::-1]
        some = every[np.unique(np.linspace(0, len(every) - 1, _CUTS).astype(int))]
        fall = np.array([np.mean(self.absent >= cut) for cut in some])
        rise = np.array([np.mean(self.present >= cut) for cut in some])
        return np.concatenate([[0.0], fall, [1.0]]), np.concatenate([[0.0], rise, [1.0]])

    @property
    def separation(self) -> float:
        """An estimate of mu, not a bound: two normal distributions so far apart overlap as these do."""
        ranks = np.searchsorted(np.sort(self.absent), self.present, side="left")
        ties = np.searchsorted(np.sort(self.absent), self.present, side="right") - ranks
        area = float(np.mean(ranks + ties / 2.0)) / len(self.absent)
        least = 0.5 / (len(self.present) * len(self.absent))
        return math.sqrt(2.0) * float(ndtri(min(max(area, least), 1.0 - least)))


# --- many canaries in one run -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Guesses:
    """How many coins of so many canaries were guessed to be in, and how many of these were."""

    canaries: int
    made: int
    right: int

    def p_value(self, epsilon: float, delta: float) -> float:
        """How likely so many right guesses are at most under (epsilon, delta) (Steinke et al., Theorem
        5.2)."""
        rate = float(expit(epsilon))
        tail = float(binom.sf(self.right - 1, self.made, rate))
        if delta == 0.0 or self.right == 0:
            return tail
        fewer = np.arange(1, self.right + 1)
        gains = (binom.sf(self.right - fewer - 1, self.made, rate) - tail) / fewer
        return float(min(1.0, tail + max(0.0, float(gains.max())) * delta * 2.0 * self.canaries))

    def epsilon(self, delta: float, significance: float) -> float:
        """The largest epsilon that is ruled out at this delta."""
        return _largest(lambda epsilon: significance - self.p_value(epsilon, delta))

    def contradicts(self, blown_down: Callable[[float], float], significance: float) -> bool:
        """Whether so many right guesses rule out a trade-off curve (Mahloujifar et al., Algorithm 3).

        Args:
            blown_down: for a probability of any set in one world, the least that the curve allows it in the
                other.
        """
        return self._excess(blown_down, significance) > 0

    def _excess(self, blown_down: Callable[[float], float], significance: float) -> float:
        if self.made == 0:
            return -1.0
        right, wrong = self.right, self.made - self.right
        r, h = significance * right / self.canaries, significance * wrong / self.canaries
        for i in range(right - 1, -1, -1):
            higher = max(h, blown_down(r))
            if higher == h:
                break
            h, r = higher, min(r + i / (self.made - i) * (higher - h), 1.0)
        return r + h - self.made / self.canaries

    def gaussian_epsilon(self, delta: float, significance: float) -> float:
        """The epsilon at this delta of the largest mu of Gaussian differential privacy that is ruled out."""
        from dp_accounting import get_sigma_gaussian

        def excess(epsilon: float) -> float:
            shift = 1.0 / float(get_sigma_gaussian(epsilon, delta))
            return self._excess(lambda share: float(ndtr(ndtri(share) - shift)), significance)

        return _largest(excess)


def _largest(excess: Callable[[float], float]) -> float:
    """The largest epsilon at which the excess is above zero; 0 where there is none."""
    low, high = 1e-9, 1.0
    if excess(low) <= 0:
        return 0.0
    while excess(high) > 0:
        low, high = high, 2.0 * high
        if high > _MOST_EPSILON:
            return low
    return float(brentq(excess, low, high, xtol=1e-9))
