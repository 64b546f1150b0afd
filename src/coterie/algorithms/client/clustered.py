"""Algorithms whose sampled clients choose one of k models themselves: what they share."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from coterie.algorithms.client import revival
from coterie.algorithms.client.client_level import ClientLevel, ClientLevelSettings, ClientLevelState, stepped
from coterie.algorithms.clusters import StartSettings, check_clusters, cluster_starts
from coterie.algorithms.protocol import (
    Choice,
    CohortJob,
    OwnChoice,
    Parts,
    PublicFacts,
    Rounds,
)
from coterie.privacy import Mechanism, Released


class ClusteredSettings(StartSettings, ClientLevelSettings):
    """Options of every clustered algorithm whose unit is a client."""

    revive: bool = Field(
        True, description="split a large cluster where the released histogram (if any) shows a dead one"
    )


@dataclass(frozen=True)
class ClusteredState(ClientLevelState):
    """Models of clusters, and what released histograms said of their sizes.

    Args:
        models: cluster models, one per row.
        shared: which parameters all models have in common.
        scale: an initialisation: how far each parameter may be perturbed.
        sizes: running mean of the noisy cluster sizes that revival reads, where they are released.
        believed: the cluster sizes that the last route went by.
        last_split: the round after which a cluster was last split.
    """

    models: NDArray[np.float32]
    shared: NDArray[np.bool_]
    scale: NDArray[np.float32]
    sizes: NDArray[np.float64]
    believed: NDArray[np.float64]
    last_split: int = 0

    @property
    def parts(self) -> Parts:
        return Parts(shared=self.shared, personal=np.zeros_like(self.shared))

    @property
    def replaced_after(self) -> int:
        return self.last_split


@dataclass(frozen=True)
class Update:
    """Noisy sums and the public numbers to divide them by, one for each cluster.

    Args:
        histogram: noisy number of clients that chose each cluster, where it was released.
        believed: cluster sizes that the route and the divisors went by, where there was a route.
        within: the count that the next clip follows, where it does.
    """

    rows: NDArray[np.float64]
    divisors: NDArray[np.float64]
    histogram: Released[NDArray[np.float64]] | None = None
    believed: NDArray[np.float64] | None = None
    within: Released[float] | None = None


class Clustered(ClientLevel[ClusteredState]):
    """Choose, train, and move each cluster's model by the noisy sum of the updates that it got."""

    settings_type = ClusteredSettings
    state_type = ClusteredState
    settings: ClusteredSettings
    choice: ClassVar[Choice]

    def release(self, facts: PublicFacts) -> Mechanism:
        check_clusters(self.settings.clusters, len(facts.clients))
        return super().release(facts)

    @abstractmethod
    def ask(self, job: CohortJob, state: ClusteredState) -> Rounds[Update]:
        """Everything that a round asks of its cohort: noisy sums, and what to divide them by."""

    def start(self, facts: PublicFacts, rng: np.random.Generator) -> ClusteredState:
        seed, models = cluster_starts(facts, rng, self.settings)
        shared = self.shared(facts)
        models[:, shared] = models[0, shared]
        scale = np.where(shared, np.float32(0), facts.initialise(seed))
        sizes = np.zeros(self.settings.clusters)
        return ClusteredState(
            0, facts.clients, seed, models, shared, scale, sizes, sizes, clip=self.first_clip()
        )

    def shared(self, facts: PublicFacts) -> NDArray[np.bool_]:
        """Which parameters all clusters have in common."""
        return np.zeros(facts.parameters, dtype=np.bool_)

    def round(self, state: ClusteredState) -> Rounds[ClusteredState]:
        job = CohortJob(
            state.clients,
            state.models,
            self.local_training(),
            choice=self.choice,
            parts=state.parts,
            clip=state.clip,
        )
        update = yield from self.ask(job, state)
        believed = state.believed if update.believed is None else update.believed
        moved = replace(
            state,
            round=state.round + 1,
            models=self.moved(state, update),
            believed=believed,
            clip=self.next_clip(state, update.within),
        )
        if update.histogram is None or not self.settings.revive:
            return moved
        return self.revived(moved, update.histogram)

    def fair_share(self, clients: int) -> float:
        """Clients of a round in each cluster, if all were equal: q n / k, a public number."""
        return self.expected(clients) / self.settings.clusters

    def revived(self, state: ClusteredState, histogram: Released[NDArray[np.float64]]) -> ClusteredState:
        """The state after dead clusters were revived, if the histograms so far show any."""
        fair_share = self.fair_share(len(state.clients))
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

    def moved(self, state: ClusteredState, update: Update) -> NDArray[np.float32]:
        """The models after a step; what is shared is divided by everyone's expected number."""
        divisors = np.where(state.shared[None], self.expected(len(state.clients)), update.divisors[:, None])
        return stepped(state.models, update.rows, divisors, self.settings.server_step)

    def models(self, state: ClusteredState) -> OwnChoice:
        return OwnChoice(state.models, self.choice, self.local_training(), state.parts)
