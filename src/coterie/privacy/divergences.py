"""Renyi divergences of single releases at any real order above 1, by quadrature.

A release with dominating pair (P, Q) has at order a the divergence log E_Q[(P/Q)^a] / (a - 1). The pairs here
are mixtures of Gaussians on a line, so the moment is a smooth one-dimensional integral, and the trapezoidal
rule converges geometrically on it. The published series for fractional orders lose binomial signs or
digits; the integral does neither.
"""

import math
from collections.abc import Callable, Iterator
from functools import wraps

import numpy as np
import numpy.typing as npt

from coterie.privacy.errors import PrivacyInputError

Floats = npt.NDArray[np.float64]


Bound = Callable[[float, float, Floats], Floats]

ORDERS: Floats = 1.0 + np.geomspace(0.01, 1999.0, 420)
ORDERS.flags.writeable = False
"""Orders of every account, 3 % apart in (order - 1): the best of them is within 0.02 % of the best of all."""

_INTEGERS = [*range(2, 65), *(72, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1536, 1999)]
INTEGER_ORDERS: Floats = np.array(_INTEGERS, dtype=np.float64)
INTEGER_ORDERS.flags.writeable = False
"""Orders of accounts that go on from one experiment to the next (`filters`), fixed once for all of them."""

# Twelve standard deviations: what lies beyond is below 1e-32 of the integral.
_TAIL = 12.0
_MOST_POINTS = 30_000
# Orders within this ratio share one grid.
_BAND = 2.5
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)


def gaussian_rdp(noise_multiplier: float, orders: Floats) -> Floats:
    """A Gaussian of standard deviation `noise_multiplier` against itself shifted by 1."""
    return orders / (2.0 * noise_multiplier**2)


def selection_rdp(bounded_range: float, orders: Floats) -> Floats:
    """A mechanism whose log-probability ratios span `bounded_range` is range^2/8-zCDP (Cesar, Rogers 2020).

    It is also purely private with epsilon = range, which caps the divergence at every order.
    """
    return np.minimum(orders * bounded_range**2 / 8.0, bounded_range)


def bands(orders: Floats, ratio: float) -> Iterator[slice]:
    """Ascending orders in pieces within this ratio."""
    first = 0
    while first < len(orders):
        last = int(np.searchsorted(orders, orders[first] * ratio, side="right"))
        yield slice(first, last)
        first = last


def _integrated(reach: float) -> Callable[[Callable[[float, float, Floats], Floats | None]], Bound]:
    """A bound by an integral over each band of orders, on a grid of its own.

    A Gaussian that moves by `reach` serves where every unit is sampled, and for bands whose integral is None:
    it would take too many points.
    """

    def decorate(integral: Callable[[float, float, Floats], Floats | None]) -> Bound:
        @wraps(integral)
        def bound(rate: float, noise_multiplier: float, orders: Floats) -> Floats:
            if not 0 < rate <= 1:
                raise PrivacyInputError(f"rate: {rate} is not allowed, a number above 0 and at most 1 is")
            if not noise_multiplier > 0:
                raise PrivacyInputError(
                    f"noise_multiplier: {noise_multiplier} is not allowed, a number above 0 is"
                )
            result = gaussian_rdp(noise_multiplier / reach, orders)
            for band in bands(orders, _BAND) if rate < 1.0 else ():
                found = integral(rate, noise_multiplier, orders[band])
                result[band] = result[band] if found is None else found
            return result

        return bound

    return decorate


@_integrated(reach=1.0)
def poisson_rdp(rate: float, noise_multiplier: float, orders: Floats) -> Floats | None:
    """(1-q) N(0) + q N(1) against N(0), standard deviation z, for adding or removing one sampled unit.

    This direction is the larger of the two (Mironov, Talwar, Zhang 2019, Thm 5), so it bounds both.
    """
    # In units of the standard deviation: E_N(0,1)[ratio^a], ratio = 1-q + q exp(u/z - 1/(2 z^2)). The
    # integrand is a mixture of unit bumps between 0 and a/z, analytic in a strip of half-width pi z.
    step = min(0.5, noise_multiplier / 2)
    points = grid(-_TAIL, orders[-1] / noise_multiplier + _TAIL, step)
    if points is None:
        return None
    log_ratio = _log_mixture(rate, points / noise_multiplier - 0.5 / noise_multiplier**2)
    return _divergence(orders, log_ratio, log_normal(points) + math.log(step))


