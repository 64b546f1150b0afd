"""The mixture finds clusters that are there and says how sure it is."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

from coterie.clustering.embedding import principal_components
from coterie.clustering.mixture import Mixture, choose_mixture, fit_mixture
from coterie.privacy.released import Released


def clusters(
    sizes: list[int], distance: float, noise: float, dimensions: int, seed: int
) -> tuple[list[Released[NDArray[np.float32]]], list[int]]:
    """Points around orthogonal centres that are `distance` apart."""
    rng = np.random.default_rng(seed)
    truth = [k for k, size in enumerate(sizes) for _ in range(size)]
    points = noise * rng.normal(size=(len(truth), dimensions))
    points[np.arange(len(truth)), truth] += distance / np.sqrt(2)
    return [Released(point.astype(np.float32), noise) for point in points], truth


def same(labels: NDArray[np.intp], truth: list[int]) -> bool:
    return len(set(zip(labels.tolist(), truth, strict=True))) == len(set(truth)) == len(set(labels.tolist()))


@pytest.mark.parametrize("sizes", [[3, 6, 6, 6], [5, 5], [2, 8, 8], [4, 4, 4, 4, 4]])
def test_separated_clusters_are_found_and_counted(sizes: list[int]) -> None:
    for seed in range(5):
        releases, truth = clusters(sizes, distance=10.0, noise=0.5, dimensions=40, seed=seed)
        mixture, scores = choose_mixture(releases, range(2, 9), seed)
        assert same(mixture.labels, truth)
        assert len(mixture.centres) == len(sizes) == max(scores, key=scores.__getitem__)
        assert mixture.separation > 3
        np.testing.assert_allclose(mixture.responsibilities.sum(axis=1), 1.0)


def test_separation_is_half_the_distance_in_spreads_and_overlap_its_tail() -> None:
    centres = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 10.0]])
    mixture = Mixture(np.zeros((1, 2)), centres, 0.8, np.ones((1, 3)) / 3)
    assert mixture.separation == pytest.approx(4.0 / (2 * 0.8))
    assert mixture.overlap == pytest.approx(2 * norm.sf(2.5))


def test_confidence_falls_with_noise() -> None:
    quiet, _ = clusters([6, 6], 4.0, 0.3, 30, seed=0)
    loud, _ = clusters([6, 6], 4.0, 3.0, 30, seed=0)
    assert fit_mixture(loud, 2, 0).separation < fit_mixture(quiet, 2, 0).separation
    assert fit_mixture(loud, 2, 0).overlap > fit_mixture(quiet, 2, 0).overlap


def test_spread_is_never_below_the_known_noise() -> None:
    releases = [Released(np.array([float(k), 0.0], dtype=np.float32), 0.5) for k in (0, 0, 9, 9)]
    assert fit_mixture(releases, 2, 0).spread == pytest.approx(0.5)


def test_noiseless_equal_points_do_not_break_it() -> None:
    releases = [Released(np.array([float(k), 0.0], dtype=np.float32), 0.0) for k in (0, 0, 9, 9)]
    mixture = fit_mixture(releases, 2, 0)
    assert mixture.separation > 1e6
    assert same(mixture.labels, [0, 0, 1, 1])


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
