"""Runs that protect persons: with one record each they are runs on records, else what is planned is done."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import coterie as ct
from coterie.algorithms import algorithm_names
from coterie.errors import InputError, LedgerError
from coterie.estimators import FitError
from coterie.experiment import local
from coterie.experiment.assigning import check_choosable
from coterie.experiment.folder import RunFolder
from coterie.experiment.predicting import predict_held_out
from coterie.experiment.recorded import recount
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.experiment.trained import TrainedRun
from coterie.experiment.verify import verify
from coterie.files import read_json, write_json
from coterie.privacy import Guarantee, Unit

DECLARED = """
task: classification
label: {column: ill, classes: 2}
person: patient
features: [{column: age, range: [0, 90]}, {column: dose, range: [0, 1]}]
"""


def clinics(path: Path, most: int, *, shared: bool = False) -> Path:
    """Four clients with patients of up to so many visits; in two groups, in which doses help or harm."""
    rng = np.random.default_rng(11)
    path.mkdir()
    (path / "federation.yaml").write_text(DECLARED)
    for clinic in range(4):
        rows = ["patient,age,dose,ill"]
        for patient in range(45):
            name = f"p{patient}" if shared and patient < 5 else f"c{clinic}p{patient}"
            for _ in range(rng.integers(1, most + 1)):
                age, dose = rng.integers(90), rng.random()
                ill = age / 90 + (dose if clinic % 2 else 1 - dose) + 0.2 * rng.normal() > 1
                rows.append(f"{name},{age},{dose:.4f},{int(ill)}")
        (path / f"clinic-{clinic}.csv").write_text("\n".join(rows) + "\n")
    return path


def experiment(folder: Path, unit: str = "person", **changes: Any) -> Experiment:
    sections: dict[str, Any] = {
        "data": {"name": "folder", "path": str(folder)},
        "federation": {"kind": "natural"},
        "model": {"name": "softmax"},
        "privacy": {"unit": unit, "epsilon": 8.0, "delta": 1e-3},
        "algorithm": {"name": "global"},
        "schedule": {"rounds": 4, "batch": 9},
        "seeds": {"noise": 5},
        "engine": {"workers": 1},
    }
    for name, keys in changes.items():
        fresh = name == "algorithm"
        sections[name] = keys if fresh else {**sections.get(name, {}), **keys}
    return Experiment.model_validate(sections)


def state_of(run: Path) -> dict[str, object]:
    """What the algorithm carries on; heads of chains, which begin with the plan's own words, are left out."""
    [arrays] = run.rglob("state.safetensors")
    found = {name: value.tobytes() for name, value in load_file(arrays).items()}
    rest = {k: v for k, v in read_json(arrays.parent / "state.json").items() if k not in ("heads", "hash")}
    return {**found, **rest}


def charges_of(run: Path) -> list[object]:
    """All that was charged, with digests of what clients were sent."""
    lines = RunFolder(run).ledger.read_text().splitlines()
    return [json.loads(line)["charges"] for line in lines[1:]]


SOUND = [name for name in algorithm_names(Unit.PERSON) if name not in ("rc-dpfl", "oracle")]
OPTIONS: dict[str, dict[str, Any]] = {"dp-ifca": {"clusters": 2}, "km-cdpfl": {"clusters": 2}}


def test_the_algorithms_for_records_are_those_for_persons() -> None:
    assert algorithm_names(Unit.PERSON) == algorithm_names(Unit.RECORD)
    assert {"r-dpcfl", "global", "local", "mr-mtl", "dp-ifca", "km-cdpfl"} == set(SOUND)


@pytest.mark.parametrize("name", SOUND)
def test_with_one_record_each_persons_are_records_bit_for_bit(name: str, tmp_path: Path) -> None:
    folder = clinics(tmp_path / "data", most=1)
    algorithm = {"name": name, **OPTIONS.get(name, {})}
    results = {}
    for unit, own in (("record", {}), ("person", {"records_per_person": 1})):
        chosen = experiment(folder, unit, algorithm=algorithm, privacy=own)
        results[unit] = local.run(chosen, tmp_path / unit).to_json()
    assert state_of(tmp_path / "record") == state_of(tmp_path / "person")
    assert charges_of(tmp_path / "record") == charges_of(tmp_path / "person")
    mine, theirs = (
        {key: value for key, value in result.items() if key not in ("seconds", "guarantee", "guarantee_text")}
        for result in results.values()
    )
    for key in ("accuracy", "clusters", "epsilon", "scores", "noise_multiplier"):
        assert mine.get(key) == theirs.get(key), key
    assert "one person's records at any of 4 clients" in results["person"]["guarantee"]


