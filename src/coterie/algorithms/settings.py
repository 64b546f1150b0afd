"""Sections of the experiment file that algorithms read: algorithm, privacy and schedule."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from coterie.errors import InputError
from coterie.privacy import Adjacency, Mode, PersonBounds, Unit
from coterie.privacy.ranges import (
    CLIENTS,
    CLIP,
    DELTA,
    EPOCHS,
    EPSILON,
    NOISE,
    PULL,
    RATE,
    RATIO,
    RECORDS,
    RECORDS_PER_PERSON,
    ROUNDS,
    STEP_SIZE,
)
from coterie.settings import Acts, Settings, within

PRIVATE = Acts("privacy.epsilon below .inf", lambda _, run: run.privacy.promises)
"""Of options that decide about noise, or how it is shared out."""
PERSONS = Acts("privacy.unit person", lambda own, _: own.unit is Unit.PERSON)
"""Of options that bound how much of the data is one person's."""

Epsilon = Annotated[float, within(EPSILON)]
Delta = Annotated[float, within(DELTA)]
Clip = Annotated[float, within(CLIP)]
NoiseMultiplier = Annotated[float, within(NOISE, 0)]
Rate = Annotated[float, within(RATE)]
Ratio = Annotated[float, within(RATIO)]
StepSize = Annotated[float, within(STEP_SIZE)]
# Numbers of a file that decide what noise is drawn, in the ranges of `coterie.privacy.ranges`.
Pull = Annotated[float, within(PULL, 0)]


class AlgorithmSettings(Settings):
    """Options of an algorithm; one that has more than a name subclasses this."""

    name: str = Field(
        "r-dpcfl",
        description="r-dpcfl | global | local | oracle | mr-mtl | dp-ifca | km-cdpfl | rc-dpfl (mode paper); "
        "unit worker: dp-ogl | dp-ogl-plus | dp-fedavg; unit client has others",
    )


class AugmentationSettings(Settings):
    """Random views of a record, averaged before its gradient is clipped."""

    copies: int = Field(4, ge=1, le=64, description="views of a record in every step")
    kinds: tuple[Literal["shift", "flip"], ...] = Field(
        ("shift",), min_length=1, description="shift (by up to `pixels`) and flip (left to right), or one"
    )
    pixels: Annotated[int, Acts("schedule.augmentation.kinds shift", lambda own, _: "shift" in own.kinds)] = (
        Field(2, ge=1, description="largest shift along each axis")
    )


class Schedule(Settings):
    """How long and how fast clients learn."""

    rounds: int = Field(30, ge=1, le=ROUNDS.most, description="rounds of the whole run; auto: by recipe")
    epochs: Annotated[
        int,
        Acts("algorithm.iterations null", lambda _, run: getattr(run.algorithm, "iterations", None) is None),
    ] = Field(1, ge=1, le=EPOCHS.most, description="passes over a client's records in a round")
    batch: int = Field(
        24, ge=1, le=RECORDS.most, description="expected records in a step (Poisson batches); auto: by recipe"
    )
    lr: StepSize = Field(0.5, description="step size of a client; auto: by recipe")
    averaging: Annotated[float, Acts("schedule.rounds 2 or more", lambda own, _: own.rounds > 1)] = Field(
        0.0,
        ge=0,
        le=1000,
        description="0: the last models serve; 8, say: their mean over rounds, where later ones weigh more; "
        "auto: by recipe",
    )
    aggregation: Annotated[
        Literal["mean", "filtered-mean", "median", "trimmed-mean"],
        Acts(
            "privacy.unit record and an algorithm that averages released updates (not local, mr-mtl)",
            lambda _, run: run.privacy.unit is Unit.RECORD and run.algorithm.name not in ("local", "mr-mtl"),
        ),
    ] = Field(
        "mean",
        description="mean | filtered-mean | median | trimmed-mean of a cluster's updates; all but mean "
        "resist a few that lie",
    )
    augmentation: AugmentationSettings | None = Field(
        None, description="null, or {copies: 4, kinds: [shift, flip]}: views averaged before the clip"
    )


