"""The mixture finds clusters that are there, counts them, and says how sure it is."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

from coterie.clustering.embedding import principal_components
from coterie.clustering.mixture import (
    CLEAR_OVERLAP,
    HAZY,
    Mixture,
    choose_mixture,
    draw_labels,
    fit_mixture,
)
from coterie.privacy.released import Released

Clients = list[Released[NDArray[np.float32]]]


def clusters(
    sizes: list[int], distance: float, noise: float, dimensions: int, seed: int
) -> tuple[Clients, NDArray[np.intp]]:
    """Points around orthogonal centres that are `distance` apart."""
    rng = np.random.default_rng(seed)
    truth = np.repeat(np.arange(len(sizes)), sizes)
    points = noise * rng.normal(size=(len(truth), dimensions))
    points[np.arange(len(truth)), truth] += distance / np.sqrt(2)
    return [Released(point.astype(np.float32), noise) for point in points], truth


def same(labels: NDArray[np.intp], truth: NDArray[np.intp]) -> bool:
    pairs = set(zip(labels.tolist(), truth.tolist(), strict=True))
    return len(pairs) == len(set(truth.tolist())) == len(set(labels.tolist()))


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("sizes", [[3, 6, 6, 6], [5, 5], [2, 8, 8], [4, 4, 4, 4, 4], [2] * 7])
def test_separated_clusters_are_found_and_counted(sizes: list[int], noise: float) -> None:
    for seed in range(3):
        releases, truth = clusters(sizes, distance=10.0, noise=noise, dimensions=40, seed=seed)
        mixture, scores = choose_mixture(releases, range(2, 9), seed)
        assert same(mixture.labels, truth)
        assert mixture.clusters == len(sizes)
        assert set(scores) == set(range(2, 9))
        assert mixture.separation == scores[len(sizes)]
        assert mixture.overlap < CLEAR_OVERLAP
        assert mixture.clustered
        np.testing.assert_allclose(mixture.responsibilities.sum(axis=1), 1.0)
        np.testing.assert_array_equal(mixture.responsibilities.argmax(axis=1), mixture.labels)


def test_two_close_clusters_beside_a_far_one_are_not_merged() -> None:
    releases, truth = clusters([6, 6], 3.0, 0.05, 50, seed=0)
    far, _ = clusters([6], 0.0, 0.05, 50, seed=1)
    moved = [Released(release.value + np.float32(100.0), release.noise_std) for release in far]
    mixture, _ = choose_mixture(releases + moved, range(2, 8), 0)
    assert same(mixture.labels, np.concatenate([truth, np.full(6, 2)]))


def test_separation_is_the_smallest_of_all_pairs_and_overlap_its_tail() -> None:
    scores = np.array([[np.inf, 2.5, 9.0], [2.5, np.inf, 4.0], [9.0, 4.0, np.inf]])
    mixture = Mixture(np.arange(3), np.eye(3), scores, 1.0, True)
    assert mixture.separation == 2.5
    assert mixture.overlap == pytest.approx(2 * norm.sf(2.5))


def test_known_centres_are_separated_by_half_their_distance_in_noise() -> None:
    # A thousand releases leave neither the centres nor the search anything to be unsure of.
    releases, truth = clusters([500, 500], distance=6.0, noise=1.0, dimensions=3, seed=0)
    mixture = fit_mixture(releases, 2, 0)
    assert same(mixture.labels, truth)
    assert mixture.separation == pytest.approx(3.0, rel=0.05)


def test_few_releases_of_many_coordinates_are_less_certain_than_many_of_few() -> None:
    short, _ = clusters([4, 4], 8.0, 1.0, 2, seed=0)
    long, _ = clusters([4, 4], 8.0, 1.0, 2000, seed=0)
    many, _ = clusters([40, 40], 8.0, 1.0, 2000, seed=0)
    few = fit_mixture(long, 2, 0).separation
    assert few < 0.5 * fit_mixture(short, 2, 0).separation
    assert few < 0.5 * fit_mixture(many, 2, 0).separation


def test_noise_alone_has_no_separation_and_no_clusters() -> None:
    overlaps, clustered = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        releases = [Released(rng.normal(size=60).astype(np.float32), 1.0) for _ in range(12)]
        for number in (2, 3, 4):
            mixture = fit_mixture(releases, number, seed)
            overlaps.append(mixture.overlap)
            clustered.append(mixture.clustered)
    assert np.mean(overlaps) > 0.8
    assert np.mean(clustered) < 0.1


@pytest.mark.parametrize("number_known", [True, False])
def test_overlap_is_the_chance_of_being_wrong(number_known: bool) -> None:
    outcomes = []
    for seed in range(120):
        sizes = [[3, 6, 6, 6], [2, 2, 2, 2], [4, 8], [3, 3, 3, 3, 3]][seed % 4]
        noise = [0.8, 1.0, 1.2, 1.6, 2.0, 2.4][seed % 6]
        releases, truth = clusters(sizes, 12.0, noise, 80, seed)
        if number_known:
            mixture = fit_mixture(releases, len(sizes), seed)
        else:
            mixture, _ = choose_mixture(releases, range(2, min(9, len(truth))), seed)
        outcomes.append((1 - mixture.overlap, same(mixture.labels, truth)))
    chance, right = np.array(outcomes).T
    assert min((chance > 0.9).sum(), (chance < 0.2).sum()) >= 15
    assert right[chance > 0.9].mean() > 0.9
    assert right[chance < 0.2].mean() < 0.5
    # Where it errs, it promises too little.
    assert chance.mean() <= right.mean() + 0.05


def test_a_client_with_less_noise_counts_for_more() -> None:
    rng = np.random.default_rng(0)
    truth = np.repeat([0, 1], 8)
    noise = np.where(np.arange(16) % 2 == 0, 0.5, 6.0)
    found = []
    for trial in range(10):
        points = noise[:, None] * rng.normal(size=(16, 30))
        points[:, 0] += 10.0 * truth
        releases = [Released(p.astype(np.float32), s) for p, s in zip(points, noise, strict=True)]
        labels = fit_mixture(releases, 2, trial).labels
        found.append(same(labels[::2], truth[::2]))
    assert all(found)


def test_spread_is_never_below_the_known_noise() -> None:
    releases = [Released(np.array([float(k), 0.0], dtype=np.float32), 0.5) for k in (0, 0, 9, 9)]
    assert fit_mixture(releases, 2, 0).spread == pytest.approx(0.5)


def test_noiseless_equal_points_do_not_break_it() -> None:
    releases = [Released(np.array([float(k), 0.0], dtype=np.float32), 0.0) for k in (0, 0, 9, 9)]
    mixture = fit_mixture(releases, 2, 0)
    assert mixture.separation > 2
    assert same(mixture.labels, np.array([0, 0, 1, 1]))
    equal = fit_mixture([Released(np.ones(3, dtype=np.float32), 0.0) for _ in range(5)], 2, 0)
    assert np.isfinite(equal.responsibilities).all()
    assert equal.overlap == 1.0


def test_as_many_clusters_as_clients_is_allowed() -> None:
    releases, _ = clusters([1, 1, 1], 10.0, 0.1, 5, seed=0)
    assert sorted(fit_mixture(releases, 3, 0).labels.tolist()) == [0, 1, 2]


def test_principal_components_equal_those_of_a_full_decomposition() -> None:
    vectors = np.random.default_rng(0).normal(size=(9, 500)) * np.linspace(1, 3, 500)
    centred = vectors - vectors.mean(axis=0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    exact = (left * values)[:, :3]
    ours = principal_components(vectors, 3)
    np.testing.assert_allclose(np.abs(ours), np.abs(exact), rtol=1e-8, atol=1e-8)


def test_the_same_releases_and_seed_give_the_same_mixture() -> None:
    releases, _ = clusters([4, 5, 6], 3.0, 1.0, 25, seed=1)
    first, second = (choose_mixture(releases, range(2, 6), 7)[0] for _ in range(2))
    np.testing.assert_array_equal(first.responsibilities, second.responsibilities)
    np.testing.assert_array_equal(first.labels, second.labels)


def test_labels_are_drawn_at_the_mixture_s_odds() -> None:
    odds = np.tile([0.2, 0.8], (4000, 1))
    # 4,000 coins: outside 0.8 +- 0.031 with probability below 1e-6.
    assert draw_labels(odds, np.random.default_rng(0)).mean() == pytest.approx(0.8, abs=0.031)


def shares_of_classes(centres: NDArray[np.float64], seed: int) -> tuple[Clients, NDArray[np.intp]]:
    """21 clients whose samples differ along nine directions that have nothing to do with their clusters.

    Sizes are those of ResNet-18 on rotated CIFAR-10: nine directions of classes, each with four times the
    noise, and centres that are hardly further apart than the nine directions together are long.
    """
    rng = np.random.default_rng(seed)
    truth = np.repeat(np.arange(len(centres)), [3, 6, 6, 6])
    points = 0.0028 * rng.normal(size=(21, 200))
    points[:, :2] += centres[truth] + 0.004 * rng.normal(size=(21, 2))
    points[:, 2:11] += 0.012 * rng.normal(size=(21, 9))
    return [Released(point.astype(np.float32), 0.0028) for point in points], truth


SQUARE = 0.024 * np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0]])


def test_clusters_in_a_plane_are_seen_through_variation_in_other_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = [shares_of_classes(SQUARE, seed) for seed in range(10)]
    chosen = [choose_mixture(releases, range(2, 11), 0) for releases, _ in cases]
    found = [same(mixture.labels, truth) for (mixture, _), (_, truth) in zip(chosen, cases, strict=True)]
    given = [same(fit_mixture(releases, 4, 0).labels, truth) for releases, truth in cases]
    assert sum(found) >= 7
    assert sum(given) >= 8
    assert all(scores[mixture.clusters] == mixture.separation for mixture, scores in chosen)
    monkeypatch.setattr("coterie.clustering.mixture.HAZY", 0.0)
    alone = [same(choose_mixture(releases, range(2, 11), 0)[0].labels, truth) for releases, truth in cases]
    assert sum(alone) <= sum(found) - 3


def test_a_cloud_in_a_plane_is_not_plainly_clustered() -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        releases, _ = shares_of_classes(np.zeros((4, 2)), seed)
        cloud = 0.025 * rng.normal(size=(21, 2)).astype(np.float32)
        moved = [
            Released(np.concatenate([release.value[:2] + place, release.value[2:]]), release.noise_std)
            for release, place in zip(releases, cloud, strict=True)
        ]
        assert choose_mixture(moved, range(2, 11), 0)[0].separation < HAZY
