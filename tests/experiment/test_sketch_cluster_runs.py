"""`dp-sketch-cluster` in whole runs: it finds clusters, charges, resumes, and says what it found."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from coterie.algorithms.client.dp_sketch_cluster import SketchCluster
from coterie.algorithms.settings import PrivacySettings, Schedule
from coterie.experiment import checkpoint, local
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.experiment.verify import verify
from coterie.report.run import write_run_report
from coterie.testing import facts_of

ROUNDS = 3
RELEASES = ["moments", "features", "sizes"]


def experiment(epsilon: float = 8.0, **sections: dict[str, Any]) -> Experiment:
    content: dict[str, Any] = {
        "data": {"name": "digits"},
        "federation": {"sizes": [20, 10], "shift": "label", "records_per_client": 40},
        "algorithm": {"name": "dp-sketch-cluster", "rate": 0.5},
        "privacy": {"unit": "client", "epsilon": epsilon, "delta": 0.01, "clip": 0.5},
        "schedule": {"rounds": ROUNDS, "epochs": 1, "batch": 10, "lr": 0.1, "averaging": 2},
        "seeds": {"simulation": 1, "noise": 2},
        "evaluation": {"references": False, "every": 3},
        "engine": {"workers": 1},
        **sections,
    }
    return Experiment.model_validate(content)


def state_of(result: RunResult) -> dict[str, np.ndarray]:
    (newest,) = (result.folder / "checkpoint").glob("round-*")
    return load_file(newest / "state.safetensors")


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return local.run(experiment(), tmp_path_factory.mktemp("runs") / "private")


def test_without_noise_everyone_finds_its_cluster(tmp_path: Path) -> None:
    result = local.run(experiment(float("inf")), tmp_path / "run")
    assert result.clusters_found
    assert result.live_clusters == 2
    findings = json.loads((result.folder / "findings.json").read_text())
    assert findings["sizes"] == [20, 10]
    assert findings["clients"] == findings["points"] == findings["responsibilities"] == []
    write_run_report(result.folder)
    assert "Clients in each cluster" in (result.folder / "report.html").read_text()


def test_it_charges_three_sums_of_everyone_and_then_its_training(private: RunResult) -> None:
    lines = [json.loads(line) for line in (private.folder / "ledger.jsonl").read_text().splitlines()]
    told = [charge["release"] for line in lines[1:] for charge in line["charges"]]
    assert told == [*RELEASES, *["sums"] * (ROUNDS - 1)]
    assert 0 < private.epsilon <= 8
    assert verify(private.folder).verdict == "holds"
    plan = (private.folder / "plan.json").read_text()
    assert plan.count('"sketch-sum"') == 3
    assert plan.count('"sampled-sum"') == 1


def test_a_cluster_too_small_to_be_served_is_named_and_so_is_finding_none() -> None:
    """By released sizes and the noise on a sum: 30 clients at rate 1/2 are 15, six of them are 3."""
    settings = experiment(4.0).algorithm
    algorithm = SketchCluster(settings, Schedule(rounds=3), PrivacySettings(epsilon=4.0))  # type: ignore[arg-type]
    state = algorithm.start(facts_of(36, 40), np.random.default_rng(0))
    centres, models = np.eye(2, 10), np.zeros((2, 40), dtype=np.float32)
    two = replace(state, round=2, models=models, centres=centres, sizes=np.array([30.0, 6.0]), noise=1.4)
    findings = algorithm.findings(two)
    assert findings is not None
    assert findings.warnings == ()
    assert findings.sizes == (30, 6)
    noisier = algorithm.findings(replace(two, noise=1.6))
    assert noisier is not None
    (line,) = noisier.warnings
    assert line.startswith("cluster 1, about 6 clients: below what epsilon 4 can serve")
    alone = algorithm.findings(replace(state, round=2))
    assert alone is not None
    assert "shows no clusters" in alone.warnings[0]


def test_interrupted_after_the_clusters_were_released_it_resumes_bit_for_bit(
    private: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 1 was charged and released, its checkpoint was never written: all three sums are repeated."""
    original = checkpoint.save

    def interrupted(folder: Path, saved: checkpoint.Checkpoint) -> None:
        if saved.state.round == 1:
            raise KeyboardInterrupt
        original(folder, saved)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            local.run(experiment(), tmp_path / "run")
    again = local.run(experiment(), tmp_path / "run", resume=True)
    assert (again.folder / "ledger.jsonl").read_bytes() == (private.folder / "ledger.jsonl").read_bytes()
    ours, theirs = state_of(again), state_of(private)
    assert {key: value.tobytes() for key, value in ours.items()} == {
        key: value.tobytes() for key, value in theirs.items()
    }
