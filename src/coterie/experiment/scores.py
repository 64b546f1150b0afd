"""The scores that people use: of all held-out records together, each judged by its own client's model.

For classification balanced accuracy, F1 and AUC, with the base rate beside them; for regression the root of
the mean squared error, the mean absolute error and R^2, in the label's units. Exact ones are scikit-learn's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from coterie.data.records import Task
from coterie.files import typed

Floats = NDArray[np.float64]
Outputs = Mapping[str, tuple[NDArray[np.float32], NDArray[Any]]]
"""What its model says of each held-out record of a client, and what is true."""


@dataclass(frozen=True)
class ScoreWords:
    """How a score is called, and how it is read.

    Args:
        is_share: shown in per cent.
        in_units: in the units of the label, where the less is the better.
    """

    name: str
    meaning: str
    is_share: bool = False
    in_units: bool = False

    def text(self, value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return "–"
        return f"{value:.1%}" if self.is_share else f"{value:.4g}" if self.in_units else f"{value:.3f}"

    def interval(self, ends: Sequence[float]) -> str:
        return " to ".join(map(self.text, ends))


SCORES = {
    "accuracy": ScoreWords("accuracy", "the share of records that are right", is_share=True),
    "base_rate": ScoreWords("base rate", "always saying the most frequent label", is_share=True),
    "balanced_accuracy": ScoreWords(
        "balanced accuracy", "the share that is right of each class, averaged over classes", is_share=True
    ),
    "f1": ScoreWords("F1", "harmonic mean of precision and recall, averaged over classes"),
    "auc": ScoreWords("AUC", "area under the ROC curve, each class against the rest, averaged over classes"),
    "rmse": ScoreWords("RMSE", "root of the mean squared error, in the label's units", in_units=True),
    "mae": ScoreWords("MAE", "mean absolute error, in the label's units", in_units=True),
    "r2": ScoreWords("R²", "share of the labels' variance that is explained"),
}
"""In the order in which they are shown."""


@dataclass(frozen=True)
class PooledScore:
    """One score of all held-out records together; None where it is not defined for them.

    Args:
        kind: exact, or private: then it follows from noisy releases.
        interval: where the exact one is in 95 of 100 cases, given the noise.
        per_client: the same of each client's own held-out records, where that is told.
    """

    value: float | None
    kind: str = "exact"
    interval: tuple[float, float] | None = None
    per_client: Mapping[str, float | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "PooledScore":
        low, high = content.get("interval") or (None, None)
        return typed(cls, {**content, "interval": None if low is None else (low, high)})


PooledScores = Mapping[str, PooledScore]


def scores_to_json(scores: PooledScores) -> dict[str, Any]:
    return {name: score.to_json() for name, score in scores.items()}


def scores_from_json(content: Mapping[str, Any]) -> dict[str, PooledScore]:
    return {name: PooledScore.from_json(score) for name, score in content.items()}


def in_label_units(label_range: tuple[float, float] | None) -> float:
    """How many of the label's units one unit of the targets is: they are its range mapped to [0, 1]."""
    return 1.0 if label_range is None else label_range[1] - label_range[0]


def exact_scores(
    task: Task, outputs: Outputs, label_range: tuple[float, float] | None
) -> dict[str, PooledScore]:
    """Every score of these records as it is, outside any guarantee."""
    said = np.concatenate([own for own, _ in outputs.values()])
    true = np.concatenate([targets for _, targets in outputs.values()])
    if task.kind == "classification":
        rates = {client: base_rate(targets) for client, (_, targets) in outputs.items()}
        found = classification_scores(said, true)
        return {
            name: PooledScore(value, per_client=rates if name == "base_rate" else {})
            for name, value in found.items()
        }
    scale = in_label_units(label_range)
    found = regression_scores(said, true, scale)
    each = {client: regression_scores(*own, scale) for client, own in outputs.items()}
    return {
        name: PooledScore(value, per_client={client: own[name] for client, own in each.items()})
        for name, value in found.items()
    }


def base_rate(targets: NDArray[Any]) -> float:
    """Share of the most frequent label: what a model reaches that says nothing else."""
    return float(np.unique(targets, return_counts=True)[1].max() / len(targets))


def classification_scores(outputs: NDArray[Any], targets: NDArray[Any]) -> dict[str, float | None]:
    """Averages are over the classes that occur among the labels (F1: or are predicted)."""
    from sklearn import metrics  # takes a second to import

    predicted = outputs.argmax(axis=1)
    recalls = metrics.recall_score(targets, predicted, labels=np.unique(targets), average="macro")
    areas = []
    if np.isfinite(outputs).all():
        chances = softmax(outputs.astype(np.float64), axis=1)
        present = [label for label in np.unique(targets) if 0 < np.mean(targets == label) < 1]
        # Of two classes, one curve is the other's mirror image.
        ranked = present[-1:] if outputs.shape[1] == 2 else present
        areas = [metrics.roc_auc_score(targets == label, chances[:, label]) for label in ranked]
    return {
        "base_rate": base_rate(targets),
        "balanced_accuracy": float(recalls),
        "f1": float(metrics.f1_score(targets, predicted, average="macro", zero_division=0.0)),
        "auc": float(np.mean(areas)) if areas else None,
    }


def regression_scores(outputs: NDArray[Any], targets: NDArray[Any], scale: float) -> dict[str, float | None]:
    """In the label's units; None where a model says what is no number, or labels do not vary."""
    from sklearn import metrics  # takes a second to import

    said, true = outputs.reshape(len(targets)).astype(np.float64), targets.astype(np.float64)
    if not np.isfinite(said).all():
        return dict.fromkeys(("rmse", "mae", "r2"))
    varies = len(true) > 1 and bool(np.ptp(true) > 0)
    return {
        "rmse": scale * float(metrics.root_mean_squared_error(true, said)),
        "mae": scale * float(metrics.mean_absolute_error(true, said)),
        "r2": float(metrics.r2_score(true, said)) if varies else None,
    }
