"""What a run is judged by, and what it found: the same everywhere."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from coterie.errors import InputError
from coterie.experiment.folder import RunFolder
from coterie.experiment.scores import SCORES, PooledScores, scores_from_json, scores_to_json
from coterie.experiment.shown import run_html
from coterie.experiment.tidy import Frame, clients_of, frame, rounds_of
from coterie.files import read_json, typed
from coterie.privacy.units import number_from_json, number_to_json
from coterie.training.scoring import Score

if TYPE_CHECKING:
    from coterie.experiment.trained import TrainedRun
    from coterie.models.preprocessed import PreprocessedModel

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
        low, high = content.get("interval") or (None, None)
        interval = None if low is None else (low, high)
        return typed(cls, {**content, "interval": interval, "intervals": pairs})

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


BETWEEN_SITES = (
    *("folder", "algorithm", "clusters", "clusters_found", "clusters_shown", "accuracy", "bounded_score"),
    *("scores", "loss", "guarantee", "guarantee_text"),
    *("epsilon", "delta", "rounds", "seconds", "participation", "asked", "warnings", "per_client"),
)
"""What the server of a run between sites knows, in the order of its file."""


@dataclass(frozen=True)
class RunResult:
    """What a finished run found, as stored in `result.json`.

    Args:
        accuracy: None where nothing was evaluated, and of a regression.
        bounded_score: of a regression 1 minus the bounded squared error of a client's records, on average.
        scores: of all held-out records together, by name: base rate, balanced accuracy, F1 and AUC; of a
            regression RMSE, MAE and R^2 in the label's units. Exact ones, or those that were released.
        clusters_shown: whether what was released shows more than one cluster, where an algorithm looked.
        cluster_accuracy: mean accuracy of each true cluster, where it is known.
        loss: as fairness and accuracies of clusters: where evaluation is exact.
        clusters: empty where which model a client uses is known to itself alone.
        guarantee, guarantee_text: its line and its paragraph.
        noise_multiplier: as the speed, not a number where it is not told.
        groups: majority, minority and worst client, where the true clusters are known.
        minority_found: whether the smallest true cluster was found, where there is one.
        clustering_accuracy: share of clients in the right cluster under the best matching with the truth.
        live_clusters: models that at least one client in a hundred uses.
        models: the models themselves, where they are small enough to be looked at.
        whole_tests: accuracy on the whole test set, under each true cluster's shift, of its most used model.
        per_worker: epsilon of each worker against the one that learns most, where workers observe each other.
        per_client: epsilon, delta and records of every client, or of the population.
        participation: of each site, requests answered and missed; empty where who was asked is a secret.
        asked: epsilon of what each site was asked for; empty where clients are no sites.
    """

    folder: Path
    algorithm: str
    accuracy: Spread | None
    cluster_accuracy: Mapping[str, float] | None = field(default=None, kw_only=True)
    loss: Spread | None
    fairness: Fairness | None = field(default=None, kw_only=True)
    clusters: Mapping[str, int]
    clusters_found: bool | None
    guarantee: str
    guarantee_text: str
    epsilon: float
    delta: float
    noise_multiplier: float = field(default=math.nan, kw_only=True)
    rounds: int
    seconds: float
    sample_gradients_per_second: float = field(default=math.nan, kw_only=True)
    warnings: tuple[str, ...]
    groups: Groups | None = None
    minority_found: bool | None = None
    clustering_accuracy: float | None = None
    live_clusters: int = 1
    models: tuple[tuple[float, ...], ...] | None = None
    whole_tests: Mapping[str, float] | None = None
    per_worker: Mapping[str, float | None] | None = None
    per_client: Mapping[str, object] = field(default_factory=dict)
    participation: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    asked: Mapping[str, float] = field(default_factory=dict)
    bounded_score: Spread | None = None
    scores: PooledScores = field(default_factory=dict)
    clusters_shown: bool | None = None

    @property
    def reached(self) -> Spread | None:
        """What clients' models are judged by, larger is better: accuracy, or a regression's bounded score."""
        return self.accuracy or self.bounded_score

    @property
    def report(self) -> Path:
        return RunFolder(self.folder).report

    # --- what was trained, to be used -------------------------------------------------------------------

    @cached_property
    def trained(self) -> "TrainedRun":
        """The folder's models, checked when they are first asked for."""
        from coterie.experiment.trained import TrainedRun  # which reads results

        return TrainedRun.open(self.folder)

    def model(self, client: str | None = None, *, cluster: int | None = None) -> "PreprocessedModel":
        """The model of a client or a cluster: an `nn.Module` that takes raw features.

        It gives logits by class, or values in the label's units. `inputs` makes what it takes of data frames.

        Example:
            >>> run.model(client="client-03")(torch.from_numpy(run.inputs(frame)))  # doctest: +SKIP
        """
        return self.trained.model(client, cluster)

    def inputs(self, X: object) -> NDArray[Any]:
        """Raw records as a model takes them: of arrays, data frames, rows by name, or texts.

        Of a table that is an array of numbers in the declared order of columns, with categories by their
        positions and NaN for missing values.
        """
        return self.trained.inputs(X)

    def predict(self, X: object, client: str | None = None, *, cluster: int | None = None) -> NDArray[Any]:
        """What a client's or cluster's model says of raw records: classes by name, or values in units.

        Example:
            >>> run.predict(frame, client="client-03")  # doctest: +SKIP
        """
        return self.trained.answer(self.trained.inputs(X), client, cluster).labels

    def predict_proba(
        self, X: object, client: str | None = None, *, cluster: int | None = None
    ) -> NDArray[np.float64]:
        """Probabilities of the classes, one row for each record."""
        found = self.trained.answer(self.trained.inputs(X), client, cluster).probabilities
        if found is None:
            raise InputError("predict_proba: this run is a regression; allowed: predict")
        return found

    def to_json(self) -> dict[str, Any]:
        content = asdict(self) | {
            "folder": str(self.folder),
            "epsilon": number_to_json(self.epsilon),
            "asked": {name: number_to_json(value) for name, value in self.asked.items()},
            "warnings": list(self.warnings),
            "scores": scores_to_json(self.scores),
        }
        if self.asked:
            return {**{key: content[key] for key in BETWEEN_SITES}, "engine": "flower"}
        del content["participation"], content["asked"]
        return {**content, "report": str(self.report)}

    @classmethod
    def load(cls, path: Path) -> "RunResult":
        content = read_json(RunFolder(path).result)
        known = {key: value for key, value in content.items() if key not in ("report", "engine")}
        if "scores" not in known and known.get("accuracy") and _is_regression(path):
            # As folders were written that knew one word for both.
            known |= {"bounded_score": known["accuracy"], "accuracy": None, "cluster_accuracy": None}
        try:
            return typed(
                cls,
                {
                    **known,
                    "folder": path,
                    "epsilon": number_from_json(content["epsilon"]),
                    **{
                        key: Spread.from_json(known[key]) if known.get(key) else None
                        for key in ("accuracy", "loss", "bounded_score")
                    },
                    "scores": scores_from_json(known.get("scores", {})),
                    "fairness": typed(Fairness, content["fairness"]) if content.get("fairness") else None,
                    "groups": typed(Groups, content["groups"]) if content.get("groups") else None,
                    "warnings": tuple(content["warnings"]),
                    "models": tuple(map(tuple, content["models"])) if content.get("models") else None,
                    "asked": {name: number_from_json(it) for name, it in content.get("asked", {}).items()},
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{RunFolder(path).result}: not a result of this version ({error})") from None

    @property
    def metrics(self) -> Frame:
        """One row for each round: epsilon spent so far, accuracy, loss; a data frame where pandas is there.

        Example:
            >>> import coterie as ct
            >>> ct.run("experiment.yaml").metrics.plot("round", "accuracy")  # doctest: +SKIP
        """
        return frame(rounds_of(self))

    @property
    def clients(self) -> Frame:
        """One row for each client: records, cluster, epsilon, accuracy; a frame where pandas is there."""
        return frame(clients_of(self))

    @property
    def summary(self) -> str:
        """What it found, in a few words."""
        found = {True: ", clusters found", False: ", clusters not found", None: ""}[self.clusters_found]
        reached = "not evaluated" if self.reached is None else f"bounded score {self.reached.mean:.3f}"
        if self.accuracy is not None:
            reached = f"mean accuracy {self.accuracy.mean:.1%}"
        elif "rmse" in self.scores:
            reached = f"RMSE {SCORES['rmse'].text(self.scores['rmse'].value)}"
        return f"{self.algorithm}: {reached}{found}"

    def __repr__(self) -> str:
        return f"RunResult({self.summary}; {self.guarantee})"

    def _repr_html_(self) -> str:
        return run_html(self)


def _is_regression(path: Path) -> bool:
    facts = RunFolder(path).federation
    return facts.exists() and read_json(facts).get("task") == "regression"


# --- accuracy, fairness, and whether the clusters were found ------------------------------------------------


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
    return len(set(zip(found, truth, strict=True))) == len(set(found)) == len(set(truth))


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
    return sum(size >= LIVE_SHARE * len(found) for size in Counter(found.values()).values())


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
