"""What algorithms share whose unit is a whole client: the plan, the local training and the server's step.

In a round every client is sampled by its own coin, trains without noise from what it was sent, and its whole
update is clipped. The trusted server sums updates, adds noise, divides by a public number and takes a step.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from coterie.algorithms.protocol import Algorithm, LocalTraining, PublicFacts, S, State
from coterie.algorithms.settings import AlgorithmSettings, Rate, Ratio, StepSize
from coterie.errors import InputError
from coterie.privacy import Mechanism, PrivacyPlan, Released, Unit
from coterie.privacy.plans import CohortReleases, client_plan
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
    count_ratio: Ratio = Field(8.0, description="noise of the count over that of the sums, both relative")

    def following(self, clip: float, within: float, expected: float) -> float:
        """The next clip: from noisy halves and the public number of clients that a round expects."""
        share = min(max(within / expected + 0.5, 0.0), 1.0)
        # Without bounds a clip would fall for ever where all updates are zeros, and grow where all are long.
        return CLIP.nearest(clip * math.exp(-self.rate * (share - self.quantile)))


@dataclass(frozen=True, kw_only=True)
class ClientLevelState(State):
    """What every algorithm whose unit is a client carries on: the clip, where it follows a count."""

    clip: float | None = None


class ClientLevelSettings(AlgorithmSettings):
    """Options of every algorithm whose unit is a client."""

    rate: Rate = Field(0.1, description="probability that a client takes part in a round")
    server_step: StepSize = Field(1.0, description="step size of the server")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of a client's local steps")
    adaptive_clip: AdaptiveClip | None = Field(
        None,
        description="null, or {quantile: 0.5, ...}: the clip follows that quantile of the updates' norms",
    )


class ClientLevel(Algorithm[S]):
    """An algorithm that asks for sums of a sample of clients."""

    unit = Unit.CLIENT
    settings: ClientLevelSettings

    def local_training(self) -> LocalTraining:
        schedule = self.schedule
        return LocalTraining(
            schedule.epochs, schedule.batch, schedule.lr, self.settings.momentum, self.proximal()
        )

    def proximal(self) -> float:
        """Weight of the pull towards the start of a round."""
        return 0.0

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        if self.privacy.budgets:
            raise InputError(
                f"privacy.budgets: {min(self.privacy.budgets)} has one of its own, but clients who are "
                "sampled alike spend alike; allowed for unit client: privacy.epsilon and privacy.delta"
            )
        caveats = (TUNING,) if self.settings.adaptive_clip is None else (TUNING, ADAPTIVE)
        return client_plan(self.release(facts), self.schedule.rounds, caveats)

    @property
    def about(self) -> CohortReleases:
        """What may be released about a sample of clients."""
        following, privacy = self.settings.adaptive_clip, self.privacy
        ratio = None if following is None else following.count_ratio
        return CohortReleases(self.settings.rate, privacy.clip, privacy.adjacency, ratio)

    def release(self, facts: PublicFacts) -> Mechanism:
        """What one round releases."""
        return self.about.sums()

    def first_clip(self) -> float | None:
        """The clip of the first round, where it will follow a count."""
        return None if self.settings.adaptive_clip is None else self.privacy.clip

    def next_clip(self, state: ClientLevelState, within: Released[float] | None) -> float | None:
        """The clip that follows on a round: a function of what was released."""
        following = self.settings.adaptive_clip
        if following is None or within is None or state.clip is None:
            return None
        return following.following(state.clip, within.value, self.expected(len(state.clients)))

    def expected(self, clients: int) -> float:
        """How many clients a round is expected to sample: a public number."""
        return self.settings.rate * clients


def last_layer(facts: PublicFacts) -> NDArray[np.bool_]:
    """Which parameters belong to the model's last layer."""
    names = list(facts.layout)
    prefix = names[-1].rpartition(".")[0]
    masks = [np.full(size, name.rpartition(".")[0] == prefix) for name, size in facts.layout.items()]
    return np.concatenate(masks)


def stepped(
    models: NDArray[np.float32],
    sums: NDArray[np.float64],
    divisors: NDArray[np.float64],
    step: float,
) -> NDArray[np.float32]:
    """Models moved by noisy sums over public divisors (that broadcast over them)."""
    moved: NDArray[np.float32] = (models + step * sums / divisors).astype(np.float32)
    return moved
