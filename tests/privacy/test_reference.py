"""The slow references: sensitivities as declared, noise as declared, choices as the exact probabilities."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from coterie.algorithms.client.rebalancing import routed_denominators, routing_matrix
from coterie.privacy import (
    Adjacency,
    CohortSums,
    FullBatchSteps,
    PoissonSample,
    PoissonSteps,
    PrivacyInputError,
    PrivateSelection,
    SecretKey,
)
from slow_mechanisms import (
    clipped,
    noisy_histogram,
    noisy_mean,
    noisy_sum,
    private_selection,
    route,
    routed_sums,
    selection_probabilities,
)

ZERO_OUT, REPLACE_ONE, ADD_REMOVE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE, Adjacency.ADD_REMOVE
# Every statistical test below fails by chance at most once in a million runs; the seeds are fixed.
ERROR_RATE = 1e-6

magnitudes = st.one_of(
    st.floats(-1e308, 1e308),
    st.sampled_from([0.0, 5e-324, 1e-310, 1e38, -1e38, math.nan, math.inf, -math.inf]),
)


def stream(name="test", seed=7):
    return SecretKey.from_seed(seed).stream("noise", subject=name, round=1, release="r", input_hash="0")


@settings(max_examples=200, deadline=None)
@given(arrays(np.float64, st.integers(1, 6), elements=magnitudes), st.floats(1e-6, 1e6))
def test_clipped_norm_never_exceeds_the_clip(vector, clip):
    result = clipped(vector, clip)
    assert np.isfinite(result).all()
    assert math.sqrt(math.fsum(float(x) ** 2 for x in result)) <= clip
    if not np.isfinite(vector).all():
        assert not result.any()


def test_short_contributions_are_left_alone_and_long_ones_keep_their_direction():
    np.testing.assert_array_equal(clipped([0.3, -0.4], 1.0), [0.3, -0.4])
    np.testing.assert_allclose(clipped([3e200, -4e200], 1.0), [0.6, -0.8], rtol=1e-11)


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float64, (4, 3), elements=st.floats(-50, 50)),
    arrays(np.float64, 3, elements=magnitudes),
    st.sampled_from([ZERO_OUT, REPLACE_ONE]),
)
def test_sums_of_neighbours_differ_by_at_most_the_declared_sensitivity(records, other, adjacency):
    mechanism = FullBatchSteps(1.5, 0.8, 4, 1, adjacency)
    one = noisy_sum(mechanism, list(records), 3, stream())
    changed = [*records[1:], other] if adjacency is REPLACE_ONE else list(records[1:])
    two = noisy_sum(mechanism, changed, 3, stream())
    assert np.linalg.norm(one - two) <= mechanism.adjacency.reach * mechanism.clip * (1 + 1e-12)


def test_empty_batch_releases_noise_of_the_declared_size():
    mechanism = PoissonSteps(2.0, 1.5, 100, 10, 1, ZERO_OUT)
    noise = noisy_mean(mechanism, [], 20_000, mechanism.denominator, stream())
    assert stats.kstest(noise, "norm", args=(0.0, 2.0 * 1.5 / 10)).pvalue > ERROR_RATE


def test_a_poisoned_record_becomes_zero_and_is_still_noised():
    mechanism = FullBatchSteps(1.0, 1.0, 2, 1, ZERO_OUT)
    poisoned = noisy_sum(mechanism, [[math.nan, 1.0], [0.2, 0.1]], 2, stream())
    clean = noisy_sum(mechanism, [[0.2, 0.1]], 2, stream())
    np.testing.assert_array_equal(poisoned, clean)
    assert not np.array_equal(clean, [0.2, 0.1])


def test_denominator_must_be_a_positive_constant():
    with pytest.raises(PrivacyInputError, match="denominator"):
        noisy_mean(FullBatchSteps(1.0, 1.0, 2, 1, ZERO_OUT), [], 2, 0, stream())


@pytest.mark.parametrize("adjacency", [ZERO_OUT, REPLACE_ONE])
def test_selection_frequencies_equal_the_exact_probabilities(adjacency):
    mechanism = PrivateSelection(0.4, adjacency)
    counts, draws = [40, 43, 41, 35], 40_000
    noise = stream("selection")
    chosen = [private_selection(mechanism, counts, noise) for _ in range(draws)]
    seen = np.bincount(chosen, minlength=4)
    expected = selection_probabilities(mechanism, counts) * draws
    assert stats.chisquare(seen, expected).pvalue > ERROR_RATE
    # Twice or half the noise would be noticed.
    for factor in (0.5, 2.0):
        other = dataclasses.replace(mechanism, epsilon=mechanism.epsilon * factor)
        assert stats.chisquare(seen, selection_probabilities(other, counts) * draws).pvalue < ERROR_RATE


def test_selection_range_is_epsilon_between_neighbours():
    for adjacency in (ZERO_OUT, REPLACE_ONE):
        mechanism = PrivateSelection(0.7, adjacency)
        base = np.array([5, 5, 5])
        worst = 0.0
        moves = [(1, 0, 0), (1, 1, 0)] if adjacency is ZERO_OUT else [(1, -1, 0), (1, 0, -1)]
        for move in moves:
            p = selection_probabilities(mechanism, base + np.array(move))
            q = selection_probabilities(mechanism, base)
            losses = np.log(p / q)
            worst = max(worst, float(losses.max() - losses.min()))
        assert worst == pytest.approx(0.7)


def test_selection_without_privacy_takes_the_best():
    assert private_selection(PrivateSelection(math.inf, ZERO_OUT), [1, 5, 2], stream()) == 1


@settings(max_examples=200, deadline=None)
@given(arrays(np.float64, st.integers(1, 6), elements=st.floats(-50, 200)), st.floats(0.5, 40))
def test_routing_rows_are_probabilities_for_any_noisy_histogram(histogram, least):
    matrix = routing_matrix(histogram, least)
    assert (matrix >= 0).all()
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=1e-9)
    expected = matrix.T @ np.maximum(histogram, 0.0)
    if np.maximum(histogram, 0.0).sum() >= least * len(histogram):
        assert (expected >= least * (1 - 1e-9)).all()
    assert (routed_denominators(histogram, matrix, least) >= least).all()


def test_large_clusters_are_left_alone():
    np.testing.assert_array_equal(routing_matrix(np.array([30.0, 20.0]), 12.0), np.eye(2))
    np.testing.assert_array_equal(routing_matrix(np.array([3.0, -2.0]), 12.0), np.eye(2))


def test_routes_follow_the_matrix_independently():
    matrix = np.array([[0.5, 0.3, 0.2], [0.0, 1.0, 0.0], [0.1, 0.1, 0.8]])
    draws = 30_000
    routes = route([0] * draws + [1] * 100, matrix, stream("routes"))
    assert (routes[draws:] == 1).all()
    assert stats.chisquare(np.bincount(routes[:draws]), matrix[0] * draws).pvalue > ERROR_RATE
    pairs = np.bincount(3 * routes[0:draws:2] + routes[1:draws:2], minlength=9)
    expected = np.outer(matrix[0], matrix[0]).ravel() * draws / 2
    assert stats.chisquare(pairs, expected).pvalue > ERROR_RATE


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float64, (5, 2), elements=st.floats(-9, 9)), st.lists(st.integers(0, 2), min_size=5, max_size=5)
)
def test_one_client_moves_all_routed_sums_together_by_at_most_the_clip(updates, clusters):
    mechanism = CohortSums(1.0, 1.2, PoissonSample(0.1), ADD_REMOVE, histogram_ratio=4.0)
    one = routed_sums(mechanism, list(updates), clusters, (3, 2), stream())
    two = routed_sums(mechanism, list(updates[1:]), clusters[1:], (3, 2), stream())
    assert np.linalg.norm(one - two) <= mechanism.adjacency.reach * mechanism.clip * (1 + 1e-12)


def test_empty_clusters_and_empty_cohorts_release_noise_like_the_others():
    mechanism = CohortSums(1.0, 1.2, PoissonSample(0.1), ADD_REMOVE, histogram_ratio=4.0)
    sums = routed_sums(mechanism, [], [], (4, 5000), stream())
    for row in sums:
        assert stats.kstest(row, "norm", args=(0.0, 1.2)).pvalue > ERROR_RATE
    assert noisy_histogram(mechanism, [], 3, stream()).all()


def test_histogram_counts_choices_with_its_own_noise():
    mechanism = CohortSums(1.0, 1.0, PoissonSample(0.1), ADD_REMOVE, histogram_ratio=3.0)
    noise = stream("histogram")
    seen = np.array([noisy_histogram(mechanism, [0, 2, 2], 3, noise) for _ in range(3000)])
    for column, count in zip(seen.T, (1, 0, 2), strict=True):
        assert stats.kstest(column, "norm", args=(count, 3.0)).pvalue > ERROR_RATE


def test_routing_needs_a_positive_least_size():
    with pytest.raises(PrivacyInputError, match="least"):
        routed_denominators(np.array([1.0]), np.eye(1), 0.0)
