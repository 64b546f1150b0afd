"""`oracle` for clients: the true clusters are known; what clustering could reach at best, equally private.

A sampled client trains its own cluster's model, and its update is added to that cluster's sum. The clusters,
and with them their sizes, were handed to the algorithm: there is nothing to choose, to count or to route, and
all of the budget goes into the sums.
"""

from collections.abc import Mapping

import numpy as np

from coterie.algorithms.client.client_level import ClientLevelState
from coterie.algorithms.client.known_sizes import KnownSizes, KnownSizesSettings
from coterie.algorithms.clusters import equal_starts
from coterie.algorithms.protocol import Assignment, Choice, Floats, PublicFacts, Rng, Rounds, Sum, Sums, ask
from coterie.algorithms.record.oracle import TOLD
from coterie.algorithms.settings import PrivacySettings, Schedule


class ClientOracle(KnownSizes[ClientLevelState]):
    name = "oracle"
    choice = Choice.TOLD
    needs_truth = True
    caveats = (TOLD,)

    def __init__(
        self,
        settings: KnownSizesSettings,
        schedule: Schedule,
        privacy: PrivacySettings,
        *,
        truth: Mapping[str, int],
    ) -> None:
        super().__init__(settings, schedule, privacy)
        self.truth = truth

    def start(self, facts: PublicFacts, rng: Rng) -> ClientLevelState:
        starts = equal_starts(facts, rng, len(set(self.truth.values())))
        return ClientLevelState(0, facts.clients, *starts, clip=self.first_clip())

    def start_of(self, state: ClientLevelState) -> Mapping[str, int]:
        return self.truth

    def round(self, state: ClientLevelState) -> Rounds[ClientLevelState]:
        cohort = yield from self.opened(state)
        sums = yield from ask(Sum(cohort), Sums)
        return self.stepped(state, sums, self.expected_in(state))

    def sizes(self, state: ClientLevelState) -> Floats:
        own = [self.truth[client] for client in state.clients]
        return np.bincount(own, minlength=len(state.models)).astype(np.float64)

    def models(self, state: ClientLevelState) -> Assignment:
        return Assignment(state.models, {client: self.truth[client] for client in state.clients})
