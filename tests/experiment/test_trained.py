"""A finished run folder is enough to use what was trained: the right model, from raw values to labels."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import coterie as ct
from coterie.errors import CoterieError, InputError
from coterie.experiment import local
from coterie.experiment.folder import RunFolder
from coterie.experiment.loop import drop_models
from coterie.experiment.predicting import predict_files, predict_held_out
from coterie.experiment.result import RunResult
from coterie.experiment.trained import TrainedRun
from coterie.experiment.verify import verify

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
    "federation": {"sizes": [4, 4], "records_per_client": 30},
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("name", [*RUNS, "table", "regression"])
def test_held_out_records_score_exactly_as_in_the_run(name: str, runs: Runs) -> None:
    run = runs(name)
    assert run.accuracy is not None
    found = predict_held_out(TrainedRun.open(run.folder)).metrics
    assert found is not None
    score = found["bounded_score" if name == "regression" else "accuracy"]
    assert score.per_client == run.accuracy.per_client
    assert score.mean == run.accuracy.mean


def test_raw_values_of_held_out_records_lead_to_the_same_accuracies(runs: Runs) -> None:
    """The way of a user: raw files, nothing of the training's own arrays."""
    run, rows = runs("table"), {}
    federation = local.load_federation(run.trained.experiment)
    for client in federation.clients:
        names, *lines = (runs.table / f"{client.name}.csv").read_text().split()
        raw = [dict(zip(names.split(","), line.split(","), strict=True)) for line in lines]
        seen = run.trained.preprocessing.inputs.features(run.inputs(raw))
        # Held-out records among all of them, by what the network saw.
        held = [int(np.flatnonzero((seen == own).all(axis=1))[0]) for own in client.test.features]
        rows[client.name] = [raw[place] for place in held]
    reached = {
        name: float(np.mean(run.predict(part, client=name) == [row["ill"] for row in part]))
        for name, part in rows.items()
    }
    assert run.accuracy is not None
    assert reached == run.accuracy.per_client


def test_a_model_is_a_module_on_raw_values(runs: Runs) -> None:
    run = runs("oracle")
    images = load_digits().data[:50]
    model = run.model(client="client-3")
    logits = model(torch.from_numpy(run.inputs(images)))
    assert logits.shape == (50, 10)
    np.testing.assert_array_equal(logits.argmax(dim=1).numpy(), run.predict(images, client="client-3"))
    np.testing.assert_array_equal(
        model(torch.from_numpy(images).reshape(-1, 1, 8, 8)).numpy(), logits.numpy()
    )
    # By hand: pixels / 16, then the one layer of the network.
    parameters = run.trained.chosen("client-3")[0]
    expected = images / 16 @ parameters[:640].reshape(10, 64).T + parameters[640:]
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(run.predict_proba(images, cluster=1).sum(axis=1), 1.0)
    np.testing.assert_array_equal(run.predict(images, cluster=1), run.predict(images, client="client-3"))


def test_classes_come_back_by_name_and_values_in_units(runs: Runs) -> None:
    run = runs("table")
    rows = [{"age": 90, "smoker": "no", "pressure": None}, {"age": 20, "smoker": "yes", "pressure": 100}]
    assert set(run.predict(rows * 20, client="north")) <= {"healthy", "ill"}
    scores = runs("regression")
    said = scores.predict([{"hours": 5.0, "age": 15.0}, {"hours": 9.0, "age": 15.0}], client="south")
    assert abs(said[0] - 40) < 8
    assert said[1] > said[0] + 5
    with pytest.raises(InputError, match="regression; allowed: predict"):
        scores.predict_proba([{"hours": 5.0, "age": 15.0}], client="south")


