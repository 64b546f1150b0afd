"""`dp-ifca` for records: clients choose among k models themselves, privately (f-CDPFL of the preprint).

Ghosh, Chung, Yin and Ramchandran, "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020,
made private as in Liu et al. (NeurIPS 2022): in the first floor(E/10) + 1 rounds every client chooses the
model that gets most of its records right, by the exponential mechanism; then the last choice stays.

How the k models begin decides whether all of them live. With `start: random` (the publications') one or two
of k independent models tend to win every client in round 1 and stay ahead. With `start: near` all begin at
one initialisation and differ by a perturbation, so that no model is better for everyone. For a convolutional
network that kept all four models of a federation alive where `random` kept two or three; softmax regression,
which has one optimum, does not care.
"""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from coterie.algorithms.clusters import StartSettings, cluster_starts
from coterie.algorithms.protocol import PublicFacts, Rng, Rounds, select
from coterie.algorithms.record.record_level import GivenClusters, RecordClustersState
from coterie.algorithms.settings import PRIVATE
from coterie.privacy import PlannedRelease
from coterie.privacy.plans import SELECTION, SELECTION_SHARE


class IFCASettings(StartSettings):
    """Options of dp-ifca."""

    selection_share: Annotated[float, PRIVATE] = Field(
        SELECTION_SHARE,
        gt=0,
        lt=1,
        description="epsilon of one private selection, as a share of privacy.epsilon",
    )


class IFCA(GivenClusters[RecordClustersState]):
    name = "dp-ifca"
    settings: IFCASettings

    @property
    def selections(self) -> int:
        """Rounds 1 .. 1 + floor(E/10), both ends included."""
        return self.schedule.rounds // 10 + 1

    def releases(self, facts: PublicFacts, client: str) -> list[PlannedRelease]:
        epsilon = self.settings.selection_share * self.privacy.epsilon_of(client)
        chosen = self.about(facts.records[client]).selections(epsilon, self.selections)
        return [*super().releases(facts, client), *chosen]

    def start(self, facts: PublicFacts, rng: Rng) -> RecordClustersState:
        starts = cluster_starts(facts, rng, self.settings)
        return RecordClustersState(0, facts.clients, *starts, dict.fromkeys(facts.clients, 0))

    def round(self, state: RecordClustersState) -> Rounds[RecordClustersState]:
        if state.round < self.selections:
            choices = yield from select(SELECTION, state.clients, state.models)
            state = replace(state, cluster_of={**state.cluster_of, **choices})
        return (yield from super().round(state))
