"""`oracle`: the true clusters are known; what clustering could reach at best under the same promise.

Its plan has no first round for clustering and no selections, so all of the budget goes into training.
"""

from collections.abc import Mapping

from coterie.algorithms.clusters import equal_starts
from coterie.algorithms.protocol import PublicFacts, Rng
from coterie.algorithms.record.record_level import RecordClusters, RecordClustersState
from coterie.algorithms.settings import AlgorithmSettings, PrivacySettings, Schedule

TOLD = "the true clusters were handed to the algorithm"
"""What the guarantee of any algorithm says that needs the truth."""


class Oracle(RecordClusters[RecordClustersState]):
    name = "oracle"
    needs_truth = True
    caveats = (TOLD,)

    def __init__(
        self,
        settings: AlgorithmSettings,
        schedule: Schedule,
        privacy: PrivacySettings,
        *,
        truth: Mapping[str, int],
    ) -> None:
        super().__init__(settings, schedule, privacy)
        self.truth = truth

    def start(self, facts: PublicFacts, rng: Rng) -> RecordClustersState:
        starts = equal_starts(facts, rng, len(set(self.truth.values())))
        return RecordClustersState(0, facts.clients, *starts, dict(self.truth))
