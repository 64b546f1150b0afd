"""What a secret sample of clients or workers releases: one type, by how it is sampled and what comes with it.

All parts of one release come from one sample, so their composition is amplified once.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Annotated, Self, TypeAlias, cast

import dp_accounting as dp
import numpy as np
from dp_accounting import DpEvent
from numpy.typing import NDArray

from coterie.privacy import events
from coterie.privacy.errors import PlanError
from coterie.privacy.mechanisms import NoisySum, mechanism
from coterie.privacy.plain import Json, MalformedError, record
from coterie.privacy.randomness import Floats
from coterie.privacy.ranges import RATE, RATIO, RECORDS, Range
from coterie.privacy.units import Adjacency, Unit

COUNT_REACH = 0.5
"""How far one unit that joins moves the count of updates within the clip."""
_SPREAD = 3.0
"""Standard deviations of a sample's size that are more than enough room for it."""


@dataclass(frozen=True)
class PoissonSample:
    """Every unit by a coin of its own, however many there are."""

    clients = None
    rate: float

    def __str__(self) -> str:
        return f"a Poisson sample, rate {self.rate:.3g}"

    def check(self, adjacency: Adjacency) -> None:
        RATE.check("rate", self.rate)

    def drawn(self, coins: Floats) -> NDArray[np.int64]:
        """The places of those who take part, by everyone's coin in (0, 1)."""
        return np.flatnonzero(coins < self.rate)

    def room(self, population: int) -> int:
        """For how many there is room at once: a function of public numbers, not of how many were drawn."""
        spread = (population * self.rate * (1.0 - self.rate)) ** 0.5
        return min(population, max(1, int(np.ceil(population * self.rate + _SPREAD * spread))))

    def event(self, release: DpEvent) -> DpEvent:
        return dp.PoissonSampledDpEvent(self.rate, release)


@dataclass(frozen=True)
class FixedSample:
    """Exactly `cohort` of `clients`, without replacement."""

    clients: int
    cohort: int

    def __str__(self) -> str:
        return f"{self.cohort:,} of {self.clients:,} clients"

    def check(self, adjacency: Adjacency) -> None:
        # A population that lost a client must still fill the cohort, or the sample's size would tell.
        spare = 1 if adjacency is Adjacency.ADD_REMOVE else 0
        RECORDS.check("clients", self.clients - spare)
        Range(1, self.clients - spare, whole=True).check("cohort", self.cohort)

    @property
    def rate(self) -> float:
        """Probability that a client is in the cohort."""
        return self.cohort / self.clients

    def drawn(self, coins: Floats) -> NDArray[np.int64]:
        """The places of those with the smallest coins."""
        return np.sort(np.argsort(coins, kind="stable")[: self.cohort])

    def room(self, population: int) -> int:
        """For how many there is room at once."""
        return self.cohort

    def event(self, release: DpEvent) -> DpEvent:
        return dp.SampledWithoutReplacementDpEvent(self.clients, self.cohort, release)


Sample: TypeAlias = PoissonSample | FixedSample

_OPTIONAL = ("histogram_ratio", "identifier_ratio", "tracking_ratio")
_PARTS: dict[tuple[str, ...], tuple[str, type[Sample], str]] = {
    (): ("sampled-sum", PoissonSample, "the sum of the updates of {}"),
    ("drafted",): ("drafted-sum", PoissonSample, "the sum of updates that {}, has shown each other"),
    ("histogram_ratio",): ("routed-sums", PoissonSample, "counts and sums by cluster of {}"),
    ("tracking_ratio",): ("tracked-sum", PoissonSample, "the sum of the updates of {}"),
    ("histogram_ratio", "tracking_ratio"): (
        "tracked-routed-sums",
        PoissonSample,
        "counts and sums by cluster of {}",
    ),
    ("identifier_ratio",): ("rebalanced-sums", FixedSample, "identifiers and sums by cluster of {}"),
}
"""What may come with the sums, by its fields: the name of that in plans, how it is sampled, in words."""


