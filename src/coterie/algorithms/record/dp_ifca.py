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

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
from coterie.algorithms.record.planning import check_clusters, record_plan, selections, training
from coterie.algorithms.registry import register
from coterie.algorithms.starts import StartSettings, cluster_starts
from coterie.privacy import PrivacyPlan, Unit


class IFCASettings(StartSettings):
    """Options of dp-ifca."""

    selection_share: float = Field(
        0.03, gt=0, lt=1, description="epsilon of one private selection, as a share of privacy.epsilon"
    )


@dataclass(frozen=True)
class IFCAState(State):
    models: NDArray[np.float32]
    """Cluster models, one per row."""
    cluster_of: Mapping[str, int]


@register
class IFCA(Algorithm[IFCAState]):
    name = "dp-ifca"
    unit = Unit.RECORD
    settings_type = IFCASettings
    state_type = IFCAState
    settings: IFCASettings

    @property
    def selections(self) -> int:
        """Rounds 1 .. 1 + floor(E/10), both ends included."""
        return self.schedule.rounds // 10 + 1

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        check_clusters(self.settings.clusters, len(facts.clients))
        share = self.settings.selection_share
        return record_plan(
            facts,
            self.privacy,
            lambda client, records: [
                training(self.schedule, self.privacy, records, self.schedule.rounds),
                *selections(self.privacy, client, share, self.selections),
            ],
        )

    def start(self, facts: PublicFacts, rng: np.random.Generator) -> IFCAState:
        seed, models = cluster_starts(facts, rng, self.settings)
        return IFCAState(
            round=0,
            clients=facts.clients,
            seed=seed,
            models=models,
            cluster_of=dict.fromkeys(facts.clients, 0),
        )

    def round(self, state: IFCAState) -> Rounds[IFCAState]:
        cluster_of = state.cluster_of
        if state.round < self.selections:
            choices = yield from select("selection", state.clients, state.models)
            cluster_of = {**cluster_of, **choices}
        jobs = [TrainJob(client, state.models[cluster_of[client]]) for client in state.clients]
        updates = yield from train("training", jobs)
        return replace(
            state,
            round=state.round + 1,
            models=step_clusters(state.models, cluster_of, updates),
            cluster_of=cluster_of,
        )

    def models(self, state: IFCAState) -> Assignment:
        return Assignment(state.models, state.cluster_of)
