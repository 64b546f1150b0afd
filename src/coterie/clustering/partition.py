"""The partition of noisy releases that explains them best, searched on their Gram matrix.

With spherical Gaussian noise of known size, the likelihood of a partition depends on its weighted sum of
squares around the cluster means: the objective of k-means, with each release weighing as much as its noise
allows. A federation has tens of clients, so the search can afford many starts and moves of single clients
until none helps, at a cost that does not depend on how long the releases are.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import squareform

from coterie.clustering.embedding import components_of, principal_components

STARTS = 24
_SWEEPS = 50

Floats = NDArray[np.float64]
Labels = NDArray[np.intp]


def best_partition(gram: Floats, weights: Floats, clusters: int, seed: int) -> Labels:
    """Labels 0 to clusters - 1 of the partition with the least weighted sum of squares found.

    Args:
        gram: inner products of the releases.
        weights: how much each release counts, one over the variance of its noise.

    Starts are k-means++ draws along the first `clusters - 1` principal components, where centres that far
    apart must lie, and Ward's tree; all are improved by whole sweeps and then by moves of one client.
    """
    if not 1 <= clusters <= len(gram):
        raise ValueError(f"clusters: {clusters} of {len(gram)} releases")
    if clusters == 1:
        return np.zeros(len(gram), dtype=np.intp)
    rng = np.random.default_rng(seed)
    points = components_of(gram, min(clusters - 1, len(gram) - 1))
    drawn = _sweep(points @ points.T, weights, _plus_plus(points, clusters, STARTS, rng), clusters)
    starts = np.concatenate([drawn, _ward(gram, clusters)[None]])
    labels = _move(gram, weights, _sweep(gram, weights, starts, clusters), clusters)
    sums = _Sums(gram, weights, labels, clusters)
    explained = _share(sums.squared, sums.mass).sum(axis=1)
    return _in_order(_fill(labels[int(np.argmax(explained))], clusters))


def kmeans(vectors: NDArray[np.floating], clusters: int, seed: int) -> Labels:
    """Labels of plain k-means with ten k-means++ starts: the baseline that others use.

    It sees distances alone, which all principal components keep: as many numbers as there are vectors,
    instead of as many as a model has weights.
    """
    if not len(vectors):
        return np.zeros(0, dtype=np.intp)
    from sklearn.cluster import KMeans  # takes a second and 70 MB to import

    points = principal_components(vectors, len(vectors)) if vectors.shape[1] > len(vectors) else vectors
    # Until nobody moves: the usual tolerance is a share of the variance by dimension.
    fitted = KMeans(n_clusters=clusters, n_init=10, tol=0.0, random_state=seed % 2**32)
    return np.asarray(fitted.fit(np.asarray(points, dtype=np.float64)).labels_, dtype=np.intp)


def relabelled(labels: Labels, before: Sequence[int], clusters: int) -> Labels:
    """The same partition, named so that as many members as possible keep the name they had."""
    shared = np.zeros((clusters, clusters))
    np.add.at(shared, (labels, np.asarray(before, dtype=np.intp)), 1)
    _, names = linear_sum_assignment(shared, maximize=True)
    return np.asarray(names[labels], dtype=np.intp)


def _in_order(labels: Labels) -> Labels:
    """Clusters numbered by their first member."""
    _, first, places = np.unique(labels, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[places], dtype=np.intp)


def _fill(labels: Labels, clusters: int) -> Labels:
    """Members for empty clusters, which only releases that coincide leave."""
    labels = labels.copy()
    for empty in set(range(clusters)) - set(labels.tolist()):
        labels[np.flatnonzero(labels == np.bincount(labels).argmax())[-1]] = empty
    return labels


def _plus_plus(points: Floats, clusters: int, starts: int, rng: np.random.Generator) -> Labels:
    """k-means++ (Arthur and Vassilvitskii, 2007): nearest of centres drawn far from each other, per start."""
    squared = ((points[:, None] - points[None]) ** 2).sum(axis=-1)
    chosen = np.empty((starts, clusters), dtype=np.intp)
    chosen[:, 0] = rng.integers(len(points), size=starts)
    nearest = squared[chosen[:, 0]]
    for column in range(1, clusters):
        mass = np.cumsum(nearest, axis=1)
        coins = rng.random((starts, 1)) * mass[:, -1:]
        chosen[:, column] = np.minimum((mass <= coins).sum(axis=1), len(points) - 1)
        nearest = np.minimum(nearest, squared[chosen[:, column]])
    return np.asarray(squared[chosen].argmin(axis=1), dtype=np.intp)


def _ward(gram: Floats, clusters: int) -> Labels:
    lengths = np.diag(gram)
    squared = np.clip(lengths[:, None] + lengths[None] - 2 * gram, 0.0, None)
    tree = linkage(squareform(np.sqrt(squared), checks=False), method="ward")
    return np.asarray(fcluster(tree, clusters, criterion="maxclust") - 1, dtype=np.intp)


class _Sums:
    """Weighted sums of each cluster's members, for many partitions (starts) at once."""

    def __init__(self, gram: Floats, weights: Floats, labels: Labels, clusters: int) -> None:
        members = np.eye(clusters)[labels]
        self.sizes = members.sum(axis=1)
        members *= weights[:, None]
        self.mass = members.sum(axis=1)
        """Weight of each cluster, by start and cluster, like `sizes` and `squared`."""
        self.inner = gram @ members
        """Inner product of each release with each cluster's sum, by start, release and cluster."""
        self.squared = (members * self.inner).sum(axis=1)
        self._gram, self._weights = gram, weights

    def move(self, start: Labels, release: Labels, source: Labels, target: Labels) -> None:
        """In each of these starts, take one release from one cluster to another."""
        weight = self._weights[release]
        own = weight**2 * np.diag(self._gram)[release]
        for cluster, sign in ((source, -1.0), (target, 1.0)):
            self.squared[start, cluster] += 2 * sign * weight * self.inner[start, release, cluster] + own
            self.inner[start, :, cluster] += sign * weight[:, None] * self._gram[release]
            self.mass[start, cluster] += sign * weight
            self.sizes[start, cluster] += sign


