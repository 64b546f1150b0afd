"""The two lemmas as functions, with the publication's setting as the example."""

import doctest
import math

import numpy as np
import published_arithmetic
import pytest

from coterie.privacy import PoissonSteps, PrivacyInputError, SecretKey
from coterie.privacy.units import Adjacency
from slow_mechanisms import noisy_mean


def update_variance(batch: int, noise: float) -> float:
    """Of all parameters together, in the publication's setting."""
    steps = PoissonSteps(3.0, noise, 6600, batch, 1, Adjacency.ZERO_OUT)
    return 11_181_642 * steps.noise_in_release(lr=5e-4, pull=0.0) ** 2


def test_examples_in_the_documentation_hold():
    assert doctest.testmod(published_arithmetic).failed == 0
    assert round(update_variance(32, 1.078), 2) == 5.91
    assert round(update_variance(6600, 1.310), 8) == 9.9e-07


def test_update_noise_falls_with_the_cube_of_the_batch():
    small, large = update_variance(33, 1.0), update_variance(330, 1.0)
    assert small / large == pytest.approx(1000)
    assert update_variance(32, 1.078) / update_variance(6600, 1.310) > 1e6


def test_update_noise_is_what_the_mechanism_adds():
    # Steps on empty batches move the model by noise alone.
    mechanism = PoissonSteps(2.0, 1.5, 100, 10, 1, Adjacency.ZERO_OUT)
    stream = SecretKey.from_seed(4).stream("noise", subject="a", round=1, release="t", input_hash="0")
    dimensions = 4000
    update = np.zeros(dimensions)
    for _ in range(mechanism.steps):
        update -= 0.1 * noisy_mean(mechanism, [], dimensions, mechanism.denominator, stream)
    expected = dimensions * mechanism.noise_in_release(lr=0.1, pull=0.0) ** 2
    # The sum of squares of 4000 normals is within 12 % in all but one of 10^6 cases.
    assert float((update**2).sum()) == pytest.approx(expected, rel=0.12)


def test_overlap_is_the_shared_mass_of_two_gaussians():
    points = np.linspace(-12, 14, 200_001)
    step = points[1] - points[0]
    one = np.exp(-(points**2) / 2) / math.sqrt(2 * math.pi)
    other = np.exp(-((points - 2.6) ** 2) / 2) / math.sqrt(2 * math.pi)
    shared = float(np.minimum(one, other).sum() * step)
    score = published_arithmetic.separation_score(distance=2.6, variance=5.0, parameters=5)
    assert published_arithmetic.overlap(score) == pytest.approx(shared, rel=1e-6)


def test_larger_first_batches_separate_unless_the_noise_grows_as_fast():
    assert published_arithmetic.overlap_after_growth(
        1.0, growth=206.0, noise_growth=1.21
    ) < published_arithmetic.overlap(10.0)
    assert published_arithmetic.overlap_after_growth(
        1.0, growth=4.0, noise_growth=2.0
    ) == published_arithmetic.overlap(1.0)


def test_meaningless_parameters_are_refused():
    with pytest.raises(PrivacyInputError, match="batch"):
        update_variance(7000, 1.0)
    with pytest.raises(PrivacyInputError, match="variance"):
        published_arithmetic.separation_score(1.0, 0.0, 5)
