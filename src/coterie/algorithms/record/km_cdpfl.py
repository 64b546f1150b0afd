"""`km-cdpfl`: the server clusters every round's updates anew by k-means++, remembering nothing.

The baseline KM-CDPFL of Malekmohammadi, Taik and Farnadi (2024), after "myopic clustering" of Werner et al.,
"Provably Personalized and Robust Federated Learning" (TMLR 2023): a client trains the model of the cluster
it was last put in, the server groups the updates of the round, and a cluster's next model is the mean of
what its members reached. Updates that start from different models are not comparable, which is the
algorithm's weakness: mistakes of a noisy round are kept.
"""

from dataclasses import replace

import numpy as np

from coterie.algorithms.clusters import equal_starts
from coterie.algorithms.protocol import PublicFacts, Rounds, train
from coterie.algorithms.record.record_level import GivenClusters, RecordClustersState
from coterie.algorithms.registry import register
from coterie.clustering.partition import kmeans, relabelled
from coterie.privacy.plans import TRAINING


@register
class KMCDPFL(GivenClusters[RecordClustersState]):
    name = "km-cdpfl"

    def start(self, facts: PublicFacts, rng: np.random.Generator) -> RecordClustersState:
        seed, models = equal_starts(facts, rng, self.settings.clusters)
        return RecordClustersState(0, facts.clients, seed, models, dict.fromkeys(facts.clients, 0))

    def round(self, state: RecordClustersState) -> Rounds[RecordClustersState]:
        before = state.cluster_of
        updates = yield from train(TRAINING, self.jobs(state))
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
        return self.moved(replace(state, cluster_of=cluster_of), models)
