"""Plans and slow, independent computations that tests of the accounting share."""

import math
from collections.abc import Callable
from itertools import pairwise

import mpmath as mp
from scipy.integrate import quad
from scipy.optimize import minimize_scalar

from coterie.privacy import (
    Adjacency,
    FullBatchSteps,
    Multiplier,
    NoiseRule,
    PlannedRelease,
    PoissonSteps,
    PrivacyPlan,
    PrivateSelection,
    ShuffledSteps,
    ThreatModel,
    Unit,
    UnitPlan,
)

SERVER = ThreatModel("server", "all updates and selections")


def record_plan(
    *,
    noise: Multiplier = NoiseRule.SHARED,
    first: Multiplier | None = NoiseRule.SHARED,
    selections: int = 21,
    selection_epsilon: float = 0.15,
    records: int = 8000,
    batch: int = 32,
    rounds: int = 200,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
    steps: type[PoissonSteps] | type[ShuffledSteps] = PoissonSteps,
    subjects: tuple[str, ...] = ("client 3",),
) -> PrivacyPlan:
    """A clustered run: full-batch first round (None: no such round), training, private selections."""
    releases = []
    if first is not None:
        releases.append(PlannedRelease("first-round", FullBatchSteps(1.0, first, records, 1, adjacency), 1))
        rounds -= 1
    releases.append(PlannedRelease("training", steps(1.0, noise, records, batch, 1, adjacency), rounds))
    if selections:
        mechanism = PrivateSelection(selection_epsilon, adjacency)
        releases.append(PlannedRelease("selection", mechanism, selections))
    units = tuple(UnitPlan(subject, tuple(releases)) for subject in subjects)
    return PrivacyPlan(Unit.RECORD, adjacency, SERVER, units)


def noise_of(plan: PrivacyPlan, release: str = "training") -> float:
    """The noise multiplier a calibrated plan gives to one release of its first unit."""
    mechanism = plan.units[0].release(release).mechanism
    assert mechanism.multiplier is not None
    return mechanism.multiplier


def mp_divergence(
    order: float,
    low: float,
    high: float,
    upper: Callable[[mp.mpf], mp.mpf],
    lower: Callable[[mp.mpf], mp.mpf],
) -> float:
    """Renyi divergence of two densities given over the standard normal, by 25-digit adaptive quadrature."""
    with mp.workdps(25):
        order = mp.mpf(order)

        def integrand(u: mp.mpf) -> mp.mpf:
            return mp.npdf(u) * lower(u) * (upper(u) / lower(u)) ** order

        # Pieces of about three standard deviations, so that no bump is missed.
        pieces = max(8, math.ceil((high - low) / 3))
        cuts = [low + (high - low) * mp.mpf(k) / pieces for k in range(pieces + 1)]
        return float(mp.log(mp.quad(integrand, cuts)) / (order - 1))


def mp_mixture(rate: float, noise: float, sign: int) -> Callable[[mp.mpf], mp.mpf]:
    """Density of (1-q) N(0) + q N(sign) over N(0), in units of the standard deviation."""
    q, z = mp.mpf(rate), mp.mpf(noise)
    return lambda u: 1 - q + q * mp.exp(sign * u / z - 1 / (2 * z * z))


def mp_poisson_rdp(rate: float, noise: float, order: float) -> float:
    """The sampled Gaussian's divergence for adding or removing one unit."""
    return mp_divergence(order, -14, order / noise + 14, mp_mixture(rate, noise, 1), lambda u: mp.mpf(1))


def mp_replace_one_rdp(rate: float, noise: float, order: float) -> float:
    """The sampled Gaussian's divergence for replacing one unit by its opposite."""
    high = (2 * order - 1) / noise + 14
    return mp_divergence(
        order, -1 / noise - 14, high, mp_mixture(rate, noise, 1), mp_mixture(rate, noise, -1)
    )


def mp_binomial_rdp(rate: float, noise: float, order: int) -> float:
    """The closed form at integer orders (Mironov, Talwar, Zhang 2019)."""
    with mp.workdps(60):
        q, z = mp.mpf(rate), mp.mpf(noise)
        terms = (
            mp.binomial(order, k) * (1 - q) ** (order - k) * q**k * mp.exp((k * k - k) / (2 * z * z))
            for k in range(order + 1)
        )
        return float(mp.log(mp.fsum(terms)) / (order - 1))


def quad_epsilon(
    releases: list[tuple[int, float, float]], selections: int, selection_epsilon: float, delta: float
) -> float:
    """Epsilon of (times, rate, noise) sampled Gaussians and selections, all by another route than ours.

    Moments by adaptive Gauss-Kronrod quadrature around both modes, the order by continuous minimisation, the
    conversion written as the bound on delta that it comes from (Canonne, Kamath, Steinke 2020, Prop. 12).
    """

    def divergence(rate: float, noise: float, order: float) -> float:
        if rate == 1.0:
            return order / (2 * noise**2)

        def excess(u: float) -> float:
            ratio = 1 - rate + rate * math.exp(u / noise - 0.5 / noise**2)
            return float(
                math.exp(-u * u / 2) * (ratio**order - 1 - order * (ratio - 1)) / math.sqrt(2 * math.pi)
            )

        top = order / noise
        cuts = [-10.0, -3.0, 0.0, 3.0, top / 2, top, top + 3, top + 10]
        pieces = sorted(set(cuts))
        total = sum(quad(excess, a, b, epsabs=0, epsrel=1e-11, limit=200)[0] for a, b in pairwise(pieces))
        return math.log1p(total) / (order - 1)

    def spent(log_excess_order: float) -> float:
        order = 1 + math.exp(log_excess_order)
        total = sum(times * divergence(rate, noise, order) for times, rate, noise in releases)
        total += selections * order * selection_epsilon**2 / 8
        # delta = exp((a-1)(R - eps)) / (a-1) * (1 - 1/a)^a, solved for eps
        log_factor = order * math.log1p(-1 / order) - math.log(order - 1)
        return total + (log_factor - math.log(delta)) / (order - 1)

    found = minimize_scalar(
        spent, bounds=(math.log(0.2), math.log(60)), method="bounded", options={"xatol": 1e-6}
    )
    return float(found.fun)
