"""What algorithms share whose unit is a whole client: the plan, the local training and the server's step.

In a round every client is sampled by its own coin, trains without noise from what it was sent, and its whole
update is clipped. The trusted server sums updates, adds noise, divides by a public number and takes a step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, TypeVar

import numpy as np
from pydantic import Field

from coterie.algorithms.protocol import (
    Algorithm,
    Assignment,
    Choice,
    Cohort,
    CohortJob,
    Floats,
    LocalTraining,
    Models,
    Opened,
    OwnChoice,
    Parts,
    PublicFacts,
    Rounds,
    Sketch,
    State,
    Sums,
    ask,
)
from coterie.algorithms.settings import PRIVATE, AlgorithmSettings, Rate, Ratio, StepSize
from coterie.errors import InputError
from coterie.privacy import Mechanism, PlannedRelease, PrivacyPlan, Unit
from coterie.privacy.plans import SUMS, CohortReleases, client_plan
from coterie.privacy.ranges import CLIP
from coterie.settings import Settings

ADAPTIVE = "the clip follows a noisy count of the updates within it, which is charged with the sums"
TUNING = "hyper-parameters chosen by trying them on private data are not accounted for"


class AdaptiveClip(Settings):
    """A clip that follows a quantile of the updates' norms, by a noisy count that every round releases.

    Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS
    2021. `privacy.clip` is where it begins; it never leaves the range that is allowed there.
    """

    quantile: float = Field(0.5, ge=0, le=1, description="share of updates that the clip should leave whole")
    rate: float = Field(
        0.2, gt=0, le=10, description="how fast the logarithm of the clip follows, in a round"
    )
    count_ratio: Annotated[Ratio, PRIVATE] = Field(
        8.0, description="noise of the count over that of the sums, both relative"
    )

    def following(self, clip: float, within: float, expected: float) -> float:
        """The next clip: from noisy halves and the public number of clients that a round expects."""
        share = min(max(within / expected + 0.5, 0.0), 1.0)
        # Without bounds a clip would fall for ever where all updates are zeros, and grow where all are long.
        return CLIP.nearest(clip * math.exp(-self.rate * (share - self.quantile)))


@dataclass(frozen=True)
class ClientLevelState(State):
    """What every algorithm whose unit is a client carries on: models, and a clip that follows a count."""

    models: Models
    clip: float | None = field(default=None, kw_only=True)

    @property
    def parts(self) -> Parts | None:
        """What is not released like the rest of the model, if anything."""
        return None


C = TypeVar("C", bound=ClientLevelState)


class ClientLevelSettings(AlgorithmSettings):
    """Options of every algorithm whose unit is a client."""

    rate: Rate = Field(0.1, description="probability that a client takes part in a round")
    server_step: StepSize = Field(1.0, description="step size of the server")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of a client's local steps")
    adaptive_clip: AdaptiveClip | None = Field(
        None,
        description="null, or {quantile: 0.5, ...}: the clip follows that quantile of the updates' norms",
    )


class ClientLevel(Algorithm[C]):
    """An algorithm that asks for sums of a sample of clients."""

    unit = Unit.CLIENT
    settings: ClientLevelSettings
    choice: ClassVar[Choice] = Choice.GIVEN
    caveats: ClassVar[tuple[str, ...]] = ()

    def local_training(self) -> LocalTraining:
        own = self.schedule
        return LocalTraining(own.epochs, own.batch, own.lr, self.settings.momentum)

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        if self.privacy.budgets:
            raise InputError(
                f"privacy.budgets: {min(self.privacy.budgets)} has one of its own, but clients who are "
                "sampled alike spend alike; allowed for unit client: privacy.epsilon and privacy.delta"
            )
        followed = () if self.settings.adaptive_clip is None else (ADAPTIVE,)
        first, caveats = self.first_releases(facts), (TUNING, *followed, *self.caveats)
        return client_plan(self.release(facts), self.schedule.rounds - bool(first), caveats, first)

    def first_releases(self, facts: PublicFacts) -> Sequence[PlannedRelease]:
        """What is released in a first round that does not train; none, unless an algorithm has one."""
        return ()

    @property
    def about(self) -> CohortReleases:
        """What may be released about a sample of clients."""
        following, privacy = self.settings.adaptive_clip, self.privacy
        ratio = following.count_ratio if following else None
        return CohortReleases(self.settings.rate, privacy.clip, privacy.adjacency, ratio)

    def release(self, facts: PublicFacts) -> Mechanism:
        """What one round releases."""
        return self.about.sums()

    def first_clip(self) -> float | None:
        """The clip of the first round, where it will follow a count."""
        return None if self.settings.adaptive_clip is None else self.privacy.clip

    def opened(self, state: C) -> Rounds[Opened]:
        """Open the cohort of a round."""
        job = CohortJob(
            *(state.clients, state.models, self.local_training(), self.choice),
            start_of=self.start_of(state),
            parts=state.parts,
            clip=state.clip,
            sketch=self.sketch(state),
        )
        return (yield from ask(Cohort(SUMS, job), Opened))

    def start_of(self, state: C) -> Mapping[str, int] | None:
        """The model from which each client starts, where clients are told one."""
        return None

    def sketch(self, state: C) -> Sketch | None:
        """How clients find their model by a sketch of their gradient, where they do."""
        return None

    def moved(self, state: C, sums: Sums, divisors: Floats | float) -> C:
        """The state after a step by noisy sums over public divisors, which broadcast over the models.

        Where the clip follows a count, the next one is a function of what was released, too.
        """
        models = (state.models + self.settings.server_step * sums.rows.value / divisors).astype(np.float32)
        clip, following = state.clip, self.settings.adaptive_clip
        if following and clip is not None and sums.within is not None:
            clip = following.following(clip, sums.within.value, self.expected(state))
        return replace(state, round=state.round + 1, models=models, clip=clip)

    def models(self, state: C) -> Assignment | OwnChoice:
        if state.parts is None:
            return Assignment(state.models, dict.fromkeys(state.clients, 0))
        return OwnChoice(state.models, self.choice, self.local_training(), state.parts)

    def expected(self, known: PublicFacts | State) -> float:
        """How many clients a round is expected to sample: a public number."""
        return self.settings.rate * len(known.clients)
