"""Mixtures from noisy sums alone: found where they are, none invented where they are not."""

import numpy as np
import pytest
from scipy.optimize import check_grad

from coterie.clustering.feature_mixture import (
    Directions,
    FeatureFit,
    FeatureMixture,
    fit_features,
    strongest_directions,
)

CLIENTS, AXES, SPREAD = 840, 20, 0.08
SHARES = (480, 240, 60, 60)


def points_of(sizes: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points of length about 1 in clusters about 0.8 apart, as sketches of gradients are."""
    rng = np.random.default_rng(seed)
    centres = np.linalg.qr(rng.normal(size=(AXES, AXES)))[0][: len(sizes)]
    truth = np.repeat(np.arange(len(sizes)), sizes)
    points = 0.5 * np.ones(AXES) / np.sqrt(AXES) + 0.57 * centres[truth]
    return points + SPREAD * rng.normal(size=points.shape), truth


def found(sizes: tuple[int, ...], noise: float, seed: int) -> tuple[FeatureMixture, np.ndarray, np.ndarray]:
    """The three sums of the algorithm's first round, with noise; and where everyone is nearest to."""
    points, truth = points_of(sizes, seed)
    rng = np.random.default_rng([seed, 1])
    symmetric = rng.normal(size=(AXES, AXES))
    symmetric = (symmetric + symmetric.T) / 2
    symmetric[np.diag_indices(AXES)] = rng.normal(size=AXES)
    sums = points.sum(axis=0) + noise * rng.normal(size=AXES)
    squares = points.T @ points + noise * symmetric
    where = strongest_directions(sums, squares, noise, len(points))
    coordinates = (points - where.mean) @ where.basis
    frequencies = rng.normal(size=(256, coordinates.shape[1])) / where.width
    angles = coordinates @ frequencies.T
    sketch = np.concatenate([np.cos(angles).sum(axis=0), np.sin(angles).sum(axis=0)]) / 16
    sketch += noise * rng.normal(size=512)
    mixture = fit_features(frequencies, sketch, noise, where, seed, clients=len(points), most=12)
    nearest = ((coordinates[:, None] - mixture.centres[None]) ** 2).sum(axis=2).argmin(axis=1)
    return mixture, nearest, truth


@pytest.mark.parametrize("sizes", [SHARES, (210, 210, 210, 210), (700, 70, 70)], ids=str)
def test_clusters_that_differ_by_an_order_in_size_are_found_under_noise(sizes: tuple[int, ...]) -> None:
    for seed in range(3):
        mixture, nearest, truth = found(sizes, 3.0, seed)
        assert len(mixture.centres) == len(sizes)
        table = np.zeros((len(sizes), len(sizes)))
        np.add.at(table, (nearest, truth), 1)
        assert table.max(axis=0).sum() > 0.98 * len(truth)
        assert sorted(mixture.sizes) == pytest.approx(sorted(sizes), abs=40)
        assert mixture.separation > 2


@pytest.mark.parametrize("noise", [0.0, 3.0, 10.0])
def test_nothing_is_invented_where_nothing_is(noise: float) -> None:
    for seed in range(4):
        mixture, _, _ = found((CLIENTS,), noise, seed)
        assert len(mixture.centres) == 1
        assert mixture.separation == np.inf


def test_the_slope_of_the_misfit_is_its_derivative() -> None:
    """Against differences, through the search for the next component and the joint improvement."""
    rng = np.random.default_rng(0)
    frequencies = rng.normal(size=(40, 3)) / 0.3
    where = Directions(np.zeros(3), np.eye(3), np.full(3, 0.4), 0.1)
    sketch = 30 * (rng.normal(size=40) + 1j * rng.normal(size=40))
    fit = FeatureFit(frequencies, sketch, 1.0, where, 0)
    before = FeatureMixture(rng.normal(size=(2, 3)), np.array([100.0, 40.0]), 0.1)
    after = fit._improved(before)
    assert fit._misfit(after) < fit._misfit(before)
    assert (after.sizes >= 0).all()

    def misfit(centres: np.ndarray) -> float:
        return fit._misfit(FeatureMixture(centres.reshape(2, 3), before.sizes, before.spread))

    def slope(centres: np.ndarray) -> np.ndarray:
        own = FeatureMixture(centres.reshape(2, 3), before.sizes, before.spread)
        atoms = fit._atoms(own.centres, own.spread)
        seen = np.conj(atoms @ own.sizes - sketch)[:, None] * atoms * own.sizes
        return (-seen.imag.T @ frequencies).ravel()

    assert check_grad(misfit, slope, before.centres.ravel()) < 1e-2 * np.linalg.norm(
        slope(before.centres.ravel())
    )


def test_halves_of_one_cluster_are_joined() -> None:
    where = Directions(np.zeros(2), np.eye(2), np.array([0.3, 0.3]), 0.1)
    rng = np.random.default_rng(1)
    points = 0.1 * rng.normal(size=(600, 2))
    frequencies = rng.normal(size=(200, 2)) / 0.3
    sketch = np.exp(1j * points @ frequencies.T).sum(axis=0) / np.sqrt(200)
    fit = FeatureFit(frequencies, sketch, 1.0, where, 0)
    halves = FeatureMixture(np.array([[0.08, 0.0], [-0.08, 0.0]]), np.array([300.0, 300.0]), 0.1)
    joined = fit._joined(halves)
    assert len(joined.centres) == 1
    np.testing.assert_allclose(joined.centres[0], 0.0, atol=0.03)
    assert joined.sizes[0] == pytest.approx(600, rel=0.05)
