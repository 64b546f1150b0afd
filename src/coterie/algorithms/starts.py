"""Where k cluster models begin: it decides whether all of them live, and costs no privacy."""

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coterie.algorithms.protocol import PublicFacts

Start: TypeAlias = Literal["near", "random"]


def cluster_starts(
    facts: PublicFacts, rng: np.random.Generator, clusters: int, start: Start, perturbation: float
) -> tuple[int, NDArray[np.float32]]:
    """The server's seed and the k models before the first round.

    `random` draws k initialisations. One or two of them then tend to fit everybody better than the others do,
    win every client in round 1 and stay ahead. `near` draws one and mixes a share of another into each model,
    so that no model is better for all; every parameter keeps the variance that its initialisation gave it.
    """
    seed, *others = (int(each) for each in rng.integers(2**31, size=1 + clusters))
    models = np.stack([facts.initialise(other) for other in others])
    if start == "near":
        models = np.sqrt(1 - perturbation**2) * facts.initialise(seed) + perturbation * models
    return seed, models.astype(np.float32)
