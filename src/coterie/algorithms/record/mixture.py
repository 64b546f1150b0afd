"""What r-dpcfl and its preprint share: a first round by which a mixture groups the clients."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.algorithms.protocol import Rounds, TrainJob, Vector, train
from coterie.algorithms.record.record_level import RecordClustersState
from coterie.clustering.mixture import Mixture, draw_labels
from coterie.privacy.plans import FIRST_ROUND
from coterie.privacy.released import Released


@dataclass(frozen=True)
class MixtureState(RecordClustersState):
    responsibilities: NDArray[np.float64]
    """Probability of each cluster (column) for each client (row), from the mixture."""


def first_releases(
    clients: Sequence[str], initial: Vector
) -> Rounds[tuple[list[str], list[Released[Vector]]]]:
    """Who answers in the clustering round, and what they release."""
    answers = yield from train(FIRST_ROUND, [TrainJob(client, initial) for client in clients])
    present = [client for client in clients if client in answers]
    return present, [answers[client] for client in present]


def responsibilities_of(
    clients: Sequence[str], present: Sequence[str], mixture: Mixture
) -> NDArray[np.float64]:
    """The mixture's probabilities for those who answered; who did not may belong anywhere."""
    table = np.full((len(clients), mixture.clusters), 1.0 / mixture.clusters)
    table[[clients.index(client) for client in present]] = mixture.responsibilities
    return table


def draw_clusters(state: MixtureState) -> dict[str, int]:
    """A cluster for each client, drawn at the mixture's odds."""
    labels = draw_labels(state.responsibilities, state.rng())
    return dict(zip(state.clients, labels.tolist(), strict=True))
