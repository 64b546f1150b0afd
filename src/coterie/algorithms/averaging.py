"""Combining released updates: ordinary functions, free of privacy cost."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.algorithms.protocol import Vector
from coterie.privacy.released import Released


def mean_update(updates: Iterable[Released[Vector]]) -> NDArray[np.float64] | None:
    """Uniform mean of released updates, or None if there are none."""
    values = [update.value for update in updates]
    return np.mean(values, axis=0, dtype=np.float64) if values else None


def step_clusters(
    models: NDArray[np.float32], cluster_of: Mapping[str, int], updates: Mapping[str, Released[Vector]]
) -> NDArray[np.float32]:
    """Move each cluster's model by the mean update of its members; an empty cluster keeps its model."""
    moved = models.copy()
    for cluster in range(len(models)):
        mean = mean_update(update for client, update in updates.items() if cluster_of[client] == cluster)
        if mean is not None:
            moved[cluster] = (models[cluster] + mean).astype(np.float32)
    return moved


def each_alone(clients: Sequence[str]) -> dict[str, int]:
    """Every client in a cluster of its own, numbered in their order."""
    return {client: row for row, client in enumerate(clients)}
