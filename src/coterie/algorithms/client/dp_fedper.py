"""`dp-fedper`: everyone shares the body of one model and keeps a head of its own.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019. The head never leaves the client:
it is neither clipped nor released, and moves only when its client is sampled.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.algorithms.client.client_level import last_layer
from coterie.algorithms.client.dp_fedavg import FedAvg, OneModelState
from coterie.algorithms.protocol import Choice, OwnChoice, Parts, PublicFacts
from coterie.algorithms.registry import register
from coterie.errors import InputError


@dataclass(frozen=True)
class FedPerState(OneModelState):
    """The head in the one row is where everyone's own head began."""

    head: NDArray[np.bool_]

    @property
    def parts(self) -> Parts:
        return Parts(shared=np.zeros_like(self.head), personal=self.head)


@register
class FedPer(FedAvg):
    name = "dp-fedper"
    state_type = FedPerState
    personal = True

    def start(self, facts: PublicFacts, rng: np.random.Generator) -> FedPerState:
        head = last_layer(facts)
        if head.all():
            raise InputError(
                "algorithm.name: dp-fedper; the model has one layer, which would be all personal: nothing is "
                "left to share; allowed are models of several layers"
            )
        return FedPerState(**vars(super().start(facts, rng)), head=head)

    def models(self, state: OneModelState) -> OwnChoice:
        return OwnChoice(state.models, Choice.GIVEN, self.local_training(), state.parts)
