"""Which of several models fits a client's records best: one index, chosen with or without noise."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import dp_accounting as dp
import numpy as np
from dp_accounting import DpEvent

from coterie.privacy import events
from coterie.privacy.mechanisms import Mechanism, mechanism
from coterie.privacy.randomness import Floats, RandomStream
from coterie.privacy.ranges import SELECTION_EPSILON, gumbel
from coterie.privacy.units import Adjacency


class ModelSelection(Mechanism):
    """The model that fits a client's records best."""

    kind = "a selection"

    @abstractmethod
    def choose(self, scores: Floats, losses: Floats, noise: RandomStream) -> int:
        """The index of a model, by the sums over all records of what each gets right and of its losses."""


@dataclass(frozen=True)
class NoisySelection(ModelSelection):
    """A model chosen by the exponential mechanism; `epsilon` is the range of its log-probabilities."""

    monotone: ClassVar[bool] = True
    epsilon: Annotated[float, replace(SELECTION_EPSILON, besides=math.inf)]  # no privacy is asked for
    adjacency: Adjacency

    @property
    def noise_summary(self) -> str:
        return f"Gumbel, scale {self.gumbel_scale:.3g}"

    @property
    def reach(self) -> float:
        """How far apart neighbours can move two counts."""
        return self.adjacency.reach

    @property
    def gumbel_scale(self) -> float:
        """Scale of the Gumbel noise on each count."""
        return self.reach / self.epsilon

    @property
    def event(self) -> DpEvent:
        return events.selection(self.gumbel_scale, self.monotone)

    def choose(self, scores: Floats, losses: Floats, noise: RandomStream) -> int:
        """By counts over the full set of records, each in it exactly once; a person counts by its mean.

        So one unit moves every score by at most one, and all in the same direction. The published mechanism
        chooses by accuracy: the same scores over a constant, with the noise that its own analysis asks for.
        """
        scale, reach = self.gumbel_scale, self.reach
        return int(np.argmax(scores + gumbel(noise, scores.shape, scale, epsilon=self.epsilon, reach=reach)))


@mechanism("private-selection")
@dataclass(frozen=True)
class PrivateSelection(NoisySelection):
    """The model with the most correct records.

    Counts have sensitivity 1 and, under zero-out and add-remove, all move the same way, which allows half the
    noise that replace-one needs.
    """

    at_sites = True
    words = "the model that fits best, by the exponential mechanism on counts of {1}s it gets right"


@mechanism("accuracy-selection")
@dataclass(frozen=True)
class AccuracySelection(NoisySelection):
    """The published selection: by train accuracy, whose denominator moves with the data.

    Taking a record away can then raise one accuracy and lower another, so nothing is saved over replacement:
    the noise, on the scale of counts, is 2 / epsilon and the range is epsilon under every adjacency.
    """

    monotone, reach = False, 2.0
    words = "the model that fits best, by the exponential mechanism on train accuracy, as published"


@mechanism("lowest-loss")
@dataclass(frozen=True)
class LowestLoss(ModelSelection):
    """The model with the lowest loss, told as it is: not private, whatever else is done."""

    adjacency: Adjacency

    words = "the model with the lowest loss, as it is"

    @property
    def event(self) -> DpEvent:
        return dp.NonPrivateDpEvent()

    def choose(self, scores: Floats, losses: Floats, noise: RandomStream) -> int:
        """A loss that is not a number is the highest."""
        return int(np.argmin(np.nan_to_num(losses, nan=np.inf)))
