"""What a server found out about clusters on its way: for the run's folder and its report."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Findings:
    """What the server concluded about the clusters, from released values; drawn in the report.

    Args:
        points: round-1 releases in their first two principal components, one per client.
        spread: standard deviation of a component along each axis, in the units of `points`.
        scores: separation score of each candidate number of clusters, keyed by that number.
        switch_round: first round in which clients choose their cluster themselves.
        clustered: whether several clusters explain round 1 better than a single one; None: not told.
        sizes: clients in each cluster, where a noisy count of them was released; with the noise on each.
    """

    clients: tuple[str, ...]
    points: tuple[tuple[float, float], ...]
    centres: tuple[tuple[float, float], ...]
    spread: float
    responsibilities: tuple[tuple[float, ...], ...]
    separation: float
    overlap: float
    scores: Mapping[str, float]
    switch_round: int
    warnings: tuple[str, ...] = ()
    clustered: bool | None = None
    sizes: tuple[int, ...] = ()
    size_noise: float = 0.0
