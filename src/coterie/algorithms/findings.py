"""What a server found out about clusters on its way: for the run's folder and its report."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Findings:
    """What the server concluded about the clusters, from released values; drawn in the report."""

    clients: tuple[str, ...]
    points: tuple[tuple[float, float], ...]
    """Round-1 releases in their first two principal components, one per client."""
    centres: tuple[tuple[float, float], ...]
    spread: float
    """Standard deviation of a component along each axis, in the units of `points`."""
    responsibilities: tuple[tuple[float, ...], ...]
    separation: float
    overlap: float
    scores: Mapping[str, float]
    """Separation score of each candidate number of clusters, keyed by that number."""
    switch_round: int
    """First round in which clients choose their cluster themselves."""
    warnings: tuple[str, ...] = ()
