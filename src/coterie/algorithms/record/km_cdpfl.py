"""`km-cdpfl`: the server clusters every round's updates anew by k-means++, remembering nothing.

The baseline KM-CDPFL of Malekmohammadi, Taik and Farnadi (2024), after "myopic clustering" of Werner et al.,
"Provably Personalized and Robust Federated Learning" (TMLR 2023): a client trains the model of the cluster
it was last put in, the server groups the updates of the round, and a cluster's next model is the mean of
what its members reached. Updates that start from different models are not comparable, which is the
algorithm's weakness: mistakes of a noisy round are kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from coterie.algorithms.protocol import (
    Algorithm,
    Assignment,
    PublicFacts,
    Rounds,
    State,
    TrainJob,
    train,
)
from coterie.algorithms.record.planning import check_clusters, training_plan
from coterie.algorithms.registry import register
from coterie.algorithms.settings import AlgorithmSettings
from coterie.clustering.partition import kmeans, relabelled
from coterie.privacy import PrivacyPlan, Unit


class MyopicSettings(AlgorithmSettings):
    """Options of km-cdpfl."""

    clusters: int = Field(4, ge=2, description="number of clusters")


@dataclass(frozen=True)
class MyopicState(State):
    models: NDArray[np.float32]
    """Cluster models, one per row."""
    cluster_of: Mapping[str, int]


@register
class Myopic(Algorithm[MyopicState]):
    name = "km-cdpfl"
    unit = Unit.RECORD
    settings_type = MyopicSettings
    state_type = MyopicState
    settings: MyopicSettings

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        check_clusters(self.settings.clusters, len(facts.clients))
        return training_plan(facts, self.schedule, self.privacy)

    def start(self, facts: PublicFacts, rng: np.random.Generator) -> MyopicState:
        seed = int(rng.integers(2**31))
        return MyopicState(
            round=0,
            clients=facts.clients,
            seed=seed,
            models=np.tile(facts.initialise(seed), (self.settings.clusters, 1)),
            cluster_of=dict.fromkeys(facts.clients, 0),
        )

    def round(self, state: MyopicState) -> Rounds[MyopicState]:
        before = state.cluster_of
        jobs = [TrainJob(client, state.models[before[client]]) for client in state.clients]
        updates = yield from train("training", jobs)
        present = [client for client in state.clients if client in updates]
        grouped = kmeans(
            np.array([updates[client].value for client in present]),
            min(self.settings.clusters, len(present)),
            int(state.rng().integers(2**31)),
        )
        labels = relabelled(grouped, [before[client] for client in present], self.settings.clusters)
        # Who did not answer stays where it was.
        cluster_of = {**before, **dict(zip(present, labels.tolist(), strict=True))}
        reached = {client: state.models[before[client]] + updates[client].value for client in present}
        models = state.models.copy()
        for cluster in set(labels.tolist()):
            members = [reached[client] for client in present if cluster_of[client] == cluster]
            models[cluster] = np.mean(members, axis=0, dtype=np.float64).astype(np.float32)
        return replace(state, round=state.round + 1, models=models, cluster_of=cluster_of)

    def models(self, state: MyopicState) -> Assignment:
        return Assignment(state.models, state.cluster_of)
