"""How well a partition explains noisy releases, and how many clusters they speak for.

The model: cluster centres are drawn around an unknown mean, and a release is its cluster's centre plus the
noise that was added for privacy, whose size is public, plus what a client's sample of records adds. Centres
and mean integrate out in closed form, so partitions into different numbers of clusters can be compared
without a penalty chosen by hand, at any noise, length of releases or size of clusters.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from coterie.clustering.partition import Floats, Labels

DIRECTIONS = 8
"""Number of directions that hold most of what a sample of records adds (participation ratio, measured)."""
_LEAST_PRIOR = 0.02
"""Variance of centres, in units of the spread, below which the estimate is not trusted."""


@dataclass(frozen=True)
class Spread:
    """How releases scatter around their centre: noise in all coordinates, variation in a few directions."""

    noise: Floats
    """Variance of the noise of each release, in each coordinate."""
    variation: float
    """What a client's sample of records adds to its squared distance from the centre."""
    dimensions: int

    @property
    def totals(self) -> Floats:
        """Expected squared distance of each release from its centre."""
        return np.asarray(self.dimensions * self.noise + self.variation)

    @property
    def along(self) -> float:
        """Variance along one direction that matters."""
        return float(self.noise.max()) + self.variation / DIRECTIONS

    @property
    def freedom(self) -> float:
        """Independent coordinates that squared distances of this spread are the sum of (Satterthwaite)."""
        noise = float(self.noise.mean())
        squares = self.dimensions * noise**2 + 2 * noise * self.variation + self.variation**2 / DIRECTIONS
        total = self.dimensions * noise + self.variation
        return total**2 / squares if squares > 0 else float(self.dimensions)

    @property
    def precisions(self) -> Floats:
        """Weights of releases in the evidence, which treats all coordinates alike.

        In its few directions variation could pass for clusters, so here it counts up to twice, the more the
        larger it is beside the noise.
        """
        per_coordinate = self.variation / self.dimensions
        noise = float(self.noise.mean())
        share = per_coordinate / (per_coordinate + noise) if per_coordinate > 0 else 0.0
        return np.asarray(1.0 / (self.noise + (1.0 + share) * per_coordinate))


def spread_within(gram: Floats, noise: Floats, dimensions: int, labels: Labels) -> Spread:
    """The spread inside the clusters of a partition, never below the known noise."""
    clusters = int(labels.max()) + 1
    members = np.eye(clusters)[labels]
    sizes = members.sum(axis=0)
    residual = np.trace(gram) - float((np.diag(members.T @ gram @ members) / sizes).sum())
    freedom = max(1, len(labels) - clusters)
    variation = residual / freedom - dimensions * float(noise.mean())
    # Points that coincide leave nothing to estimate from; rounding is what is left to tell them apart.
    least = 0.0 if noise.min() > 0 else np.finfo(np.float64).eps * float(np.trace(gram)) / len(labels) + 1e-30
    return Spread(noise, max(variation, least), dimensions)


def log_likelihood(gram: Floats, spread: Spread, labels: Labels, clusters: int) -> float:
    """Logarithm of the probability of the releases under a partition, up to a constant of the releases."""
    precisions, dimensions = spread.precisions, spread.dimensions
    prior = _prior_variance(gram, spread, clusters)
    members = np.eye(clusters)[labels] * precisions[:, None]
    mass = members.sum(axis=0)
    inner = members.T @ gram @ members
    shrink = 1.0 / (1.0 + prior * mass)
    explained = prior / 2 * float(np.diag(inner) @ shrink)
    complexity = dimensions / 2 * float(np.log1p(prior * mass).sum())
    # The mean of the centres, under a flat prior.
    certainty = float((mass * shrink).sum())
    mean = float(shrink @ inner @ shrink) / (2 * certainty) - dimensions / 2 * np.log(certainty)
    return float(explained - complexity + mean)


def log_evidence(gram: Floats, spread: Spread, labels: Labels) -> float:
    """Log-likelihood of a partition, where a release may as likely come from any of the clusters."""
    clusters = int(labels.max()) + 1
    return log_likelihood(gram, spread, labels, clusters) - len(labels) * float(np.log(clusters))


def most_likely_number(gram: Floats, noise: Floats, dimensions: int, partitions: Mapping[int, Labels]) -> int:
    """The number of clusters with the most evidence, given the best partition into each number.

    The variation inside clusters is estimated from a partition, so it depends on the answer. It starts from
    the finest partition with two releases to a cluster, where it is smallest and can still be seen, and then
    only ever grows with coarser ones.
    """
    paired = [number for number in partitions if 2 * number <= len(gram)]
    reference = max(paired, default=min(partitions))
    while True:
        scores = evidence_by_number(gram, noise, dimensions, partitions, reference)
        best = max(scores, key=scores.__getitem__)
        if best >= reference:
            return best
        reference = best


def evidence_by_number(
    gram: Floats, noise: Floats, dimensions: int, partitions: Mapping[int, Labels], reference: int
) -> dict[int, float]:
    """Log-evidence of every partition, with the spread found inside the clusters of one of them."""
    spread = spread_within(gram, noise, dimensions, partitions[reference])
    return {number: log_evidence(gram, spread, labels) for number, labels in partitions.items()}


def _prior_variance(gram: Floats, spread: Spread, clusters: int) -> float:
    """Variance of centres per coordinate, from how far releases are apart beyond their spread."""
    releases = len(gram)
    mean = float((1.0 / spread.precisions).mean())
    between = float(np.trace(gram)) / spread.dimensions - (releases - 1) * mean
    room = releases * (1.0 - 1.0 / clusters) if clusters > 1 else float(releases)
    return max(between / room, _LEAST_PRIOR * mean)
