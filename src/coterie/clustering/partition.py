"""Hard partitions of noisy releases, and names for their parts that last."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans

from coterie.privacy.released import Released


def kmeans(
    releases: Sequence[Released[NDArray[np.float32]]], clusters: int, seed: int, restarts: int = 10
) -> NDArray[np.intp]:
    """Labels of k-means with k-means++ starts on the releases as they are."""
    if not releases:
        return np.zeros(0, dtype=np.intp)
    vectors = np.stack([release.value for release in releases]).astype(np.float64)
    fitted = KMeans(n_clusters=clusters, n_init=restarts, random_state=seed % 2**32).fit(vectors)
    return np.asarray(fitted.labels_, dtype=np.intp)


def relabelled(labels: NDArray[np.intp], before: Sequence[int], clusters: int) -> NDArray[np.intp]:
    """The same partition, named so that as many members as possible keep the name they had."""
    shared = np.zeros((clusters, clusters))
    np.add.at(shared, (labels, np.asarray(before, dtype=np.intp)), 1)
    _, names = linear_sum_assignment(shared, maximize=True)
    return np.asarray(names[labels], dtype=np.intp)
