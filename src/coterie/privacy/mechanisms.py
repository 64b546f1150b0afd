"""What one unit releases in one round: sampling, clip, noise, denominator and event in one frozen object.

Everything that decides the cost of a release stands together here, so that execution and accounting cannot
drift apart, and what differs between mechanisms is a method of theirs: how long a release is, how many
gradients it takes, how it is described, charged and written. `noise_multiplier` always means the standard
deviation of the noise on the clipped SUM divided by the clip, under every adjacency.

A family each: `record_sums` trains on one client's records, `selections` choose between models by them,
`cohort_sums` add up what a sample of clients learnt. Scores of held-out units are here.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, ClassVar, Self, TypeVar, cast, get_args, get_type_hints

from dp_accounting import DpEvent

from coterie.privacy import events
from coterie.privacy.errors import PlanError
from coterie.privacy.plain import Json, MalformedError, Plain, record
from coterie.privacy.ranges import CLIP, NOISE, RECORDS, Range
from coterie.privacy.units import Adjacency, Unit


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


class Mechanism(Plain, ABC):
    """One kind of release; subclasses are frozen dataclasses known to the registry by name.

    Numbers whose annotation names a range are checked against it. Of a class it is known
        tag: its name in plans on disk;
        kind: what it serves for, as a request that needs another kind of release says it;
        words: what one use of it lets out, with {0} for itself and {1} for the unit;
        sampled: whether chance decides whose contribution is in it;
        at_sites: whether a site that trusts nobody releases it on its own.
    """

    called = "mechanism"
    kind: ClassVar[str]
    tag: ClassVar[str]
    words: ClassVar[str]
    sampled: ClassVar[bool] = False
    at_sites: ClassVar[bool] = False
    adjacency: Adjacency

    def __post_init__(self) -> None:
        for name, allowed, beside in _ranges(type(self)):
            if not isinstance(value := getattr(self, name), beside):
                allowed.check(name, value)

    @property
    def name(self) -> str:
        """As plans on disk know it."""
        return self.tag

    @property
    @abstractmethod
    def event(self) -> DpEvent:
        """What one use of the mechanism costs."""

    def summary(self, unit: Unit) -> str:
        """What one use of it lets out of such units, in plain words."""
        return self.words.format(self, unit)

    @property
    def noise_summary(self) -> str:
        """How much noise hides one unit."""
        return "none"

    @property
    def rule(self) -> NoiseRule | None:
        """The rule by which calibration must find the noise, or None when the noise is known."""
        return None

    @property
    def multiplier(self) -> float | None:
        """The noise multiplier as a number; None where the noise is not Gaussian."""
        return None

    @property
    def steps(self) -> int:
        """Releases of which one use is composed."""
        return 1

    def length(self, parameters: int) -> int:
        """How many numbers one use releases, of a model with so many parameters."""
        return parameters

    def gradients(self, times: int, learning: int) -> int:
        """Per-record gradients of so many uses, where all members together take `learning` to learn once."""
        return 0

    def with_noise(self, noise_multiplier: float) -> Self:
        """The same mechanism with this much noise."""
        raise PlanError(f"{self.name}: this mechanism has no noise multiplier to set")

    def to_json(self) -> Json:
        return {"mechanism": self.name, **super().to_json()}

    @classmethod
    def read(cls, data: object) -> Self:
        found = dict(data) if isinstance(data, Mapping) else {}
        name = str(found.pop("mechanism", None))
        if name not in _MECHANISMS:
            raise MalformedError(f"{name!r} is not known; allowed are {', '.join(sorted(_MECHANISMS))}")
        return cast(Self, _MECHANISMS[name].named(name, found))

    @classmethod
    def named(cls, name: str, fields: Json) -> Self:
        """The mechanism of that name with these fields."""
        return cast(Self, record(cls).read(fields))


_MECHANISMS: dict[str, type[Mechanism]] = {}
_M = TypeVar("_M", bound=Mechanism)


def mechanism(*names: str) -> Callable[[type[_M]], type[_M]]:
    """Register a mechanism under the name, or names, that plans on disk use."""

    def register(cls: type[_M]) -> type[_M]:
        cls.tag = names[0]
        _MECHANISMS.update(dict.fromkeys(names, cls))
        return cls

    return register


@cache
def _ranges(kind: type[Mechanism]) -> list[tuple[str, Range, tuple[type, ...]]]:
    """The numbers with a range, and what else may stand in the place of each."""
    notes = get_type_hints(kind, include_extras=True).items()
    return [
        (name, note, tuple({*get_args(hint.__origin__)} - {int, float}))
        for name, hint in notes
        for note in getattr(hint, "__metadata__", ())
        if isinstance(note, Range)
    ]


@dataclass(frozen=True)
class NoisySum(Mechanism):
    """Contributions clipped to `clip` are summed and Gaussian noise is added to the sum."""

    clip: Annotated[float, CLIP]
    noise_multiplier: Annotated[Multiplier, dataclasses.replace(NOISE, besides=0)]

    @property
    def rule(self) -> NoiseRule | None:
        return self.noise_multiplier if isinstance(self.noise_multiplier, NoiseRule) else None

    @property
    def multiplier(self) -> float:
        """The noise multiplier as a number; a plan that was not calibrated has none."""
        if isinstance(self.noise_multiplier, NoiseRule):
            rule = self.noise_multiplier.value
            raise PlanError(f"{self.name}: the noise is still to be calibrated ({rule})")
        return self.noise_multiplier

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on each coordinate of the sum."""
        return self.clip * self.multiplier

    @property
    def noise_summary(self) -> str:
        return f"{self.multiplier:.4g} x clip {self.clip:g}"

    @property
    def event(self) -> DpEvent:
        return events.repeated(events.gaussian(self.multiplier), self.steps)

    def with_noise(self, noise_multiplier: float) -> Self:
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)


@mechanism("noisy-scores")
@dataclass(frozen=True)
class NoisyScores(NoisySum):
    """How well models do: scores in [0, 1] of `units` held-out records (or clients), summed with noise.

    A half is taken off every score before they are summed and given back to the sum, `units` times: a
    constant. What a unit adds then has a size of at most one half, and one that is silenced adds as much as
    one that is right half the time. That takes half the noise of summing the scores as they are.
    """

    kind = "a score"
    clip: Annotated[float, Range(HALF, HALF)]
    units: Annotated[int, RECORDS]
    adjacency: Adjacency

    words = "how well the models do: the sum of {0.units:,} held-out scores between 0 and 1"
