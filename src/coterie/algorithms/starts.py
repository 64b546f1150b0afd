"""Where k cluster models begin: it decides whether all of them live, and costs no privacy."""

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from coterie.algorithms.protocol import PublicFacts
from coterie.algorithms.settings import AlgorithmSettings

Start: TypeAlias = Literal["near", "random"]


class StartSettings(AlgorithmSettings):
    """How many models there are, and where they begin."""

    clusters: int = Field(4, ge=2, description="number of clusters")
    start: Start = Field(
        "near", description="near (one initialisation, perturbed) | random (k initialisations)"
    )
    perturbation: float = Field(
        0.5, gt=0, le=1, description="share of another initialisation in each model (start near, revive)"
    )


def cluster_starts(
    facts: PublicFacts, rng: np.random.Generator, settings: StartSettings
) -> tuple[int, NDArray[np.float32]]:
    """The server's seed and the k models before the first round.

    `random` draws k initialisations. One or two of them then tend to fit everybody better than the others do,
    win every client in round 1 and stay ahead. `near` draws one and mixes a share of another into each model,
    so that no model is better for all; every parameter keeps the variance that its initialisation gave it.
    """
    seed, *others = (int(each) for each in rng.integers(2**31, size=1 + settings.clusters))
    models = np.stack([facts.initialise(other) for other in others])
    if settings.start == "near":
        share = settings.perturbation
        models = np.sqrt(1 - share**2) * facts.initialise(seed) + share * models
    return seed, models.astype(np.float32)
