"""What one unit releases in one round: sampling, clip, noise, denominator and event in one frozen object.

Everything that decides the cost of a release stands together here, so that execution and accounting cannot
drift apart. `noise_multiplier` always means the standard deviation of the noise on the clipped SUM divided
by the clip, under every adjacency.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Self, TypeVar

import dp_accounting as dp
from dp_accounting import DpEvent

from coterie.privacy import events
from coterie.privacy.errors import PlanError, RangeError
from coterie.privacy.ranges import (
    CLIP,
    DIMENSIONS,
    EPOCHS,
    NOISE,
    RATE,
    RATIO,
    RECORDS,
    SELECTION_EPSILON,
    Range,
)
from coterie.privacy.units import Adjacency, Json, number_from_json, number_to_json


class NoiseRule(Enum):
    """A noise multiplier that calibration has yet to find.

    `SHARED` is the plan's one free multiplier; `AUTO` is the first round's own noise, chosen so that the
    round costs a small, fixed share of the training noise.
    """

    SHARED = "shared"
    AUTO = "auto"


Multiplier = float | NoiseRule
HALF = 0.5
"""The largest size of a score less one half."""


class Mechanism(ABC):
    """One kind of release; subclasses are frozen dataclasses known to the registry by name."""

    name: ClassVar[str]
    adjacency: Adjacency

    @property
    @abstractmethod
    def event(self) -> DpEvent:
        """What one use of the mechanism costs."""

    @property
    def summary(self) -> str:
        """What one use of it lets out, in plain words."""
        return self.name

    @property
    def noise_summary(self) -> str:
        """How much noise hides one unit."""
        return "none"

    @property
    def rule(self) -> NoiseRule | None:
        """The rule by which calibration must find the noise, or None when the noise is known."""
        return None

    def with_noise(self, noise_multiplier: float) -> Self:
        """The same mechanism with this much noise."""
        raise PlanError(f"{self.name}: this mechanism has no noise multiplier to set")

    def to_json(self) -> Json:
        """The mechanism as plain data."""
        data: Json = {"mechanism": self.name}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            data[field.name] = _write_field(field.type, getattr(self, field.name))
        return data


_MECHANISMS: dict[str, type[Mechanism]] = {}
_M = TypeVar("_M", bound=Mechanism)


def mechanism(name: str) -> Callable[[type[_M]], type[_M]]:
    """Register a mechanism under the name that plans on disk use."""

    def register(cls: type[_M]) -> type[_M]:
        cls.name = name
        _MECHANISMS[name] = cls
        return cls

    return register


def mechanism_from_json(data: Mapping[str, object]) -> Mechanism:
    """The mechanism that `to_json` wrote."""
    name = str(data.get("mechanism"))
    if name not in _MECHANISMS:
        raise PlanError(f"mechanism: {name!r} is not known; allowed are {', '.join(sorted(_MECHANISMS))}")
    cls = _MECHANISMS[name]
    fields = {field.name: field.type for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given = {key: value for key, value in data.items() if key != "mechanism"}
    if given.keys() != fields.keys():
        odd = ", ".join(sorted(given.keys() ^ fields.keys()))
        raise PlanError(f"mechanism {name}: missing or unknown fields: {odd}")
    return cls(**{key: _read_field(fields[key], value) for key, value in given.items()})


def _write_field(kind: object, value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    # By declared type, so that a clip of 1 and a clip of 1.0 have the same spelling.
    return int(str(value)) if kind is int else number_to_json(float(str(value)))


def _read_field(kind: object, value: object) -> object:
    if kind is Adjacency:
        return Adjacency(str(value))
    if kind is int:
        return int(str(value))
    if kind == Multiplier and isinstance(value, str) and value != "inf":
        return NoiseRule(value)
    return number_from_json(value)


_FOLLOWED = "and how many are within the clip, which follows it"


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number:,} steps"


@dataclass(frozen=True)
class NoisySum(Mechanism):
    """Contributions clipped to `clip` are summed and Gaussian noise is added to the sum."""

    clip: float
    noise_multiplier: Multiplier

    def __post_init__(self) -> None:
        CLIP.check("clip", self.clip)
        if not isinstance(self.noise_multiplier, NoiseRule):
            NOISE.check_or_zero("noise_multiplier", self.noise_multiplier)

    @property
    def rule(self) -> NoiseRule | None:
        return self.noise_multiplier if isinstance(self.noise_multiplier, NoiseRule) else None

    @property
    def multiplier(self) -> float:
        """The noise multiplier as a number; a plan that was not calibrated has none."""
        if isinstance(self.noise_multiplier, NoiseRule):
            raise PlanError(
                f"{self.name}: the noise is still to be calibrated ({self.noise_multiplier.value})"
            )
        return self.noise_multiplier

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on each coordinate of the sum."""
        return self.clip * self.multiplier

    @property
    def sensitivity(self) -> float:
        """How far the sum can move between neighbours."""
        return self.adjacency.reach * self.clip

    @property
    def noise_summary(self) -> str:
        return f"{self.multiplier:.4g} x clip {self.clip:g}"

    def with_noise(self, noise_multiplier: float) -> Self:
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)


