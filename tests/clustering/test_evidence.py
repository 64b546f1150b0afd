"""The evidence of a partition is the integral it claims to be."""

import itertools

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from coterie.clustering.embedding import centred_gram
from coterie.clustering.evidence import (
    Spread,
    _prior_variance,
    log_likelihood,
    most_likely_number,
    spread_within,
)
from coterie.clustering.partition import best_partition


def integrated(points: np.ndarray, spread: Spread, labels: np.ndarray, prior: float) -> float:
    """Density of the releases by one big covariance matrix, with a nearly flat prior on the mean."""
    flat = 1e6
    together = (labels[:, None] == labels[None]).astype(float)
    covariance = np.diag(1.0 / spread.precisions) + prior * together + flat
    normal = multivariate_normal(np.zeros(len(points)), covariance, allow_singular=False)
    return float(sum(normal.logpdf(column) for column in points.T))


def test_differences_of_log_likelihood_are_those_of_the_integral() -> None:
    rng = np.random.default_rng(0)
    points = rng.normal(size=(5, 3)) * 2
    gram = centred_gram(points)
    spread = Spread(rng.uniform(0.5, 2.0, size=5), 0.3, 3)
    prior = _prior_variance(gram, spread, 3)
    partitions = [np.array(p) for p in itertools.product(range(3), repeat=5) if len(set(p)) == 3][:20]
    ours = np.array([log_likelihood(gram, spread, labels, 3) for labels in partitions])
    exact = np.array([integrated(points, spread, labels, prior) for labels in partitions])
    np.testing.assert_allclose(ours - ours[0], exact - exact[0], atol=1e-4)


def test_variation_beyond_the_noise_is_found_inside_clusters() -> None:
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(20), 10)
    points = 30.0 * rng.normal(size=(20, 50))[labels] + rng.normal(size=(200, 50)) * np.sqrt(1.0 + 0.5)
    spread = spread_within(centred_gram(points), np.ones(200), 50, labels)
    # 9,000 degrees of freedom: a standard error of 0.022 per coordinate.
    assert spread.variation / 50 == pytest.approx(0.5, abs=0.11)


def test_a_squared_distance_has_as_many_degrees_of_freedom_as_it_varies() -> None:
    assert Spread(np.ones(4), 0.0, 100).freedom == pytest.approx(100)
    assert Spread(np.zeros(4), 1.0, 100).freedom == pytest.approx(8)
    assert 8 < Spread(np.full(4, 0.01), 1.0, 100).freedom < 100


def test_the_number_of_clusters_does_not_grow_with_variation_in_few_directions() -> None:
    rng = np.random.default_rng(2)
    for trial in range(5):
        centres = 6.0 * rng.normal(size=(3, 100))
        labels = np.repeat(np.arange(3), 6)
        points = centres[labels] + 0.01 * rng.normal(size=(18, 100))
        points[:, :8] += 3.0 * rng.normal(size=(18, 8))
        gram = centred_gram(points)
        partitions = {k: best_partition(gram, np.ones(18), k, trial) for k in range(2, 9)}
        assert most_likely_number(gram, np.full(18, 1e-4), 100, partitions) == 3
