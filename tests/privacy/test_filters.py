"""Budgets that several plans share: composition at integer orders, and a filter for adaptive choices."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting import DpEvent, rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.privacy import Adjacency, Budget
from coterie.privacy.divergences import INTEGER_ORDERS, ORDERS, gaussian_rdp
from coterie.privacy.errors import RangeError
from coterie.privacy.events import (
    BridgedSumDpEvent,
    composed,
    gaussian,
    poisson_gaussian,
    repeated,
    selection,
)
from coterie.privacy.filters import RdpFilter, _bounds, composed_epsilon, main_order
from coterie.privacy.rdp import divergences_of
from coterie.privacy.shifts import shift_rdp

noises, times = st.floats(0.6, 20.0), st.integers(1, 60)
releases = st.one_of(
    st.builds(lambda z, n: repeated(gaussian(z), n), noises, st.integers(1, 4)),
    st.builds(lambda q, z, n: repeated(poisson_gaussian(q, z), n), st.floats(0.001, 0.5), noises, times),
)
runs = st.lists(releases, min_size=1, max_size=4)


def theirs(events: list[DpEvent], delta: float) -> float:
    account = rdp.RdpAccountant(list(map(int, INTEGER_ORDERS)), dp.NeighboringRelation.REPLACE_SPECIAL)
    for event in events:
        account.compose(event)
    return float(account.get_epsilon(delta))


@settings(max_examples=25, deadline=None)
@given(runs, st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_composition_is_that_of_dp_accounting_at_integer_orders(events: list[DpEvent], delta: float) -> None:
    total = np.sum([divergences_of(event, Adjacency.ZERO_OUT) for event in events], axis=0)
    ours, reference = composed_epsilon(total, delta), theirs(events, delta)
    assert ours >= reference - 1e-6
    if reference > 0:  # where delta alone covers a tiny divergence, theirs is zero and ours stays above it
        assert ours == pytest.approx(reference, abs=1e-6, rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.lists(releases, min_size=2, max_size=4))
def test_composition_costs_less_than_the_sum_of_epsilons(events: list[DpEvent]) -> None:
    curves = [divergences_of(event, Adjacency.ZERO_OUT) for event in events]
    alone = [composed_epsilon(curve, 1e-5) for curve in curves]
    assert max(alone) <= composed_epsilon(np.sum(curves, axis=0), 1e-5) + 1e-12
    if min(alone) > 0:
        assert composed_epsilon(np.sum(curves, axis=0), 1e-5) < sum(alone)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.1, 20.0), st.sampled_from([1e-3, 1e-5, 1e-9]), st.floats(0.01, 3.0))
def test_what_is_taken_as_chosen_one_after_the_other_costs_more(
    epsilon: float, delta: float, size: float
) -> None:
    curve = size * INTEGER_ORDERS / 2
    assert RdpFilter(Budget(epsilon, delta)).epsilon(curve) > composed_epsilon(curve, delta)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.2, 20.0), st.sampled_from([1e-3, 1e-5, 1e-9]))
def test_the_shares_of_delta_add_up_to_it(epsilon: float, delta: float) -> None:
    filtered = RdpFilter(Budget(epsilon, delta))
    assert math.fsum(filtered._deltas) == pytest.approx(delta, rel=1e-12)
    # The most Gaussian noise that fits, by the filter, is not far from what a plan fixed in advance may have.
    low, high = 0.0, 50.0 * (epsilon + 1)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if filtered.admits(middle * INTEGER_ORDERS) else (low, middle)
    assert composed_epsilon(low * INTEGER_ORDERS, delta) > 0.85 * epsilon - 0.05


def test_each_order_alone_proves_the_budget_with_its_share() -> None:
    """At the bound of one order, the conversion at this order with its share of delta gives epsilon."""
    filtered = RdpFilter(Budget(3.0, 1e-5))
    bounds = _bounds(filtered.budget.epsilon, filtered._deltas)
    for order, bound, share in zip(INTEGER_ORDERS, bounds, filtered._deltas, strict=True):
        proven = bound + math.log1p(-1 / order) - (math.log(share) + math.log(order)) / (order - 1)
        assert proven == pytest.approx(3.0)


@settings(max_examples=20, deadline=None)
@given(st.lists(releases, min_size=3, max_size=8), st.randoms(use_true_random=False))
def test_a_filter_is_never_exceeded_in_whatever_order_runs_come(
    events: list[DpEvent], random: object
) -> None:
    """Whoever chooses the next run by what came before: what was admitted stays within the budget."""
    filtered, total = RdpFilter(Budget(2.0, 1e-5)), np.zeros_like(INTEGER_ORDERS)
    random.shuffle(events)  # type: ignore[attr-defined]
    for event in events:
        curve = total + divergences_of(event, Adjacency.ZERO_OUT)
        if filtered.admits(curve):
            total = curve
    assert filtered.epsilon(total) <= 2.0
    assert composed_epsilon(total, 1e-5) <= 2.0


def test_an_adaptive_chooser_of_orders_is_bounded_by_the_sum_of_shares() -> None:
    """The worst that a history-dependent choice can do: one Gaussian of the largest size at each order.

    For each order, delta of the largest Gaussian release that this order admits is at most its share; an
    adversary that picks which by what it saw gains at most their sum.
    """
    from scipy.stats import norm

    budget = Budget(1.5, 1e-4)
    filtered, gained = RdpFilter(budget), 0.0
    for order, bound, share in zip(
        INTEGER_ORDERS, _bounds(filtered.budget.epsilon, filtered._deltas), filtered._deltas, strict=True
    ):
        if bound <= 0:
            continue
        shift = math.sqrt(2 * bound / order)
        delta = norm.cdf(shift / 2 - 1.5 / shift) - math.exp(1.5) * norm.cdf(-shift / 2 - 1.5 / shift)
        assert delta <= share * (1 + 1e-9)
        gained += delta
    assert 0 < gained <= budget.delta


@settings(max_examples=20, deadline=None)
@given(releases, st.integers(2, 6), st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_a_filter_made_for_the_first_plan_costs_little_for_more_of_them(
    event: DpEvent, copies: int, delta: float
) -> None:
    """What it adds at the order that is best for so many copies, and how much steeper its own order is."""
    curve = divergences_of(event, Adjacency.ZERO_OUT)
    total = composed_epsilon(copies * curve, delta)
    if total > 0.5:
        whole = copies * curve - _bounds(0.0, np.full_like(INTEGER_ORDERS, delta))
        best, main = int(np.argmin(whole)), main_order(Budget(total, delta), curve)
        steeper = curve[main == INTEGER_ORDERS][0] / curve[best]
        added = steeper * math.log(1 / 0.9) / (INTEGER_ORDERS[best] - 1)
        found = RdpFilter(Budget(total, delta), main).epsilon(copies * curve)
        assert total < found <= total + added + 1e-9


def test_an_order_that_no_account_has_is_refused() -> None:
    with pytest.raises(RangeError, match="order: 65"):
        RdpFilter(Budget(1.0, 1e-5), 65)


def test_no_privacy_and_no_bound_are_never_admitted() -> None:
    filtered = RdpFilter(Budget(100.0, 1e-3))
    assert not filtered.admits(divergences_of(dp.NonPrivateDpEvent(), Adjacency.ZERO_OUT))
    assert filtered.admits(divergences_of(dp.NoOpDpEvent(), Adjacency.ZERO_OUT))
    with pytest.raises(RangeError, match="finite"):
        RdpFilter(Budget(math.inf, 1e-3))


def test_neighbours_and_kinds_of_releases() -> None:
    both = divergences_of(gaussian(2.0), Adjacency.REPLACE_ONE)
    np.testing.assert_allclose(both, gaussian_rdp(1.0, INTEGER_ORDERS))
    parts = composed([gaussian(2.0), selection(4.0)])
    alone = divergences_of(gaussian(2.0), Adjacency.ZERO_OUT)
    assert np.all(divergences_of(parts, Adjacency.ZERO_OUT) > alone)
    bridged = divergences_of(BridgedSumDpEvent(0.3, 1.5, 2, 1), Adjacency.ZERO_OUT)
    below = np.searchsorted(ORDERS, INTEGER_ORDERS, side="right") - 1
    assert np.all(bridged >= shift_rdp(0.3, 1.5, 2, 1)[below])
