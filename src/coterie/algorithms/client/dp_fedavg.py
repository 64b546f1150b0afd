"""`dp-fedavg` and `dp-fedprox`: one model for everyone, private for whole clients.

McMahan, Ramage, Talwar and Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018; Li
et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, adds a pull towards the model that
a client was sent.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from coterie.algorithms.client.client_level import (
    SUMS,
    ClientLevel,
    ClientLevelSettings,
    ClientLevelState,
    stepped,
)
from coterie.algorithms.protocol import (
    Assignment,
    CohortJob,
    OwnChoice,
    Parts,
    PublicFacts,
    Rounds,
    State,
    add_up,
    open_cohort,
)
from coterie.algorithms.registry import register
from coterie.algorithms.settings import Pull


@dataclass(frozen=True)
class OneModelState(ClientLevelState):
    models: NDArray[np.float32]
    """One row."""

    @property
    def parts(self) -> Parts | None:
        """What is not released like the rest of the model, if anything."""
        return None


@register
class FedAvg(ClientLevel[OneModelState]):
    name = "dp-fedavg"
    settings_type = ClientLevelSettings
    state_type: ClassVar[type[State]] = OneModelState

    def start(self, facts: PublicFacts, rng: np.random.Generator) -> OneModelState:
        seed = int(rng.integers(2**31))
        return OneModelState(
            0, facts.clients, seed, models=facts.initialise(seed)[None], clip=self.first_clip()
        )

    def round(self, state: OneModelState) -> Rounds[OneModelState]:
        job = CohortJob(
            state.clients, state.models, self.local_training(), parts=state.parts, clip=state.clip
        )
        cohort = yield from open_cohort(SUMS, job)
        sums = yield from add_up(cohort)
        divisor = np.array([[self.expected(len(state.clients))]])
        moved = stepped(state.models, sums.rows.value, divisor, self.settings.server_step)
        clip = self.next_clip(state, sums.within)
        return replace(state, round=state.round + 1, models=moved, clip=clip)

    def models(self, state: OneModelState) -> Assignment | OwnChoice:
        return Assignment(state.models, dict.fromkeys(state.clients, 0))


class FedProxSettings(ClientLevelSettings):
    """Options of dp-fedprox."""

    proximal: Pull = Field(0.01, gt=0, description="weight mu of the pull towards the model that was sent")


@register
class FedProx(FedAvg):
    name = "dp-fedprox"
    settings_type = FedProxSettings
    settings: FedProxSettings

    def proximal(self) -> float:
        return self.settings.proximal
