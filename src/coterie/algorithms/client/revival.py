"""A second life for dead clusters, read off released histograms alone: it costs no privacy.

A cluster model that nobody chooses stays dead: what rebalancing sends it is a mixture of everyone, so it is
never the best for anyone, while some other model serves two clusters at once. When the noisy histogram shows
one nearly empty cluster and one far too large, the large one is split: its model plus a public random
direction, and its model minus the same direction, take the places of both. A model that serves two clusters
sits where their gradients cancel, so to first order a step that helps one of them hurts the other: each of
them prefers another sign, whichever direction was drawn.
"""

import math
import sys
from dataclasses import dataclass

import numpy as np

from coterie.algorithms.protocol import Floats, Models

# Most weight of the newest histogram in the running mean that decides.
SMOOTHING = 0.5
# Shares of a fair share below which a cluster is dead, above which it is worth splitting.
DEAD, LARGE = 0.3, 1.4
# The round from which clusters may be split, and the share of all rounds after which they are left alone.
FIRST, LAST = 3, 0.7
# Least rounds between two splits.
LEAST_PAUSE = 3
# Noise of the running mean, in fair shares, that leaves dead, fair and large clusters apart.
CLEAR = 0.2
# Noise, relative to that, which no number of rounds averages out.
_NEVER = 1e6


@dataclass(frozen=True)
class Rhythm:
    """How long histograms are averaged before anything is read off them: longer where they are noisier.

    Args:
        weight: of the newest histogram in the running mean.
        first: the round from which clusters may be split.
        pause: rounds between two splits.
    """

    weight: float
    first: int
    pause: int

    @classmethod
    def of(cls, noise_std: float, fair_share: float) -> "Rhythm":
        """The mean of t histograms has 1/t of their variance, the running mean w / (2 - w) of it."""
        relative = noise_std / (CLEAR * fair_share)
        if relative > _NEVER:
            return cls(0.0, sys.maxsize, sys.maxsize)
        rounds = relative**2
        weight = min(SMOOTHING, 2.0 / (1.0 + rounds))
        return cls(weight, max(FIRST, math.ceil(rounds)), max(LEAST_PAUSE, math.ceil(1.0 / weight)))

    def smoothed(self, sizes: Floats, histogram: Floats, round: int) -> Floats:
        """The running mean of noisy sizes after `round` rounds: of all of them, while they are few."""
        weight = max(self.weight, 1.0 / round)
        return (1.0 - weight) * sizes + weight * histogram

    def may_split(self, round: int, rounds: int, last_split: int) -> bool:
        """Whether clusters may be split after `round` of `rounds` rounds."""
        return self.first <= round <= LAST * rounds and round - last_split >= self.pause


def splits(sizes: Floats, fair_share: float) -> list[tuple[int, int]]:
    """Dead clusters, each with a large one to be split: the emptiest with the largest, and so on."""
    order = np.argsort(sizes, kind="stable")
    pairs = zip(order[: len(order) // 2].tolist(), order[::-1].tolist(), strict=False)
    return [
        (dead, large)
        for dead, large in pairs
        if sizes[dead] < DEAD * fair_share and sizes[large] > LARGE * fair_share
    ]


def split(models: Models, pairs: list[tuple[int, int]], directions: Models) -> Models:
    """Models after each large cluster was split into its own place and a dead one's."""
    models, (dead, large) = models.copy(), np.transpose(pairs)
    models[dead], models[large] = models[large] - directions, models[large] + directions
    return models


def shared_out(sizes: Floats, pairs: list[tuple[int, int]]) -> Floats:
    """Sizes after it: both halves are taken to be equal."""
    sizes, (dead, large) = sizes.copy(), np.transpose(pairs)
    sizes[dead] = sizes[large] = (sizes[dead] + sizes[large]) / 2
    return sizes