class ClientBudgetSettings(Settings):
    """A budget of one client's own."""

    epsilon: Epsilon = Field(description="epsilon of this client's records")
    delta: Delta | None = Field(None, lt=1, description="delta; null: as for everyone")


class PrivacySettings(Settings):
    """The promise: for which unit, how strong, counted how."""

    unit: Unit = Field(Unit.RECORD, description="what one individual is: record | person | client | worker")
    epsilon: Epsilon = Field(8.0, description="budget of every unit; .inf trains without privacy")
    delta: Delta | None = Field(
        None, lt=1, description="null: a tenth of one over the number of units, rounded down"
    )
    adjacency: Adjacency = Field(
        Adjacency.ZERO_OUT, description="zero-out | replace-one | add-remove (default for clients)"
    )
    accountant: Literal["rdp", "pld"] = Field("rdp", description="rdp | pld (tighter, slower)")
    mode: Mode = Field(Mode.SOUND, description="sound | paper (a publication's own arithmetic, labelled)")
    budgets: Mapping[str, ClientBudgetSettings] = Field(
        default_factory=dict, description="budgets of single clients, by name: {name: {epsilon: 2}}"
    )
    clip: Annotated[
        Clip, Acts("algorithm.clip null", lambda _, run: getattr(run.algorithm, "clip", None) is None)
    ] = Field(1.0, description="largest norm of one unit's contribution; auto: by recipe")
    records_per_person: Annotated[int, within(RECORDS_PER_PERSON), PERSONS] = Field(
        4, description="unit person: records of one that count at a client; others are dropped by chance"
    )
    clients_per_person: Annotated[int, within(CLIENTS), PERSONS] = Field(
        1, description="unit person: clients at which one may have records; what they cost it is composed"
    )

    @property
    def persons(self) -> PersonBounds | None:
        """How much of the data may be one person's, where that is the unit."""
        if self.unit is not Unit.PERSON:
            return None
        return PersonBounds(self.records_per_person, self.clients_per_person)

    @property
    def promises(self) -> bool:
        """Whether anybody is promised anything."""
        own = (budget.epsilon for budget in self.budgets.values())
        return any(map(math.isfinite, (self.epsilon, *own)))

    def epsilon_of(self, client: str) -> float:
        """The budget of one client."""
        return self.budgets.get(client, self).epsilon

    def delta_of(self, client: str, default: float) -> float:
        """Delta of one client: its own, else everyone's, else the default."""
        given = (self.budgets.get(client, self).delta, self.delta, default)
        return next(delta for delta in given if delta is not None)

    def check_budgets(self, clients: Sequence[str]) -> None:
        """Refuse a budget for somebody who is not there."""
        unknown = set(self.budgets) - set(clients)
        if unknown:
            raise InputError(
                f"privacy.budgets: no client is called '{min(unknown)}'; the clients are "
                f"{clients[0]} to {clients[-1]}"
            )

    @model_validator(mode="before")
    @classmethod
    def _clients_come_and_go(cls, values: Any) -> Any:
        """A whole client is added or removed, unless the file says otherwise."""
        if isinstance(values, Mapping) and str(values.get("unit")) == Unit.CLIENT:
            return {"adjacency": Adjacency.ADD_REMOVE, **values}
        return values

    @model_validator(mode="after")
    def _records_are_counted_in_public(self) -> Self:
        if self.unit.within_client and self.adjacency is Adjacency.ADD_REMOVE:
            raise ValueError(
                f"adjacency: add-remove would make the number of a client's {self.unit}s secret, but rates "
                f"and denominators use it; allowed for unit {self.unit}: zero-out, replace-one"
            )
        return self

    @model_validator(mode="after")
    def _publications_are_about_records(self) -> Self:
        if self.unit is Unit.PERSON and self.mode is Mode.PAPER:
            raise ValueError("mode: paper; no publication is about persons; allowed for unit person: sound")
        return self
