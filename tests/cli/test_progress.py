"""What long commands say while they work: on a terminal what is being done, to machines nothing."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from command import Printed, coterie

from coterie.cli import console
from coterie.cli.compare import compare, show
from coterie.cli.console import ProgressBar, duration
from coterie.experiment.cells import Progress
from coterie.experiment.comparison import SweepResult
from coterie.experiment.sweep import Sweep

Run = Callable[..., Printed]
SMALL = ["--set", "federation.sizes=[2,3]", "--set", "federation.records_per_client=60"]
SMALL += ["--set", "schedule.rounds=3", "--set", "schedule.batch=20"]
SMALL += ["--set", "algorithm.name=global"]
SWEEP = """
base: {federation: {sizes: [2], records_per_client: 60}, schedule: {rounds: 1, batch: 20}}
grid: {algorithm.name: [local]}
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: coterie(capsys, monkeypatch, *arguments)


def shown_on_a_terminal(folder: Path, *arguments: str) -> str:
    """What a command draws on a terminal of 200 columns, until it ends."""
    screen, terminal = pty.openpty()
    command = [sys.executable, "-m", "coterie", *arguments]
    environment = {**os.environ, "COLUMNS": "200", "TERM": "xterm"}
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=terminal, env=environment
    ) as process:
        os.close(terminal)
        drawn = b""
        try:
            while part := os.read(screen, 1 << 16):
                drawn += part
        except OSError:  # the other end was closed
            pass
        finally:
            os.close(screen)
    assert process.returncode == 0, drawn.decode()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.decode())


def in_order(text: str, *words: str) -> None:
    places = [text.find(word) for word in words]
    assert min(places) >= 0, dict(zip(words, places, strict=True))
    assert places == sorted(places)


def test_a_terminal_is_never_blank(tmp_path: Path) -> None:
    shown = shown_on_a_terminal(tmp_path, "run", *SMALL)
    in_order(shown, "starting", "reading digits", "checking the model", "calibrating the noise")
    in_order(shown, "calibrating the noise", "round 1 of 3 begins", "central models", "writing the report")


def test_a_comparison_says_how_long_it_will_take_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    shown = shown_on_a_terminal(tmp_path, "compare", "sweep.yaml")
    in_order(shown, "starting", "reading digits", "1 of 1 runs to do, about ", "1 of 1 runs done")


def test_machines_are_told_nothing_beside_the_object(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.cli.console.LINE_SECONDS", 0.0)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    assert run("run", *SMALL, "--out", "out", "--json").err == ""
    assert run("compare", "sweep.yaml", "--json").err == ""


def test_without_a_terminal_a_step_is_a_line_where_nothing_was_said_for_long(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = run("run", *SMALL)
    assert (printed.code, printed.err) == (0, "")
    monkeypatch.setattr("coterie.cli.console.LINE_SECONDS", 0.0)
    lines = run("run", *SMALL).err.splitlines()
    assert lines[0] == "global: reading digits"
    assert len(lines) == len(set(lines))


def test_missing_data_end_a_comparison_and_a_reproduction_before_anything_is_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "no-data"))
    (tmp_path / "sweep.yaml").write_text("base: {data: {name: mnist}}\ngrid: {seeds.simulation: [1, 2]}\n")
    for arguments in (["compare", "sweep.yaml", "--out", "out"], ["reproduce", "rdpcfl-mnist"]):
        printed = run(*arguments)
        assert (printed.code, printed.out, printed.err.count("\n")) == (2, "", 1), printed.err
        assert "no-data" in printed.err
        assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


def test_without_a_terminal_a_failure_is_all_that_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long a comparison will take is for whoever watches: a file gets the lines of what failed."""
    begun = Progress({"a": 0, "b": 0}, {"a": 3, "b": 2}, frozenset(), left=40.0)
    for watched in (False, True):
        with monkeypatch.context() as patch, ProgressBar("comparing") as bar:
            patch.setattr(type(console.err), "is_terminal", watched)
            bar.update_cells(begun)
            bar.update_cells(replace(begun, failed=frozenset({"b"})))
            assert bar.total == 5
        show(SweepResult(tmp_path, Sweep({}, {"seeds.simulation": [1]}), (), {}, {"b": "killed by signal 9"}))
        estimate, failed = "comparing: 2 of 2 runs to do, about 40 s\n", "failed: b: killed by signal 9\n"
        assert capsys.readouterr().err == (estimate if watched else "") + failed


def test_rounds_so_far_tell_how_long_the_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = 100.0, []
    monkeypatch.setattr("time.monotonic", lambda: now)
    bar = ProgressBar("run", 5)
    monkeypatch.setattr(bar._bar, "update", lambda task, **fields: told.append(fields["left"]))
    for done in (1, 2, 4):
        bar.update(done, "going")
        now += 10.0 * done
    assert told == ["", "about 30 s left", "about 10 s left"]


def test_a_duration_is_a_rough_word() -> None:
    assert [duration(seconds) for seconds in (0.2, 89, 600, 5400, 90000)] == [
        "1 s", "89 s", "10 min", "1.5 h", "25.0 h",
    ]  # fmt: skip


def test_machines_are_told_what_failed_in_lines_beside_the_object(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = SweepResult(tmp_path, Sweep({}, {"seeds.simulation": [1]}), (), {}, {"b": "no GPU here"})
    monkeypatch.setattr("coterie.api.compare", lambda *_, **__: failed)
    with pytest.raises(typer.Exit):
        compare(tmp_path, json=True)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["failed"] == {"b": "no GPU here"}
    assert printed.err == "failed: b: no GPU here\n"


def test_a_comparison_of_which_nothing_finished_shows_no_table_and_no_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sweep = Sweep({}, {"seeds.simulation": [1]})
    show(SweepResult(tmp_path, sweep, (), {}, {"simulation=1": "killed by signal 9"}))
    assert tuple(capsys.readouterr()) == ("", "failed: simulation=1: killed by signal 9\n")
