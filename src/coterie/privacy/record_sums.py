"""Noisy sums over the records of one client: the steps of private training, and sketches of gradients.

Where the unit is a person, read person for record throughout: what is sampled, clipped and counted is then
one person, whose gradient is the sum of those of its records.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import dp_accounting as dp
import numpy as np
from dp_accounting import DpEvent

from coterie.privacy import events
from coterie.privacy.errors import RangeError
from coterie.privacy.mechanisms import NoisySum, mechanism
from coterie.privacy.ranges import DIMENSIONS, EPOCHS, RECORDS, Range
from coterie.privacy.units import Adjacency

LARGEST = float(np.finfo(np.float32).max)
"""Of what is released."""


@dataclass(frozen=True)
class RecordSums(NoisySum):
    """Noisy sums over the records of one client, each divided by a public number."""

    kind, at_sites = "trainable", True
    records: Annotated[int, RECORDS]

    @property
    def taken(self) -> str:
        """How many steps, in words."""
        return "1 step" if self.steps == 1 else f"{self.steps:,} steps"

    @property
    def rate(self) -> float:
        """Probability that a record is in a sum."""
        return 1.0

    @property
    def denominator(self) -> int:
        """What sums are divided by: the public number of records, never how many there were in one."""
        return self.records

    @property
    def projected(self) -> int | None:
        """To how many numbers gradients are projected instead of taking steps; None where they are not."""
        return None

    def length(self, parameters: int) -> int:
        return parameters if self.projected is None else self.projected

    def gradients(self, times: int, learning: int) -> int:
        return times * self.steps * self.denominator

    def noise_in_release(self, lr: float, pull: float) -> float:
        """Standard deviation of the noise in what is released, public like all it is computed from.

        Every step adds noise of standard deviation lr clip z / batch to each parameter, and without a pull
        the variances of epochs * ceil(records / batch) steps add up (R-DPCFL, Lemma 4.1): with records /
        batch for the ceiling the variance falls with the cube of the batch.

        Args:
            lr: step size.
            pull: weight of a pull towards an anchor, which shrinks in each step the noise of those before.

        Raises:
            RangeError: a pull so strong that steps fly away from the anchor, beyond what a float32 holds.
        """
        each_step = self.noise_std / self.denominator
        if self.projected is not None:
            return each_step
        kept = 1.0 - lr * pull
        try:
            growth = sum(kept ** (2 * later) for later in range(self.steps))
        except OverflowError:
            growth = math.inf
        spread = lr * math.sqrt(growth)
        noise = each_step * spread
        if not max(spread, noise) <= LARGEST:
            raise RangeError(
                f"anchor_weight: {pull} in {self.steps} steps of {lr} is not allowed, a pull "
                "under which steps come closer to the anchor (at most 2 over the step) is"
            )
        return noise

    def norm_in_release(self, lr: float, pull: float, parameters: int) -> float:
        """The norm that what is released stays within, but for one release in a million; public.

        A step moves by at most lr clip times the records in its sum over the denominator. Of b records in
        expectation in all Poisson batches together, more than b + 6 sqrt(b) + 12 have a probability below
        e^-18 (Bernstein), and the norm of noise in d dimensions exceeds its standard deviation times
        sqrt(d) + 6 with one below e^-18.
        With a pull there is no bound: an anchor may be anywhere.
        """
        if pull:
            return math.inf
        steps, step = (1, 1.0) if self.projected is not None else (self.steps, lr)
        most, expected = float(steps * self.records), steps * self.rate * self.records
        if self.rate < 1.0:
            most = min(most, expected + 6.0 * math.sqrt(expected) + 12.0)
        spread = math.sqrt(self.length(parameters)) + 6.0
        return step * self.clip * most / self.denominator + spread * self.noise_in_release(lr, pull)


@dataclass(frozen=True)
class BatchedSteps(RecordSums):
    """DP-SGD over batches; every step's sum is divided by the public batch size."""

    batch: int
    epochs: Annotated[int, EPOCHS]
    adjacency: Adjacency

    def __post_init__(self) -> None:
        super().__post_init__()
        Range(1, self.records, whole=True).check("batch", self.batch)

    @property
    def steps(self) -> int:
        return self.epochs * math.ceil(self.records / self.batch)

    @property
    def denominator(self) -> int:
        """The expected batch, a constant, also for a shorter one: the realised size would be data."""
        return self.batch


@mechanism("poisson-steps")
@dataclass(frozen=True)
class PoissonSteps(BatchedSteps):
    """Batches into which every record comes by a coin of its own."""

    sampled = True
    words = "{0.taken} on Poisson batches, {0.batch:,} of {0.records:,} {1}s in expectation"

    @property
    def rate(self) -> float:
        return self.batch / self.records

    @property
    def event(self) -> DpEvent:
        return events.repeated(events.poisson_gaussian(self.rate, self.multiplier), self.steps)


@mechanism("shuffled-steps")
@dataclass(frozen=True)
class ShuffledSteps(BatchedSteps):
    """Disjoint batches of a shuffled order: every record once an epoch, nothing amplified.

    For plans alone: no engine trains so.
    """

    kind, at_sites = "executed", False
    words = "{0.taken} on shuffled batches, {0.batch:,} of {0.records:,} {1}s"

    @property
    def event(self) -> DpEvent:
        if not self.multiplier > 0:
            return dp.NonPrivateDpEvent()
        return events.repeated(events.ShuffledEpochDpEvent(self.multiplier), self.epochs)


@mechanism("full-batch-steps")
@dataclass(frozen=True)
class FullBatchSteps(RecordSums):
    """One step an epoch over all records, divided by their public number."""

    words = "{0.taken} on all {0.records:,} {1}s"
    epochs: Annotated[int, EPOCHS]
    adjacency: Adjacency

    @property
    def steps(self) -> int:
        return self.epochs


@mechanism("full-batch-sketch")
@dataclass(frozen=True)
class FullBatchSketch(RecordSums):
    """One noisy sum of per-record gradients, each projected at random (publicly) and then clipped."""

    words = (
        "the sum of the gradients of all {0.records:,} {1}s, each projected to {0.dimensions} numbers "
        "and clipped"
    )
    dimensions: Annotated[int, DIMENSIONS]
    adjacency: Adjacency

    @property
    def projected(self) -> int:
        return self.dimensions

    def multiplier_for(self, length: float) -> float:
        """The multiplier whose noise is so long on the mean sketch, in clips."""
        return float(length * self.records / math.sqrt(self.dimensions))
