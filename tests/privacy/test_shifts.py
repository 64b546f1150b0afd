"""The divergence of a sum that several workers may move: exact numbers, and nothing beats it."""

import math

import dp_accounting as dp
import mpmath as mp
import numpy as np
import pytest

from coterie.privacy import Adjacency, PlanError, rdp
from coterie.privacy.accounting import epsilon_of
from coterie.privacy.divergences import ORDERS, gaussian_rdp, poisson_rdp, replace_one_poisson_rdp
from coterie.privacy.events import BridgedSumDpEvent
from coterie.privacy.shifts import shift_rdp
from divergence_oracles import binomial, renyi


def at(order):
    return int(np.argmin(np.abs(ORDERS - order)))


def exact(order, rate, noise, up, down):
    """The larger of both directions, by adaptive quadrature with 20 digits."""
    mp.mp.dps = 20

    def density(x, workers, sign):
        weights = binomial(workers, rate)
        return mp.fsum(w * mp.npdf(x, sign * k, noise) for k, w in enumerate(weights))

    def moment(first, second):
        reach = order * (up + down) + 12 * noise
        points = mp.linspace(-reach, reach, 25)
        return mp.quad(lambda x: density(x, *first) ** order * density(x, *second) ** (1 - order), points)

    p, q = (up, 1), (down, -1)
    return float(mp.log(max(moment(p, q), moment(q, p))) / (order - 1))


@pytest.mark.parametrize(
    ("rate", "noise", "up", "down", "order"),
    [(0.7, 2.0, 2, 2, 1.3), (0.7, 2.0, 2, 1, 3.0), (0.1, 1.0, 3, 2, 1.5), (0.4, 5.0, 4, 4, 8.0)],
)
def test_divergence_agrees_with_slow_quadrature(rate, noise, up, down, order):
    index = at(order)
    expected = exact(float(ORDERS[index]), rate, noise, up, down)
    assert shift_rdp(rate, noise, up, down)[index] == pytest.approx(expected, rel=1e-8)


def test_one_worker_gives_the_known_pairs():
    assert np.array_equal(shift_rdp(0.3, 1.7, 1, 0), poisson_rdp(0.3, 1.7, ORDERS))
    assert np.array_equal(shift_rdp(0.3, 1.7, 1, 1), replace_one_poisson_rdp(0.3, 1.7, ORDERS))
    assert np.array_equal(shift_rdp(1.0, 2.0, 2, 1), gaussian_rdp(2.0 / 3, ORDERS))
    assert not shift_rdp(0.3, 1.7, 0, 0).any()


@pytest.mark.parametrize("rate", [0.05, 0.7, 0.99])
@pytest.mark.parametrize("noise", [0.4, 2.0, 50.0, 1e5])
@pytest.mark.parametrize(("up", "down"), [(2, 1), (2, 2), (6, 5), (30, 30)])
def test_divergence_is_monotone_and_never_above_full_participation(rate, noise, up, down):
    found = shift_rdp(rate, noise, up, down)
    assert np.all(np.diff(found) >= -1e-9 * found[1:])
    assert np.all(found <= gaussian_rdp(noise / (up + down), ORDERS) * (1 + 1e-12))
    assert np.all(found >= shift_rdp(rate, noise, up, down - 1) * (1 - 1e-7))


def vectors(rng, count):
    """Contributions within the clip, half of them on its edge."""
    angles = rng.uniform(0, 2 * np.pi, count)
    lengths = np.where(rng.random(count) < 0.5, 1.0, rng.random(count))
    return np.stack([lengths * np.cos(angles), lengths * np.sin(angles)], axis=1)


def law(sent, rate, noise, x, y):
    """Density of the noisy sum in the plane when each contribution is sent with this probability."""
    total = np.zeros_like(x)
    for coins in np.ndindex(*(2,) * len(sent)):
        weight = math.prod(rate if coin else 1 - rate for coin in coins)
        mean = sum((c * v for c, v in zip(coins, sent, strict=True)), np.zeros(2))
        total += weight * np.exp(-((x - mean[0]) ** 2 + (y - mean[1]) ** 2) / (2 * noise**2))
    return total / (2 * np.pi * noise**2)


def test_no_choice_of_contributions_beats_the_line():
    """Random vectors in the plane within the clip, in both worlds, both directions: always below."""
    rng = np.random.default_rng(5)
    axis = np.linspace(-11, 11, 181)
    x, y = np.meshgrid(axis, axis, indexing="ij")
    cell = (axis[1] - axis[0]) ** 2
    worst = 0.0
    for _ in range(60):
        rate, noise = rng.uniform(0.05, 0.95), rng.uniform(0.8, 1.5)
        up = int(rng.integers(1, 4))
        down = int(rng.integers(0, up + 1))
        p = law(vectors(rng, up), rate, noise, x, y)
        q = law(vectors(rng, down), rate, noise, x, y)
        bound = shift_rdp(rate, noise, up, down)
        for index in (at(1.1), at(1.5), at(2.0), at(4.0)):
            for first, second in ((p, q), (q, p)):
                found = renyi(float(ORDERS[index]), first, second, cell)
                worst = max(worst, found / bound[index])
    assert 0.5 < worst <= 1 + 1e-6


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_a_bridged_sum_is_bounded_by_the_accountant_under_both_adjacencies(rate):
    """Zeroing takes the unit out of the second world; replacing leaves it there, turned round."""
    event = dp.SelfComposedDpEvent(BridgedSumDpEvent(rate, 1.7, 3, 2), 4)
    zeroed, replaced = (
        rdp.RdpAccountant(event, a).divergences for a in (Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE)
    )
    np.testing.assert_array_equal(zeroed, 4 * shift_rdp(rate, 1.7, 3, 2))
    np.testing.assert_array_equal(replaced, 4 * shift_rdp(rate, 1.7, 3, 3))


def test_a_sum_that_only_one_unit_moves_is_the_sampled_gaussian():
    alone = dp.PoissonSampledDpEvent(0.3, dp.GaussianDpEvent(1.7))
    for adjacency in Adjacency:
        one = rdp.RdpAccountant(BridgedSumDpEvent(0.3, 1.7, 1, 0), adjacency).divergences
        np.testing.assert_array_equal(one, rdp.RdpAccountant(alone, adjacency).divergences)


def test_an_accountant_that_cannot_bound_a_bridged_sum_refuses_it():
    with pytest.raises(PlanError, match="BridgedSum"):
        epsilon_of(BridgedSumDpEvent(0.3, 1.7, 2, 2), 1e-5, "pld", Adjacency.ZERO_OUT)
