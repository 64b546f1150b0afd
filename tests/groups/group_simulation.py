"""Overlapping grouped learning in plain numpy, worker by worker, with all coins handed in.

Models are small vectors, workers' local training is a fixed nonlinear map of where they start and their data,
everybody takes part. `Coins` gives the same noise to every run that uses the same seed.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.groups import Structure

DIMENSION = 3
Vector = NDArray[np.float64]


def clipped(vector: Vector, clip: float) -> Vector:
    length = float(np.linalg.norm(vector))
    return vector * min(1.0, clip / length) if length > 0 else vector


class Coins:
    """Noise for (group, release), the same for equal seeds."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def noise(self, group: int, release: int) -> Vector:
        return np.random.default_rng((self.seed, group, release)).normal(size=DIMENSION)


def train(start: Vector, data: Vector) -> Vector:
    """One local epoch: any deterministic map of the start model and the worker's data will do."""
    return np.asarray(start + np.tanh(0.7 * data - start) + 0.1 * np.sin(3 * start))


def groups_of(structure: Structure, worker: int) -> list[int]:
    return [number for number, members in enumerate(structure.groups) if worker in members]


def starts(structure: Structure, models: Sequence[Vector]) -> dict[int, Vector]:
    """Where each worker starts after a merge: the mean of its groups' models."""
    return {
        worker: np.mean([models[group] for group in groups_of(structure, worker)], axis=0)
        for worker in range(structure.workers)
    }


def dp_ogl(
    structure: Structure,
    period: int,
    epochs: int,
    data: Mapping[int, Vector],
    seed: int,
    clip: float = 1.0,
    noise: float = 1.0,
) -> dict[int, list[Vector]]:
    """models[t][group] for t = 1..epochs."""
    coins = Coins(seed)
    models = [np.zeros(DIMENSION) for _ in structure.groups]
    history = {1: models}
    for epoch in range(1, epochs):
        merged = starts(structure, models) if (epoch - 1) % period == 0 else None
        following = []
        for group, members in enumerate(structure.groups):
            total = np.zeros(DIMENSION)
            for worker in members:
                start = models[group] if merged is None else merged[worker]
                total = total + clipped(train(start, data[worker]) - start, clip)
            total = total + clip * noise * coins.noise(group, epoch)
            following.append(models[group] + total / len(members))
        models = following
        history[epoch + 1] = models
    return history


def dp_ogl_plus(
    structure: Structure,
    period: int,
    epochs: int,
    data: Mapping[int, Vector],
    seed: int,
    clip: float = 1.0,
    noise: float = 1.0,
) -> dict[int, list[Vector]]:
    """The sound version: workers train alone through a block; models change at its end only."""
    coins = Coins(seed)
    models = [np.zeros(DIMENSION) for _ in structure.groups]
    history = {1: models}
    for epoch in range(1, epochs):
        if epoch % period == 0:
            merged = starts(structure, models)
            block_clip = math.sqrt(period) * clip
            following = []
            for group, members in enumerate(structure.groups):
                total = np.zeros(DIMENSION)
                for worker in members:
                    local = merged[worker]
                    for _ in range(period):
                        local = train(local, data[worker])
                    total = total + clipped(local - merged[worker], block_clip)
                total = total + block_clip * noise * coins.noise(group, epoch // period)
                following.append(models[group] + total / len(members))
            models = following
        history[epoch + 1] = models
    return history
