"""A Gaussian mixture on noisy releases: who belongs together, and how sure we are.

Every release is its cluster's centre plus spherical Gaussian noise whose size is public, plus what the
client's sample of records adds, estimated for all clusters together. A variance of its own per component, as
usual in mixtures, has nothing to learn from the two to six releases of a cluster: it shrinks onto two of them
and reports a separation that is not there.

A few releases of many coordinates leave the centres themselves uncertain, and the search for the best
partition finds some distance between the halves of anything. Separations here are what remains of a distance
once both are taken off, so they are 0 where noise alone would look the same, and the overlap of the closest
two components is the chance that the partition is wrong (`benchmarks/clustering.py` holds it to that).

What a client's sample of records adds need not be the same in all directions. Where it is large in some
(every client has its own share of each class) and the centres differ in others, distances in the full length
are blurred by directions that tell nothing, and four clusters can be plain to see in the first two
components that nothing else shows. There, and only there, the plane decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfc, gammaln, logsumexp

from coterie.clustering.embedding import centred_gram, components_of
from coterie.clustering.evidence import WithinSpread, log_evidence, most_likely_number, spread_within
from coterie.clustering.partition import Floats, Labels, best_partition
from coterie.privacy.released import Released

# Overlap up to which components count as clearly apart: noise or a split cluster rarely look like that.
CLEAR_OVERLAP = 0.2
# Separation below which the full length leaves the decision to the plane, from which the plane takes it.
HAZY, PLAIN = 1.0, 2.0
# How much less a separation in the plane is worth: it is the plane in which there was most to be seen.
LOOKED_AT = 0.8

Releases: TypeAlias = Sequence[Released[NDArray[np.float32]]]


@dataclass(frozen=True)
class Mixture:
    """Spherical Gaussians fitted to one release per client.

    Args:
        labels: component of each release, in the most likely partition.
        responsibilities: probability of each component (column) for each release (row).
        separations: separation score of each two components, infinite on the diagonal: half their distance,
            in units of what blurs the line between them.
        spread: standard deviation of a release around its centre, per coordinate.
        clustered: whether the components explain the releases better than a single one does.
    """

    labels: Labels
    responsibilities: Floats
    separations: Floats
    spread: float
    clustered: bool

    @property
    def clusters(self) -> int:
        return len(self.separations)

    @cached_property
    def separation(self) -> float:
        """Smallest separation score of two components (MSS)."""
        return float(self.separations.min())

    @property
    def overlap(self) -> float:
        """Largest overlap of two components (MPO), 2 Q(separation)."""
        return float(erfc(self.separation / np.sqrt(2.0)))


def fit_mixture(releases: Releases, clusters: int, seed: int) -> Mixture:
    """The most likely partition into `clusters` components, and how sure it is."""
    gram, noise, dimensions = _read(releases)
    fitted = _mixture(gram, noise, dimensions, _partition(gram, noise, clusters, seed))
    return _plainest(fitted, gram, noise, (clusters,), seed)


def choose_mixture(
    releases: Releases, candidates: Sequence[int], seed: int
) -> tuple[Mixture, Mapping[int, float]]:
    """The mixture with the number of components that the releases speak for, and every candidate's MSS."""
    gram, noise, dimensions = _read(releases)
    partitions = {clusters: _partition(gram, noise, clusters, seed) for clusters in candidates}
    fitted = {clusters: _mixture(gram, noise, dimensions, labels) for clusters, labels in partitions.items()}
    likeliest = fitted[most_likely_number(gram, noise, dimensions, partitions)]
    chosen = _plainest(likeliest, gram, noise, candidates, seed)
    scores = {clusters: mixture.separation for clusters, mixture in fitted.items()}
    return chosen, scores | {chosen.clusters: chosen.separation}


def draw_labels(responsibilities: Floats, rng: np.random.Generator) -> Labels:
    """A component for each release, drawn at the mixture's odds."""
    odds = responsibilities / responsibilities.sum(axis=1, keepdims=True)
    return np.array([rng.choice(odds.shape[1], p=row) for row in odds], dtype=np.intp)


def _read(releases: Releases) -> tuple[Floats, Floats, int]:
    """Inner products around the mean, variance of the noise of each, and the number of coordinates."""
    vectors = np.stack([release.value for release in releases])
    if not np.isfinite(vectors).all():
        wrong = int((~np.isfinite(vectors).all(axis=1)).sum())
        raise ValueError(f"releases: {wrong} of {len(vectors)} are not finite; allowed: finite vectors")
    noise = np.array([release.noise_std**2 for release in releases], dtype=np.float64)
    return centred_gram(vectors), noise, vectors.shape[1]


def _partition(gram: Floats, noise: Floats, clusters: int, seed: int) -> Labels:
    """Clients with less noise count for more; without any noise, all count alike."""
    weights = noise.mean() / noise if noise.min() > 0 else np.ones(len(noise))
    return best_partition(gram, weights, clusters, seed)


