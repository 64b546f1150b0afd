"""`dp-fedavg`: one model for everyone, private for whole clients.

McMahan, Ramage, Talwar and Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.algorithms.client.client_level import (
    ClientLevel,
    ClientLevelSettings,
    ClientLevelState,
    stepped,
)
from coterie.algorithms.clusters import equal_starts
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
from coterie.privacy.plans import SUMS


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
        return OneModelState(0, facts.clients, *equal_starts(facts, rng, 1), clip=self.first_clip())

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
