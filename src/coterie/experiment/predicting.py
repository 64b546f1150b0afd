"""Predictions of a finished run on files, or on the records that its own clients held out."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.client_files import Clipped, client_files, formats, read_client
from coterie.engines.clients import build_learner
from coterie.engines.feature_cache import FeatureCache
from coterie.engines.features import featured
from coterie.errors import DataError, InputError
from coterie.experiment.evaluator import held_out_sums
from coterie.experiment.local import device_of, load_federation
from coterie.experiment.result import Spread
from coterie.experiment.scores import regression_scores
from coterie.experiment.trained import TrainedRun
from coterie.experiment.usable import ModelAnswers, UsableModels, answers, in_parts
from coterie.files import finite, read_json
from coterie.table import csv_text
from coterie.training.learner import Batch

OUTSIDE = "metrics are computed from labels as they are, without noise: they are outside the guarantee"


@dataclass(frozen=True)
class Predicted:
    """What a model says of the records of one file or client.

    Args:
        name: of the file, without its ending, or of the client.
        metrics: where labels are there.
    """

    name: str
    answers: ModelAnswers
    metrics: dict[str, float] | None


@dataclass(frozen=True)
class Prediction:
    """All that was asked for, part by part."""

    parts: Sequence[Predicted]
    classes: Sequence[str | int | float]

    @property
    def metrics(self) -> dict[str, Spread] | None:
        """Each figure over the parts that have labels; None where none has."""
        told = {part.name: part.metrics for part in self.parts if part.metrics is not None}
        names = next(iter(told.values()), {})
        found = {name: Spread.of({part: own[name] for part, own in told.items()}) for name in names}
        return found or None

    @property
    def cluster(self) -> int | dict[str, int | None] | None:
        """The model's number, or that of each part where they differ."""
        used = {part.name: part.answers.cluster for part in self.parts}
        return used if len(set(used.values())) > 1 else next(iter(used.values()))

    @property
    def records(self) -> int:
        return sum(len(part.answers) for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        shares = [part.answers.probabilities for part in self.parts]
        metrics = self.metrics
        told = {} if metrics is None else {name: _short(spread) for name, spread in metrics.items()}
        content = {
            "predictions": [label for part in self.parts for label in part.answers.labels.tolist()],
            **({"classes": list(self.classes)} if self.classes else {}),
            **(
                {"probabilities": [row for each in shares if each is not None for row in each.tolist()]}
                if self.classes
                else {}
            ),
            "cluster": self.cluster,
            "records": self.records,
            "parts": [{"name": part.name, "records": len(part.answers)} for part in self.parts],
            **({"metrics": told, "note": OUTSIDE} if metrics else {}),
        }
        return {key: finite(value) for key, value in content.items()}

    def to_csv(self) -> str:
        """One line for each record: where it is from, what is said of it, and how sure."""
        rows: list[list[object]] = [["part", "row", "prediction", *(f"p({name})" for name in self.classes)]]
        for part in self.parts:
            shares = part.answers.probabilities
            for row, label in enumerate(part.answers.labels.tolist()):
                rows.append([part.name, row, label, *([] if shares is None else shares[row].tolist())])
        return csv_text(rows)


def _short(spread: Spread) -> dict[str, Any]:
    return {
        key: value for key, value in asdict(spread).items() if key in ("mean", "min", "max", "per_client")
    }


# --- on files ---------------------------------------------------------------------------------------


def predict_files(
    run: UsableModels, path: Path, client: str | None = None, cluster: int | None = None
) -> Prediction:
    """Predict the records of one file, or of every client's file in a folder.

    Args:
        client, cluster: whose model; by default, that of the client that a file is named after.
    """
    described, clipped = run.preprocessing, Clipped()
    if not path.exists():
        raise DataError(f"--data: {path} does not exist; allowed: a {formats(described)} file, or a folder")
    one = path.is_file() or path.suffix == ".parquet"
    if one and path.suffix not in formats(described).split(" or "):
        raise DataError(f"--data: {path}; allowed: a {formats(described)} file, or a folder of them")
    parts = []
    for file in [path] if one else client_files(path, formats(described)):
        own = file.stem if client is None and cluster is None and file.stem in run.clients else client
        records = read_client(file, described, clipped, labelled=False)
        said = run.answer(records.raw, own, cluster)
        parts.append(Predicted(file.stem, said, metrics_of(run, said, records.targets)))
    clipped.tell(path)
    return Prediction(parts, described.label.names)


def metrics_of(
    run: UsableModels, said: ModelAnswers, targets: NDArray[Any] | None
) -> dict[str, float] | None:
    """How well answers agree with labels: exact, and for whoever holds the records."""
    if targets is None or not len(targets):
        return None
    if run.task.kind == "classification":
        return {"accuracy": float(np.mean(said.outputs.argmax(axis=1) == targets))}
    truth = run.preprocessing.label.in_units(targets.astype(np.float64))
    found = regression_scores(said.outputs, truth, 1.0)
    return {name: math.nan if value is None else value for name, value in found.items()}


# --- on what clients of the run held out ------------------------------------------------------------------


def predict_held_out(run: TrainedRun, client: str | None = None) -> Prediction:
    """Predict what the run's own clients held out, each with the model that it uses.

    Scores are computed as the run computed them, so exact ones are the same to the last digit.
    """
    experiment, task, assignment = run.experiment, run.task, run.evaluated()
    federation = load_federation(experiment)
    facts = {one["name"]: (one["records"], one["test_records"]) for one in _clients(run)}
    if {one.name: (len(one.train), len(one.test)) for one in federation.clients} != facts:
        raise InputError(f"--held-out: the data of {run.files.path} are not what they were when it was run")
    if client is not None and client not in facts:
        raise InputError(f"client: {client!r} took no part; allowed: {', '.join(facts)}")
    seed, device = experiment.seeds.simulation, device_of(experiment)
    learner = build_learner(experiment.model, task, seed, device, additive=run.algorithm.additive)
    features = experiment.model.features
    federation = featured(federation, features, device, FeatureCache()).federation
    tests = {one.name: Batch.of(one.test, device) for one in federation.clients}
    scores = held_out_sums(learner, tests, assignment)[:, 0]
    parts = []
    for one, score in zip(federation.clients, scores.tolist(), strict=True):
        if client in (None, one.name):
            model = run.around(run.network(assignment.model_of(one.name)))
            records = one.test.flat
            outputs = model.answers(in_parts(model.network, records.features))
            said = answers(model, outputs, assignment.cluster_of[one.name])
            found = metrics_of(run, said, records.targets) or {}
            name = "accuracy" if task.kind == "classification" else "bounded_score"
            parts.append(Predicted(one.name, said, {**found, name: score / len(one.test)}))
    return Prediction(parts, run.preprocessing.label.names)


def _clients(run: TrainedRun) -> list[dict[str, Any]]:
    return list(read_json(run.files.federation)["clients"])
