"""Divergences against the closed form, against 30-digit integrals, and against each other."""

import math

import dp_accounting as dp
import mpmath as mp
import numpy as np
import pytest
from privacy_oracles import mp_binomial_rdp, mp_mixture, mp_poisson_rdp, mp_replace_one_rdp
from scipy.special import ndtr

from coterie.privacy import Adjacency, PrivacyInputError, rdp
from coterie.privacy.accounting import delta_of, epsilon_of
from coterie.privacy.events import gaussian, poisson_gaussian, repeated

PAIRS = [(0.004, 1.3), (0.1, 4.0), (0.7, 2.0), (0.01, 0.5), (1e-5, 1.0), (0.3, 0.3), (0.95, 1.0)]


ORACLES = {
    "the binomial formula": (rdp.poisson_rdp, mp_binomial_rdp, [2, 3, 5, 16, 64, 256], PAIRS),
    "the integral": (rdp.poisson_rdp, mp_poisson_rdp, [1.01, 1.5, 4.7], PAIRS),
    "the integral, replacing one": (
        rdp.replace_one_poisson_rdp,
        mp_replace_one_rdp,
        [1.01, 2.0, 9.3],
        [(0.004, 1.3), (0.7, 2.0), (0.01, 0.5), (0.95, 1.0), (0.5, 4.0)],
    ),
}


@pytest.mark.parametrize(
    ("oracle", "rate", "noise"), [(name, *pair) for name, (*_, pairs) in ORACLES.items() for pair in pairs]
)
def test_divergences_equal_the_oracle(oracle, rate, noise):
    fast, slow, orders, _ = ORACLES[oracle]
    found = fast(rate, noise, np.array(orders, dtype=float))
    np.testing.assert_allclose(found, [slow(rate, noise, order) for order in orders], rtol=1e-8)


def test_an_order_gets_the_same_answer_alone_and_among_all():
    orders = rdp.ORDERS[[0, 100, 200, 300, 419]]
    alone = [rdp.poisson_rdp(0.01, 0.8, np.array([order]))[0] for order in orders]
    among = rdp.poisson_rdp(0.01, 0.8, rdp.ORDERS)[[0, 100, 200, 300, 419]]
    np.testing.assert_allclose(among, alone, rtol=1e-8)


@pytest.mark.parametrize(("rate", "noise"), PAIRS)
def test_taking_away_is_never_cheaper_than_adding(rate, noise):
    orders = np.array([1.05, 1.5, 2.0, 8.0])
    removed = rdp.poisson_rdp(rate, noise, orders)
    points = np.linspace(-14, 14, 40001)
    ratio = 1 - rate + rate * np.exp(points / noise - 0.5 / noise**2)
    weight = np.exp(-(points**2) / 2) / math.sqrt(2 * math.pi) * (points[1] - points[0])
    moments = np.array([(weight * ratio ** (1 - order)).sum() for order in orders])
    added = np.log(moments) / (orders - 1)
    assert np.all(removed >= added - 1e-9)


@pytest.mark.parametrize(("rate", "noise"), [(0.1, 1.0), (0.5, 0.7)])
def test_fixed_size_replacement_equals_the_integral(rate, noise):
    for order in (1.2, 3.5):
        with mp.workdps(30):
            ratio, a = mp_mixture(rate, noise, 1), mp.mpf(order)

            def excess(u, ratio=ratio, a=a):
                r = ratio(u)
                up, down = r**a - 1 - a * (r - 1), r ** (-a) - 1 - a * (1 / r - 1)
                return mp.npdf(u) * (up + r * down)

            start = 0.5 / noise
            cuts = [start + k * (order / noise + 14) / 16 for k in range(17)]
            exact = float(mp.log1p(mp.quad(excess, cuts)) / (a - 1))
        found = rdp.replace_one_fixed_size_rdp(rate, noise, np.array([order]))[0]
        assert found == pytest.approx(exact, rel=1e-8)


def test_everyone_sampled_is_the_plain_gaussian():
    for bound, factor in (
        (rdp.poisson_rdp, 1),
        (rdp.replace_one_poisson_rdp, 4),
        (rdp.replace_one_fixed_size_rdp, 1),
    ):
        exact = factor * rdp.ORDERS / (2 * 1.7**2)
        np.testing.assert_allclose(bound(1.0, 1.7, rdp.ORDERS), exact, rtol=1e-12)
        nearly = bound(1.0 - 1e-9, 1.7, rdp.ORDERS[:200])
        np.testing.assert_allclose(nearly, exact[:200], rtol=1e-3)


@pytest.mark.parametrize("bound", [rdp.poisson_rdp, rdp.replace_one_poisson_rdp])
def test_orders_beyond_the_grid_fall_back_to_the_unsampled_bound(bound):
    found = bound(0.1, 0.01, rdp.ORDERS)
    factor = 4 if bound is rdp.replace_one_poisson_rdp else 1
    unsampled = factor * rdp.ORDERS / (2 * 0.01**2)
    assert np.all(found <= unsampled * (1 + 1e-12))
    assert found[-1] == pytest.approx(unsampled[-1])


