"""Whole runs with whole clients as the unit: what they charge, keep, resume to and say."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from trained_runs import last_state

from coterie.experiment import checkpoint, local
from coterie.experiment.checkpoint import PERSONAL
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment

ROUNDS = 3


def experiment(algorithm: dict[str, Any], **sections: Any) -> Experiment:
    content = {
        "federation": {"kind": "clusters", "sizes": [5, 5], "shift": "rotation", "records_per_client": 30},
        "algorithm": {"rate": 0.5, **algorithm},
        "privacy": {"unit": "client", "epsilon": 8, "delta": 0.01, "clip": 0.5},
        "schedule": {"rounds": ROUNDS, "epochs": 1, "batch": 10, "lr": 0.1},
        "seeds": {"simulation": 1, "noise": 2},
        "evaluation": {"references": False, "every": 2},
        **sections,
    }
    return Experiment.model_validate(content)


ROUTED = {"name": "dp-ifca", "clusters": 2, "rebalance": {"minimum": 2}}
FEDPER = {"name": "dp-fedper"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunResult]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "routed": local.run(experiment(ROUTED), folder / "routed"),
        "fedper": local.run(experiment(FEDPER, model={"name": "cnn"}), folder / "fedper"),
    }


def test_a_run_says_what_it_protects_charges_once_a_round_and_knows_its_clusters(
    finished: dict[str, RunResult],
) -> None:
    result = finished["routed"]
    assert "for one client of the population, add-remove" in result.guarantee
    assert "trusting the server; simulation; one process held all records" in result.guarantee
    assert "Hyper-parameters chosen by trying them on private data" in result.guarantee_text
    assert "The number of clients is public" in result.guarantee_text
    assert list(result.per_client) == ["the population"]
    assert result.epsilon <= 8
    lines = (result.folder / "ledger.jsonl").read_text().splitlines()
    assert len(lines) == 1 + ROUNDS
    assert not any("client-" in line for line in lines)
    assert result.clustering_accuracy is not None
    assert 0.5 <= result.clustering_accuracy <= 1
    assert result.live_clusters in (1, 2)
    assert result.whole_tests is not None
    assert set(result.whole_tests) == {"0", "1"}
    assert result.sample_gradients_per_second > 0
    assert RunResult.load(result.folder) == result


@pytest.mark.parametrize("name", ["routed", "fedper"])
def test_interrupted_after_a_release_it_resumes_bit_for_bit(
    name: str, finished: dict[str, RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second round was charged and released, its checkpoint was never written: all of it is repeated."""
    whole = finished[name]
    made = experiment(ROUTED) if name == "routed" else experiment(FEDPER, model={"name": "cnn"})
    original = checkpoint.save

    def interrupted(folder: Path, saved: checkpoint.Checkpoint) -> None:
        if saved.state.round == 2:
            raise KeyboardInterrupt
        original(folder, saved)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            local.run(made, tmp_path / "run")
    assert len((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()) == 3
    again = local.run(made, tmp_path / "run", resume=True)
    assert (again.folder / "ledger.jsonl").read_bytes() == (whole.folder / "ledger.jsonl").read_bytes()
    ours, theirs = last_state(again.folder), last_state(whole.folder)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.tobytes() == theirs[key].tobytes(), key
    assert again.accuracy == whole.accuracy


def test_personal_parts_are_kept_apart_from_the_state_and_for_their_owner_alone(
    finished: dict[str, RunResult],
) -> None:
    folder = finished["fedper"].folder
    assert "personal.safetensors" in finished["fedper"].guarantee_text, "what lies there unnoised is said"
    assert "personal.safetensors" not in finished["routed"].guarantee_text
    (newest,) = (folder / "checkpoint").glob("round-*")
    kept = load_file(newest / PERSONAL)
    assert kept
    assert set(kept) <= set(finished["fedper"].clusters)
    assert (newest / PERSONAL).stat().st_mode & 0o077 == 0
    state = load_file(newest / "state.safetensors")
    assert set(state) == {"models", "head"}
    heads = np.stack(list(kept.values()))
    assert not np.isclose(heads, state["models"][0][state["head"]]).all(axis=1).any()
    assert "personal" not in (folder / "metrics.jsonl").read_text()
    assert finished["fedper"].whole_tests is None  # no cluster has a whole model


def test_a_minimum_of_zero_is_the_base_algorithm_bit_for_bit(tmp_path: Path) -> None:
    base = {"name": "dp-ifca", "clusters": 2}
    results = [
        local.run(experiment({**base, "rebalance": options}), tmp_path / str(number))
        for number, options in enumerate([{"rule": "none"}, {"rule": "route", "minimum": 0}])
    ]
    for name in ("ledger.jsonl", "plan.json", "metrics.jsonl"):
        contents = [(result.folder / name).read_bytes() for result in results]
        assert contents[0] == contents[1], name
    first, second = (last_state(result.folder) for result in results)
    assert all(first[key].tobytes() == second[key].tobytes() for key in first)
    assert "routed" not in (results[1].folder / "plan.json").read_text()


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "dp-fedprox"},
        {"name": "dp-fesem", "clusters": 2, "rebalance": {"minimum": "auto"}},
        {"name": "dp-fedcam", "clusters": 2, "rebalance": {"rule": "rebalance", "minimum": 2}},
        {"name": "gmfsc", "clusters": 2},
        {"name": "oracle"},
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_every_algorithm_runs_within_its_budget(algorithm: dict[str, Any], tmp_path: Path) -> None:
    result = local.run(
        experiment(algorithm, schedule={"rounds": 2, "epochs": 1, "batch": 10, "lr": 0.1}), tmp_path / "run"
    )
    assert 0 < result.epsilon <= 8
    assert np.isfinite(result.accuracy.mean)


