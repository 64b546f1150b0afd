"""The mechanisms in plain numpy, one unit at a time: slow, float64, and simple enough to be right.

Engines run the same mechanisms on tensors; tests hold them to these functions.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from coterie.privacy import CohortSums, PrivateSelection
from coterie.privacy.errors import PrivacyInputError
from coterie.privacy.mechanisms import NoisySum
from coterie.privacy.randomness import RandomStream
from coterie.privacy.ranges import gaussian, gumbel

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# The clipped norm must not exceed the clip by a rounding error.
_MARGIN = 1.0 - 2.0**-40


def clipped(contribution: npt.ArrayLike, clip: float) -> Floats:
    """The contribution scaled down to norm `clip`; one that is not finite becomes zero."""
    vector = np.asarray(contribution, dtype=np.float64)
    largest = float(np.max(np.abs(vector), initial=0.0))
    if not math.isfinite(largest) or largest == 0.0:
        return np.zeros_like(vector)
    # Relative to the largest entry, so that no square overflows or vanishes.
    direction = vector / largest
    length = math.sqrt(math.fsum((direction**2).ravel()))
    if largest <= clip * _MARGIN / length:
        return vector
    scaled: Floats = direction * (clip * _MARGIN / length)
    return scaled


def noisy_sum(
    mechanism: NoisySum, contributions: Sequence[npt.ArrayLike], dimensions: int, stream: RandomStream
) -> Floats:
    """Clipped contributions summed, plus noise; an empty sample still releases noise."""
    total = np.zeros(dimensions)
    for contribution in contributions:
        total += clipped(contribution, mechanism.clip)
    clip, std = mechanism.clip, mechanism.noise_std
    return total + gaussian(stream, dimensions, std, multiplier=mechanism.multiplier, clip=clip)


def noisy_mean(
    mechanism: NoisySum,
    contributions: Sequence[npt.ArrayLike],
    dimensions: int,
    denominator: int,
    stream: RandomStream,
) -> Floats:
    """The noisy sum over a public constant; how many contributions there were is never looked at."""
    if denominator < 1:
        raise PrivacyInputError(f"denominator: {denominator} is not allowed, an integer of at least 1 is")
    return noisy_sum(mechanism, contributions, dimensions, stream) / denominator


def private_selection(mechanism: PrivateSelection, counts: Sequence[int], stream: RandomStream) -> int:
    """The index of the largest count after Gumbel noise; ties are broken by the noise."""
    scores = np.asarray(counts, dtype=np.float64)
    epsilon, reach = mechanism.epsilon, mechanism.reach
    noise = gumbel(stream, len(scores), mechanism.gumbel_scale, epsilon=epsilon, reach=reach)
    return int(np.argmax(scores + noise))


def selection_probabilities(mechanism: PrivateSelection, counts: Sequence[int]) -> Floats:
    """The exact probability of each index."""
    exponents = np.asarray(counts, dtype=np.float64) / mechanism.gumbel_scale
    weights = np.exp(exponents - exponents.max())
    probabilities: Floats = weights / weights.sum()
    return probabilities


def noisy_histogram(
    mechanism: CohortSums, choices: Sequence[int], clusters: int, stream: RandomStream
) -> Floats:
    """How many of the sampled clients chose each cluster, plus noise."""
    counts = np.bincount(np.asarray(choices, dtype=np.int64), minlength=clusters).astype(np.float64)
    multiplier = (mechanism.histogram_ratio or 0.0) * mechanism.multiplier
    return counts + gaussian(stream, clusters, mechanism.histogram_multiplier, multiplier=multiplier)


def route(choices: Sequence[int], matrix: Floats, stream: RandomStream) -> Integers:
    """Each client's cluster, drawn independently: a quota would couple clients and void the bound."""
    uniforms = stream.uniform(len(choices))
    edges = np.cumsum(matrix, axis=1)
    edges[:, -1] = 1.0
    rows = edges[np.asarray(choices, dtype=np.int64)]
    return np.asarray((uniforms[:, None] >= rows).sum(axis=1), dtype=np.int64)


def routed_sums(
    mechanism: CohortSums,
    updates: Sequence[npt.ArrayLike],
    clusters: Sequence[int],
    shape: tuple[int, int],
    stream: RandomStream,
) -> Floats:
    """One noisy sum for each cluster; an empty cluster releases noise like the others."""
    total = np.zeros(shape)
    for update, cluster in zip(updates, clusters, strict=True):
        total[cluster] += clipped(update, mechanism.clip)
    clip, std = mechanism.clip, mechanism.noise_std
    return total + gaussian(stream, shape, std, multiplier=mechanism.multiplier, clip=clip)