@mechanism(*(name for name, _, _ in _PARTS.values()))
@dataclass(frozen=True)
class CohortSums(NoisySum):
    """Noisy sums of the updates of a secret sample of units: one (DP-FedAvg, a group of DP-OGL), or several.

    With several, a unit adds one vector of norm at most `clip` to exactly one of them, so all together move
    by `clip` (DP-IFCA without rebalancing). What else may be released of the same sample:

    Args:
        clip: largest norm of an update; where a count tracks it, that of the first round.
        sampling: who takes part.
        histogram_ratio: a noisy histogram of the members' choices, with so many times the sums' multiplier.
        tracking_ratio: a noisy count of the updates within the clip, so that the next clip can follow
            (Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive Clipping",
            NeurIPS 2021). A unit adds 1/2 if its update is within the round's clip, and -1/2 if not: its
            joining moves the count by 1/2, its replacement by 1. The next clips are functions of what was
            released, and noise scales with the clip of its own round, so every round costs the same.
        identifier_ratio: noisy one-hot identifiers by which clusters are refilled, the published rebalancing
            rule. Every comparison inside a round is between cohorts that differ in one slot: an identifier
            moves by sqrt(2), one sum by twice the clip. The ratio is the identifiers' noise over half the
            sums' multiplier, which the publication calls sigma_s and sigma_theta.
        drafted: as published for DP-OGL+: units show each other what they learnt before anything is clipped.
            Each may then react to one unit's presence, so the sum moves by far more than its clip, and
            whoever shares the drafts sees updates without noise: nothing bounds what that tells.
    """

    kind, sampled = "one of a cohort", True
    histogram_ratio: Annotated[float | None, RATIO] = field(default=None, kw_only=True)
    identifier_ratio: Annotated[float | None, RATIO] = field(default=None, kw_only=True)
    sampling: Sample
    adjacency: Adjacency
    tracking_ratio: Annotated[float | None, RATIO] = field(default=None, kw_only=True)
    drafted: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampling.check(self.adjacency)
        if self.parts not in _PARTS or not isinstance(self.sampling, _PARTS[self.parts][1]):
            raise PlanError(f"{' and '.join(self.parts) or 'sums'} of {self.sampling}: no such release")

    @property
    def parts(self) -> tuple[str, ...]:
        """The fields of what comes with the sums."""
        found = tuple(name for name in _OPTIONAL if getattr(self, name) is not None)
        return (*found, "drafted") if self.drafted else found

    @property
    def name(self) -> str:
        return _PARTS[self.parts][0]

    @property
    def rate(self) -> float:
        """Probability that a unit is in the sample."""
        return self.sampling.rate

    @property
    def histogram_multiplier(self) -> float:
        """Standard deviation of the noise on each count; 0 where none is released."""
        return (self.histogram_ratio or 0.0) * self.multiplier

    @property
    def identifier_multiplier(self) -> float:
        """Standard deviation of the noise on each entry of a one-hot identifier; 0 where there is none."""
        return (self.identifier_ratio or 0.0) * self.multiplier / 2

    @property
    def tracking_multiplier(self) -> float:
        """Standard deviation of the noise on the count within the clip, over how far one unit moves it."""
        return (self.tracking_ratio or 0.0) * self.multiplier

    @property
    def count_std(self) -> float:
        """Standard deviation of the noise on the count within the clip."""
        return COUNT_REACH * self.tracking_multiplier

    def at(self, clip: float) -> Self:
        """The release of a round with this clip: sensitivity and noise change together."""
        return dataclasses.replace(self, clip=clip)

    def summary(self, unit: Unit) -> str:
        followed = ", and how many are within the clip, which follows it" if self.tracking_ratio else ""
        return _PARTS[self.parts][2].format(self.sampling) + followed

    @property
    def event(self) -> DpEvent:
        if self.drafted or not (self.parts or self.multiplier > 0):
            return dp.NonPrivateDpEvent()
        sums = events.gaussian(self.multiplier)
        if not self.parts:
            return self.sampling.event(sums)
        # Identifiers are points at mutual distance sqrt(2), as contributions bounded by sqrt(1/2) would be.
        noise = {
            "histogram_ratio": self.histogram_multiplier,
            "tracking_ratio": self.tracking_multiplier,
            "identifier_ratio": math.sqrt(2) * self.identifier_multiplier,
        }
        together = [events.gaussian(noise[part]) for part in self.parts]
        return self.sampling.event(dp.ComposedDpEvent([*together, sums]))

    def gradients(self, times: int, learning: int) -> int:
        return round(times * self.rate * learning)

    def to_json(self) -> Json:
        """Its fields as far as they say something, those of the sample among them."""
        found: Json = {}
        for key, value in super().to_json().items():
            if isinstance(value, dict):
                found.update(value)
            elif key != "drafted" and value is not None:
                found[key] = value
        return found

    @classmethod
    def named(cls, name: str, fields: Json) -> Self:
        parts, sample = next((parts, kind) for parts, (tag, kind, _) in _PARTS.items() if tag == name)
        of_sample = {each.name for each in dataclasses.fields(sample)}
        expected = {"clip", "noise_multiplier", "adjacency", *parts, *of_sample} - {"drafted"}
        odd = {*(fields.keys() ^ expected), *(part for part in parts if fields.get(part, "") is None)}
        if odd:
            raise MalformedError(f"{name}: missing or unknown fields: {', '.join(sorted(map(str, odd)))}")
        rest: Json = dict.fromkeys(_OPTIONAL) | fields | {"drafted": "drafted" in parts}
        rest["sampling"] = {key: rest.pop(key) for key in sorted(of_sample)}
        return cast(Self, record(cls).read(rest))
