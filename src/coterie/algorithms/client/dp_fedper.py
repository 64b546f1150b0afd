"""`dp-fedper`: everyone shares the body of one model and keeps a head of its own.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019. The head never leaves the client:
it is neither clipped nor released, and moves only when its client is sampled.
"""

from dataclasses import dataclass

import numpy as np

from coterie.algorithms.client.client_level import ClientLevelState
from coterie.algorithms.client.dp_fedavg import FedAvg
from coterie.algorithms.protocol import Mask, Parts, PublicFacts, Rng
from coterie.errors import InputError
from coterie.privacy import PrivacyPlan


@dataclass(frozen=True)
class FedPerState(ClientLevelState):
    """The head in the one row is where everyone's own head began."""

    head: Mask

    @property
    def parts(self) -> Parts:
        return Parts(shared=np.zeros_like(self.head), personal=self.head)


class FedPer(FedAvg):
    name = "dp-fedper"
    personal = True

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        _last_layer(facts)  # what has none to share is refused before a folder is written
        return super().plan(facts)

    def start(self, facts: PublicFacts, rng: Rng) -> FedPerState:
        return FedPerState(**vars(super().start(facts, rng)), head=_last_layer(facts))


def _last_layer(facts: PublicFacts) -> Mask:
    """Which parameters stay with a client."""
    layers = [name.rpartition(".")[0] for name in facts.layout]
    head: Mask = np.repeat(np.array(layers) == layers[-1], list(facts.layout.values()))
    if head.all():
        raise InputError(
            "algorithm.name: dp-fedper; the model has one layer, which would be all personal: nothing is "
            "left to share; allowed are models of several layers"
        )
    return head
