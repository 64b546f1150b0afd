"""What an attacker gains at best: never less than the truth, and close to it where the truth is known."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from coterie.privacy import Adjacency, PlanError
from coterie.privacy.accounting import ACCOUNTANTS
from coterie.privacy.divergences import ORDERS, gaussian_rdp
from coterie.privacy.events import composed, gaussian, poisson_gaussian, repeated, selection
from coterie.privacy.meaning import (
    FALSE_POSITIVES,
    Meaning,
    from_bound,
    from_divergences,
    percent_up,
    sharpest,
    weakest,
)

ZERO_OUT = Adjacency.ZERO_OUT


def exact(shift: float) -> Meaning:
    """Two unit Gaussians at this distance: the likelihood-ratio test is a threshold."""
    return Meaning(norm.cdf(shift / 2), norm.sf(norm.isf(FALSE_POSITIVES) - shift))


def best_test(head: float) -> float:
    """Of a coin and its mirror image: heads are accused first, and tails where the rate leaves room."""
    rate = FALSE_POSITIVES
    if rate <= 1 - head:
        return head * rate / (1 - head)
    return head + (1 - head) * (rate - (1 - head)) / head


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("noise", [0.3, 0.7, 1.0, 2.0, 5.0, 30.0, 300.0])
def test_a_gaussian_is_never_said_to_tell_less_than_it_does(accountant, noise):
    found, truth = ACCOUNTANTS[accountant](gaussian(noise), ZERO_OUT).meaning(), exact(1 / noise)
    assert truth.guess <= found.guess <= 1
    assert truth.found <= found.found <= 1
    if accountant == "pld":  # on a grid of 1e-4, nothing but the grid is lost
        assert found.guess == pytest.approx(truth.guess, abs=1e-4)
        assert found.found == pytest.approx(truth.found, abs=2e-3)
    else:
        assert found.guess - 0.5 <= 1.3 * (truth.guess - 0.5) + 1e-3
        assert found.found <= 1.5 * truth.found + 1e-3


@given(st.lists(st.floats(0.4, 50.0), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_composed_gaussians_are_bounded_by_their_joint_one(noises):
    event = composed([gaussian(noise) for noise in noises])
    truth = exact(math.sqrt(sum(1 / noise**2 for noise in noises)))
    found = ACCOUNTANTS["rdp"](event, ZERO_OUT).meaning()
    assert truth.guess <= found.guess
    assert truth.found <= found.found


@given(st.floats(0.4, 20.0), st.floats(1.01, 3.0), st.integers(1, 20))
@settings(max_examples=30, deadline=None)
def test_more_noise_and_fewer_releases_never_tell_more(noise, factor, times):
    for louder, quieter in (
        (repeated(gaussian(noise), times), repeated(gaussian(factor * noise), times)),
        (repeated(gaussian(noise), times + 1), repeated(gaussian(noise), times)),
    ):
        more = ACCOUNTANTS["rdp"](louder, ZERO_OUT).meaning()
        less = ACCOUNTANTS["rdp"](quieter, ZERO_OUT).meaning()
        assert less.guess <= more.guess
        assert less.found <= more.found


def test_samples_and_selections_agree_between_accountants():
    for event in (repeated(poisson_gaussian(0.05, 1.1), 200), repeated(selection(5.0), 7)):
        by_pld, by_rdp = (ACCOUNTANTS[name](event, ZERO_OUT).meaning() for name in ("pld", "rdp"))
        assert 0.5 < by_pld.guess <= by_rdp.guess + 1e-9
        assert FALSE_POSITIVES < by_pld.found <= by_rdp.found + 1e-9
        replaced = ACCOUNTANTS["rdp"](event, Adjacency.REPLACE_ONE).meaning()
        assert replaced.guess > by_rdp.guess
        assert replaced.found > by_rdp.found


@given(st.floats(0.05, 3.0))
@settings(max_examples=40, deadline=None)
def test_no_test_of_two_coins_beats_what_their_divergences_allow(odds):
    """Coins whose log-ratios are +-odds: purely private, and every test of them is known."""
    head = math.exp(odds) / (1 + math.exp(odds))
    forth = np.log(head**ORDERS * (1 - head) ** (1 - ORDERS) + (1 - head) ** ORDERS * head ** (1 - ORDERS))
    found = from_divergences(ORDERS, forth / (ORDERS - 1))
    assert found.guess >= head
    assert found.guess == pytest.approx(head, abs=1e-3)
    assert found.found >= best_test(head) - 1e-12


def test_nothing_released_tells_nothing_and_no_noise_tells_everything():
    for name, accountant in ACCOUNTANTS.items():
        silent = accountant(composed([]), ZERO_OUT).meaning()
        assert silent.guess == pytest.approx(0.5, abs=1e-5), name
        assert silent.found == pytest.approx(FALSE_POSITIVES, abs=1e-5), name
        assert accountant(gaussian(0.0), ZERO_OUT).meaning() == Meaning(1.0, 1.0), name


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 8.0, 800.0, math.inf])
@pytest.mark.parametrize("delta", [0.0, 1e-4, 0.5])
def test_a_pair_of_epsilon_and_delta_bounds_every_threshold_test(epsilon, delta):
    """The worst mechanism with this pair: nothing is hidden with probability delta, else a biased coin."""
    found = from_bound(epsilon, delta)
    head = 1.0 if epsilon > 700 else math.exp(epsilon) / (1 + math.exp(epsilon))
    assert found.guess == pytest.approx((1 + delta + (1 - delta) * (2 * head - 1)) / 2, abs=1e-12)
    assert found.found >= delta + (1 - delta) * best_test(head) - 1e-12


def test_several_bounds_on_one_unit_and_one_for_several_units():
    one, other = Meaning(0.6, 0.3), Meaning(0.7, 0.2)
    assert sharpest(one, other) == Meaning(0.6, 0.2)
    assert weakest(one, other) == Meaning(0.7, 0.3)
    assert Meaning.from_json(one.to_json()) == one
    for damaged in ([], {}, one.to_json() | {"false_positive_rate": 0.5}):
        with pytest.raises(PlanError, match="meaning"):
            Meaning.from_json(damaged)


@given(st.floats(0.0, 1.0))
def test_percentages_are_never_rounded_down(share):
    assert float(percent_up(share).removesuffix(" %")) >= 100 * share * (1 - 1e-12)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.5, "50.0 %"), (0.7741, "77.5 %"), (0.99561, "99.57 %"), (0.99999, "100 %"), (1.0, "100 %")],
)
def test_percentages_have_few_digits(share, text):
    assert percent_up(share) == text


def test_an_order_that_proves_nothing_changes_nothing():
    curve = gaussian_rdp(2.0, ORDERS)
    broken = curve.copy()
    broken[-1] = np.nan
    assert from_divergences(ORDERS, broken) == from_divergences(ORDERS, curve)
    finite = from_divergences(ORDERS, curve)
    for worse in itertools.accumulate([1.5, 2.0]):
        assert from_divergences(ORDERS, worse * curve).guess > finite.guess
