"""The evidence of a partition is the integral it claims to be."""

import itertools

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from coterie.clustering import evidence
from coterie.clustering.embedding import centred_gram
from coterie.clustering.evidence import (
    ALONE_PENALTY,
    WithinSpread,
    _merges,
    _prior_variance,
    log_evidence,
    log_likelihood,
    log_odds_of_splits,
    log_prior,
    most_likely_number,
    spread_within,
    standing_out,
)
from coterie.clustering.partition import best_partition


def integrated(points: np.ndarray, spread: WithinSpread, labels: np.ndarray, prior: float) -> float:
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
    spread = WithinSpread(rng.uniform(0.5, 2.0, size=5), 0.3, 3)
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
    assert WithinSpread(np.ones(4), 0.0, 100).freedom == pytest.approx(100)
    assert WithinSpread(np.zeros(4), 1.0, 100).freedom == pytest.approx(8)
    assert 8 < WithinSpread(np.full(4, 0.01), 1.0, 100).freedom < 100


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


def test_the_merges_of_a_tree_add_up_to_all_that_is_between_clusters() -> None:
    """Also with releases of unequal noise, each counting as much as its noise allows."""
    rng = np.random.default_rng(3)
    labels = np.array([0, 0, 1, 2, 2, 2, 3, 3, 1, 4, 4])
    points = rng.normal(size=(11, 7)) + 3 * rng.normal(size=(5, 7))[labels]
    spread = WithinSpread(rng.uniform(0.5, 2.0, size=11), 0.8, 7)
    weights = 1.0 / spread.totals
    centre = weights @ points / weights.sum()
    between = 0.0
    for cluster in range(5):
        own = labels == cluster
        mean = weights[own] @ points[own] / weights[own].sum()
        between += weights[own].sum() * float(((mean - centre) ** 2).sum())
    ratios = _merges(centred_gram(points), spread, labels)
    assert len(ratios) == 4
    assert ratios.sum() == pytest.approx(between)


def nested(rng: np.random.Generator, near: float) -> tuple[np.ndarray, np.ndarray]:
    """Four clusters of five in two far pairs, whose members are `near` apart, under noise of one."""
    labels = np.repeat(np.arange(4), 5)
    centres = np.zeros((4, 200))
    centres[2:, 0] = 400.0
    centres[1, 1] = centres[3, 2] = near
    return centres[labels] + rng.normal(size=(20, 200)), labels


def test_clusters_much_closer_than_the_rest_are_found_and_nothing_closer() -> None:
    for trial in range(10):
        for near, expected in ((12.0, 4), (0.0, 2)):
            points, _ = nested(np.random.default_rng(trial), near)
            gram, noise = centred_gram(points), np.ones(20)
            partitions = {k: best_partition(gram, np.ones(20), k, trial) for k in range(2, 8)}
            assert most_likely_number(gram, noise, 200, partitions) == expected
            spread = spread_within(gram, noise, 200, partitions[4])
            pooled = {k: log_evidence(gram, spread, labels) for k, labels in partitions.items()}
            # What the second rule is for: the first would merge the near ones.
            assert max(pooled, key=pooled.__getitem__) == 2


def test_a_split_that_noise_would_show_has_odds_against_it() -> None:
    """The best halves of 12 releases that are noise alone, 300 times: never odds for a split."""
    for trial in range(300):
        points = np.random.default_rng(trial).normal(size=(12, 60))
        gram = centred_gram(points)
        halves = best_partition(gram, np.ones(12), 2, trial)
        assert log_odds_of_splits(gram, WithinSpread(np.ones(12), 0.0, 60), halves) < 0.0


def test_partitions_of_the_same_sizes_share_their_chance() -> None:
    """All ways to part seven things, counted one by one: those of each list of sizes add up to one."""
    chance: dict[tuple[int, ...], float] = {}
    for labels in itertools.product(range(7), repeat=7):
        # Each partition once: a new cluster has the next number.
        if all(label <= max(labels[:k], default=-1) + 1 for k, label in enumerate(labels)):
            sizes = np.bincount(labels)
            alone = ALONE_PENALTY * int((sizes == 1).sum())
            key = tuple(sorted(sizes.tolist()))
            chance[key] = chance.get(key, 0.0) + float(np.exp(log_prior(np.array(labels), 0.0) + alone))
    assert len(chance) == 15
    assert list(chance.values()) == pytest.approx([1.0] * 15)


def test_a_cluster_of_one_must_be_far_away() -> None:
    """An odd release among two clusters is found when it is far, and taken for an accident when it is not."""
    for trial in range(5):
        for away, expected in ((60.0, 3), (5.0, 2)):
            rng = np.random.default_rng(trial)
            labels = np.array([0] * 6 + [1] * 6 + [2])
            centres = np.zeros((3, 100))
            centres[1, 0], centres[2, 1] = 40.0, away
            gram = centred_gram(centres[labels] + rng.normal(size=(13, 100)))
            partitions = {k: best_partition(gram, np.ones(13), k, trial) for k in range(2, 7)}
            assert most_likely_number(gram, np.ones(13), 100, partitions) == expected


def test_directions_stand_out_of_noise_that_is_larger_than_noise() -> None:
    rng = np.random.default_rng(5)
    centres = np.zeros((4, 400))
    centres[1:, :3] = 60.0 * np.eye(3)
    labels = np.repeat(np.arange(4), 5)
    standing = [standing_out(centred_gram(centres[labels] + rng.normal(size=(20, 400))), 1.0, 400)]
    standing.append(standing_out(centred_gram(rng.normal(size=(20, 400))), 1.2, 400))
    assert standing == [3, 0]


def test_more_clusters_than_anything_shows_need_better_odds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rule's odds for three clusters against two, which are all that splits and directions show."""
    gram = centred_gram(np.random.default_rng(6).normal(size=(8, 50)))
    partitions = {2: np.arange(8) % 2, 3: np.arange(8) % 3}
    for gain, expected in ((1.9, 2), (2.1, 3)):
        odds = {log_evidence: {2: 0.0, 3: gain}, log_odds_of_splits: {2: 0.0, 3: -5.0}}
        monkeypatch.setattr(evidence, "_scores", lambda *arguments, odds=odds: odds[arguments[-1]])
        assert most_likely_number(gram, np.full(8, 1.5), 50, partitions) == expected