@_integrated(reach=2.0)
def replace_one_poisson_rdp(rate: float, noise_multiplier: float, orders: Floats) -> Floats | None:
    """(1-q) N(0) + q N(1) against (1-q) N(0) + q N(-1): a sampled unit replaced by its opposite.

    For any two contributions x, y of norm at most 1, the hockey-stick divergence of (1-q) N(0) + q N(x) from
    (1-q) N(0) + q N(y) only grows when y turns away from x and both lengthen, at every threshold; the
    opposite unit vectors therefore dominate, also when later contributions adapt to earlier releases.
    """
    inverse = 1.0 / noise_multiplier
    step = min(0.25, noise_multiplier / 4)
    if rate > 0.3:
        # The denominator's own transition then meets the bulk of the integrand and narrows it.
        step = min(step, noise_multiplier / math.sqrt(orders[-1]))
    points = grid(-inverse - _TAIL, (2 * orders[-1] - 1) * inverse + _TAIL, step)
    if points is None:
        return None
    log_minus = _log_mixture(rate, -points * inverse - 0.5 * inverse**2)
    log_plus = _log_mixture(rate, points * inverse - 0.5 * inverse**2)
    return _divergence(orders, log_plus - log_minus, log_normal(points) + log_minus + math.log(step))


@_integrated(reach=1.0)
def replace_one_fixed_size_rdp(rate: float, noise_multiplier: float, orders: Floats) -> Floats | None:
    """A unit of the population replaced, under sampling of a fixed share without replacement.

    With swap-one pair (A, B), advanced joint convexity (Balle, Barthe, Gaboardi 2018, Thm 2) bounds the
    hockey-stick divergence at every threshold above 1 by that of ((1-q) B + q A, B), in both directions;
    below 1 it follows by swapping the worlds. A moment is an integral over all thresholds, so it is at most
    1 + E_B[(f(r) + r f(1/r)) 1{r > 1}], f(r) = r^a - 1 - a (r - 1), r the ratio of that pair.
    """
    start = 0.5 / noise_multiplier  # where the ratio crosses 1
    width = min(1.0, noise_multiplier)
    panels = math.ceil((orders[-1] / noise_multiplier + _TAIL) / width)
    if panels * len(_NODES) > _MOST_POINTS:
        return None
    points = (start + width * (np.arange(panels)[:, None] + (_NODES + 1) / 2)).ravel()
    log_ratio = _log_mixture(rate, points / noise_multiplier - 0.5 / noise_multiplier**2)
    log_weight = log_normal(points) + np.tile(np.log(_WEIGHTS * width / 2), panels)
    both = np.concatenate([log_ratio, -log_ratio])
    return _divergence(orders, both, np.concatenate([log_weight, log_weight + log_ratio]))


def grid(low: float, high: float, step: float, most: int = _MOST_POINTS) -> Floats | None:
    """Points of the trapezoidal rule, or None when there would be too many (then a plain bound serves)."""
    if not (high - low) / step < most:
        return None
    return step * np.arange(math.floor(low / step), math.ceil(high / step) + 1, dtype=np.float64)


def log_normal(points: Floats) -> Floats:
    """Log density of a unit normal."""
    return -0.5 * points**2 - 0.5 * math.log(2 * math.pi)


def _log_mixture(rate: float, exponent: Floats) -> Floats:
    """log(1 - q + q exp(exponent)), with all digits where the result is close to 0."""
    near = np.log1p(rate * np.expm1(np.minimum(exponent, 30.0)))
    far = np.logaddexp(math.log1p(-rate), math.log(rate) + exponent)
    return np.where(exponent < 30.0, near, far)


def _divergence(orders: Floats, log_ratio: Floats, log_weight: Floats) -> Floats:
    return np.logaddexp(0.0, _log_excess(orders, log_ratio, log_weight)) / (orders - 1.0)


def _log_excess(orders: Floats, log_ratio: Floats, log_weight: Floats) -> Floats:
    """log of the weighted sum of r^a - 1 - a (r - 1), which is the moment less 1 since r has mean 1.

    Every term is positive, so divergences far below the rounding error of 1 keep their digits.
    """
    shift = np.expm1(np.minimum(log_ratio, 700.0))
    # All terms of the series shrink by this factor or more.
    tiny = orders[-1] * np.abs(shift) < 1e-2
    order = orders[:, None]

    ratio, weight, excess = log_ratio[~tiny], log_weight[~tiny], shift[~tiny]
    exponents = order * ratio + weight
    peak = np.maximum(exponents.max(axis=1, initial=-np.inf), 0.0)
    powers = np.exp(exponents - peak[:, None]).sum(axis=1)
    plain, linear = np.exp(weight).sum(), (np.exp(weight) * excess).sum()
    total = powers - np.exp(-peak) * (plain + orders * linear)

    small = shift[tiny]
    if small.size:
        binomial = order * (order - 1.0) / 2.0
        power = np.exp(log_weight[tiny]) * small**2
        series = np.zeros_like(orders)
        for k in range(2, 9):
            series += binomial[:, 0] * power.sum()
            binomial = binomial * (order - k) / (k + 1)
            power = power * small
        total += np.exp(-peak) * series
    with np.errstate(divide="ignore"):
        return np.asarray(peak + np.log(np.maximum(total, 0.0)))
