"""Plans and slow, independent computations that tests of the accounting share."""

from collections.abc import Callable

import mpmath as mp

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
    assert not isinstance(mechanism, PrivateSelection)
    return mechanism.multiplier  # type: ignore[attr-defined]


def mp_divergence(
    order: float,
    low: float,
    high: float,
    upper: Callable[[mp.mpf], mp.mpf],
    lower: Callable[[mp.mpf], mp.mpf],
) -> float:
    """Renyi divergence of two densities given over the standard normal, by 40-digit adaptive quadrature."""
    with mp.workdps(40):
        order = mp.mpf(order)

        def integrand(u: mp.mpf) -> mp.mpf:
            return mp.npdf(u) * lower(u) * (upper(u) / lower(u)) ** order

        cuts = [low + (high - low) * mp.mpf(k) / 24 for k in range(25)]
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
