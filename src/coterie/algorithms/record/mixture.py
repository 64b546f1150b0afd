"""What r-dpcfl and its preprint share: a mixture groups the clients by what they release first."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coterie.algorithms.protocol import Floats
from coterie.algorithms.record.record_level import RecordClustersState
from coterie.clustering.mixture import Mixture, draw_labels


@dataclass(frozen=True)
class MixtureState(RecordClustersState):
    responsibilities: Floats
    """Probability of each cluster (column) for each client (row), from the mixture."""

    def drawn(self) -> dict[str, int]:
        """A cluster for each client, drawn at the mixture's odds."""
        labels = draw_labels(self.responsibilities, self.rng())
        return dict(zip(self.clients, labels.tolist(), strict=True))

    def rows_of(self, clients: Sequence[str]) -> list[int]:
        """The places of these clients among all."""
        return [self.clients.index(client) for client in clients]

    def odds(self, present: Sequence[str], mixture: Mixture) -> Floats:
        """The mixture's probabilities for those who answered; who did not may belong anywhere."""
        table = np.full((len(self.clients), mixture.clusters), 1.0 / mixture.clusters)
        table[self.rows_of(present)] = mixture.responsibilities
        return table
