"""`rc-dpfl`: the preprint of r-dpcfl, kept to compare with. Its cluster choice is not private.

Malekmohammadi, Taik and Farnadi, "Mitigating Disparate Impact of Differential Privacy in Federated Learning
through Robust Clustering" (2024), Algorithm 1; line numbers in comments are the preprint's. The number of
clusters is given, round E_c is fixed in advance, and at the end of every later round each client reveals the
model with the lowest training loss, without noise: nothing bounds what that choice says about one record.
It therefore runs in `privacy.mode: paper` only.

The mixture is that of r-dpcfl, because one fitted to the raw updates finds nothing, and members of a cluster
weigh the same, which in the preprint's experiments they do.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from coterie.algorithms.clusters import ClusterSettings, check_clusters, equal_starts
from coterie.algorithms.protocol import PublicFacts, Rng, Rounds, select, train
from coterie.algorithms.record.record_level import GivenClusters, MixtureState
from coterie.algorithms.settings import PrivacySettings, Schedule
from coterie.clustering.mixture import fit_mixture
from coterie.errors import InputError
from coterie.privacy import Mode, PlannedRelease
from coterie.privacy.plans import CHOICE, FIRST_ROUND


class RCDPFLSettings(ClusterSettings):
    """Options of rc-dpfl."""

    switch_round: int | Literal["auto"] = Field(
        "auto", description="E_c, last round that follows the mixture; auto: half of the rounds"
    )


class RCDPFL(GivenClusters[MixtureState]):
    name = "rc-dpfl"
    settings: RCDPFLSettings
    caveats = ("clients reveal which model has the lowest loss, which is not private",)

    def __init__(self, settings: RCDPFLSettings, schedule: Schedule, privacy: PrivacySettings) -> None:
        super().__init__(settings, schedule, privacy)
        if privacy.mode is not Mode.PAPER:
            raise InputError(
                "algorithm.name: 'rc-dpfl' reveals which model has the lowest loss, without noise, and is "
                f"not private; allowed with privacy.mode {privacy.mode}: r-dpcfl, its private successor"
            )
        if schedule.rounds < 3 or not 1 <= self.switch_round < schedule.rounds:
            raise InputError(
                f"algorithm.switch_round: {settings.switch_round} of {schedule.rounds} rounds; "
                "allowed: auto, or 1 to one less than schedule.rounds, which is 3 or more"
            )

    @property
    def switch_round(self) -> int:
        """E_c: clients choose at the end of every later round."""
        wanted = self.settings.switch_round
        return max(1, self.schedule.rounds // 2) if wanted == "auto" else wanted

    def releases(self, facts: PublicFacts, client: str) -> list[PlannedRelease]:
        records, rounds = facts.records[client], self.schedule.rounds
        return [
            self.about(records).steps(FIRST_ROUND, 1, None),
            self.training(records, rounds - 1),
            self.about(records).choices(rounds - self.switch_round),
        ]

    def start(self, facts: PublicFacts, rng: Rng) -> MixtureState:
        clusters = self.settings.clusters
        seed, models = equal_starts(facts, rng, clusters)  # l. 1
        anywhere = np.full((len(facts.clients), clusters), 1.0 / clusters)
        return MixtureState(0, facts.clients, seed, models, dict.fromkeys(facts.clients, 0), anywhere)

    def round(self, state: MixtureState) -> Rounds[MixtureState]:
        if state.round == 0:
            return (yield from self._cluster(state))
        trained = yield from super().round(state)  # l. 11-16
        if trained.round <= self.switch_round:
            return replace(trained, cluster_of=state.drawn())  # l. 17-19
        choices = yield from select(CHOICE, state.clients, trained.models)  # l. 20-22
        return replace(trained, cluster_of={**state.cluster_of, **choices})

    def _cluster(self, state: MixtureState) -> Rounds[MixtureState]:
        answers = yield from train(FIRST_ROUND, self.jobs(state))  # l. 4-6
        clusters, seed = self.settings.clusters, int(state.rng().integers(2**31))
        check_clusters(clusters, len(answers))
        mixture = fit_mixture(list(answers.values()), clusters, seed)  # l. 7
        clustered = replace(state, round=1, responsibilities=state.odds(list(answers), mixture))
        return replace(clustered, cluster_of=clustered.drawn())  # l. 8-9
