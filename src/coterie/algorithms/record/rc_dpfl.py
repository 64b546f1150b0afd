"""`rc-dpfl`: the preprint of r-dpcfl, kept to compare with. Its cluster choice is not private.

Malekmohammadi, Taik and Farnadi, "Mitigating Disparate Impact of Differential Privacy in Federated Learning
through Robust Clustering" (2024), Algorithm 1; line numbers in comments are the preprint's. The number of
clusters is given, round E_c is fixed in advance, and at the end of every later round each client reveals the
model with the lowest training loss, without noise: nothing bounds what that choice says about one record.
It therefore runs in `privacy.mode: paper` only.

The mixture is that of r-dpcfl, because one fitted to the raw updates finds nothing, and members of a cluster
weigh the same, which in the preprint's experiments they do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from coterie.algorithms.averaging import step_clusters
from coterie.algorithms.protocol import (
    Algorithm,
    Assignment,
    PublicFacts,
    Rounds,
    State,
    TrainJob,
    select,
    train,
)
from coterie.algorithms.record.planning import check_clusters, clustering_round, record_plan, training
from coterie.algorithms.registry import register
from coterie.algorithms.settings import AlgorithmSettings, PrivacySettings, Schedule
from coterie.clustering.mixture import draw_labels, fit_mixture
from coterie.errors import InputError
from coterie.privacy import LowestLoss, Mode, NoiseRule, PlannedRelease, PrivacyPlan, Unit


class RCDPFLSettings(AlgorithmSettings):
    """Options of rc-dpfl."""

    clusters: int = Field(4, ge=2, description="number of clusters")
    switch_round: int | Literal["auto"] = Field(
        "auto", description="E_c, last round that follows the mixture; auto: half of the rounds"
    )


@dataclass(frozen=True)
class RCDPFLState(State):
    models: NDArray[np.float32]
    """Cluster models, one per row."""
    responsibilities: NDArray[np.float64]
    """Probability of each cluster (column) for each client (row), from the mixture."""
    cluster_of: Mapping[str, int]


@register
class RCDPFL(Algorithm[RCDPFLState]):
    name = "rc-dpfl"
    unit = Unit.RECORD
    settings_type = RCDPFLSettings
    state_type = RCDPFLState
    settings: RCDPFLSettings

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

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        check_clusters(self.settings.clusters, len(facts.clients))
        rounds = self.schedule.rounds
        choice = LowestLoss(self.privacy.adjacency)
        return record_plan(
            facts,
            self.privacy,
            lambda client, records: [
                clustering_round(self.schedule, self.privacy, records, NoiseRule.SHARED),
                training(self.schedule, self.privacy, records, rounds - 1),
                PlannedRelease("choice", choice, rounds - self.switch_round),
            ],
            caveats=("clients reveal which model has the lowest loss, which is not private",),
        )

    def start(self, facts: PublicFacts, rng: np.random.Generator) -> RCDPFLState:
        seed = int(rng.integers(2**31))
        clusters = self.settings.clusters
        return RCDPFLState(
            round=0,
            clients=facts.clients,
            seed=seed,
            models=np.tile(facts.initialise(seed), (clusters, 1)),  # l. 1
            responsibilities=np.full((len(facts.clients), clusters), 1.0 / clusters),
            cluster_of=dict.fromkeys(facts.clients, 0),
        )

    def round(self, state: RCDPFLState) -> Rounds[RCDPFLState]:
        if state.round == 0:
            return (yield from self._cluster(state))
        current, joined = state.round + 1, state.cluster_of
        jobs = [TrainJob(client, state.models[joined[client]]) for client in state.clients]
        updates = yield from train("training", jobs)  # l. 11-13
        models = step_clusters(state.models, joined, updates)  # l. 14-16
        if current <= self.switch_round:
            cluster_of = _draw(state)  # l. 17-19
        else:
            choices = yield from select("choice", state.clients, models)  # l. 20-22
            cluster_of = {**joined, **choices}
        return replace(state, round=current, models=models, cluster_of=cluster_of)

    def models(self, state: RCDPFLState) -> Assignment:
        return Assignment(state.models, state.cluster_of)

    def _cluster(self, state: RCDPFLState) -> Rounds[RCDPFLState]:
        jobs = [TrainJob(client, state.models[0]) for client in state.clients]
        answers = yield from train("first round", jobs)  # l. 4-6
        present = [client for client in state.clients if client in answers]
        check_clusters(self.settings.clusters, len(present))
        mixture = fit_mixture(
            [answers[client] for client in present],
            self.settings.clusters,
            int(state.rng().integers(2**31)),
        )  # l. 7
        responsibilities = state.responsibilities.copy()
        responsibilities[[state.clients.index(client) for client in present]] = mixture.responsibilities
        clustered = replace(state, round=1, responsibilities=responsibilities)
        return replace(clustered, cluster_of=_draw(clustered))  # l. 8-9


def _draw(state: RCDPFLState) -> dict[str, int]:
    labels = draw_labels(state.responsibilities, state.rng())
    return dict(zip(state.clients, labels.tolist(), strict=True))
