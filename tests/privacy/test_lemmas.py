"""The two lemmas as functions, with the publication's setting as the example."""

import doctest
import math

import numpy as np
import published_arithmetic
import pytest

from coterie.privacy import PoissonSteps, PrivacyInputError, SecretKey, lemmas
from coterie.privacy.units import Adjacency
from slow_mechanisms import noisy_mean

SETTING = {"records": 6600, "epochs": 1, "learning_rate": 5e-4, "parameters": 11_181_642, "clip": 3.0}


def test_examples_in_the_documentation_hold():
    for module in (lemmas, published_arithmetic):
        assert doctest.testmod(module).failed == 0


def test_update_noise_falls_with_the_cube_of_the_batch():
    small = lemmas.update_noise_variance(batch=33, noise_multiplier=1.0, **SETTING)
    large = lemmas.update_noise_variance(batch=330, noise_multiplier=1.0, **SETTING)
    assert small / large == pytest.approx(1000)
    full = lemmas.update_noise_variance(batch=6600, noise_multiplier=1.310, **SETTING)
    later = lemmas.update_noise_variance(batch=32, noise_multiplier=1.078, **SETTING)
    assert later / full > 1e6


def test_update_noise_is_what_the_mechanism_adds():
    # Steps on empty batches move the model by noise alone.
    mechanism = PoissonSteps(2.0, 1.5, 100, 10, 1, Adjacency.ZERO_OUT)
    stream = SecretKey.from_seed(4).stream("noise", subject="a", round=1, release="t", input_hash="0")
    dimensions = 4000
    update = np.zeros(dimensions)
    for _ in range(mechanism.steps):
        update -= 0.1 * noisy_mean(mechanism, [], dimensions, mechanism.denominator, stream)
    expected = lemmas.update_noise_variance(
        records=100,
        batch=10,
        epochs=1,
        learning_rate=0.1,
        parameters=dimensions,
        clip=2.0,
        noise_multiplier=1.5,
    )
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
        lemmas.update_noise_variance(batch=7000, noise_multiplier=1.0, **SETTING)
    with pytest.raises(PrivacyInputError, match="variance"):
        published_arithmetic.separation_score(1.0, 0.0, 5)
