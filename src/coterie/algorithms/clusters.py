"""Models of clusters: how many there may be, where they begin, how they move. It costs no privacy."""

from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from coterie.algorithms.aggregation import Rule, combined
from coterie.algorithms.protocol import Models, PublicFacts, Rng, Vector
from coterie.algorithms.settings import AlgorithmSettings
from coterie.errors import InputError
from coterie.privacy import Released
from coterie.privacy.ranges import CLUSTERS
from coterie.settings import Acts


class ClusterSettings(AlgorithmSettings):
    """How many models there are."""

    clusters: int = Field(4, ge=CLUSTERS.least, le=CLUSTERS.most, description="number of clusters")


class StartSettings(ClusterSettings):
    """How many models there are, and where they begin."""

    start: Literal["near", "random"] = Field(
        "near", description="near (one initialisation, perturbed) | random (k initialisations)"
    )
    perturbation: Annotated[
        float, Acts("algorithm.start near, or where clusters are revived", lambda own, _: own.perturbs)
    ] = Field(
        0.5, gt=0, le=1, description="share of another initialisation in each model (start near, revive)"
    )

    @property
    def perturbs(self) -> bool:
        """Whether any model is ever perturbed."""
        return self.start == "near"


def check_clusters(clusters: int, clients: int, also: str = "") -> None:
    """Refuse more clusters than there are clients."""
    if clusters > clients:
        raise InputError(
            f"algorithm.clusters: {clusters} is more than the {clients} clients; "
            f"allowed: {also}2 to {clients}"
        )


def equal_starts(facts: PublicFacts, rng: Rng, models: int) -> tuple[int, Models]:
    """The server's seed, and so many times the model that it initialises."""
    seed = int(rng.integers(2**31))
    return seed, np.tile(facts.initialise(seed), (models, 1))


def cluster_starts(facts: PublicFacts, rng: Rng, settings: StartSettings) -> tuple[int, Models]:
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


def step_clusters(
    models: Models,
    cluster_of: Mapping[str, int],
    updates: Mapping[str, Released[Vector]],
    rule: Rule = "mean",
) -> Models:
    """Move each cluster's model by the mean update of its members, or by what another rule makes of them.

    An empty cluster keeps its model.
    """
    moved = models.copy()
    for cluster in range(len(models)):
        own = [update for client, update in updates.items() if cluster_of[client] == cluster]
        if own:
            moved[cluster] = (models[cluster] + combined(own, rule)).astype(np.float32)
    return moved
