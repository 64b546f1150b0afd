"""Algorithms whose sampled clients choose one of k models themselves: what they share."""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field, StrictBool

from coterie.algorithms.client import revival
from coterie.algorithms.client.client_level import ClientLevel, ClientLevelSettings, ClientLevelState
from coterie.algorithms.clusters import StartSettings, check_clusters, cluster_starts
from coterie.algorithms.protocol import Floats, Mask, Models, Parts, PublicFacts, Rng, State, Sums
from coterie.privacy import Mechanism, Released
from coterie.settings import Acts


class ClusteredSettings(StartSettings, ClientLevelSettings):
    """Options of every clustered algorithm whose unit is a client."""

    revive: Annotated[
        StrictBool, Acts("algorithm.rebalance.rule route and minimum above 0", lambda own, _: own.counts)
    ] = Field(
        True, description="split a large cluster where the released histogram (if any) shows a dead one"
    )

    @property
    def counts(self) -> bool:
        """Whether a histogram of the choices is released."""
        return True

    @property
    def perturbs(self) -> bool:
        return super().perturbs or (self.revive and self.counts)


@dataclass(frozen=True)
class ClusteredState(ClientLevelState):
    """Models of clusters, and what released histograms said of their sizes.

    Args:
        shared: which parameters all models have in common.
        scale: an initialisation: how far each parameter may be perturbed.
        sizes: running mean of the noisy cluster sizes that revival reads, where they are released.
        believed: the cluster sizes that the last route went by.
        last_split: the round after which a cluster was last split.
    """

    shared: Mask
    scale: Models
    sizes: Floats
    believed: Floats
    last_split: int = 0

    @property
    def parts(self) -> Parts:
        return Parts(shared=self.shared, personal=np.zeros_like(self.shared))

    @property
    def replaced_after(self) -> int:
        return self.last_split


class Clustered(ClientLevel[ClusteredState]):
    """Choose, train, and move each cluster's model by the noisy sum of the updates that it got."""

    settings: ClusteredSettings

    def release(self, facts: PublicFacts) -> Mechanism:
        check_clusters(self.settings.clusters, len(facts.clients))
        return super().release(facts)

    def start(self, facts: PublicFacts, rng: Rng) -> ClusteredState:
        seed, models = cluster_starts(facts, rng, self.settings)
        shared = self.shared(facts)
        models[:, shared] = models[0, shared]
        scale = np.where(shared, np.float32(0), facts.initialise(seed))
        sizes = np.zeros(self.settings.clusters)
        return ClusteredState(
            0, facts.clients, seed, models, shared, scale, sizes, sizes, clip=self.first_clip()
        )

    def shared(self, facts: PublicFacts) -> Mask:
        """Which parameters all clusters have in common."""
        return np.zeros(facts.parameters, dtype=np.bool_)

    def fair_share(self, known: PublicFacts | State) -> float:
        """Clients of a round in each cluster, if all were equal: q n / k, a public number."""
        return self.expected(known) / self.settings.clusters

    def revived(self, state: ClusteredState, histogram: Released[Floats]) -> ClusteredState:
        """The state after dead clusters were revived, if the histograms so far show any, and it is wanted."""
        if not self.settings.revive:
            return state
        fair_share = self.fair_share(state)
        rhythm = revival.Rhythm.of(histogram.noise_std, fair_share)
        sizes = rhythm.smoothed(state.sizes, histogram.value, state.round)
        state = replace(state, sizes=sizes)
        pairs = revival.splits(sizes, fair_share)
        if not (pairs and rhythm.may_split(state.round, self.schedule.rounds, state.last_split)):
            return state
        signs = state.rng().choice(np.array([-1, 1], dtype=np.float32), (len(pairs), state.models.shape[1]))
        directions = np.float32(self.settings.perturbation) * signs * state.scale
        return replace(
            state,
            models=revival.split(state.models, pairs, directions),
            sizes=revival.shared_out(sizes, pairs),
            believed=revival.shared_out(state.believed, pairs),
            last_split=state.round,
        )

    def moved(self, state: ClusteredState, sums: Sums, divisors: Floats | float) -> ClusteredState:
        """The state after a step; what is shared is divided by everyone's expected number."""
        return super().moved(
            state, sums, np.where(state.shared, self.expected(state), np.reshape(divisors, (-1, 1)))
        )
