"""A second life for dead clusters, read off released histograms alone: it costs no privacy.

A cluster model that nobody chooses stays dead: what rebalancing sends it is a mixture of everyone, so it is
never the best for anyone, while some other model serves two clusters at once. When the noisy histogram shows
one nearly empty cluster and one far too large, the large one is split: its model plus a public random
direction, and its model minus the same direction, take the places of both. A model that serves two clusters
sits where their gradients cancel, so to first order a step that helps one of them hurts the other: each of
them prefers another sign, whichever direction was drawn.
"""

import math

import numpy as np
from numpy.typing import NDArray

from coterie.privacy.released import Released

SMOOTHING = 0.5
"""Weight of the newest histogram in the running mean that decides."""
DEAD, LARGE = 0.3, 1.4
"""Shares of a fair share below which a cluster is dead, above which it is worth splitting."""
FIRST, LAST = 3, 0.7
"""The round from which clusters may be split, and the share of all rounds after which they are left alone."""
PATIENCE = 3
"""Rounds between two splits."""
_CLEAR = 0.2
"""Largest noise in the running mean, in fair shares, that still lets anything be told from it."""


def smoothed(
    sizes: NDArray[np.float64], histogram: Released[NDArray[np.float64]], round: int
) -> NDArray[np.float64]:
    """The running mean of noisy cluster sizes after `round` rounds."""
    if round == 1:
        return histogram.value
    return (1.0 - SMOOTHING) * sizes + SMOOTHING * histogram.value


def is_clear(noise_std: float, fair_share: float) -> bool:
    """Whether the noise leaves dead, fair and large clusters apart."""
    return noise_std * math.sqrt(SMOOTHING / (2.0 - SMOOTHING)) <= _CLEAR * fair_share


def splits(sizes: NDArray[np.float64], fair_share: float) -> list[tuple[int, int]]:
    """Dead clusters, each with a large one to be split: the emptiest with the largest, and so on."""
    order = np.argsort(sizes, kind="stable")
    pairs = zip(order[: len(order) // 2].tolist(), order[::-1].tolist(), strict=False)
    return [
        (dead, large)
        for dead, large in pairs
        if sizes[dead] < DEAD * fair_share and sizes[large] > LARGE * fair_share
    ]


def may_split(round: int, rounds: int, last_split: int) -> bool:
    """Whether clusters may be split after `round` of `rounds` rounds."""
    return FIRST <= round <= LAST * rounds and round - last_split >= PATIENCE


def split(
    models: NDArray[np.float32],
    sizes: NDArray[np.float64],
    pairs: list[tuple[int, int]],
    directions: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Models and sizes after each large cluster was split into its own place and a dead one's."""
    models, sizes = models.copy(), sizes.copy()
    for (dead, large), direction in zip(pairs, directions, strict=True):
        models[dead], models[large] = models[large] - direction, models[large] + direction
        sizes[[dead, large]] = (sizes[dead] + sizes[large]) / 2
    return models, sizes
