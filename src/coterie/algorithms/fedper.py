"""`dp-fedper`: everyone shares the body of one model and keeps a head of its own.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019. The head never leaves the client:
it is neither clipped nor released, and moves only when its client is sampled.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coterie.algorithms.client_level import (
    SUMS,
    ClientLevel,
    ClientLevelSettings,
    ClientLevelState,
    last_layer,
    stepped,
)
from coterie.algorithms.protocol import (
    Asking,
    Choice,
    CohortJob,
    OwnChoice,
    Parts,
    PublicFacts,
    add_up,
    open_cohort,
)
from coterie.algorithms.registry import register
from coterie.errors import InputError


@dataclass(frozen=True)
class FedPerState(ClientLevelState):
    models: NDArray[np.float32]
    """One row; the head in it is where everyone's own head began."""
    head: NDArray[np.bool_]

    @property
    def parts(self) -> Parts:
        return Parts(shared=np.zeros_like(self.head), personal=self.head)


@register
class FedPer(ClientLevel[FedPerState]):
    name = "dp-fedper"
    settings_type = ClientLevelSettings
    state_type = FedPerState

    def start(self, facts: PublicFacts, rng: np.random.Generator) -> FedPerState:
        head = last_layer(facts)
        if head.all():
            raise InputError(
                "algorithm.name: dp-fedper; the model has one layer, which would be all personal: nothing is "
                "left to share; allowed are models of several layers"
            )
        seed = int(rng.integers(2**31))
        return FedPerState(
            0, facts.clients, seed, models=facts.initialise(seed)[None], head=head, clip=self.first_clip()
        )

    def round(self, state: FedPerState) -> Asking[FedPerState]:
        job = CohortJob(
            state.clients, state.models, self.local_training(), parts=state.parts, clip=state.clip
        )
        cohort = yield from open_cohort(SUMS, job)
        sums = yield from add_up(cohort)
        divisor = np.array([[self.expected(len(state.clients))]])
        moved = stepped(state.models, sums.rows.value, divisor, self.settings.server_step)
        clip = self.next_clip(state, sums.within)
        return replace(state, round=state.round + 1, models=moved, clip=clip)

    def models(self, state: FedPerState) -> OwnChoice:
        return OwnChoice(state.models, Choice.GIVEN, self.local_training(), state.parts)
