"""The publications' own arithmetic, kept to compare with; nothing here is a guarantee.

R-DPCFL (Malekmohammadi, Taik, Farnadi 2025) splits the budget: selections and training are converted to
epsilon one by one at the same delta and the two are added; its preprint RC-DPFL charges training alone.
RR-Cluster's Theorem 1 amplifies with the fixed-size bound of Wang, Balle, Kasiviswanathan 2019. What is wrong
with each stands in the caveat that a guarantee in paper mode carries.
"""

import math

import numpy as np
from scipy.special import gammaln, logsumexp

from coterie.privacy.cohort_sums import CohortSums
from coterie.privacy.divergences import Floats, gaussian_rdp, poisson_rdp
from coterie.privacy.errors import PrivacyInputError
from coterie.privacy.mechanisms import Mechanism
from coterie.privacy.plan import UnitPlan
from coterie.privacy.record_sums import PoissonSteps, RecordSums
from coterie.privacy.selections import LowestLoss, NoisySelection

SPLIT_CAVEAT = (
    "as published: claims replace-one with the sensitivity of zero-out, spends delta twice, "
    "leaves one selection uncharged"
)
LOWEST_LOSS_CAVEAT = "as published: nothing is charged for the choices by lowest loss"
REBALANCE_CAVEAT = (
    "as published: the proof adds and removes clients inside a round, where sums can move by more than 2C "
    "and divisors depend on the data"
)

# The orders and the conversion of the released code.
_ORDERS = np.array([1 + tenth / 10 for tenth in range(1, 100)] + list(range(12, 64)), dtype=np.float64)
_INTEGER_ORDERS = np.arange(2, 257, dtype=np.float64)


def epsilon(unit: UnitPlan, delta: float) -> float:
    """What the publication would claim for a calibrated plan."""
    sums = unit.releases[0].mechanism if len(unit.releases) == 1 else None
    if isinstance(sums, CohortSums) and sums.identifier_ratio is not None:
        noise, identifier_noise = sums.multiplier / 2, sums.identifier_multiplier
        return rebalance_epsilon(sums.rate, noise, identifier_noise, unit.releases[0].times, delta)
    return _split_epsilon(unit, delta)


def caveat(unit: UnitPlan) -> str:
    """What is wrong with the publication's number."""
    kinds = {release.mechanism.name for release in unit.releases}
    if "rebalanced-sums" in kinds:
        return REBALANCE_CAVEAT
    return LOWEST_LOSS_CAVEAT if LowestLoss.tag in kinds else SPLIT_CAVEAT


def _split_epsilon(unit: UnitPlan, delta: float) -> float:
    """Selections and training converted apart and added, with one selection fewer than are made."""
    releases = [(release.mechanism, release.times) for release in unit.releases]
    rhos = [(times - 1) * each.epsilon**2 / 8 for each, times in releases if isinstance(each, NoisySelection)]
    curves = [rho * _ORDERS for rho in rhos if rho]
    training = [
        _training_rdp(each, times)
        for each, times in releases
        if not isinstance(each, NoisySelection | LowestLoss)  # the preprint leaves choices by lowest loss out
    ]
    if training:
        curves.append(np.sum(training, axis=0))
    return sum(_classic(_ORDERS, curve, delta) for curve in curves)


def _training_rdp(mechanism: Mechanism, times: int) -> Floats:
    if not (isinstance(mechanism, RecordSums) and mechanism.kind == RecordSums.kind):
        raise PrivacyInputError(
            f"privacy.mode: paper; no publication accounts for {mechanism.name}; allowed: sound"
        )
    if not mechanism.multiplier > 0:
        return np.full_like(_ORDERS, math.inf)
    # The sum is taken to move by the clip, whatever the adjacency.
    if isinstance(mechanism, PoissonSteps):
        steps = times * mechanism.epochs * mechanism.records / mechanism.batch  # a real number, not ceil(N/b)
        return steps * poisson_rdp(mechanism.rate, mechanism.multiplier, _ORDERS)
    return times * mechanism.steps * gaussian_rdp(mechanism.multiplier, _ORDERS)


def _classic(orders: Floats, divergences: Floats, delta: float) -> float:
    """The conversion of Mironov 2017, Prop. 3."""
    return float(np.min(divergences - math.log(delta) / (orders - 1.0)))


def rebalance_epsilon(
    rate: float, sum_noise: float, identifier_noise: float, rounds: int, delta: float
) -> float:
    """Theorem 1 of RR-Cluster: `sum_noise` is its sigma_theta, `identifier_noise` its sigma_s.

    The bound of Wang et al. keeps a positive floor however large the noise is.
    """
    if not (sum_noise > 0 and identifier_noise > 0):
        return math.inf
    slope = 0.5 / sum_noise**2 + 0.5 / identifier_noise**2
    return _classic(_INTEGER_ORDERS, rounds * _fixed_size_rdp(rate, slope), delta)


def _fixed_size_rdp(rate: float, slope: float) -> Floats:
    """Wang et al. 2019, Thm 9 for a mechanism with divergence slope * order and no pure epsilon."""
    top = int(_INTEGER_ORDERS[-1])
    power = np.arange(3, top + 1, dtype=np.float64)
    tail = math.log(2.0) + power * math.log(rate) + (power - 1) * power * slope
    first = min(4 * math.expm1(2 * slope), 2 * math.exp(2 * slope)) if 2 * slope < 700 else math.inf
    result = np.empty_like(_INTEGER_ORDERS)
    for index, order in enumerate(_INTEGER_ORDERS):
        used = power[: int(order) - 2]
        binomials = gammaln(order + 1) - gammaln(used + 1) - gammaln(order - used + 1)
        pair = rate**2 * order * (order - 1) / 2 * first
        terms = np.concatenate([[0.0], [math.log(pair)] if pair > 0 else [], binomials + tail[: len(used)]])
        result[index] = logsumexp(terms) / (order - 1)
    return result
