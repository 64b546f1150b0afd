"""A finished run folder is enough to use what was trained: the right model, from raw values to labels."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from trained_runs import RUNS, Runs, runs

import coterie as ct
from coterie.errors import CoterieError, InputError
from coterie.experiment import local
from coterie.experiment.assigning import check_choosable
from coterie.experiment.folder import RunFolder
from coterie.experiment.loop import drop_models
from coterie.experiment.predicting import predict_files, predict_held_out
from coterie.experiment.trained import TrainedRun
from coterie.experiment.verify import verify

__all__ = ["runs"]


@pytest.mark.parametrize("name", [*RUNS, "table", "regression"])
def test_held_out_records_score_exactly_as_in_the_run(name: str, runs: Runs) -> None:
    run = runs(name)
    reached = run.reached
    assert reached is not None
    found = predict_held_out(TrainedRun.open(run.folder)).metrics
    assert found is not None
    score = found["bounded_score" if name == "regression" else "accuracy"]
    assert score.per_client == reached.per_client
    assert score.mean == reached.mean


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


def test_of_no_records_there_are_no_predictions(runs: Runs) -> None:
    run = runs("oracle")
    assert run.predict(load_digits().data[:0], client="client-3").shape == (0,)
    assert run.predict_proba(load_digits().data[:0], client="client-3").shape == (0, 10)


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
    with pytest.raises(InputError, match="no whole model for a newcomer"):
        check_choosable(personal.trained)
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
        ({"client": 0}, "client: 0; allowed: a client's name"),
        ({"cluster": "0"}, "cluster: '0'; allowed: the number"),
        ({"cluster": True}, "cluster: True; allowed: the number"),
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
    from coterie.data.task_file import read_task

    for change, said in (
        ({"format": 9}, "format 9, ours is 1"),
        ({"task": {"kind": "nothing"}}, "not the task of a run"),
        ({"preprocessing": {"inputs": {"kind": "array"}}}, "shape"),
    ):
        (tmp_path / "task.json").write_text(json.dumps({**content, **change}))
        with pytest.raises(InputError, match=said):
            read_task(tmp_path / "task.json")
