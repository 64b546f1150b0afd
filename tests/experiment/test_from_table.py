"""`ct.federation` and `coterie init`: a folder that runs, a draft that does not, a guarantee that says it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import coterie as ct
from coterie.cli.main import load
from coterie.data.folder import read_declaration
from coterie.errors import InputError, LedgerError
from coterie.experiment import local
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.from_table import federation
from coterie.experiment.interview import Interview
from coterie.experiment.recorded import recount
from coterie.experiment.verify import verify
from coterie.files import read_json, write_json
from coterie.privacy import Guarantee
from coterie.privacy.wording import FROM_DATA

PUBLIC: dict[str, Any] = {"x": (0, 1), "y": ["no", "yes"]}
SMALL = ["schedule.rounds=2", "schedule.batch=8", "algorithm.name=global", "seeds.noise=1"]


def rows() -> dict[str, Any]:
    x = np.random.default_rng(0).random(90)
    return {"site": np.repeat(["a", "b", "c"], 30), "x": x, "y": np.where(x > 0.5, "yes", "no")}


def write_csv(path: Path) -> Path:
    content = rows()
    lines = zip(*content.values(), strict=True)
    path.write_text("\n".join([",".join(content), *(",".join(map(str, line)) for line in lines)]) + "\n")
    return path


def test_a_table_runs_from_its_own_folder_and_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = ct.federation(rows(), client="site", label="y", bounds=PUBLIC, out="sites")
    assert made.clients == {"a": 30, "b": 30, "c": 30}
    assert repr(made) == "NewFederation(sites: 3 clients, 90 records; ready to run)"
    elsewhere = read_experiment(made.experiment)
    assert elsewhere.data.path == Path("sites")
    # What a run writes down reads as the same, though it lies elsewhere.
    Path("stored.yaml").write_text("data: {name: folder, path: sites}\nfederation: {kind: natural}\n")
    assert read_experiment(Path("stored.yaml")).data == elsewhere.data
    there = local.load_federation(elsewhere).fingerprint()
    monkeypatch.chdir(tmp_path / "sites")
    assert local.load_federation(read_experiment(Path("experiment.yaml"))).fingerprint() == there


def test_bounds_from_the_data_stand_in_the_guarantee_and_verify_asks_for_them(tmp_path: Path) -> None:
    said = {}
    for name, bounds in (("public", PUBLIC), ("taken", "data")):
        made = federation(rows(), client="site", label="y", bounds=bounds, out=tmp_path / name)
        result = local.run(read_experiment(made.experiment, SMALL), tmp_path / f"run-{name}")
        said[name] = f"; {FROM_DATA};" in result.guarantee
        assert verify(tmp_path / f"run-{name}").verdict == "holds"
    assert said == {"public": False, "taken": True}
    path = tmp_path / "run-taken" / "guarantee.json"
    stored = Guarantee.from_json(read_json(path))
    kept = tuple(caveat for caveat in stored.caveats if FROM_DATA not in caveat)
    write_json(path, replace(stored, caveats=kept).to_json())
    with pytest.raises(LedgerError, match=f"guarantee.json: the caveat '{FROM_DATA}"):
        recount(tmp_path / "run-taken")


def test_nothing_is_overwritten_but_the_same_again_is_no_mistake(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"client": "site", "label": "y", "out": tmp_path / "sites"}
    first = federation(rows(), bounds=PUBLIC, **chosen)
    assert federation(rows(), bounds=PUBLIC, **chosen) == first
    with pytest.raises(InputError, match="sites: holds something else already"):
        federation(rows(), bounds={**PUBLIC, "x": (0, 2)}, **chosen)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sites"]


def test_a_folder_of_files_gets_its_two_files_beside_them(tmp_path: Path) -> None:
    made = federation(rows(), client="site", label="y", bounds=PUBLIC, out=tmp_path / "sites")
    made.experiment.unlink()
    made.declaration.unlink()
    again = federation(made.path, label="y", bounds=PUBLIC)
    assert again == made
    with pytest.raises(InputError, match=r"federation.yaml: exists already"):
        federation(made.path, label="y", bounds=PUBLIC)
    with pytest.raises(InputError, match="in a folder every file is a client"):
        federation(made.path, client="site", label="y", bounds=PUBLIC, out=tmp_path / "other")


def invoke(*arguments: str | Path, answers: str | None = None) -> Any:
    return CliRunner().invoke(load("init"), list(map(str, arguments)), input=answers, catch_exceptions=False)


def test_init_without_a_terminal_leaves_a_draft_and_says_what_is_open(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "rows.csv")
    chosen = ["--data", table, "--client", "site", "--label", "y", "--out", tmp_path / "out"]
    done = invoke(*chosen, "--json")
    assert json.loads(done.stdout)["fill_in"] == ["y (classes)", "x (range)"]
    with pytest.raises(InputError, match="a draft, in which y"):
        local.calibrate(read_experiment(tmp_path / "out" / "experiment.yaml"))
    # A column of 90 numbers that the holder has told nobody of is nowhere in what was written.
    assert "0." not in (tmp_path / "out" / "federation.yaml").read_text().replace("0 to 120", "")


def test_init_takes_answers_and_asks_again_for_odd_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write_csv(tmp_path / "rows.csv")
    monkeypatch.setattr("coterie.cli.init._on_a_terminal", lambda: True)
    chosen = ["--data", table, "--client", "site", "--label", "y", "--out", tmp_path / "out"]
    done = invoke(*chosen, answers="no, maybe\nno, yes\n5\n0 to 1\n")
    assert done.exit_code == 0
    assert "'yes'; allowed: no, maybe" in done.output
    declared = (tmp_path / "out" / "federation.yaml").read_text()
    assert "classes: ['no', 'yes']" in declared
    assert "range: [0.0, 1.0]" in declared
    assert "declared" not in declared


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "x: '' is not allowed"),
        ("low to high", "x: 'low to high' is no range"),
        ("3 to 2", "x: range"),
        ("2001-01-01 to 2002-01-01", "is no date"),
        ("1,2", "allowed: 1, 2"),
    ],
)
def test_answers_that_are_none_are_refused(tmp_path: Path, text: str, line: str) -> None:
    interview = Interview(write_csv(tmp_path / "rows.csv"), "site", "y")
    with pytest.raises(InputError, match=line):
        interview.answer("x", text)


def test_a_declared_folder_gets_an_experiment(tmp_path: Path) -> None:
    made = federation(rows(), client="site", label="y", bounds=PUBLIC, out=tmp_path / "sites")
    written = made.experiment.read_text()
    made.experiment.unlink()
    done = invoke("--data", made.path)
    assert done.exit_code == 0
    assert made.experiment.read_text() == written


def visits() -> dict[str, Any]:
    """Each of three sites with 15 patients, who came twice."""
    return {**rows(), "patient": np.repeat([f"p{place}" for place in range(45)], 2)}


def test_a_column_of_persons_makes_an_experiment_that_protects_them(tmp_path: Path) -> None:
    made = ct.federation(
        visits(), client="site", label="y", bounds=PUBLIC, person="patient", out=tmp_path / "sites"
    )
    assert made.clients == {"a": 15, "b": 15, "c": 15}
    assert (made.to_json()["persons"], "records" in made.to_json()) == (45, False)
    chosen = read_experiment(made.experiment)
    assert (chosen.privacy.unit, chosen.privacy.records_per_person) == ("person", 4)
    assert local.calibrate(chosen).population.records == {"a": 12, "b": 12, "c": 12}
    assert [column.column for column in read_declaration(made.declaration).features] == ["x"]  # type: ignore[union-attr]
    made.experiment.unlink()
    again = CliRunner().invoke(load("init"), ["--data", str(made.path), "--json"])
    assert json.loads(again.stdout)["persons"] == 45
    assert read_experiment(made.experiment) == chosen


def test_init_takes_the_column_of_persons_and_nothing_else_about_it(tmp_path: Path) -> None:
    path, content = tmp_path / "visits.csv", visits()
    lines = zip(*content.values(), strict=True)
    path.write_text("\n".join([",".join(content), *(",".join(map(str, line)) for line in lines)]) + "\n")
    asked = ["--data", str(path), "--client", "site", "--label", "y", "--out", str(tmp_path / "out")]
    bounds = ["--bound", "x=0 to 1", "--bound", "y=no, yes"]
    told = CliRunner().invoke(load("init"), [*asked, *bounds, "--person", "patient"])
    assert told.exit_code == 0, told.output
    assert "3 clients, 45 persons" in told.stdout
    assert "person: patient" in (tmp_path / "out" / "federation.yaml").read_text()
    for column in ("y", "x"):
        wrong = CliRunner().invoke(load("init"), [*asked, *bounds, "--person", column])
        assert isinstance(wrong.exception, InputError)
        assert "person: " in str(wrong.exception)
    absent = CliRunner().invoke(load("init"), [*asked, *bounds, "--person", "nobody"])
    assert "no column 'nobody'" in str(absent.exception)


def test_a_folder_that_waits_to_be_run_is_no_run_folder(tmp_path: Path) -> None:
    made = ct.federation(rows(), client="site", label="y", bounds=PUBLIC, out=tmp_path / "sites")
    before = sorted(path.name for path in made.path.iterdir())
    for refused in (verify, ct.load, lambda path: ct.run(made.experiment, path, resume=True)):
        with pytest.raises(InputError, match=r"not (?:a run folder|the folder of a finished run)"):
            refused(made.path)
    assert sorted(path.name for path in made.path.iterdir()) == before
