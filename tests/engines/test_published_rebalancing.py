"""The published rebalancing rule: what it does, and why its published proof does not hold.

The proof says that with one client more or less, each cluster's sum moves by at most 2C and, clusters being
disjoint, so do all sums together. That would need a way of pairing the outcomes of both worlds (a coupling)
in which no pair is further apart. Here every outcome of both worlds is enumerated, and a maximum flow decides
whether such a pairing exists.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from coterie.algorithms.client.rebalancing import routing_matrix
from coterie.engines.cohorts import refilled, routed
from coterie.errors import PlanError

Outcomes = dict[tuple[float, ...], int]


def outcomes(assigned: Sequence[int], updates: Sequence[float], clusters: int, minimum: int) -> Outcomes:
    """Cluster sums that the rule can produce, each with the number of equally likely draws behind it."""
    found: Counter[tuple[float, ...]] = Counter()
    groups, values = np.array(assigned), np.array(updates)
    sizes = np.bincount(groups, minlength=clusters)
    pool = np.flatnonzero(sizes[groups] >= minimum)
    for order in itertools.permutations(range(len(pool))):
        coins = np.full(len(groups), 0.5)
        coins[pool] = (np.array(order) + 0.5) / len(pool)
        filled = refilled(groups, clusters, minimum, coins)
        found[tuple(float(values[filled == cluster].sum()) for cluster in range(clusters))] += 1
    return dict(found)


def farthest_pair_of_the_best_coupling(one: Outcomes, other: Outcomes) -> float:
    """The least distance d for which the outcomes can be paired so that no pair is further apart than d."""
    total = math.lcm(sum(one.values()), sum(other.values()))
    supply = {sums: count * (total // sum(one.values())) for sums, count in one.items()}
    demand = {sums: count * (total // sum(other.values())) for sums, count in other.items()}
    distances = sorted({round(math.dist(a, b), 9) for a in one for b in other})
    low, high = 0, len(distances) - 1
    while low < high:
        middle = (low + high) // 2
        if pairable(supply, demand, distances[middle], total):
            high = middle
        else:
            low = middle + 1
    return distances[low]


def pairable(supply: Outcomes, demand: Outcomes, reach: float, total: int) -> bool:
    source, sink = 0, 1 + len(supply) + len(demand)
    graph = np.zeros((sink + 1, sink + 1), dtype=np.int32)
    for i, (a, amount) in enumerate(supply.items(), start=1):
        graph[source, i] = amount
        for j, b in enumerate(demand, start=1 + len(supply)):
            if math.dist(a, b) <= reach + 1e-9:
                graph[i, j] = total
    for j, amount in enumerate(demand.values(), start=1 + len(supply)):
        graph[j, sink] = amount
    return bool(maximum_flow(csr_array(graph), source, sink).flow_value == total)


def test_every_coupling_of_two_neighbours_moves_the_sums_by_more_than_twice_the_clip() -> None:
    """Seven clients, clip 1, minimum 2; the first client is there or not."""
    assigned = [0, 0, 1, 1, 1, 1, 1]  # the third cluster is empty and will be filled
    worst = 0.0
    for signs in ([1, 1, 1, 1, 1, 1, 1], [1, 1, -1, -1, -1, -1, -1], [-1, 1, -1, -1, 1, -1, -1]):
        updates = [float(sign) for sign in signs]
        with_client = outcomes(assigned, updates, 3, 2)
        without = outcomes(assigned[1:], updates[1:], 3, 2)
        worst = max(worst, farthest_pair_of_the_best_coupling(with_client, without))
    # With the client its cluster is large, and gives; without it, it is small, and takes.
    assert worst == 5.0 > 2.0


def test_routing_the_same_neighbours_moves_the_sums_by_the_clip_at_most() -> None:
    """Given the released histogram and everyone's own coin, only the client's own row moves, by itself."""
    assigned, coins = np.array([0, 0, 1, 1, 1, 1, 1]), np.random.default_rng(0).uniform(size=(200, 7))
    matrix = routing_matrix(np.array([2.0, 5.0, 0.0]), 2.0)
    assert not np.array_equal(matrix, np.eye(3))
    updates = np.array([-1.0, 1, -1, -1, 1, -1, -1])
    for draw in coins:
        goes_to = routed(assigned, matrix, draw)
        np.testing.assert_array_equal(goes_to[1:], routed(assigned[1:], matrix, draw[1:]))
        sums = [np.bincount(goes_to[first:], updates[first:], minlength=3) for first in (0, 1)]
        assert math.dist(*sums) <= 1.0


def test_the_measure_of_couplings_itself_is_right() -> None:
    """Two points that can swap: the best coupling keeps them, and a forced move counts in full."""
    assert farthest_pair_of_the_best_coupling({(0.0,): 1, (5.0,): 1}, {(0.0,): 3, (5.0,): 3}) == 0.0
    assert farthest_pair_of_the_best_coupling({(0.0,): 1, (5.0,): 1}, {(0.0,): 1, (5.0,): 3}) == 5.0
    assert farthest_pair_of_the_best_coupling({(0.0,): 1}, {(1.0,): 1, (2.0,): 1}) == 2.0


def test_small_clusters_are_filled_to_the_minimum_by_members_of_large_ones_moved_not_copied() -> None:
    assigned = np.array([0, 0, 0, 0, 0, 1, 2, 2])
    filled = refilled(assigned, 3, 2, np.array([0.9, 0.1, 0.5, 0.6, 0.7, 0.0, 0.3, 0.2]))
    np.testing.assert_array_equal(filled, [0, 1, 0, 0, 0, 1, 2, 2])
    assert len(filled) == len(assigned)
    np.testing.assert_array_equal(refilled(assigned, 3, 0, np.zeros(8)), assigned)


def test_who_is_moved_is_uniform_over_all_members_of_large_clusters() -> None:
    """Exhaustive: of all orders of the coins, each member of the pool is moved equally often."""
    assigned = np.array([0, 0, 0, 1, 1, 2])
    moved: Counter[int] = Counter()
    for order in itertools.permutations(range(5)):
        coins = np.array([*order, 9]) / 10
        filled = refilled(assigned, 3, 2, coins)
        moved.update(np.flatnonzero(filled != assigned).tolist())
    assert set(moved) == {0, 1, 2, 3, 4}
    assert set(moved.values()) == {math.factorial(5) // 5}


def test_a_minimum_beyond_the_cohort_is_refused() -> None:
    with pytest.raises(PlanError, match="minimum: 6"):
        refilled(np.array([0, 0, 0, 0, 1]), 2, 6, np.zeros(5))
