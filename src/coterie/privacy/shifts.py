"""Renyi divergence of a noisy sum when several of its participants change what they send.

Workers take part independently with one rate. In one world `up` of them may send anything within the clip, in
the other `down` of them; whoever is silent in a world sends nothing there. Among all such pairs of laws the
mixtures on a line

    P = sum_k Bin(up, rate)(k) N(k, z^2)   against   Q = sum_l Bin(down, rate)(l) N(-l, z^2)

have the largest hockey-stick divergence at every threshold (docs/leakage.md proves it with Kahane's
comparison of Gaussians), so their Renyi divergences bound all others. up=1, down=0 is a worker present
or silent; up=down=1 is a worker that turns round.
"""

import math
from functools import lru_cache

import numpy as np
from scipy.special import gammaln, logsumexp

from coterie.privacy.divergences import (
    ORDERS,
    Floats,
    bands,
    gaussian_rdp,
    grid,
    log_normal,
    poisson_rdp,
    replace_one_poisson_rdp,
)

# Beyond these the plain Gaussian bound serves: no cut through that many workers is ever worth its price.
_MOST_MOVED = 40
_MOST_POINTS = 6000
# So small a shift drowns in the rounding of the quadrature.
_LEAST_SHIFT = 1e-3
_TAIL = 12.0
_BAND = 1.6


@lru_cache(maxsize=4096)
def shift_rdp(rate: float, noise: float, up: int, down: int) -> Floats:
    """The larger of R(P, Q) and R(Q, P) at every order of the accountant."""
    if up < down:
        return shift_rdp(rate, noise, down, up)
    if up == 0:
        result = np.zeros_like(ORDERS)
    elif rate == 1.0:
        result = _certain(noise, up + down)
    elif up == 1:
        result = (replace_one_poisson_rdp if down else poisson_rdp)(rate, noise, ORDERS)
    else:
        result = _mixtures(rate, noise, up, down)
    result.flags.writeable = False
    return result


def _certain(noise: float, moved: int) -> Floats:
    """Everybody takes part: one Gaussian against another `moved` clips away."""
    return gaussian_rdp(noise / moved, ORDERS)


def _mixtures(rate: float, noise: float, up: int, down: int) -> Floats:
    # Conditioning on who takes part can only raise the divergence, so the largest shift bounds every order.
    # Or all who turn round are silent in the second world with a known probability, at most that far away.
    quiet = -math.log1p(-rate)
    silent = np.maximum(_certain(noise, up) + down * quiet, _certain(noise, max(down, 1)) + up * quiet)
    bound = np.minimum(_certain(noise, up + down), silent)
    if up + down > _MOST_MOVED or (up + down) / noise < _LEAST_SHIFT:
        return bound
    for band in bands(ORDERS, _BAND):
        exact = _divergence(ORDERS[band], rate, noise, up, down)
        if exact is None:
            break
        bound[band] = np.minimum(bound[band], exact)
    return bound


def _divergence(orders: Floats, rate: float, noise: float, up: int, down: int) -> Floats | None:
    """By the trapezoidal rule, in units of the noise; None where it would take too many points.

    The integrand is a sum of unit bumps. Between them the logarithms bend over a length `noise`, which the
    power `order` narrows by its root.
    """
    highest = float(orders[-1])
    step = min(0.125, noise / 8, noise / (4 * math.sqrt(highest)))
    forth = (highest * up + (highest - 1) * down) / noise + _TAIL
    back = (highest * down + (highest - 1) * up) / noise + _TAIL
    points = grid(-back, forth, step, _MOST_POINTS)
    if points is None:
        return None
    log_p, log_q = _log_density(points, rate, noise, up), _log_density(points, rate, noise, -down)
    order = orders[:, None]
    log_moment = logsumexp(order * log_p + (1 - order) * log_q, axis=1)
    if up != down:
        log_moment = np.maximum(log_moment, logsumexp(order * log_q + (1 - order) * log_p, axis=1))
    # The moment is at least 1; what rounding may have taken away is given back.
    found: Floats = (np.maximum(log_moment + math.log(step), 0.0) + 1e-12) / (orders - 1.0)
    return found


def _log_density(points: Floats, rate: float, noise: float, workers: int) -> Floats:
    """Log density of a unit normal shifted by the number of participants (to the left if negative)."""
    count = abs(workers)
    k = np.arange(count + 1)
    log_weights = gammaln(count + 1) - gammaln(k + 1) - gammaln(count - k + 1)
    log_weights += k * math.log(rate) + (count - k) * math.log1p(-rate)
    centres = k * (1 if workers > 0 else -1) / noise
    total: Floats = logsumexp(log_normal(points[:, None] - centres) + log_weights, axis=1)
    return total