def test_with_several_records_noise_is_bound_to_how_many_count(tmp_path: Path) -> None:
    """The same noise on what was computed from other records would cancel."""
    folder = clinics(tmp_path / "data", most=4)
    contexts = {
        (unit, most): experiment(folder, unit, privacy={"records_per_person": most} if most else {})
        .plan()
        .context()
        for unit, most in (("record", 0), ("person", 1), ("person", 2), ("person", 3))
    }
    assert len(set(contexts.values())) == 4


@pytest.mark.parametrize("name", SOUND)
def test_every_algorithm_does_and_charges_what_it_planned(name: str, tmp_path: Path) -> None:
    folder = clinics(tmp_path / "data", most=4)
    out = tmp_path / "run"
    result = local.run(experiment(folder, algorithm={"name": name, **OPTIONS.get(name, {})}), out)
    checked = verify(out)
    assert (checked.verdict, checked.finished) == ("holds", True)
    assert result.epsilon <= 8.0
    assert result.accuracy.mean > 0.3
    plan = read_json(RunFolder(out).plan)
    assert plan["persons"] == {"records": 4, "clients": 1}
    assert RunResult.load(out) == result
    for client in read_json(RunFolder(out).federation)["clients"]:
        assert (client["records"], client["test_records"]) == (36, 9)  # persons of 45, not their records


def test_a_run_that_was_cut_short_goes_on_bit_for_bit(tmp_path: Path) -> None:
    folder = clinics(tmp_path / "data", most=4)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    chosen = experiment(folder, algorithm={"name": "r-dpcfl", "clusters": 2})
    local.run(chosen, whole)
    work = local.work(local.calibrate(chosen), RunFolder(cut))
    asked = next(work)
    for _ in range(3):
        asked = work.send(asked.engine.answer(asked.request, asked.round))
    work.close()
    local.run(chosen, cut, resume=True)
    assert state_of(cut) == state_of(whole)
    assert charges_of(cut) == charges_of(whole)
    assert verify(cut).verdict == "holds"


