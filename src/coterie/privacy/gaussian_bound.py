"""One number for a whole privacy curve: mu of the tightest Gaussian that lies above it.

A mechanism whose profile delta(epsilon) is nowhere above that of a Gaussian release of shift mu over standard
deviation 1 gives an attacker no more than that release does (Dong, Roth, Su 2019), whatever errors they aim
at. Numerical profiles never fall below what their tails were cut at, and a Gaussian's does: they are compared
where delta is at least `LEAST`.
"""

from collections.abc import Callable

import numpy as np
from scipy.special import log_ndtr

from coterie.privacy.divergences import Floats

LEAST = 1e-10
"""The smallest delta at which curves are compared."""
_MOST = 50.0
_HALVINGS = 40
_EPSILONS: Floats = np.concatenate([[0.0], np.geomspace(1e-4, 200.0, 4000)])


def gaussian_profile(mu: float, epsilons: Floats) -> Floats:
    """delta of a Gaussian release with this mu, at each epsilon from 0."""
    upper, lower = log_ndtr(-epsilons / mu + mu / 2), log_ndtr(-epsilons / mu - mu / 2)
    with np.errstate(over="ignore", under="ignore"):
        found: Floats = np.exp(upper) - np.exp(np.minimum(epsilons + lower, upper))
    return np.maximum(found, 0.0)


def gaussian_mu(delta_at: Callable[[Floats], Floats]) -> float | None:
    """The smallest mu whose profile is above this one, rounded up; None where not even a large one is.

    Between two points of the grid the profile is at most what it is at the left one, and the Gaussian's at
    least what it is at the right one.
    """
    deltas = delta_at(_EPSILONS)
    counts = deltas[:-1] >= LEAST
    if not counts.any():
        return 0.0

    def covers(mu: float) -> bool:
        return bool(np.all(gaussian_profile(mu, _EPSILONS[1:])[counts] >= deltas[:-1][counts]))

    low, high = 0.0, _MOST
    if deltas[-1] >= LEAST or not covers(high):
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if covers(middle) else (middle, high)
    return high
