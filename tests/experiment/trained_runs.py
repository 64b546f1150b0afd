"""Finished runs of every kind, each run once in a process, for tests of what can be done with them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import coterie as ct
from coterie.experiment import local
from coterie.experiment.checkpoint import PERSONAL
from coterie.experiment.result import RunResult

DECLARED = """
task: classification
label: {column: ill, classes: [healthy, ill]}
features:
  - {column: age, range: [18, 100]}
  - {column: smoker, categories: ["no", "yes"]}
  - {column: pressure, range: [80, 200], missing: indicator, missing_values: [0]}
"""
SCORED = """
task: regression
label: {column: score, range: [0, 70]}
features: [{column: hours, range: [0, 10]}, {column: age, range: [10, 20]}]
"""
SMALL: dict[str, Any] = {
    "federation": {"sizes": [2, 3], "records_per_client": 60},
    "schedule": {"rounds": 2, "batch": 20},
    "evaluation": {"references": False},
}
CLIENT = {
    "federation": {"sizes": [2, 2], "records_per_client": 30},
    "privacy": {"unit": "client", "epsilon": 8, "delta": 0.01},
    "schedule": {"rounds": 2, "epochs": 1, "batch": 10, "lr": 0.1},
    "evaluation": {"references": False},
}
WORKER = {
    "federation": {"kind": "groups", "workers": 8, "groups": 4, "alpha": 1.0, "records_per_client": 20},
    "algorithm": {"name": "dp-ogl", "rate": 0.7, "noise": 2.0, "iterations": 2},
    "privacy": {"unit": "worker", "epsilon": 50.0, "delta": 1e-3, "clip": 0.5},
    "schedule": {"rounds": 2, "batch": 10},
}
RUNS: dict[str, dict[str, Any]] = {
    "mr-mtl": {**SMALL, "algorithm": {"name": "mr-mtl"}, "schedule": {**SMALL["schedule"], "averaging": 0.5}},
    "oracle": {**SMALL, "algorithm": {"name": "oracle"}},
    "own choice": {**CLIENT, "algorithm": {"name": "dp-ifca", "rate": 0.5, "clusters": 2}},
    "personal": {**CLIENT, "algorithm": {"name": "dp-fedper", "rate": 0.5}, "model": {"name": "cnn"}},
    "worker": WORKER,
}


def write_table(folder: Path, declared: str, row: Callable[[np.random.Generator], str], header: str) -> Path:
    rng = np.random.default_rng(2)
    folder.mkdir()
    (folder / "federation.yaml").write_text(declared)
    for name in ("north", "south"):
        rows = "\n".join(row(rng) for _ in range(40))
        (folder / f"{name}.csv").write_text(f"{header}\n{rows}\n")
    return folder


def patient(rng: np.random.Generator) -> str:
    age, smoker = rng.integers(18, 99), rng.choice(["no", "yes"])
    pressure = rng.choice(["", "0", f"{rng.uniform(70, 210):.1f}"])
    return f"{age},{smoker},{pressure},{'ill' if age > 60 else 'healthy'}"


def pupil(rng: np.random.Generator) -> str:
    hours, age = rng.uniform(0, 10), rng.uniform(10, 20)
    return f"{hours:.3f},{age:.2f},{5 * hours + age:.2f}"


class Runs:
    """Runs by name, each run once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = write_table(folder / "table", DECLARED, patient, "age,smoker,pressure,ill")
        self.scores = write_table(folder / "scores", SCORED, pupil, "hours,age,score")
        own = {"federation": {"kind": "natural"}, "schedule": {"rounds": 2, "batch": 10}}
        own |= {"evaluation": {"kind": "exact"}, "algorithm": {"name": "local"}}
        self.experiments = {
            **RUNS,
            "table": {**own, "data": {"name": "folder", "path": str(self.table)}},
            "regression": {
                **own,
                "data": {"name": "folder", "path": str(self.scores)},
                "model": {"name": "linear"},
                "schedule": {"rounds": 20, "batch": 20},
                "privacy": {"epsilon": 1e4},
            },
        }

    def __call__(self, name: str) -> RunResult:
        target = self.folder / f"run {name}"
        if not target.exists():
            local.run(ct.Experiment.model_validate(self.experiments[name]), target)
        return ct.load(target)


@cache
def _runs(folder: Path) -> Runs:
    folder.mkdir()
    return Runs(folder)


@pytest.fixture
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return _runs(tmp_path_factory.getbasetemp() / "trained runs")


def last_state(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a run's newest checkpoint."""
    (newest,) = (path / "checkpoint").glob("round-*")
    files = {"state": load_file(newest / "state.safetensors")}
    if (newest / PERSONAL).exists():
        files["personal"] = load_file(newest / PERSONAL)
    return {f"{name}/{key}": value for name, arrays in files.items() for key, value in arrays.items()}