@dataclass(frozen=True)
class BatchedSteps(NoisySum):
    """DP-SGD over batches; every step's sum is divided by the public batch size."""

    records: int
    batch: int
    epochs: int
    adjacency: Adjacency

    def __post_init__(self) -> None:
        super().__post_init__()
        RECORDS.check("records", self.records)
        Range(1, self.records, whole=True).check("batch", self.batch)
        EPOCHS.check("epochs", self.epochs)

    @property
    def steps(self) -> int:
        """Steps of one round."""
        return self.epochs * math.ceil(self.records / self.batch)

    @property
    def denominator(self) -> int:
        """The expected batch, a constant, also for a shorter one: the realised size would be data."""
        return self.batch


@mechanism("poisson-steps")
@dataclass(frozen=True)
class PoissonSteps(BatchedSteps):
    """Batches into which every record comes by a coin of its own."""

    @property
    def rate(self) -> float:
        """Probability that a record is in a batch."""
        return self.batch / self.records

    @property
    def summary(self) -> str:
        batches = f"{self.batch:,} of {self.records:,} records in expectation"
        return f"{_steps(self.steps)} on Poisson batches, {batches}"

    @property
    def event(self) -> DpEvent:
        return events.repeated(events.poisson_gaussian(self.rate, self.multiplier), self.steps)


@mechanism("shuffled-steps")
@dataclass(frozen=True)
class ShuffledSteps(BatchedSteps):
    """Disjoint batches of a shuffled order: every record once an epoch, nothing amplified."""

    @property
    def summary(self) -> str:
        return f"{_steps(self.steps)} on shuffled batches, {self.batch:,} of {self.records:,} records"

    @property
    def event(self) -> DpEvent:
        if not self.multiplier > 0:
            return dp.NonPrivateDpEvent()
        return events.repeated(events.ShuffledEpochDpEvent(self.multiplier), self.epochs)


@mechanism("full-batch-steps")
@dataclass(frozen=True)
class FullBatchSteps(NoisySum):
    """One step an epoch over all records, divided by their public number."""

    records: int
    epochs: int
    adjacency: Adjacency

    def __post_init__(self) -> None:
        super().__post_init__()
        RECORDS.check("records", self.records)
        EPOCHS.check("epochs", self.epochs)

    @property
    def steps(self) -> int:
        """Steps of one round."""
        return self.epochs

    @property
    def denominator(self) -> int:
        """The public number of records."""
        return self.records

    @property
    def summary(self) -> str:
        return f"{_steps(self.steps)} on all {self.records:,} records"

    @property
    def event(self) -> DpEvent:
        return events.repeated(events.gaussian(self.multiplier), self.steps)


@mechanism("full-batch-sketch")
@dataclass(frozen=True)
class FullBatchSketch(NoisySum):
    """One noisy sum of per-record gradients, each projected at random (publicly) and then clipped."""

    records: int
    dimensions: int
    adjacency: Adjacency

    def __post_init__(self) -> None:
        super().__post_init__()
        RECORDS.check("records", self.records)
        DIMENSIONS.check("dimensions", self.dimensions)

    @property
    def denominator(self) -> int:
        """The public number of records."""
        return self.records

    def multiplier_for(self, length: float) -> float:
        """The multiplier whose noise is so long on the mean sketch, in clips."""
        return float(length * self.records / math.sqrt(self.dimensions))

    @property
    def summary(self) -> str:
        return (
            f"the sum of the gradients of all {self.records:,} records, each projected to "
            f"{self.dimensions} numbers and clipped"
        )

    @property
    def event(self) -> DpEvent:
        return events.gaussian(self.multiplier)


@mechanism("noisy-scores")
@dataclass(frozen=True)
class NoisyScores(NoisySum):
    """How well models do: scores in [0, 1] of `units` held-out records (or clients), summed with noise.

    A half is taken off every score before they are summed and given back to the sum, `units` times: a
    constant. What a unit adds then has a size of at most one half, and one that is silenced adds as much as
    one that is right half the time. That takes half the noise of summing the scores as they are.
    """

    units: int
    adjacency: Adjacency

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip != HALF:
            raise RangeError(f"clip: {self.clip} is not allowed for scores, {HALF} is")
        RECORDS.check("units", self.units)

    @property
    def denominator(self) -> int:
        """The public number of units that are scored."""
        return self.units

    @property
    def summary(self) -> str:
        return f"how well the models do: the sum of {self.units:,} held-out scores between 0 and 1"

    @property
    def event(self) -> DpEvent:
        return events.gaussian(self.multiplier)


