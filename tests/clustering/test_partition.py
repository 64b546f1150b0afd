"""The best partition is the best one, and its clusters keep their names."""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from coterie.clustering.embedding import centred_gram
from coterie.clustering.partition import best_partition, kmeans, relabelled


def scatter(points: NDArray[np.float64], weights: NDArray[np.float64], labels: NDArray[np.intp]) -> float:
    """Weighted sum of squares around the weighted means, the slow and simple way."""
    total = 0.0
    for cluster in set(labels.tolist()):
        mine, mass = points[labels == cluster], weights[labels == cluster]
        mean = (mass[:, None] * mine).sum(axis=0) / mass.sum()
        total += float((mass * ((mine - mean) ** 2).sum(axis=1)).sum())
    return total


@pytest.mark.parametrize("clusters", [2, 3, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_no_partition_of_a_few_points_is_better(clusters: int, weighted: bool) -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        points = rng.normal(size=(7, 3))
        weights = rng.uniform(0.2, 5.0, size=7) if weighted else np.ones(7)
        found = best_partition(centred_gram(points), weights, clusters, seed)
        every = itertools.product(range(clusters), repeat=7)
        partitions = (np.array(labels) for labels in every if len(set(labels)) == clusters)
        least = min(scatter(points, weights, labels) for labels in partitions)
        assert scatter(points, weights, found) == pytest.approx(least, rel=1e-9)


def test_all_clusters_have_members_even_among_equal_points() -> None:
    gram = centred_gram(np.ones((6, 4)))
    for clusters in (1, 2, 6):
        assert set(best_partition(gram, np.ones(6), clusters, 0).tolist()) == set(range(clusters))
    points = np.concatenate([np.zeros((5, 2)), np.ones((1, 2))])
    assert best_partition(centred_gram(points), np.ones(6), 2, 0).tolist() == [0, 0, 0, 0, 0, 1]


def test_clusters_are_numbered_by_their_first_member() -> None:
    points = np.array([[5.0], [0.0], [5.1], [0.1], [9.0]])
    assert best_partition(centred_gram(points), np.ones(5), 3, 0).tolist() == [0, 1, 0, 1, 2]


def test_more_clusters_than_points_are_refused() -> None:
    with pytest.raises(ValueError, match="clusters: 4 of 3"):
        best_partition(np.eye(3), np.ones(3), 4, 0)


def test_most_members_keep_their_cluster_s_name() -> None:
    labels = np.array([0, 0, 0, 1, 1, 2])
    assert relabelled(labels, [2, 2, 0, 0, 0, 1], 3).tolist() == [2, 2, 2, 0, 0, 1]


def test_kmeans_groups_plain_vectors() -> None:
    vectors = np.array([[0.0, 0.0], [0.1, 0.0], [9.0, 9.0]])
    labels = kmeans(vectors, 2, 0)
    assert labels[0] == labels[1] != labels[2]


@pytest.mark.parametrize("clusters", [2, 3, 5])
def test_kmeans_of_long_vectors_is_that_of_their_distances(clusters: int) -> None:
    """The partition that scikit-learn finds among the vectors themselves, as long as they are."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        vectors = (
            rng.normal(size=(12, 4000)) + 3 * rng.normal(size=(clusters, 4000))[np.arange(12) % clusters]
        )
        whole = KMeans(clusters, n_init=10, tol=0.0, random_state=seed).fit(vectors).labels_
        found = kmeans(vectors, clusters, seed)
        pairs = (labels[:, None] == labels[None] for labels in (whole, found))
        assert np.array_equal(*pairs)


def test_kmeans_does_not_go_through_the_weights_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    fit = KMeans.fit

    def seen(self: KMeans, points: NDArray[np.float64]) -> KMeans:
        shapes.append(points.shape)
        return fit(self, points)

    monkeypatch.setattr(KMeans, "fit", seen)
    kmeans(np.random.default_rng(0).normal(size=(6, 50_000)), 2, 0)
    assert shapes == [(6, 6)]