def test_files_are_predicted_by_the_clients_they_are_named_after(runs: Runs, tmp_path: Path) -> None:
    run = TrainedRun.open(runs("table").folder)
    found = predict_files(run, runs.table)
    assert found.cluster == {"north": 0, "south": 1}
    assert found.records == 80
    assert found.metrics is not None
    told = found.to_json()
    assert len(told["predictions"]) == len(told["probabilities"]) == 80
    assert "outside the guarantee" in told["note"]
    (tmp_path / "new.csv").write_text("age,smoker,pressure\n50,no,\n")
    with pytest.raises(InputError, match="several models; name a client or cluster 0 to 1"):
        predict_files(run, tmp_path / "new.csv")
    alone = predict_files(run, tmp_path / "new.csv", cluster=1)
    assert (alone.metrics, alone.cluster, "metrics" in alone.to_json()) == (None, 1, False)
    header, row = alone.to_csv().splitlines()
    assert header == "part,row,prediction,p(healthy),p(ill)"
    assert row.startswith(f"new,0,{alone.to_json()['predictions'][0]},")


def test_a_secret_choice_needs_a_cluster_and_a_personal_part_its_client(runs: Runs) -> None:
    images = load_digits().data[:5]
    chosen = runs("own choice")
    with pytest.raises(InputError, match=r"its own secret choice, .*; name cluster 0 to 1"):
        chosen.predict(images, client="client-0")
    assert len(chosen.predict(images, cluster=1)) == 5
    personal = runs("personal")
    with pytest.raises(InputError, match="keep a part of the model for themselves"):
        personal.predict(images, cluster=0)
    models = [personal.model(client=client) for client in personal.trained.clients]
    heads = {model.network.head.weight.numpy().tobytes() for model in models}
    bodies = {model.network.conv1.weight.numpy().tobytes() for model in models}
    assert len(bodies) == 1 < len(heads)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"client": "client-9"}, "'client-9' took no part .*client-"),
        ({"cluster": 2}, "cluster: 2 .* cluster 0 to 1"),
        ({"cluster": -1}, "cluster: -1"),
        ({"client": "client-0", "cluster": 0}, "both"),
        ({}, "several models"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(given: dict[str, Any], said: str, runs: Runs) -> None:
    with pytest.raises(InputError, match=said) as refused:
        runs("oracle").predict(load_digits().data[:5], **given)
    assert "\n" not in str(refused.value)


def test_a_folder_of_an_earlier_version_is_refused_in_one_line(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs("oracle").folder, tmp_path / "run")
    files = RunFolder(tmp_path / "run")
    text = files.task.read_text()
    files.task.unlink()
    with pytest.raises(InputError, match=r"earlier version, without task\.json.*run it anew"):
        TrainedRun.open(files.path)
    files.task.write_text(text.replace("16.0", "8.0"))
    with pytest.raises(CoterieError, match=r"task\.json: changed since it was written"):
        TrainedRun.open(files.path)
    assert any("task.json" in problem for problem in verify(files.path).problems)
    files.task.write_text(text)
    assert not verify(files.path).problems
    drop_models(files)
    with pytest.raises(InputError, match="dropped on purpose"):
        TrainedRun.open(files.path).model(cluster=0)


def test_a_run_that_is_not_finished_is_not_used(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs("oracle").folder, tmp_path / "run")
    RunFolder(tmp_path / "run").result.unlink()
    with pytest.raises(InputError, match="not finished"):
        TrainedRun.open(tmp_path / "run")
    with pytest.raises(InputError, match="not a run folder"):
        TrainedRun.open(tmp_path)
    with pytest.raises(InputError, match="not the folder of a finished run"):
        ct.load(tmp_path / "run")


def test_what_a_task_file_says_is_checked(runs: Runs, tmp_path: Path) -> None:
    content = json.loads(RunFolder(runs("oracle").folder).task.read_text())
    from coterie.experiment.trained import read_task

    for change, said in (
        ({"format": 9}, "format 9, ours is 1"),
        ({"task": {"kind": "nothing"}}, "not the task of a run"),
        ({"preprocessing": {"inputs": {"kind": "array"}}}, "shape"),
    ):
        (tmp_path / "task.json").write_text(json.dumps({**content, **change}))
        with pytest.raises(InputError, match=said):
            read_task(tmp_path / "task.json")
