"""`km-cdpfl`: the server clusters every round's updates anew by k-means++, remembering nothing.

The baseline KM-CDPFL of Malekmohammadi, Taik and Farnadi (2024), after "myopic clustering" of Werner et al.,
"Provably Personalized and Robust Federated Learning" (TMLR 2023): a client trains the model of the cluster
it was last put in, the server groups the updates of the round, and a cluster's next model is the mean of
what its members reached. Updates that start from different models are not comparable, which is the
algorithm's weakness: mistakes of a noisy round are kept.
"""

from dataclasses import replace

import numpy as np

from coterie.algorithms.aggregation import agreeing, believable, centre, shortened
from coterie.algorithms.clusters import equal_starts
from coterie.algorithms.protocol import PublicFacts, Rng, Rounds, train
from coterie.algorithms.record.record_level import GivenClusters, RecordClustersState
from coterie.clustering.partition import kmeans, relabelled
from coterie.privacy.plans import TRAINING


class KMCDPFL(GivenClusters[RecordClustersState]):
    name = "km-cdpfl"

    def start(self, facts: PublicFacts, rng: Rng) -> RecordClustersState:
        seed, models = equal_starts(facts, rng, self.settings.clusters)
        return RecordClustersState(0, facts.clients, seed, models, dict.fromkeys(facts.clients, 0))

    def round(self, state: RecordClustersState) -> Rounds[RecordClustersState]:
        before = state.cluster_of
        updates = yield from train(TRAINING, self.jobs(state))
        present, released = list(updates), np.array([update.value for update in updates.values()])
        clusters, seed = self.settings.clusters, int(state.rng().integers(2**31))
        grouped = kmeans(released, min(clusters, len(present)), seed)
        labels = relabelled(grouped, [before[client] for client in present], clusters)
        # Who did not answer stays where it was.
        cluster_of = {**before, **dict(zip(present, labels.tolist(), strict=True))}
        models, starts = state.models.copy(), state.models[[before[client] for client in present]]
        rule = self.schedule.aggregation
        reached = starts + released.reshape(starts.shape)
        if rule != "mean":
            reached = starts + shortened(list(updates.values()))
        for cluster in set(labels.tolist()):
            own = labels == cluster
            members = [update for update, here in zip(updates.values(), own, strict=True) if here]
            if rule != "mean":
                own[own] = within = believable(members)
                members = [update for update, kept in zip(members, within, strict=True) if kept]
            if rule == "filtered-mean":
                own[own] = agreeing((reached - starts)[own], [update.noise_std for update in members])
            models[cluster] = centre(reached[own], rule)
        return self.moved(replace(state, cluster_of=cluster_of), models)