def test_runs_of_other_bounds_side_by_side_are_as_if_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: clients of all runs in one program, where persons have as many places."""
    monkeypatch.setattr("coterie.engines.local.stacks", lambda learner: True)
    folder = clinics(tmp_path / "data", most=4)
    cells = {
        f"{most}-{lr}": experiment(folder, privacy={"records_per_person": most}, schedule={"lr": lr})
        for most, lr in ((1, 0.5), (2, 0.5), (2, 0.25), (3, 0.5))
    }
    ended = local.run_together({tmp_path / name: chosen for name, chosen in cells.items()})
    assert not ended.failures
    for name, chosen in cells.items():
        assert verify(tmp_path / name).verdict == "holds"
        local.run(chosen, tmp_path / f"{name}-alone")
        models = [
            load_file(next((tmp_path / place).rglob("state.safetensors")))["model"]
            for place in (name, f"{name}-alone")
        ]
        np.testing.assert_allclose(*models, rtol=1e-4, atol=1e-6)


def numbers_of(path: Path) -> set[str]:
    """Every whole number in a file, written as one or as a float; not what stands within hashes."""
    return set(re.findall(r"(?<![\w.])(\d+)(?:\.0)?(?!\w|\.\d)", path.read_text()))


def test_numbers_are_found_wherever_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"a":81,"b":[82.0,0.83,84.5],"c":85} of 86. 87e8f "88" e89')
    assert numbers_of(tmp_path / "file") == {"81", "82", "85", "86", "88"}


@pytest.mark.usefixtures("register")  # its length is written: all tests' register may be as long as a table
def test_nothing_written_tells_how_many_records_there_are(tmp_path: Path) -> None:
    """Not of persons, not of clients, not of what was dropped."""
    folder = clinics(tmp_path / "data", most=7)
    rows = [len((folder / f"clinic-{place}.csv").read_text().splitlines()) - 1 for place in range(4)]
    result = local.run(experiment(folder, privacy={"records_per_person": 2}), tmp_path / "run")
    federation = local.load_federation(
        result_experiment := experiment(folder, privacy={"records_per_person": 2})
    )
    kept = [
        client.train.arrays["present"].sum() + client.test.arrays["present"].sum()
        for client in federation.clients
    ]
    secret = {str(number) for number in (*rows, sum(rows), *kept, sum(kept), sum(rows) - sum(kept))}
    assert result_experiment.privacy.persons is not None
    for path in (tmp_path / "run").rglob("*"):
        if path.suffix in (".json", ".jsonl", ".yaml"):
            assert secret.isdisjoint(numbers_of(path)), path.name
    write_json(tmp_path / "result.json", result.to_json())
    assert secret.isdisjoint(numbers_of(tmp_path / "result.json"))


def test_who_is_at_several_clients_pays_at_each_and_the_guarantee_says_what(tmp_path: Path) -> None:
    folder = clinics(tmp_path / "data", most=3, shared=True)
    with pytest.raises(
        InputError, match=r"privacy.clients_per_person: 1; there are persons with records at more"
    ):
        local.calibrate(experiment(folder))
    promise = experiment(folder, privacy={"clients_per_person": 4}).plan().guarantee
    assert promise.epsilon_across_clients is not None
    assert promise.epsilon < promise.epsilon_across_clients < 4 * promise.epsilon
    assert f"eps={promise.epsilon_across_clients:.2f}"[:6] in promise.line
    assert "a person at up to 4 clients" in promise.line


@pytest.mark.parametrize("figure", ["epsilon_across_clients", "persons"])
def test_a_guarantee_that_leaves_out_what_persons_pay_does_not_follow_from_its_plan(
    figure: str, tmp_path: Path
) -> None:
    folder, out = clinics(tmp_path / "data", most=3, shared=True), tmp_path / "run"
    local.run(experiment(folder, privacy={"clients_per_person": 4}, schedule={"rounds": 1}), out)
    assert recount(out) is not None
    files = RunFolder(out)
    stored = Guarantee.from_json(read_json(files.guarantee))
    write_json(files.guarantee, replace(stored, **{figure: None}).to_json())  # type: ignore[arg-type]
    with pytest.raises(LedgerError, match=f"{figure} is None; counted again"):
        recount(out)
    write_json(files.guarantee, replace(stored, epsilon_across_clients=stored.epsilon).to_json())
    with pytest.raises(LedgerError, match="epsilon_across_clients is 7"):
        recount(out)


def test_held_out_persons_are_predicted_record_by_record_and_scored_as_the_run_did(tmp_path: Path) -> None:
    folder = clinics(tmp_path / "data", most=4)
    out = tmp_path / "run"
    result = local.run(experiment(folder, evaluation={"kind": "exact", "references": True}), out)
    found = predict_held_out(TrainedRun.open(out))
    assert {part.name: (part.metrics or {})["accuracy"] for part in found.parts} == result.accuracy.per_client
    assert result.fairness is not None
    assert set(result.scores) == {"base_rate", "balanced_accuracy", "f1", "auc"}
    with pytest.raises(InputError, match="protects persons, and a newcomer's choice would protect single"):
        check_choosable(TrainedRun.open(out))


def test_an_estimator_that_is_not_told_of_persons_protects_none() -> None:
    estimator = ct.ClusteredClassifier(unit="person", bounds=(0, 1))
    records = np.linspace(0, 1, 60).reshape(30, 2)
    with pytest.raises(FitError, match="unit: person; an estimator is not told whose each record is"):
        estimator.fit(records, np.arange(30) % 2, clients=np.repeat([0, 1], 15))


def test_private_scores_of_persons_are_within_their_interval(tmp_path: Path) -> None:
    folder, out = clinics(tmp_path / "data", most=4), tmp_path / "run"
    scores = {"kind": "private", "epsilon": 8.0, "scores": ["accuracy", "balanced_accuracy"]}
    result = local.run(experiment(folder, evaluation=scores), out)
    exact = [(part.metrics or {})["accuracy"] for part in predict_held_out(TrainedRun.open(out)).parts]
    assert result.accuracy.interval is not None
    low, high = result.accuracy.interval
    assert low <= np.mean(exact) <= high < low + 0.3


REFUSED = {
    "unit record": (
        {"privacy": {"unit": "record", "records_per_person": 3}},
        r"records_per_person: 3 has no effect",
    ),
    "client bound": (
        {"privacy": {"unit": "record", "clients_per_person": 3}},
        r"clients_per_person: 3 has no effect",
    ),
    "paper": ({"privacy": {"mode": "paper"}}, r"privacy.mode: paper; no publication is about persons"),
    "add-remove": ({"privacy": {"adjacency": "add-remove"}}, r"number of a client's persons secret"),
    "none": ({"privacy": {"records_per_person": 0}}, r"records_per_person"),
    "batch": ({"schedule": {"batch": 40}}, r"schedule.batch: 40 is more than the 36 persons of a client"),
    "thinned": (
        {"data": {"name": "star", "path": None, "per_client": 9}},
        r"data.per_client: 9 with privacy.unit person",
    ),
    "published": (
        {"algorithm": {"name": "rc-dpfl", "clusters": 2}},
        r"allowed with privacy.mode sound: r-dpcfl",
    ),
    "other unit's": ({"algorithm": {"name": "dp-fedavg"}}, r"'dp-fedavg' is not known for unit 'person'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_for_persons_is_one_line(case: str, tmp_path: Path) -> None:
    changes, said = REFUSED[case]
    with pytest.raises(InputError, match=said) as caught:
        local.calibrate(experiment(clinics(tmp_path / "data", most=2), **changes))
    assert "\n" not in str(caught.value)


def test_published_data_without_persons_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"federation.kind: clusters deals single records"):
        Experiment.model_validate({"privacy": {"unit": "person"}}).plan()
