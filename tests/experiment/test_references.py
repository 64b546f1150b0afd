"""Central models are trained on the records of one cluster, and judged on what was held out."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from coterie.data import Client, Federation, Records, Task
from coterie.experiment.evaluator import train_references
from coterie.experiment.schema import Experiment
from coterie.models import ModelSettings, build_model
from coterie.training.learner import Learner

TASK = Task(kind="classification", shape=(2,), classes=2)


def client(name: str, *, swapped: bool, held_out_swapped: bool) -> Client:
    """Two far groups of points; whoever is swapped calls them the other way round."""
    rng = np.random.default_rng(len(name))
    labels = np.arange(40) % 2
    features = (rng.normal(size=(40, 2)) + 6.0 * labels[:, None] - 3.0).astype(np.float32)

    def records(swap: bool) -> Records:
        return Records(features, (1 - labels if swap else labels).astype(np.int64))

    train = records(swapped)
    return Client(name, train, train.take(slice(0, 0)), records(held_out_swapped).take(slice(0, 10)))


def test_each_cluster_has_a_model_of_its_own_records_judged_on_held_out_ones() -> None:
    clients = (
        client("plain", swapped=False, held_out_swapped=False),
        client("misled", swapped=False, held_out_swapped=True),
        client("swapped", swapped=True, held_out_swapped=True),
    )
    learner = Learner(build_model(ModelSettings(name="softmax"), TASK, seed=0), TASK, torch.device("cpu"))
    start = np.zeros(learner.layout.size, dtype=np.float32)
    calibrated: Any = SimpleNamespace(
        learner=learner,
        featured=SimpleNamespace(federation=Federation(clients, TASK)),
        experiment=Experiment(),
        facts=SimpleNamespace(initialise=lambda seed: start),
    )
    clusters = {"plain": 0, "misled": 0, "swapped": 1}
    scores = train_references(calibrated, clusters, epochs=10)
    assert {name: score.accuracy for name, score in scores.items()} == {
        "plain": 1.0,
        "misled": 0.0,
        "swapped": 1.0,
    }
    untrained = np.log(2)
    assert scores["plain"].loss < untrained < scores["misled"].loss