def test_without_noise_clustering_learns_what_one_model_cannot(tmp_path: Path) -> None:
    """Digits upright and upside down: two models, chosen by their users, do better than one for all."""
    sections: dict[str, Any] = {
        "federation": {"kind": "clusters", "sizes": [8, 8], "shift": "label", "records_per_client": 60},
        "privacy": {"unit": "client", "epsilon": float("inf"), "delta": 0.01, "clip": 5.0},
        "schedule": {"rounds": 12, "epochs": 2, "batch": 10, "lr": 0.2},
    }
    clustered = {"name": "dp-ifca", "clusters": 2, "rebalance": {"minimum": 1}}
    two = local.run(experiment(clustered, **sections), tmp_path / "two")
    one = local.run(experiment({"name": "dp-fedavg"}, **sections), tmp_path / "one")
    assert two.clustering_accuracy == 1.0
    assert two.live_clusters == 2
    assert two.accuracy.mean > one.accuracy.mean + 0.2


def test_models_that_clustering_alone_loses_are_trained_with_rebalancing(tmp_path: Path) -> None:
    """Four lines above all starts: the nearest model wins everyone, and without help others stay behind."""
    sections: dict[str, Any] = {
        "data": {"name": "lines"},
        "federation": {"kind": "natural"},
        "model": {"name": "linear"},
        "privacy": {"unit": "client", "epsilon": float("inf"), "delta": 0.001, "clip": 100.0},
        "schedule": {"rounds": 40, "epochs": 1, "batch": 10, "lr": 0.05},
        "evaluation": {"references": False, "every": 40},
    }
    base = {"name": "dp-ifca", "rate": 1.0, "start": "random"}
    alone = local.run(experiment(base, **sections), tmp_path / "alone")
    helped = local.run(experiment({**base, "rebalance": {"minimum": 8}}, **sections), tmp_path / "helped")
    assert alone.live_clusters < 4
    assert helped.live_clusters == 4
    assert helped.models is not None
    assert len(helped.models) == 4
    assert helped.reached is not None
    assert alone.reached is not None
    assert helped.reached.mean > alone.reached.mean
