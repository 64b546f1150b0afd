"""What dp_accounting 0.6.0 does differently from what we need; an upgrade that changes it is noticed here."""

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting import NeighboringRelation, UnsupportedEventError
from dp_accounting.pld import privacy_loss_distribution
from privacy_oracles import mp_poisson_rdp

from coterie.privacy import Adjacency, epsilon_of, pld, rdp
from coterie.privacy.events import gaussian, poisson_gaussian

REPLACE_ONE = NeighboringRelation.REPLACE_ONE


def test_its_rdp_accountant_forgets_that_replacing_moves_a_sum_twice_as_far():
    divergences = dp.rdp.RdpAccountant(neighboring_relation=REPLACE_ONE)
    losses = dp.pld.PLDAccountant(REPLACE_ONE)
    for accountant in (divergences, losses):
        accountant.compose(dp.GaussianDpEvent(2.0))
    assert divergences.get_epsilon(1e-5) == pytest.approx(2.166, rel=1e-3)
    assert losses.get_epsilon(1e-5) == pytest.approx(4.377, rel=1e-3)
    for name in ("rdp", "pld"):
        assert epsilon_of(gaussian(2.0), 1e-5, name, Adjacency.REPLACE_ONE) >= 4.377


def test_its_fractional_orders_are_too_large_or_infinite():
    too_large = dp.rdp.RdpAccountant(orders=[1.1])
    too_large.compose(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(4.0)))
    exact = mp_poisson_rdp(0.1, 4.0, 1.1)
    assert too_large._rdp[0] == pytest.approx(8.4e-4, rel=0.01)
    assert rdp.poisson_rdp(0.1, 4.0, np.array([1.1]))[0] == pytest.approx(exact, rel=1e-8)
    assert exact == pytest.approx(3.5e-4, rel=0.01)
    infinite = dp.rdp.RdpAccountant(orders=[1.5])
    infinite.compose(dp.PoissonSampledDpEvent(0.7, dp.GaussianDpEvent(2.0)))
    assert np.isinf(infinite._rdp[0])
    assert rdp.poisson_rdp(0.7, 2.0, np.array([1.5]))[0] == pytest.approx(0.0953, rel=1e-3)


def test_its_integer_orders_agree_with_ours():
    orders = [2, 3, 8, 32, 128]
    theirs = dp.rdp.RdpAccountant(orders=orders)
    theirs.compose(dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.1)))
    np.testing.assert_allclose(
        rdp.poisson_rdp(0.01, 1.1, np.array(orders, dtype=float)), theirs._rdp, rtol=1e-8
    )


@pytest.mark.parametrize(
    "event",
    [
        dp.ZCDpEvent(0.1),
        dp.PoissonSampledDpEvent(0.1, dp.ComposedDpEvent([dp.GaussianDpEvent(1.0), dp.GaussianDpEvent(2.0)])),
    ],
)
def test_its_pld_accountant_refuses_zcdp_and_composition_under_a_sample(event):
    with pytest.raises(UnsupportedEventError):
        dp.pld.PLDAccountant().compose(event)


def test_its_rdp_accountant_refuses_sampling_under_replacement():
    with pytest.raises(UnsupportedEventError):
        dp.rdp.RdpAccountant(neighboring_relation=REPLACE_ONE).compose(
            dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.0))
        )


def test_its_loss_distributions_gain_mass_by_rounding_and_ours_do_not():
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        1.3, sampling_prob=0.004, neighboring_relation=REPLACE_ONE, value_discretization_interval=1e-4
    )._pmf_remove.to_dense_pmf()
    ours = pld._composed(pld._replaced_pieces(0.004, 1.3), 1)
    assert theirs._probs.sum() + theirs._infinity_mass - 1 > 1e-9
    assert abs(ours._probs.sum() + ours._infinity_mass - 1) < 1e-12


def test_two_amplifications_of_one_sample_would_promise_too_much():
    pair = [dp.GaussianDpEvent(12.088), dp.GaussianDpEvent(1.2088)]
    together = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, dp.ComposedDpEvent(pair)), 100)
    balanced = [dp.GaussianDpEvent(1.7), dp.GaussianDpEvent(1.7)]
    once = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, dp.ComposedDpEvent(balanced)), 100)
    twice = dp.SelfComposedDpEvent(
        dp.ComposedDpEvent([poisson_gaussian(0.1, part.noise_multiplier) for part in balanced]), 100
    )
    add_remove = Adjacency.ADD_REMOVE
    assert epsilon_of(together, 1e-3, "pld", add_remove) == pytest.approx(3.41, rel=2e-3)
    assert epsilon_of(together, 1e-3, "rdp", add_remove) == pytest.approx(4.0, rel=1e-3)
    assert epsilon_of(twice, 1e-3, "pld", add_remove) < 0.87 * epsilon_of(once, 1e-3, "pld", add_remove)