def _share(squared: Floats, mass: Floats) -> Floats:
    """What a cluster explains of the weighted sum of squares: its sum squared over its mass."""
    return np.divide(squared, mass, out=np.zeros_like(squared), where=mass > 0)


def _sweep(gram: Floats, weights: Floats, labels: Labels, clusters: int) -> Labels:
    """Everyone to the nearest mean, until nobody moves (Lloyd); an emptied cluster stays empty."""
    for _ in range(_SWEEPS):
        sums = _Sums(gram, weights, labels, clusters)
        with np.errstate(divide="ignore", invalid="ignore"):
            means = sums.inner / sums.mass[:, None]
            lengths = sums.squared / sums.mass**2
        distances = np.where(sums.mass[:, None] > 0, lengths[:, None] - 2 * means, np.inf)
        moved = distances.argmin(axis=2)
        if (moved == labels).all():
            break
        labels = moved
    return np.asarray(labels, dtype=np.intp)


def _move(gram: Floats, weights: Floats, labels: Labels, clusters: int) -> Labels:
    """The best move of a single release in each partition, until none helps (Hartigan).

    A move into an empty cluster helps as long as releases differ.
    """
    labels = labels.copy()
    weight = weights[None, :, None]
    own = weight**2 * np.diag(gram)[None, :, None]
    sums = _Sums(gram, weights, labels, clusters)
    for _ in range(20 * labels.shape[1]):
        mass, squared = sums.mass[:, None], sums.squared[:, None]
        before = _share(squared, mass)
        gain = _share(squared + 2 * weight * sums.inner + own, mass + weight) - before
        here = labels[..., None]
        left = _share(
            np.take_along_axis(squared - 2 * weight * sums.inner + own, here, axis=2),
            np.take_along_axis(np.maximum(mass - weight, 0.0), here, axis=2),
        )
        leaving = left - np.take_along_axis(np.broadcast_to(before, gain.shape), here, axis=2)
        alone = np.take_along_axis(np.broadcast_to(sums.sizes[:, None] == 1, gain.shape), here, axis=2)
        gain = gain + np.where(alone, -np.inf, leaving)
        np.put_along_axis(gain, here, -np.inf, axis=2)
        flat = gain.reshape(len(labels), -1)
        best = flat.argmax(axis=1)
        start = np.flatnonzero(flat[np.arange(len(labels)), best] > 1e-12 * np.abs(own).max())
        if not len(start):
            break
        release, target = np.divmod(best[start], clusters)
        sums.move(start, release, labels[start, release], target)
        labels[start, release] = target
    return labels
