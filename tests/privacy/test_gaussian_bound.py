"""mu of the tightest Gaussian above a privacy curve."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from coterie.privacy import Adjacency
from coterie.privacy.accounting import accountant_named
from coterie.privacy.divergences import Floats
from coterie.privacy.events import composed, gaussian, poisson_gaussian, repeated, selection
from coterie.privacy.gaussian_bound import LEAST, gaussian_mu, gaussian_profile


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 8.0), st.floats(0.0, 10.0))
def test_the_profile_of_a_gaussian_is_the_textbooks(mu: float, epsilon: float) -> None:
    expected = norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2)
    assert gaussian_profile(mu, np.array([epsilon]))[0] == pytest.approx(max(expected, 0.0), abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 6.0))
def test_a_gaussian_is_found_again_and_never_smaller(mu: float) -> None:
    found = gaussian_mu(lambda epsilons: gaussian_profile(mu, epsilons))
    assert found is not None
    assert mu * (1 - 1e-9) <= found <= mu * 1.02 + 1e-3


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_whatever_is_composed_lies_below_its_gaussian(accountant: str) -> None:
    event = composed([repeated(poisson_gaussian(0.1, 1.5), 60), gaussian(4.0), repeated(selection(8.0), 3)])
    account = accountant_named(accountant)(event, Adjacency.ZERO_OUT)
    mu = gaussian_mu(account.deltas)
    assert mu is not None
    epsilons = np.linspace(0, 12, 500)
    deltas = account.deltas(epsilons)
    counts = deltas >= LEAST
    assert np.all(gaussian_profile(mu, epsilons)[counts] >= deltas[counts])
    meant = account.meaning()
    assert norm.cdf(mu / 2) >= meant.guess - 1e-9
    assert norm.cdf(norm.ppf(meant.accused) + mu) >= meant.found - 1e-9
    one_less = gaussian_profile(0.97 * mu, epsilons)
    assert np.any(one_less[counts] < deltas[counts])  # it is the tightest but for the grid


def test_two_gaussians_are_one_with_the_root_of_both_squares() -> None:
    account = accountant_named("pld")(composed([gaussian(2.0), gaussian(1.0)]), Adjacency.ZERO_OUT)
    assert gaussian_mu(account.deltas) == pytest.approx(math.sqrt(0.25 + 1.0), rel=0.01)
    assert account.delta(1.0) == pytest.approx(float(account.deltas(np.array([1.0]))[0]), rel=1e-6)


def test_nothing_and_everything() -> None:
    def no_privacy(epsilons: Floats) -> Floats:
        return np.ones_like(epsilons)

    assert gaussian_mu(np.zeros_like) == 0.0
    assert gaussian_mu(no_privacy) is None
