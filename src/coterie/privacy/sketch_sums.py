"""What all clients release once, before training, so that clusters can be found: sums of short vectors."""

from dataclasses import dataclass, field
from typing import Annotated, Self, cast

from dp_accounting import DpEvent

from coterie.privacy import events
from coterie.privacy.cohort_sums import CohortSums, PoissonSample
from coterie.privacy.mechanisms import mechanism
from coterie.privacy.plain import Json, MalformedError, record
from coterie.privacy.ranges import CLIENTS, DIMENSIONS, RATIO
from coterie.privacy.units import Unit

CLIENTS_PER_NOISE = 190.0
"""Clients for each unit of noise on second moments at which a cluster of a fourteenth of them is still found
(`benchmarks/client_clusters.py`)."""


@mechanism("sketch-sum")
@dataclass(frozen=True)
class SketchSums(CohortSums):
    """A noisy sum over all clients of what each derives from the sketch of its own gradient.

    Everyone takes part, so nothing is amplified. What a client adds is a vector of norm at most `clip`,
    whatever its sketch is: moments of it, features of it, or the component that it is nearest to.

    Args:
        numbers: of which a contribution consists.
        clients: how many there are: public.
        ratio: of this release's multiplier to the `noise_multiplier` that all sketches of a plan share.
        about: what a client adds, in words.
    """

    numbers: Annotated[int, DIMENSIONS] = field(kw_only=True)
    clients: Annotated[int, CLIENTS] = field(kw_only=True)
    ratio: Annotated[float, RATIO] = field(kw_only=True)
    about: str = field(kw_only=True)

    sampled = False

    @property
    def name(self) -> str:
        return self.tag

    @property
    def multiplier(self) -> float:
        return self.ratio * super().multiplier

    @property
    def telling_noise(self) -> float:
        """The `noise_multiplier` from which more noise begins to lose clusters."""
        return self.clients / CLIENTS_PER_NOISE

    def summary(self, unit: Unit) -> str:
        return f"the sum over all {self.clients:,} clients of {self.about} ({self.numbers:,} numbers)"

    @property
    def event(self) -> DpEvent:
        return self.sampling.event(events.gaussian(self.multiplier))

    def length(self, parameters: int) -> int:
        return self.numbers

    @property
    def noise_summary(self) -> str:
        return f"{self.multiplier:.4g} x clip {self.clip:g}"

    def gradients(self, times: int, learning: int) -> int:
        return times * self.clients

    def to_json(self) -> Json:
        left_out = ("histogram_ratio", "identifier_ratio", "tracking_ratio", "drafted", "rate")
        return {key: value for key, value in super().to_json().items() if key not in left_out}

    @classmethod
    def named(cls, name: str, fields: Json) -> Self:
        if "rate" in fields:
            raise MalformedError(f"{name}: unknown field: rate; everyone takes part")
        rest: Json = dict.fromkeys(("histogram_ratio", "identifier_ratio", "tracking_ratio"))
        return cast(Self, record(cls).read({**rest, "drafted": False, **fields, "sampling": {"rate": 1.0}}))


EVERYONE = PoissonSample(1.0)
