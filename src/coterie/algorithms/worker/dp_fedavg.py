"""`dp-fedavg` for workers: everybody in one group, whatever groups there are."""

from coterie.algorithms.protocol import PublicFacts
from coterie.algorithms.worker.worker_level import WorkerLevel
from coterie.groups import Structure


class WorkerFedAvg(WorkerLevel):
    name = "dp-fedavg"

    def structure(self, facts: PublicFacts) -> Structure:
        count = len(facts.clients)
        return Structure("global", (tuple(range(count)),), count, names=facts.clients)
