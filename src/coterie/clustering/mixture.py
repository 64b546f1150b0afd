"""A Gaussian mixture on noisy releases: who belongs together, and how sure we are.

All components share one spherical variance. The noise added for privacy is the same for everyone and
dominates the spread inside a cluster, so a variance of its own per component has nothing to learn from
three to six points; it shrinks onto two of them and reports a separation that is not there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfc, logsumexp
from sklearn.cluster import KMeans

from coterie.clustering.embedding import principal_components
from coterie.privacy.released import Released

RESTARTS = 30


@dataclass(frozen=True)
class Mixture:
    """Spherical Gaussians with a common spread, fitted to one point per client."""

    points: NDArray[np.float64]
    centres: NDArray[np.float64]
    spread: float
    responsibilities: NDArray[np.float64]
    """Probability of each component (column) for each point (row)."""

    @property
    def separation(self) -> float:
        """Smallest separation score of two components: half their distance in units of the spread."""
        gaps = np.linalg.norm(self.centres[:, None] - self.centres[None], axis=-1)
        closest = float(gaps[np.triu_indices(len(self.centres), 1)].min())
        return closest / (2.0 * self.spread) if self.spread > 0 else np.inf

    @property
    def overlap(self) -> float:
        """Largest overlap of two components, 2 Q(separation)."""
        return float(erfc(self.separation / np.sqrt(2.0)))

    @property
    def labels(self) -> NDArray[np.intp]:
        labels: NDArray[np.intp] = np.argmax(self.responsibilities, axis=1)
        return labels


def fit_mixture(releases: Sequence[Released[NDArray[np.float32]]], clusters: int, seed: int) -> Mixture:
    """Fit `clusters` components to the first `clusters - 1` principal components of the releases.

    k centres span at most k - 1 directions; further components would carry noise alone.
    """
    vectors = np.stack([release.value for release in releases])
    points = principal_components(vectors, max(1, min(clusters - 1, len(vectors) - 1)))
    partition = KMeans(n_clusters=clusters, n_init=RESTARTS, random_state=seed % 2**32).fit(points)
    centres = np.asarray(partition.cluster_centers_, dtype=np.float64)
    freedom = points.shape[1] * max(1, len(points) - clusters)
    variance = float(partition.inertia_) / freedom
    known = float(np.mean([release.noise_std**2 for release in releases]))
    spread = float(np.sqrt(max(variance, known)))
    return Mixture(points, centres, spread, _responsibilities(points, centres, spread))


def choose_mixture(
    releases: Sequence[Released[NDArray[np.float32]]], candidates: Sequence[int], seed: int
) -> tuple[Mixture, Mapping[int, float]]:
    """The candidate number of clusters whose components are furthest apart, and every candidate's score."""
    fitted = {clusters: fit_mixture(releases, clusters, seed) for clusters in candidates}
    scores = {clusters: mixture.separation for clusters, mixture in fitted.items()}
    return fitted[max(scores, key=scores.__getitem__)], scores


def draw_labels(responsibilities: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.intp]:
    """A component for each point, drawn at the mixture's odds."""
    odds = responsibilities / responsibilities.sum(axis=1, keepdims=True)
    drawn = [rng.choice(odds.shape[1], p=row) for row in odds]
    return np.array(drawn, dtype=np.intp)


def _responsibilities(
    points: NDArray[np.float64], centres: NDArray[np.float64], spread: float
) -> NDArray[np.float64]:
    """Posterior of each component under equal weights: the size of a cluster is not evidence here."""
    squared = ((points[:, None] - centres[None]) ** 2).sum(axis=-1)
    if spread == 0:
        return np.asarray(squared == squared.min(axis=1, keepdims=True), dtype=np.float64)
    logits = -squared / (2.0 * spread**2)
    posterior: NDArray[np.float64] = np.exp(logits - logsumexp(logits, axis=1, keepdims=True))
    return posterior