def test_divergence_grows_with_the_order():
    for rate, noise in PAIRS:
        for bound in (rdp.poisson_rdp, rdp.replace_one_poisson_rdp, rdp.replace_one_fixed_size_rdp):
            found = bound(rate, noise, rdp.ORDERS)
            assert np.all(np.diff(found) >= -1e-9 * found[1:])


def test_selection_is_capped_by_its_pure_epsilon():
    found = rdp.selection_rdp(0.5, np.array([2.0, 1000.0]))
    np.testing.assert_allclose(found, [2 * 0.25 / 8, 0.5])


def test_selection_bound_holds_for_every_two_point_mechanism():
    span = 1.3
    for top in np.linspace(0.01, span - 0.01, 25):
        p = math.expm1(span - top) / (math.exp(span - top) - math.exp(-top))
        q = p * math.exp(-top)
        for order in (1.1, 2.0, 7.0, 50.0):
            log_moment = np.logaddexp(
                order * math.log(p) + (1 - order) * math.log(q),
                order * math.log1p(-p) + (1 - order) * math.log1p(-q),
            )
            assert log_moment / (order - 1) <= rdp.selection_rdp(span, np.array([order]))[0] + 1e-12


def gaussian_delta(epsilon, noise):
    """Balle and Wang 2018, Thm 8: the exact delta of one Gaussian release."""
    return ndtr(0.5 / noise - epsilon * noise) - math.exp(epsilon) * ndtr(-0.5 / noise - epsilon * noise)


@pytest.mark.parametrize("noise", [0.7, 1.5, 4.0])
def test_conversion_never_promises_more_than_the_exact_gaussian(noise):
    for delta in (1e-3, 1e-6):
        claimed = epsilon_of(gaussian(noise), delta, "rdp", Adjacency.ZERO_OUT)
        assert gaussian_delta(claimed, noise) <= delta
        assert gaussian_delta(claimed * 0.8, noise) > delta


def test_delta_and_epsilon_are_inverse():
    event = repeated(poisson_gaussian(0.01, 1.1), 500)
    spent = epsilon_of(event, 1e-5, "rdp", Adjacency.ZERO_OUT)
    assert delta_of(event, spent, "rdp", Adjacency.ZERO_OUT) == pytest.approx(1e-5, rel=1e-9)
    assert delta_of(event, math.inf, "rdp", Adjacency.ZERO_OUT) == 0


def test_default_orders_lose_nothing_that_matters():
    event = repeated(poisson_gaussian(0.004, 1.3), 49750)
    fine = 1 + np.geomspace(1, 100, 3000)
    exact = rdp.epsilon_from_rdp(fine, 49750 * rdp.poisson_rdp(0.004, 1.3, fine), 1e-4)
    found = epsilon_of(event, 1e-4, "rdp", Adjacency.ZERO_OUT)
    assert exact * (1 - 1e-7) <= found <= exact * (1 + 2e-4)


def test_an_order_that_is_no_number_proves_nothing():
    divergences = rdp.gaussian_rdp(1.0, rdp.ORDERS)
    holed = np.where(np.arange(len(rdp.ORDERS)) % 2 == 0, np.nan, divergences)
    assert rdp.epsilon_from_rdp(rdp.ORDERS, holed, 1e-5) >= rdp.epsilon_from_rdp(
        rdp.ORDERS, divergences, 1e-5
    )
    assert rdp.epsilon_from_rdp(rdp.ORDERS, np.full_like(rdp.ORDERS, np.nan), 1e-5) == math.inf


def test_shares_add_up():
    parts = [gaussian(2.0), repeated(poisson_gaussian(0.01, 1.0), 100)]
    assert sum(rdp.shares(parts, delta=1e-5, adjacency=Adjacency.ZERO_OUT)) == pytest.approx(1)
    assert rdp.shares([gaussian(0.0), gaussian(1.0)], delta=1e-5, adjacency=Adjacency.ZERO_OUT) == [1, 0]


@pytest.mark.parametrize(("rate", "noise"), [(0.0, 1.0), (1.1, 1.0), (0.1, 0.0), (0.1, -1.0)])
def test_meaningless_rates_and_noises_are_refused(rate, noise):
    with pytest.raises(PrivacyInputError):
        rdp.poisson_rdp(rate, noise, rdp.ORDERS)


def test_a_zeroed_unit_keeps_its_slot_in_a_fixed_cohort():
    event = repeated(dp.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(3.0)), 20)
    zeroed, replaced, removed = (
        epsilon_of(event, 1e-5, "rdp", adjacency)
        for adjacency in (Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE, Adjacency.ADD_REMOVE)
    )
    assert zeroed == replaced > removed
