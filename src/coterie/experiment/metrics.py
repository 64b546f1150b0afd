"""What a run is judged by, on held-out records: accuracy, fairness, and whether the clusters were found."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from coterie.privacy.units import number_to_json
from coterie.training.scoring import Score

Scores = Mapping[str, Score]
LIVE_SHARE = 0.01


@dataclass(frozen=True)
class Spread:
    """A figure over clients, as it is or with noise.

    Args:
        min, max: None where nothing is known of single clients.
        kind: exact, or private: then all of it follows from noisy releases.
        interval: where the exact mean is in 95 of 100 cases, given the noise.
        sampling_error: half-width of the 95 % interval of what other held-out records would give, beside it.
        intervals: that of each client.
    """

    mean: float
    min: float | None
    max: float | None
    per_client: Mapping[str, float]
    kind: str = "exact"
    interval: tuple[float, float] | None = None
    sampling_error: float | None = None
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def is_private(self) -> bool:
        return self.kind == "private"

    @property
    def least(self) -> float:
        """The lower end of what a figure must show: the worst client, or that of the mean's interval."""
        return self.min if self.min is not None else (self.interval or (self.mean, self.mean))[0]

    @property
    def most(self) -> float:
        return self.max if self.max is not None else (self.interval or (self.mean, self.mean))[1]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Spread":
        """What `asdict` wrote, after a file made lists of its pairs."""
        pairs = {client: (low, high) for client, (low, high) in content.get("intervals", {}).items()}
        interval = content.get("interval")
        whole = None if interval is None else (interval[0], interval[1])
        return cls(**{**content, "interval": whole, "intervals": pairs})

    @classmethod
    def of(cls, per_client: Mapping[str, float]) -> "Spread":
        values = list(per_client.values())
        return cls(float(np.mean(values)), float(min(values)), float(max(values)), dict(per_client))


@dataclass(frozen=True)
class Fairness:
    """How evenly clients are served (smaller is fairer).

    `f_acc` and `f_loss` are the largest difference between two clients in what each falls short of
    the best model of its cluster, trained centrally without privacy; None where no reference was trained.
    """

    disparity: float
    f_acc: float | None
    f_loss: float | None


@dataclass(frozen=True)
class Groups:
    """Mean accuracy of the clients of small and of large true clusters, and of the worst served client.

    The minority is every cluster of the smallest size; where all clusters are of one size there is none.
    """

    majority: float | None
    minority: float | None
    worst: float


def fairness(scores: Scores, best: Scores | None) -> Fairness:
    """Disparity of accuracy, and how unevenly clients fall short of their cluster's best model."""
    reached = [score.accuracy for score in scores.values()]
    disparity = max(reached) - min(reached)
    if best is None:
        return Fairness(disparity, None, None)
    missing = [best[client].accuracy - score.accuracy for client, score in scores.items()]
    excess = [score.loss - best[client].loss for client, score in scores.items()]
    return Fairness(disparity, max(missing) - min(missing), max(excess) - min(excess))


def same_partition(found: Sequence[int], truth: Sequence[int]) -> bool:
    """Whether two assignments group the clients alike, whatever the clusters are called."""
    pairs = set(zip(found, truth, strict=True))
    return len(pairs) == len(set(found)) == len(set(truth))


def clustering_accuracy(found: Mapping[str, int], truth: Mapping[str, int]) -> float:
    """Share of clients in the right cluster, under the best matching of found to true clusters."""
    labels = [sorted(set(names.values())) for names in (truth, found)]
    counts = np.zeros([len(each) for each in labels])
    for client, own in truth.items():
        counts[labels[0].index(own), labels[1].index(found[client])] += 1
    matched = linear_sum_assignment(counts, maximize=True)
    return float(counts[matched].sum() / len(truth))


def live_clusters(found: Mapping[str, int]) -> int:
    """Models that at least one client in a hundred uses: the others are as good as never trained."""
    sizes = Counter(found.values())
    return sum(size >= LIVE_SHARE * len(found) for size in sizes.values())


def minority_clusters(truth: Mapping[str, int]) -> set[int]:
    """The true clusters of the smallest size, unless all are of one size."""
    sizes = Counter(truth.values())
    smallest = {cluster for cluster, size in sizes.items() if size == min(sizes.values())}
    return smallest if len(smallest) < len(sizes) else set()


def groups(scores: Scores, truth: Mapping[str, int]) -> Groups:
    """Accuracy of minority, majority and worst client."""
    small = minority_clusters(truth)
    minority = [scores[client].accuracy for client, own in truth.items() if own in small]
    majority = [scores[client].accuracy for client, own in truth.items() if own not in small]
    return Groups(
        majority=float(np.mean(majority)) if small else None,
        minority=float(np.mean(minority)) if small else None,
        worst=min(score.accuracy for score in scores.values()),
    )


def minority_found(found: Mapping[str, int], truth: Mapping[str, int]) -> bool | None:
    """Whether each small true cluster is a cluster of its own, nobody missing or added; None without any."""
    small = minority_clusters(truth)
    if not small:
        return None
    parts = [{client for client in truth if found[client] == label} for label in set(found.values())]
    return all({client for client, own in truth.items() if own == cluster} in parts for cluster in small)


def cluster_means(scores: Scores, truth: Mapping[str, int]) -> dict[int, float]:
    """Mean accuracy of the clients of each true cluster."""
    return {
        cluster: float(np.mean([scores[client].accuracy for client, own in truth.items() if own == cluster]))
        for cluster in sorted(set(truth.values()))
    }


def round_line(
    round: int, judged: tuple[Spread, Spread | None] | None, cluster_of: Mapping[str, int], epsilon: float
) -> dict[str, Any]:
    """One line of a run's metrics, as reports and comparisons read it.

    Args:
        judged: accuracy and, where it is exact, loss; None in rounds that were not evaluated.
    """
    reached, lost = judged if judged is not None else (None, None)
    return {
        "round": round,
        "accuracy": asdict(reached) if reached else None,
        "loss": asdict(lost) if lost else None,
        "clusters": dict(cluster_of),
        "epsilon": number_to_json(epsilon),
    }
