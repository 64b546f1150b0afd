"""The scores that people use, exact: beside scikit-learn's, by hand, and where they are not defined."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.data.records import Task
from coterie.experiment import local
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.experiment.scores import classification_scores, exact_scores, regression_scores
from coterie.files import read_json, write_json

RNG = np.random.default_rng(5)


def by_hand(said: np.ndarray[Any, Any], true: np.ndarray[Any, Any]) -> dict[str, float]:
    """Recall, F1 and the share of ordered pairs, class by class, without any library."""
    predicted, recalls, harmonic, areas = said.argmax(axis=1), [], [], []
    for label in range(said.shape[1]):
        positive = true == label
        hit = float(np.sum(positive & (predicted == label)))
        recalls.append(hit / positive.sum())
        harmonic.append(2 * hit / (positive.sum() + (predicted == label).sum()))
        chance = np.exp(said[:, label]) / np.exp(said).sum(axis=1)
        above = chance[positive][:, None] - chance[~positive][None, :]
        areas.append(np.mean((above > 0) + 0.5 * (above == 0)))
    return {
        "balanced_accuracy": float(np.mean(recalls)),
        "f1": float(np.mean(harmonic)),
        "auc": float(np.mean(areas)),
        "base_rate": float(np.bincount(true).max() / len(true)),
    }


@pytest.mark.parametrize("classes", [2, 4])
def test_scores_of_a_classification_are_those_counted_by_hand(classes: int) -> None:
    true = RNG.choice(classes, size=300, p=np.arange(1, classes + 1) / np.arange(1, classes + 1).sum())
    said = RNG.normal(size=(300, classes)) + 1.5 * np.eye(classes)[true]
    assert classification_scores(said, true) == pytest.approx(by_hand(said, true))


def test_a_class_that_nobody_has_is_in_no_average_and_one_class_alone_has_no_curve() -> None:
    true = np.array([0, 0, 1, 1])
    said = np.array([[2.0, 0, 0], [0, 2, 0], [0, 2, 0], [0, 2, 0]])
    found = classification_scores(said, true)
    assert found["balanced_accuracy"] == pytest.approx((0.5 + 1.0) / 2)
    assert classification_scores(said[:2], true[:2])["auc"] is None
    assert classification_scores(np.full((4, 3), np.nan), true)["auc"] is None


def test_errors_of_a_regression_are_in_the_units_of_its_label() -> None:
    outputs, targets = np.array([[0.5], [0.25]], np.float32), np.array([0.25, 0.75], np.float32)
    task = Task("regression", (1,), 0, error_cap=0.1)
    found = exact_scores(task, {"a": (outputs, targets)}, (10.0, 110.0))
    assert found["rmse"].value == pytest.approx(100 * np.sqrt((0.25**2 + 0.5**2) / 2))
    assert found["mae"].value == pytest.approx(37.5)
    assert found["r2"].value == pytest.approx(1 - (0.25**2 + 0.5**2) / (2 * 0.25**2))
    assert found["mae"].per_client == {"a": pytest.approx(37.5)}
    assert regression_scores(outputs[:1], targets[:1], 1.0)["r2"] is None, "one label does not vary"
    assert regression_scores(np.array([[np.nan]]), targets[:1], 1.0)["rmse"] is None


def lines(**sections: Any) -> Experiment:
    return Experiment.model_validate(
        {
            "data": {"name": "lines"},
            "model": {"name": "linear"},
            "federation": {"kind": "natural", "clients": 6},
            "algorithm": {"name": "global"},
            "schedule": {"rounds": 2, "batch": 10},
            "privacy": {"epsilon": 8, "delta": 1e-3},
            **sections,
        }
    )


def test_a_regression_has_errors_and_no_accuracy_and_old_folders_stay_readable(tmp_path: Path) -> None:
    result = local.run(lines(), tmp_path / "run")
    assert result.accuracy is None
    assert result.cluster_accuracy is None
    assert result.loss is not None
    losses = np.array(list(result.loss.per_client.values()))
    rmse = result.scores["rmse"]
    assert rmse.value == pytest.approx(np.sqrt(2 * losses.mean()), rel=1e-5), "all have ten test points"
    assert {name: rmse.per_client[name] for name in result.clusters} == pytest.approx(
        {name: np.sqrt(2 * own) for name, own in result.loss.per_client.items()}, rel=1e-5
    )
    loaded = RunResult.load(tmp_path / "run")
    assert (loaded.scores, loaded.bounded_score) == (result.scores, result.bounded_score)
    assert "RMSE" in repr(loaded)
    assert "accuracy" not in repr(loaded)

    path = tmp_path / "run" / "result.json"
    content = read_json(path)
    old = {key: content[key] for key in content if key not in ("scores", "bounded_score", "clusters_shown")}
    write_json(path, {**old, "accuracy": content["bounded_score"]})
    loaded = RunResult.load(tmp_path / "run")
    assert loaded.accuracy is None
    assert loaded.bounded_score == result.bounded_score
    assert loaded.scores == {}


def test_a_classification_tells_its_base_rate_beside_its_accuracy(tmp_path: Path) -> None:
    chosen = Experiment.model_validate(
        {
            "federation": {"sizes": [2, 2], "records_per_client": 60},
            "algorithm": {"name": "global"},
            "schedule": {"rounds": 1, "batch": 20},
        }
    )
    federation = local.load_federation(chosen)
    labels = {client.name: client.test.targets for client in federation.clients}
    result = local.run(chosen, tmp_path / "run")
    everyone = np.concatenate(list(labels.values()))
    rate = result.scores["base_rate"]
    assert rate.value == np.bincount(everyone).max() / len(everyone)
    assert rate.per_client == {name: np.bincount(own).max() / len(own) for name, own in labels.items()}
    assert set(result.scores) == {"base_rate", "balanced_accuracy", "f1", "auc"}
    assert result.accuracy is not None
    assert result.bounded_score is None
