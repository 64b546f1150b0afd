"""How well a partition explains noisy releases, and how many clusters they speak for.

The model: cluster centres are drawn around an unknown mean, and a release is its cluster's centre plus the
noise that was added for privacy, whose size is public, plus what a client's sample of records adds. Centres
and mean integrate out in closed form, so partitions into different numbers of clusters can be compared
without a penalty chosen by hand, at any noise, length of releases or size of clusters.

That model expects centres about equally far from each other, gains by pooling what they have in common, and
would merge two that are much closer than the rest. A second one looks at every split alone: the clusters of
a partition form a tree of merges, and the difference between the halves of each is either noise or has a
length of its own. The number of clusters is the larger of what the two speak for, unless the first wants more
than the second and than the directions that stand out of the noise, and hardly gains by them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln

from coterie.clustering.partition import Floats, Labels

# Number of directions that hold most of what a sample of records adds (participation ratio, measured).
DIRECTIONS = 8
# Log-odds against each cluster more, where all are looked at together.
CLUSTER_PENALTY = 0.5
# Log-odds against each split, where it is looked at alone: noise shows one by chance once in 400 times.
SPLIT_PENALTY = 6.0
# Log-odds against each cluster of one: a release that is far from all is more often an accident.
ALONE_PENALTY = 8.0
# Log-odds by which clusters must be better than fewer, if they are seen in no other way.
DOUBT = 2.0
# Variance of centres, in units of the spread, below which the estimate is not trusted.
_LEAST_PRIOR = 0.02


@dataclass(frozen=True)
class WithinSpread:
    """How releases scatter around their centre: noise in all coordinates, variation in a few directions.

    Args:
        noise: variance of the noise of each release, in each coordinate.
        variation: what a client's sample of records adds to its squared distance from the centre.
    """

    noise: Floats
    variation: float
    dimensions: int

    @property
    def totals(self) -> Floats:
        """Expected squared distance of each release from its centre."""
        return np.asarray(self.dimensions * self.noise + self.variation)

    @property
    def directions(self) -> int:
        """Number of directions that variation lies in."""
        return min(DIRECTIONS, self.dimensions)

    @property
    def along(self) -> float:
        """Variance along one direction that matters."""
        return float(self.noise.max()) + self.variation / self.directions

    @property
    def freedom(self) -> float:
        """Independent coordinates that squared distances of this spread are the sum of (Satterthwaite)."""
        noise = float(self.noise.mean())
        squares = (
            self.dimensions * noise**2 + 2 * noise * self.variation + self.variation**2 / self.directions
        )
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


def spread_within(gram: Floats, noise: Floats, dimensions: int, labels: Labels) -> WithinSpread:
    """The spread inside the clusters of a partition, never below the known noise."""
    clusters = int(labels.max()) + 1
    members = np.eye(clusters)[labels]
    sizes = members.sum(axis=0)
    residual = np.trace(gram) - float((np.diag(members.T @ gram @ members) / sizes).sum())
    freedom = max(1, len(labels) - clusters)
    variation = residual / freedom - dimensions * float(noise.mean())
    # Points that coincide leave nothing to estimate from; rounding is what is left to tell them apart.
    least = 0.0 if noise.min() > 0 else np.finfo(np.float64).eps * float(np.trace(gram)) / len(labels) + 1e-30
    return WithinSpread(noise, max(variation, least), dimensions)


def log_likelihood(gram: Floats, spread: WithinSpread, labels: Labels, clusters: int) -> float:
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


def log_evidence(gram: Floats, spread: WithinSpread, labels: Labels) -> float:
    """Log-likelihood of a partition, with what speaks for and against it before any release was seen."""
    clusters = int(labels.max()) + 1
    return log_likelihood(gram, spread, labels, clusters) + log_prior(labels, CLUSTER_PENALTY)


def log_prior(labels: Labels, penalty: float) -> float:
    """Log-odds of a partition against a single cluster: its sizes are as likely as any others.

    Given its sizes it is one of so many partitions, all alike. Labels drawn one by one instead, each as
    likely as any, would rarely come in many small clusters, and clusters of two clients would be missed.
    """
    sizes = np.bincount(labels)
    ways = gammaln(len(labels) + 1) - gammaln(sizes + 1).sum() - gammaln(np.bincount(sizes) + 1).sum()
    alone = int((sizes == 1).sum()) if len(labels) > 1 else 0
    return -float(ways) - penalty * (len(sizes) - 1) - ALONE_PENALTY * alone


def log_odds_of_splits(gram: Floats, spread: WithinSpread, labels: Labels) -> float:
    """Evidence that every split in the tree of a partition's clusters is one, against a single cluster.

    The differences between the halves of the merges are independent of each other. One that is r times as
    long (squared) as its noise makes it on average is f/2 (r - 1 - log r) more likely under the length that
    fits it best, f being the coordinates it is the sum of: also Chernoff's bound for noise to be so long.
    """
    ratios = np.maximum(_merges(gram, spread, labels), 1.0)
    found = spread.freedom / 2 * float((ratios - 1.0 - np.log(ratios)).sum())
    return found + log_prior(labels, SPLIT_PENALTY)


def _merges(gram: Floats, spread: WithinSpread, labels: Labels) -> Floats:
    """Squared distance of the halves of each merge over what their errors make of it (Ward's tree)."""
    members = np.eye(int(labels.max()) + 1)[labels] / spread.totals[:, None]
    mass = members.sum(axis=0)
    means = members / mass
    inner = means.T @ gram @ means
    ratios = []
    while len(mass) > 1:
        lengths = np.diag(inner)
        apart = (lengths[:, None] + lengths[None] - 2 * inner) / (1.0 / mass[:, None] + 1.0 / mass[None])
        np.fill_diagonal(apart, np.inf)
        kept, gone = sorted(divmod(int(apart.argmin()), len(mass)))
        ratios.append(float(apart[kept, gone]))
        joined = np.eye(len(mass))
        joined[[kept, gone], kept] = mass[[kept, gone]] / (mass[kept] + mass[gone])
        joined = np.delete(joined, gone, axis=1)
        inner = joined.T @ inner @ joined
        mass[kept] += mass[gone]
        mass = np.delete(mass, gone)
    return np.array(ratios)


def most_likely_number(gram: Floats, noise: Floats, dimensions: int, partitions: Mapping[int, Labels]) -> int:
    """The number of clusters that the releases speak for, given the best partition into each number."""
    together = _scores(gram, noise, dimensions, partitions, log_evidence)
    apart = _scores(gram, noise, dimensions, partitions, log_odds_of_splits)
    pooled, split = (max(scores, key=scores.__getitem__) for scores in (together, apart))
    directions = standing_out(gram, float(noise.max()), dimensions)
    spanned = max((number for number in partitions if number <= directions + 1), default=min(partitions))
    seen = max(split, spanned)
    if pooled > seen and together[pooled] - together[seen] < DOUBT:
        return seen
    return max(pooled, split)


def standing_out(gram: Floats, noise: float, dimensions: int) -> int:
    """Number of directions in which releases differ by more than noise alone would make them, at most.

    The edge is that of Marchenko and Pastur; M centres span M - 1 directions. What a client's records add
    spans some, too, so this tells where clusters are not seen rather than where they are.
    """
    edge = noise * (np.sqrt(dimensions) + np.sqrt(len(gram) - 1)) ** 2
    return int((np.linalg.eigvalsh(gram) > edge).sum())


def _scores(
    gram: Floats,
    noise: Floats,
    dimensions: int,
    partitions: Mapping[int, Labels],
    rule: Callable[[Floats, WithinSpread, Labels], float],
) -> dict[int, float]:
    """What one rule makes of every number.

    The variation inside clusters is estimated from a partition, so it depends on the answer. It starts from
    the finest partition with two releases to a cluster, where it is smallest and can still be seen, and then
    only ever grows with coarser ones.
    """
    paired = [number for number in partitions if 2 * number <= len(gram)]
    reference = max(paired, default=min(partitions))
    while True:
        spread = spread_within(gram, noise, dimensions, partitions[reference])
        scores = {number: rule(gram, spread, labels) for number, labels in partitions.items()}
        best = max(scores, key=scores.__getitem__)
        if best >= reference:
            return scores
        reference = best


def _prior_variance(gram: Floats, spread: WithinSpread, clusters: int) -> float:
    """Variance of centres per coordinate, from how far releases are apart beyond their spread."""
    releases = len(gram)
    mean = float((1.0 / spread.precisions).mean())
    between = float(np.trace(gram)) / spread.dimensions - (releases - 1) * mean
    room = releases * (1.0 - 1.0 / clusters) if clusters > 1 else float(releases)
    return max(between / room, _LEAST_PRIOR * mean)