@dataclass(frozen=True)
class NoisySelection(Mechanism):
    """A model chosen by the exponential mechanism; `epsilon` is the range of its log-probabilities."""

    epsilon: float
    adjacency: Adjacency

    def __post_init__(self) -> None:
        if not (math.isinf(self.epsilon) and self.epsilon > 0):  # an infinite one asks for no privacy
            SELECTION_EPSILON.check("selection epsilon", self.epsilon)

    @property
    def noise_summary(self) -> str:
        return f"Gumbel, scale {self.gumbel_scale:.3g}"

    @property
    @abstractmethod
    def reach(self) -> float:
        """How far apart neighbours can move two counts."""

    @property
    def gumbel_scale(self) -> float:
        """Scale of the Gumbel noise on each count."""
        return self.reach / self.epsilon


@mechanism("private-selection")
@dataclass(frozen=True)
class PrivateSelection(NoisySelection):
    """The model with the most correct records.

    Counts have sensitivity 1 and, under zero-out and add-remove, all move the same way, which allows half the
    noise that replace-one needs.
    """

    @property
    def reach(self) -> float:
        return self.adjacency.reach

    @property
    def summary(self) -> str:
        return "the model that fits best, by the exponential mechanism on counts of records it gets right"

    @property
    def event(self) -> DpEvent:
        return events.selection(self.gumbel_scale)


@mechanism("accuracy-selection")
@dataclass(frozen=True)
class AccuracySelection(NoisySelection):
    """The published selection: by train accuracy, whose denominator moves with the data.

    Taking a record away can then raise one accuracy and lower another, so nothing is saved over replacement:
    the noise, on the scale of counts, is 2 / epsilon and the range is epsilon under every adjacency.
    """

    @property
    def reach(self) -> float:
        return 2.0

    @property
    def summary(self) -> str:
        return "the model that fits best, by the exponential mechanism on train accuracy, as published"

    @property
    def event(self) -> DpEvent:
        return events.selection(self.gumbel_scale, monotone=False)


@mechanism("lowest-loss")
@dataclass(frozen=True)
class LowestLoss(Mechanism):
    """The model with the lowest loss, told as it is: not private, whatever else is done."""

    adjacency: Adjacency

    @property
    def summary(self) -> str:
        return "the model with the lowest loss, as it is"

    @property
    def event(self) -> DpEvent:
        return dp.NonPrivateDpEvent()


@mechanism("sampled-sum")
@dataclass(frozen=True)
class SampledSum(NoisySum):
    """Noisy sums of the updates of Poisson-sampled units: one (DP-FedAvg, a group of DP-OGL), or several.

    With several, a unit adds one vector of norm at most `clip` to one of them, so all together move by `clip`
    (DP-IFCA without rebalancing).
    """

    rate: float
    adjacency: Adjacency

    def __post_init__(self) -> None:
        super().__post_init__()
        RATE.check("rate", self.rate)

    @property
    def summary(self) -> str:
        return f"the sum of the updates of a Poisson sample, rate {self.rate:.3g}"

    @property
    def event(self) -> DpEvent:
        return events.poisson_gaussian(self.rate, self.multiplier)


@mechanism("drafted-sum")
@dataclass(frozen=True)
class DraftedSum(SampledSum):
    """As published for DP-OGL+: sampled units show each other what they learnt before anything is clipped.

    Each may then react to one unit's presence, so the sum moves by far more than its clip, and whoever shares
    the drafts sees updates without noise: nothing bounds what that tells.
    """

    @property
    def summary(self) -> str:
        return f"the sum of updates that a Poisson sample, rate {self.rate:.3g}, has shown each other"

    @property
    def event(self) -> DpEvent:
        return dp.NonPrivateDpEvent()


@mechanism("routed-sums")
@dataclass(frozen=True)
class RoutedSums(NoisySum):
    """A Poisson cohort releases a noisy histogram of its choices, then one noisy sum for each cluster.

    A unit adds one vector of norm at most `clip` to exactly one of the sums, so all sums together move by
    `clip`. Histogram and sums come from the same sample: their composition is amplified once.
    """

    histogram_ratio: float
    rate: float
    adjacency: Adjacency

    def __post_init__(self) -> None:
        super().__post_init__()
        RATIO.check("histogram_ratio", self.histogram_ratio)
        RATE.check("rate", self.rate)

    @property
    def histogram_multiplier(self) -> float:
        """Standard deviation of the noise on each count."""
        return self.histogram_ratio * self.multiplier

    @property
    def summary(self) -> str:
        return f"counts and sums by cluster of a Poisson sample, rate {self.rate:.3g}"

    @property
    def event(self) -> DpEvent:
        return events.poisson_gaussians(self.rate, [self.histogram_multiplier, self.multiplier])


