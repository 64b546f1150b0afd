"""An algorithm, a model, data and a federation of a package that is not coterie, by the command line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Printed, coterie

import own_package
from coterie.experiment.cluster import _with_code
from coterie.experiment.experiment_file import read_experiment, to_yaml
from coterie.experiment.own_code import OWN_ALGORITHM, OWN_DATA, OWN_FEDERATION, code_of
from coterie.experiment.schema import Experiment
from coterie.experiment.verify import verify
from coterie.files import parse_yaml
from own_package import EXAMPLE

SWEEP = """
base:
  data: {name: "own_algorithm.data:sensors", readings: 240, published: true}
  federation: {kind: sites, clients: 3}
  model: {name: "own_algorithm.model:narrow"}
  privacy: {epsilon: 8, delta: 1.0e-3}
  schedule: {rounds: 2, batch: 20}
  engine: {device: cpu}
  evaluation: {references: false}
  seeds: {noise: 1}
grid:
  algorithm.name: [half, "own_algorithm.algorithm:Half"]
"""
Command = Callable[..., Printed]


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Printed]:
    installed = own_package.announce(EXAMPLE, tmp_path / "installed")
    own_package.put_on_path(monkeypatch, EXAMPLE, installed)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: coterie(capsys, monkeypatch, *arguments)


def test_it_runs_in_a_sweep_with_two_workers_by_its_place_and_by_its_entry_points(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.yaml").write_text(SWEEP)
    printed = run("compare", "s.yaml", "--workers", "2", "--out", "c", "--json")
    assert printed.code == 0, printed.err
    result = json.loads(printed.out)
    assert result["failed"] == {}
    cells = [tmp_path / cell for cell in result["cells"].values()]
    assert len(cells) == 2
    # The same code on the same seeds, whatever it was called.
    assert result["table"][0]["accuracy"] == result["table"][1]["accuracy"]
    codes = [json.loads((cell / "code.json").read_text()) for cell in cells]
    assert {key: entry["sha256"] for key, entry in codes[0].items()} == {
        key: entry["sha256"] for key, entry in codes[1].items()
    }
    # Nobody knows what own code reads: runs on it add up.
    assert result["total"]["epsilon"] > 8
    own_package.forget()
    monkeypatch.undo()
    found = verify(tmp_path / "c")
    assert (found.verdict, found.finished, len(found.runs)) == ("holds", True, 2)
    assert own_package.MODULE not in sys.modules


def test_single_keys_name_it_too_and_what_is_wrong_with_them_is_one_line(run: Command) -> None:
    named = ["data.name=sensors", "federation.kind=own_algorithm.federation:sites", "model.name=narrow"]
    named += ["algorithm.name=half", "schedule.batch=20"]
    options = [word for key in named for word in ("--set", key)]
    printed = run("plan", *options, "--json")
    assert printed.code == 0, printed.err
    assert "(eps=8.00" in json.loads(printed.out)["guarantee"]
    printed = run("run", *options, "--set", "federation.colour=red")
    assert (printed.code, printed.out) == (2, "")
    assert printed.err == "error: federation.colour: unknown key; known here: clients, held_out\n"


@pytest.mark.usefixtures("run")
def test_a_machine_with_other_code_of_that_name_runs_no_cell() -> None:
    sections = ["data.name=sensors", "federation.kind=sites", "model.name=narrow", "algorithm.name=half"]
    chosen = read_experiment(None, [*sections, "schedule.batch=20"])
    code = code_of(chosen)
    assert code is not None
    assert _with_code(to_yaml(chosen), code) == (chosen, "")
    other = {**code, "data.name": {**code["data.name"], "sha256": "0" * 64}}
    found, reason = _with_code(to_yaml(chosen), other)
    assert found is None
    assert "data.name: sensors: the code here (own-algorithm 0.1.0, sha256" in reason
    assert "is not the one (own-algorithm 0.1.0, sha256 000000000000) that the comparison runs" in reason


def test_the_documents_show_the_example_as_it_is_and_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = EXAMPLE.parents[1]
    code = (EXAMPLE / "own_algorithm" / "algorithm.py").read_text(encoding="utf-8")
    assert code.partition('"""\n\n')[2] in (root / "README.md").read_text(encoding="utf-8")
    [(shown, option)] = re.findall(r"algorithm: (\{.*(share): .*\})", (root / "README.md").read_text("utf-8"))
    own_package.put_on_path(monkeypatch, EXAMPLE)
    assert Experiment.model_validate({"algorithm": parse_yaml(shown)}).algorithm.model_extra is None
    assert option in parse_yaml(shown)
    text = (root / "docs" / "plugins.md").read_text(encoding="utf-8")
    for caveat in (OWN_ALGORITHM, OWN_DATA, OWN_FEDERATION):
        assert caveat in " ".join(text.replace("\n> ", " ").split())
    [checked] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(checked, {})
    assert re.fullmatch(r"\{'training': [0-4]\} of \{'training': 4\}\n", capsys.readouterr().out)
    own_package.forget()
