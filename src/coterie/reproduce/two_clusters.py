"""Two clusters of two clients on a line: why losses mislead early, and updates late.

The example of Malekmohammadi, Taik and Farnadi (TMLR 2025, Figure 1): clients 1 and 2 have the losses
4 (theta + 6)^2 and 4 (theta + 5)^2, clients 3 and 4 have 4 (theta - 5)^2 and 4 (theta - 6)^2. No client holds
any record here, so there is nothing to protect; the noise stands for what privacy would add to a gradient.

With the printed start of the first model, 11, client 4 chooses it (100 is less than 144): the trap closes for
starts beyond 12, and 13 is used here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

OPTIMA = np.array([-6.0, -5.0, 5.0, 6.0])
TRUTH = (0, 0, 1, 1)
CURVATURE = 8.0
TRAPPED_START = (13.0, 0.0)

STRATEGIES = ("by loss", "by update, each round", "by update first, then by loss")


def choose_by_loss(models: Sequence[float] | Floats) -> tuple[int, ...]:
    """The model with the lowest loss, for each client."""
    losses = CURVATURE / 2 * (np.asarray(models)[:, None] - OPTIMA) ** 2
    return tuple(np.argmin(losses, axis=0).tolist())


def split_by_update(updates: Floats) -> tuple[int, ...]:
    """Two groups of updates, closest within: on a line, the best of the cuts between neighbours."""
    order = np.argsort(updates)
    cuts = [(updates[order[:cut]], updates[order[cut:]]) for cut in range(1, len(order))]
    within = [sum(((part - part.mean()) ** 2).sum() for part in cut) for cut in cuts]
    labels = np.zeros(len(order), dtype=int)
    labels[order[int(np.argmin(within)) + 1 :]] = 1
    return tuple(labels.tolist())


def same_groups(found: Sequence[int]) -> bool:
    """Whether the clients are grouped as they should be, whatever the groups are called."""
    return len(set(zip(found, TRUTH, strict=True))) == 2 == len(set(found))


@dataclass(frozen=True)
class Course:
    """Models of both clusters and the groups of the clients, from round to round."""

    models: Sequence[tuple[float, float]]
    groups: Sequence[tuple[int, ...]]

    @property
    def found(self) -> bool:
        return same_groups(self.groups[-1])


def play(
    strategy: str, start: Sequence[float] | Floats, noise: float, rng: np.random.Generator, rounds: int = 30
) -> Course:
    """Train the two models with one way of grouping the clients; every gradient carries noise.

    A cluster's next model is the mean of what its members reached.

    Args:
        start: both models at the beginning; the third strategy starts both at their mean, because updates
            can be compared only where they start from the same model.
        noise: standard deviation of what is added to every gradient.
    """
    by_loss, by_update, both = (strategy == name for name in STRATEGIES)
    models = np.array(start, dtype=np.float64)
    groups: tuple[int, ...] = (0, 0, 0, 0)
    history, chosen = [(float(models[0]), float(models[1]))], []
    if both:
        models[:] = models.mean()
    for round_ in range(rounds):
        if by_loss or (both and round_ > rounds // 2):
            groups = choose_by_loss(models)
        began = models[list(groups)]
        noisy = CURVATURE * (began - OPTIMA) + noise * rng.standard_normal(len(OPTIMA))
        if by_update or (both and round_ == 0):
            groups = split_by_update(noisy)
        reached = began - 0.03 * noisy
        for k in set(groups):
            models[k] = reached[np.equal(groups, k)].mean()
        history.append((float(models[0]), float(models[1])))
        chosen.append(groups)
    return Course(history, chosen)


def success(strategy: str, noise: float, draws: int, seed: int) -> float:
    """Share of random starts and noises after which the clients are grouped right."""
    rng = np.random.default_rng([seed, round(1000 * noise)])
    starts = rng.uniform(-15.0, 15.0, (draws, 2))
    return sum(play(strategy, start, noise, rng).found for start in starts) / draws