COUNT_REACH = 0.5
"""How far one unit that joins moves the count of updates within the clip."""


class Tracked(NoisySum):
    """Sums that come with a noisy count of the updates within the clip, so that the next clip can follow.

    Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS
    2021. A sampled unit adds 1/2 to the count if its update is within the round's clip, and -1/2 if not: its
    joining moves the count by 1/2, its replacement by 1. `clip` is that of the first round. The next ones are
    functions of what was released, and noise scales with the clip of its own round, so every round costs the
    same. Sums and count come from one sample and are amplified once.
    """

    tracking_ratio: float

    def __post_init__(self) -> None:
        super().__post_init__()
        RATIO.check("tracking_ratio", self.tracking_ratio)

    @property
    def tracking_multiplier(self) -> float:
        """Standard deviation of the noise on the count, over how far one unit moves it."""
        return self.tracking_ratio * self.multiplier

    @property
    def count_std(self) -> float:
        """Standard deviation of the noise on the count."""
        return COUNT_REACH * self.tracking_multiplier

    def at(self, clip: float) -> Self:
        """The release of a round with this clip: sensitivity and noise change together."""
        return dataclasses.replace(self, clip=clip)


@mechanism("tracked-sum")
@dataclass(frozen=True)
class TrackedSum(SampledSum, Tracked):
    """Sums of a Poisson sample and the count that the next clip follows."""

    tracking_ratio: float

    @property
    def summary(self) -> str:
        return f"{super().summary}, {_FOLLOWED}"

    @property
    def event(self) -> DpEvent:
        return events.poisson_gaussians(self.rate, [self.tracking_multiplier, self.multiplier])


@mechanism("tracked-routed-sums")
@dataclass(frozen=True)
class TrackedRoutedSums(RoutedSums, Tracked):
    """Histogram and routed sums of a Poisson cohort, and the count that the next clip follows."""

    tracking_ratio: float

    @property
    def summary(self) -> str:
        return f"{super().summary}, {_FOLLOWED}"

    @property
    def event(self) -> DpEvent:
        parts = [self.histogram_multiplier, self.tracking_multiplier, self.multiplier]
        return events.poisson_gaussians(self.rate, parts)


@mechanism("rebalanced-sums")
@dataclass(frozen=True)
class RebalancedSums(NoisySum):
    """The published rebalancing rule: noisy one-hot identifiers, refilled clusters, noisy cluster sums.

    A cohort of exactly `cohort` of `clients` is drawn without replacement and every comparison inside a
    round is between cohorts that differ in one slot: an identifier moves by sqrt(2), one sum by twice the
    clip. With one client taken away there must be enough left for a cohort. `identifier_ratio` is the
    identifiers' noise over half the sums' multiplier, which the publication calls sigma_s and sigma_theta.
    """

    identifier_ratio: float
    clients: int
    cohort: int
    adjacency: Adjacency

    def __post_init__(self) -> None:
        super().__post_init__()
        RATIO.check("identifier_ratio", self.identifier_ratio)
        # A population that lost a client must still fill the cohort, or the sample's size would tell.
        spare = 1 if self.adjacency is Adjacency.ADD_REMOVE else 0
        RECORDS.check("clients", self.clients - spare)
        Range(1, self.clients - spare, whole=True).check("cohort", self.cohort)

    @property
    def rate(self) -> float:
        """Probability that a client is in the cohort."""
        return self.cohort / self.clients

    @property
    def identifier_multiplier(self) -> float:
        """Standard deviation of the noise on each entry of a one-hot identifier."""
        return self.identifier_ratio * self.multiplier / 2

    @property
    def summary(self) -> str:
        return f"identifiers and sums by cluster of {self.cohort:,} of {self.clients:,} clients"

    @property
    def event(self) -> DpEvent:
        # Identifiers are points at mutual distance sqrt(2), as contributions bounded by sqrt(1/2) would be.
        identifiers = events.gaussian(math.sqrt(2) * self.identifier_multiplier)
        pair = dp.ComposedDpEvent([identifiers, events.gaussian(self.multiplier)])
        return dp.SampledWithoutReplacementDpEvent(self.clients, self.cohort, pair)
