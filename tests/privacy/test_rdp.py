"""Divergences against the closed form, against 40-digit integrals, and against each other."""

import numpy as np
import pytest
from privacy_oracles import mp_binomial_rdp, mp_poisson_rdp

from coterie.privacy import rdp

PAIRS = [(0.004, 1.3), (0.1, 4.0), (0.7, 2.0), (0.01, 0.5), (1e-5, 1.0), (0.3, 0.3), (0.95, 1.0)]


@pytest.mark.parametrize(("rate", "noise"), PAIRS)
def test_integer_orders_equal_the_binomial_formula(rate, noise):
    orders = [2, 3, 5, 16, 64, 256]
    found = rdp.poisson_rdp(rate, noise, np.array(orders, dtype=float))
    exact = [mp_binomial_rdp(rate, noise, order) for order in orders]
    np.testing.assert_allclose(found, exact, rtol=1e-9)


@pytest.mark.parametrize(("rate", "noise"), PAIRS)
def test_fractional_orders_equal_the_integral(rate, noise):
    orders = [1.01, 1.1, 1.5, 4.7, 17.3]
    found = rdp.poisson_rdp(rate, noise, np.array(orders))
    exact = [mp_poisson_rdp(rate, noise, order) for order in orders]
    np.testing.assert_allclose(found, exact, rtol=1e-8)
