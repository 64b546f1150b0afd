"""What holds of every command: help, one JSON object, one line and exit code 2 for bad input.

A command that is registered and has no cases here fails.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import typer
from command import Printed, coterie

from coterie.bench.records import BenchResult
from coterie.bench.timing import Timing
from coterie.cli.main import COMMANDS, load

TESTS = Path(__file__).resolve().parents[1]
SMALL = ["--set", "federation.sizes=[2,3]", "--set", "federation.records_per_client=60"]
SMALL += [
    "--set",
    "schedule.rounds=1",
    "--set",
    "schedule.batch=20",
    "--set",
    "algorithm.name=global",
    "--set",
    "evaluation.references=false",
    "--out",
    "out",
]
SMALL_CLUSTERS = [word.replace("global", "oracle") for word in SMALL]
SWEEP = """
base: {federation: {sizes: [2], records_per_client: 60}, schedule: {rounds: 1, batch: 20}}
grid: {algorithm.name: [local]}
"""
DECLARED = """
task: classification
label: {column: y, classes: ["no", "yes"]}
features: [{column: x, range: [0, 9]}]
"""
SAMPLE = ["--records", "600", "--batch", "30", "--rounds", "3", "--delta", "1e-4"]
CLIENT = ["--clients", "100", "--rate", "0.1", "--rounds", "3", "--delta", "1e-3"]
RING = ["--structure", "ring", "--workers", "4", "--groups", "4", "--period", "2", "--epochs", "3"]
RING += ["--rate", "0.5", "--noise", "2", "--delta", "1e-5"]
HERE = ["--data", "nowhere", "--server", "127.0.0.1:1", "--plaintext"]


@dataclass(frozen=True)
class Cases:
    """What a command is asked here.

    Args:
        bad: arguments that are mistakes, with a word of the line that says so.
        prints: arguments that make it print one object, without --json; None where it has no such option; a
            path where a whole deployment is needed, to the file that starts one.
        before: a command that must have been run.
    """

    bad: dict[str, list[str]]
    prints: list[str] | str | None = None
    before: tuple[str, ...] = ()


CASES = {
    "run": Cases({"nothing.yaml": ["nothing.yaml"], "schedule.round": ["--set", "schedule.round=1"]}, SMALL),
    "init": Cases(
        {"nowhere.csv": ["--data", "nowhere.csv", "--label", "y"], "--label": ["--data", "rows.csv"]},
        ["--data", "rows.csv", "--client", "who", "--label", "y", "--confirm", "--out", "made"],
    ),
    "compare": Cases(
        {"nothing.yaml": ["nothing.yaml"], "--ray": ["--ray", "127.0.0.1:1"]}, ["sweep.yaml", "--out", "out"]
    ),
    "reproduce": Cases(
        {"no-such": ["no-such"], "--scale": ["rdpcfl-noise", "--scale", "big"], "--all": ["x", "--all"]},
        ["rdpcfl-noise", "--out", "out"],
    ),
    "plan experiment": Cases(
        {"nothing.yaml": ["nothing.yaml"], "schedule.round": ["--set", "schedule.round=1"]}, SMALL[:-2]
    ),
    "plan sample": Cases({"--rounds": SAMPLE[:4], "--epsilon": SAMPLE}, [*SAMPLE, "--epsilon", "3"]),
    "plan client": Cases({"--clients": CLIENT[2:], "--epsilon": CLIENT}, [*CLIENT, "--noise", "2"]),
    "leakage": Cases({"--structure": RING[2:], "--threat-model": [*RING, "--threat-model", "3"]}, RING),
    "verify": Cases({"nowhere": ["nowhere"]}, ["out"], before=("run", *SMALL)),
    "audit": Cases(
        {
            "nothing.yaml": ["nothing.yaml"],
            "--seconds": ["--trials", "400", "--seconds", "5"],
            "--contract": ["--data", "newcomer"],
            "--release": [*SMALL[:-2], "--release", "sums"],
        },
        [*SMALL, "--trials", "400"],
    ),
    "report": Cases({"nowhere": ["nowhere"]}),
    "predict": Cases(
        {"nowhere": ["nowhere", "--held-out"], "--data": ["out"]},
        ["out", "--held-out"],
        before=("run", *SMALL),
    ),
    "export": Cases(
        {"nowhere": ["nowhere", "--out", "o"], "--format": ["out", "--out", "o", "--format", "pickle"]},
        ["out", "--out", "models"],
        before=("run", *SMALL),
    ),
    "assign": Cases(
        {"nowhere": ["nowhere", "--data", "d", "--epsilon", "1"], "--epsilon": ["out", "--data", "d"]},
        ["out", "--data", "newcomer", "--epsilon", "1"],
        before=("run", *SMALL_CLUSTERS),
    ),
    "card": Cases({"nowhere": ["nowhere"], "--format": ["out", "--format", "pdf"]}),
    "budget show": Cases({"--data": ["--data", "nowhere"]}, ["--data", "mine"]),
    "budget export": Cases(
        {"--data": ["--data", "nowhere", "--out", "b.json"]}, ["--data", "mine", "--out", "b.json"]
    ),
    "budget set": Cases(
        {
            "--lifetime-delta": ["--data", "mine", "--lifetime-epsilon", "3", "--lifetime-delta", "2"],
            "--lifetime-epsilon": ["--data", "mine", "--lifetime-epsilon", "0", "--lifetime-delta", "1e-5"],
        },
        ["--data", "mine", "--lifetime-epsilon", "3", "--lifetime-delta", "1e-5"],
    ),
    "bench": Cases({"--slow": ["--slow"]}, ["--quick"]),
    "serve": Cases({"--keys": ["e.yaml"]}, "engines/flower/real_federation.py"),
    "join": Cases(
        {
            "--epsilon": HERE,
            "data.path": [*HERE, "--epsilon", "8"],
            "--policy": [*HERE, "--policy", "nowhere.yaml"],
        }
    ),
    "keys": Cases({"--site": ["k", "--site", "a", "--sites", "b"]}),
}


def commands() -> list[str]:
    """Every command that is registered, the parts of one under their full names."""
    found = []
    for name in COMMANDS:
        parts = getattr(typer.main.get_command(load(name)), "commands", None)
        found += [name] if parts is None else [f"{name} {part}" for part in parts]
    return found


Run = Callable[..., Printed]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    Path("sweep.yaml").write_text(SWEEP)
    Path("newcomer").mkdir()
    np.savez("newcomer/me.npz", x=np.zeros((5, 1, 8, 8)), y=np.arange(5))
    Path("rows.csv").write_text("who,x,y\na,1,no\na,2,yes\nb,3,no\nb,4,yes\n")
    Path("mine").mkdir()
    Path("mine/federation.yaml").write_text(DECLARED)
    Path("mine/a.csv").write_text("x,y\n1,no\n2,yes\n")
    Path("e.yaml").write_text("algorithm: {name: global}\n")
    measured = BenchResult("a machine", "2.x", "cpu", (Timing("cnn", "ours", 4000.0, None),), ())
    monkeypatch.setattr("coterie.bench.records.run_bench", lambda quick, watch: measured)
    return lambda *arguments: coterie(capsys, monkeypatch, *arguments)


def test_every_registered_command_has_cases() -> None:
    assert set(commands()) <= set(CASES)
    assert {name.split()[0] for name in CASES} == set(COMMANDS)


@pytest.mark.parametrize("name", commands())
def test_help_says_what_it_does(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    printed = run(*name.split(), "--help")
    assert (printed.code, printed.err) == (0, "")
    assert f"Usage: coterie {name} " in printed.out
    assert ("--json" in printed.out) == (CASES[name].prints is not None)
    if name in COMMANDS:
        assert COMMANDS[name] in printed.out


@pytest.mark.parametrize("name", [name for name in commands() if CASES[name].prints is not None])
def test_json_is_one_object_and_nothing_else(name: str, run: Run) -> None:
    cases = CASES[name]
    if isinstance(cases.prints, str):
        assert f'"{name}"' in (TESTS / cases.prints).read_text()
        assert '"--json"' in (TESTS / cases.prints).read_text()
        return
    if cases.before:
        run(*cases.before)
    printed = run(*name.split(), *(cases.prints or ()), "--json")
    assert printed.code == 0, printed.err
    assert isinstance(json.loads(printed.out), dict)
    assert printed.out.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "named"), [(name, named) for name in commands() for named in CASES[name].bad]
)
def test_bad_input_is_one_line_and_exit_code_two(name: str, named: str, run: Run, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    printed = run(*name.split(), *CASES[name].bad[named])
    assert (printed.code, printed.out) == (2, ""), printed.err
    assert re.fullmatch(rf"error: .*{re.escape(named)}.*\n", printed.err)
    assert sorted(tmp_path.iterdir()) == before


def test_help_needs_none_of_the_commands() -> None:
    """It lists them all in a tenth of a second because it imports none of them, nor torch or accounting."""
    code = "import sys; from coterie.cli.main import app; app(['--help'], standalone_mode=False); "
    code += "print([m for m in sys.modules if m in ('torch', 'numpy', 'scipy', 'coterie.privacy')])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(re.search(rf"\b{name}\b", printed) for name in COMMANDS)
    assert printed.splitlines()[-1] == "[]"
