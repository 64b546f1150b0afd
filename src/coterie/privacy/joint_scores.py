"""Several scores of held-out units in one release: a vector for each unit, summed with noise.

What a unit adds is a vector of blocks, one for each statistic, and each block has a size of at most one half:

- `right`: 1 where the model is right, less one half;
- `classes`: three counts for each class: hits with weight 1/2, and misses and false alarms, of which a wrong
  answer makes one each, with weight 1/2 / sqrt(2): the block of a right answer has size 1/2, that of a wrong
  one sqrt(2 * (1/2 / sqrt(2))^2) = 1/2;
- `ranks`: for each curve the histogram of what the model says of this class, of its own records and of all
  others: one cell for each of k curves, with weight 1/2 / sqrt(k), so sqrt(k * (1/2)^2 / k) = 1/2 in all;
- `squared`, `absolute`: the bounded error over its bound, in [0, 1], less one half;
- `labels`: of a label u in [-1/2, 1/2] the pair (u, 4 (u^2 - 1/8)) / sqrt(2), neither above 1/2 / sqrt(2).

With m blocks the vector has a size of at most sqrt(m) / 2, which is the clip. The sum over units moves by no
more when one unit is silenced, added or removed, and by at most twice that when one is replaced. A client,
or a person, adds the mean of its records' vectors, which is no longer than the longest of them. One Gaussian
noise on all coordinates, of the multiplier times the clip, then covers all of them at once.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from coterie.privacy.errors import PlanError
from coterie.privacy.mechanisms import HALF, NoisySum, mechanism
from coterie.privacy.ranges import RECORDS, Range
from coterie.privacy.units import Adjacency

Floats = NDArray[np.float64]
BINS = 16
"""Of a histogram of what a model says: the log-odds of a class, from -6 to 6."""
LOG_ODDS = 6.0
_ROOT = math.sqrt(2.0)


class Statistic(StrEnum):
    """What is counted or summed over held-out units; see above."""

    RIGHT = "right"
    CLASSES = "classes"
    RANKS = "ranks"
    SQUARED = "squared"
    ABSOLUTE = "absolute"
    LABELS = "labels"


_WORDS = {
    Statistic.RIGHT: "how many are right",
    Statistic.CLASSES: "hits, misses and false alarms of each class",
    Statistic.RANKS: "histograms of what models say of each class",
    Statistic.SQUARED: "bounded squared errors",
    Statistic.ABSOLUTE: "bounded absolute errors",
    Statistic.LABELS: "labels and their squares",
}


def curves(classes: int) -> int:
    """How many ROC curves there are: of two classes, one is the other's mirror image."""
    return 1 if classes == 2 else classes


def joint_clip(statistics: int) -> float:
    """The largest size of one unit's vector of so many blocks."""
    return HALF * math.sqrt(statistics)


def _block(statistic: Statistic, classes: int) -> tuple[Floats, Floats]:
    """Weight and centre of each coordinate of a block."""
    match statistic:
        case Statistic.CLASSES:
            weights = np.repeat([HALF, HALF / _ROOT, HALF / _ROOT], classes)
        case Statistic.RANKS:
            number = curves(classes)
            weights = np.full(2 * number * BINS, HALF / math.sqrt(number))
        case Statistic.LABELS:
            return np.array([1.0, 4.0]) / _ROOT, np.array([0.0, 0.125])
        case _:
            return np.ones(1), np.full(1, HALF)
    return weights, np.zeros(len(weights))


@mechanism("joint-scores")
@dataclass(frozen=True)
class JointScores(NoisySum):
    """How well models do, by several statistics of `units` held-out records (or clients) at once.

    Args:
        statistics: the blocks of a unit's vector, in this order.
        classes: of the labels; 0 for a regression.
    """

    kind = "several scores"
    clip: Annotated[float, Range(HALF, HALF * math.sqrt(len(Statistic)))]
    units: Annotated[int, RECORDS]
    statistics: tuple[Statistic, ...]
    classes: Annotated[int, Range(0, 10**6, whole=True)]
    adjacency: Adjacency

    words = "how well the models do: sums over {0.units:,} held-out units of {0.listed}"

    def __post_init__(self) -> None:
        super().__post_init__()
        number = len(self.statistics)
        if len(set(self.statistics)) != number or self.clip != joint_clip(number):
            raise PlanError(
                f"joint-scores: a clip of {self.clip} for {number} statistics is not allowed, each of them "
                f"once and {joint_clip(number)} is"
            )

    @property
    def listed(self) -> str:
        return "; ".join(_WORDS[statistic] for statistic in self.statistics)

    @cached_property
    def _blocks(self) -> tuple[Floats, Floats]:
        blocks = [_block(statistic, self.classes) for statistic in self.statistics]
        weights, centres = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        return weights, centres

    @property
    def weights(self) -> Floats:
        """Of each coordinate, with which it is counted."""
        return self._blocks[0]

    def length(self, parameters: int) -> int:
        return len(self.weights)

    def centred(self, sums: Floats, units: float) -> Floats:
        """What so many units add to the release, from the sums of their statistics as they are."""
        weights, centres = self._blocks
        return (sums - units * centres) * weights

    def natural(self, released: Floats, units: float) -> Floats:
        """Sums of statistics as they are, from the centred ones of so many units."""
        weights, centres = self._blocks
        return released / weights + units * centres

    def places(self) -> dict[Statistic, slice]:
        """Where each block is."""
        found, first = {}, 0
        for statistic in self.statistics:
            width = len(_block(statistic, self.classes)[0])
            found[statistic] = slice(first, first + width)
            first += width
        return found