def _plainest(mixture: Mixture, gram: Floats, noise: Floats, candidates: Sequence[int], seed: int) -> Mixture:
    """The mixture, or where it is hazy one of at least as many clusters that are plain to see in a plane.

    The plane is that of the first two principal components. Two clusters differ along a line, where the full
    length has no more to blur than the plane has; a cluster of one shows nothing but that it is far away.
    """
    if mixture.separation >= HAZY:
        return mixture
    points = components_of(gram, 2)
    plane = points @ points.T
    shown = (
        _mixture(plane, noise, 2, _partition(plane, noise, clusters, seed))
        for clusters in candidates
        if max(3, mixture.clusters) <= clusters <= len(gram) // 2
    )
    plain = [seen for seen in shown if seen.separation >= PLAIN and np.bincount(seen.labels).min() > 1]
    if not plain:
        return mixture
    chosen = max(plain, key=lambda seen: seen.separation)
    return replace(chosen, separations=np.maximum(chosen.separations - LOOKED_AT, 0.0))


def _mixture(gram: Floats, noise: Floats, dimensions: int, labels: Labels) -> Mixture:
    spread = spread_within(gram, noise, dimensions, labels)
    components = _Components(gram, spread, labels)
    return Mixture(
        labels=labels,
        responsibilities=components.responsibilities(),
        separations=components.separations,
        spread=float(np.sqrt(spread.along)),
        clustered=log_evidence(gram, spread, labels) > log_evidence(gram, spread, np.zeros_like(labels)),
    )


class _Components:
    """Centres of a partition, each as uncertain as the releases it is the mean of."""

    def __init__(self, gram: Floats, spread: WithinSpread, labels: Labels) -> None:
        self.labels = labels
        self.spread = spread
        self.precisions = 1.0 / spread.totals
        members = np.eye(int(labels.max()) + 1)[labels]
        self.sizes = members.sum(axis=0)
        self.mass = members.T @ self.precisions
        means = members * self.precisions[:, None] / self.mass
        inner = gram @ means
        lengths = np.diag(means.T @ inner)
        self.from_centres = np.diag(gram)[:, None] - 2 * inner + lengths[None]
        """Squared distance of each release (row) from each centre (column)."""
        self.apart = self._apart(lengths[:, None] + lengths[None] - 2 * means.T @ inner)
        self.separations = self._separations()

    def _apart(self, squared: Floats) -> Floats:
        """Squared distances of the centres, less what noise and search put there.

        The errors of two centres lengthen the line between them, and so does the choice of these two
        clusters among all ways to split their members: the largest of so many chi-squared numbers, bounded
        as by Laurent and Massart (2000), Lemma 1. Only splits by a plane compete, and of those there are
        fewer than n^d where points are many and coordinates few.
        """
        error = 1.0 / self.mass
        both = self.sizes[:, None] + self.sizes[None]
        splits = gammaln(both + 1) - gammaln(self.sizes + 1)[:, None] - gammaln(self.sizes + 1)[None]
        splits = np.minimum(splits / self.spread.freedom, np.log(both))
        longest = 1.0 + 2 * np.sqrt(splits) + 2 * splits
        return np.asarray(np.maximum(squared - longest * (error[:, None] + error[None]), 0.0))

    def _separations(self) -> Floats:
        """Separation score of each two components.

        To which of two centres a release belongs is decided along the line between them. Along a line the
        noise has one coordinate, but the line itself is estimated: its error, in all coordinates, adds to
        that of the release and of the midpoint.
        """
        total = float(self.spread.totals.max())
        along = self.spread.along
        # In units of a release's: the error of a centre, and of a centre when one of its members is left out.
        error = 1.0 / (self.mass * total)
        left_out = 1.0 / np.maximum(self.mass * total - 1.0, 1.0)
        line = error[None] + left_out[:, None] + (error[None] ** 2 + left_out[:, None] ** 2) / 2
        blur = along * self.apart * (1.0 + error[None]) + total**2 / self.spread.freedom * line
        scores = np.divide(self.apart / 2, np.sqrt(blur), out=np.zeros_like(blur), where=blur > 0)
        scores = np.minimum(scores, scores.T)
        np.fill_diagonal(scores, np.inf)
        return np.asarray(scores)

    def responsibilities(self) -> Floats:
        """Posterior of each component under equal weights: the size of a cluster is not evidence here.

        What decides is how much further a release is from another centre than from its own (of the others
        in its cluster), beside how far that is on average, which a separation of s makes log-odds of
        2 s^2: normal log-odds of that mean have twice it as their variance.
        """
        rows, own = np.arange(len(self.labels)), self.precisions / self.mass[self.labels]
        alone = own > 1.0 - 1e-9
        stays = self.from_centres[rows, self.labels] / np.where(alone, 1.0, 1.0 - own)
        moves = self.from_centres / (1.0 + self.precisions[:, None] / self.mass[None])
        excess = np.maximum(moves - stays[:, None], 0.0)
        scores = np.where(np.isfinite(self.separations), self.separations, 0.0)
        per_excess = np.divide(2 * scores**2, self.apart, out=np.zeros_like(scores), where=self.apart > 0)
        logits = -per_excess[self.labels] * excess
        logits[rows, self.labels] = 0.0
        return np.asarray(np.exp(logits - logsumexp(logits, axis=1, keepdims=True)))
