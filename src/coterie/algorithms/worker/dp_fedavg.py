"""`dp-fedavg` for workers: everybody in one group, whatever groups there are."""

from coterie.algorithms.protocol import PublicFacts
from coterie.algorithms.registry import register
from coterie.algorithms.worker.worker_level import WorkerLevel, WorkerLevelSettings
from coterie.groups import Structure


@register
class WorkerFedAvg(WorkerLevel):
    name = "dp-fedavg"
    settings_type = WorkerLevelSettings

    def structure(self, facts: PublicFacts) -> Structure:
        count = len(facts.clients)
        return Structure("global", (tuple(range(count)),), count, names=facts.clients)
