"""Cells of a comparison: checked before any is started, ended with it, watched at little cost."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from coterie.engines import features
from coterie.errors import BudgetError, InputError
from coterie.experiment import local
from coterie.experiment.cells import LocalProcesses, Progress, compare, compute_features, run_cells
from coterie.experiment.forecast import Forecast, TimeLeft, look_ahead
from coterie.experiment.schema import Experiment
from coterie.experiment.sweep import Cell, Sweep

SMALL = {
    "federation": {"kind": "clusters", "sizes": [2, 3], "records_per_client": 60},
    "schedule": {"rounds": 3, "batch": 20},
    "evaluation": {"references": False},
}


HALVES = """
from torch import nn
class Halves(nn.Module):
    def forward(self, records):
        return records.flatten(1) / 2.0
def made(task):
    return Halves()
"""


# --- before any is started ------------------------------------------------------------------------------


def test_data_that_are_missing_for_one_cell_are_found_before_anything_is_written(tmp_path: Path) -> None:
    elsewhere = tmp_path / "nowhere"
    data = {"data": {"name": "folder", "path": str(elsewhere)}, "federation": {"kind": "natural"}}
    with pytest.raises(InputError, match="nowhere"):
        compare(Sweep(data, {"seeds.simulation": [1, 2]}), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_where_no_cell_can_run_the_reason_is_told_and_nothing_is_written(tmp_path: Path) -> None:
    base = {**SMALL, "algorithm": {"name": "r-dpcfl", "selection_share": 0.9}}
    base["schedule"] = {"rounds": 40, "batch": 20}
    with pytest.raises(BudgetError):
        compare(Sweep(base, {"seeds.simulation": [1, 2]}), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_name_begins_like_an_option_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    compared = compare(Sweep(base=SMALL, grid={"algorithm.name": ["local"]}), Path("-"))
    assert not compared.failed


def test_a_forecast_counts_what_each_cell_has_to_do(tmp_path: Path) -> None:
    sweep = Sweep(SMALL, {"schedule.rounds": [10, 1000], "federation.records_per_client": [60, 10**6]})
    forecast = look_ahead(sweep.cells(), tmp_path)
    assert forecast.timed
    short, long = (forecast.work[f"rounds={rounds}+records_per_client=60"] for rounds in (10, 1000))
    assert 0 < short < long
    assert len(forecast.work) == 2  # the others have more records than there are: each says so itself


@pytest.mark.parametrize("pace", [0.5, 1.0, 4.0])
def test_an_estimate_starts_as_the_forecast_and_ends_as_what_was_seen(
    pace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = TimeLeft(Forecast({"one": 60.0, "two": 40.0}, timed=True), at_once=2)
    seconds = 60.0 * pace  # that it really takes
    told = []
    for step in range(101):
        now = seconds * step / 100
        share = step / 100
        told.append((clock.after({"one": share, "two": share}), seconds - now))
    assert told[0][0] == pytest.approx(60.0)
    for left, true in told[70:]:
        assert left == pytest.approx(true, rel=0.5, abs=2.0)
    steps = [abs(after[0] - before[0]) for before, after in pairwise(told)]
    assert max(steps) <= 0.05 * max(60.0, seconds)


def test_where_nothing_was_measured_the_first_rounds_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = TimeLeft(Forecast({"one": 5.0}), at_once=1)
    assert clock.after({"one": 0.0}) is None
    now = 10.0
    assert clock.after({"one": 0.25}) == pytest.approx(30.0)


def test_features_are_computed_before_cells_run_and_by_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for the same records, whatever else the cells differ in."""
    (tmp_path / "halves.py").write_text(HALVES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    computed: list[int] = []
    real = features._computed
    monkeypatch.setattr(
        features, "_computed", lambda parts, *rest: (computed.append(len(parts)), real(parts, *rest))[1]
    )

    class Begun(Exception):
        """Instead of running."""

    def begin(cells: list[Cell], *_: object) -> None:
        assert len(computed) == 2  # a federation for each seed
        for cell in cells[:2]:
            local.run(cell.experiment, tmp_path / cell.name)
        raise Begun

    monkeypatch.setattr("coterie.experiment.cells.run_cells", begin)
    base = {**SMALL, "model": {"name": "softmax", "features": "halves:made"}, "engine": {"device": "cpu"}}
    sweep = Sweep(base, {"algorithm.name": ["global", "local"], "seeds.simulation": [0, 1]})
    forecast = Forecast(dict.fromkeys((cell.name for cell in sweep.cells()), 1.0))
    with pytest.raises(Begun):
        compare(sweep, tmp_path / "out", forecast=forecast)
    assert len(computed) == 2


@pytest.mark.parametrize("reason", [ValueError("no such thing"), SystemExit(3)])
def test_features_that_cannot_be_computed_stop_their_cells_alone(
    reason: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(*_: object) -> None:
        raise reason

    monkeypatch.setattr("coterie.experiment.cells.featured", refusing)
    base = {**SMALL, "model": {"name": "softmax", "features": "scattering"}}
    with caplog.at_level(logging.INFO, "coterie"):
        compute_features(Sweep(base, {"seeds.simulation": [0, 1]}).cells())
    assert caplog.text.count("features are left to the runs") == 2


# --- while they run -------------------------------------------------------------------------------------


class Scripted:
    """Cells that append to their metrics whenever somebody looks."""

    gpu, workers = False, 9

    def __init__(self, looks: int) -> None:
        self._looks = looks

    def start(self, runs: Mapping[Path, Experiment]) -> Callable[[], bool]:
        (path,) = runs
        path.mkdir(parents=True)
        metrics, seen = path / "metrics.jsonl", []

        def ended() -> bool:
            if seen:  # what was read once is not read again: it may as well be gone
                with metrics.open("r+b") as handle:
                    handle.write(b"?")
            seen.append(True)
            with metrics.open("ab") as handle:
                handle.write(json.dumps({"round": len(seen)}).encode() + b"\n" + b'{"torn')
                handle.truncate(handle.tell() - len(b'{"torn'))
            return len(seen) == self._looks

        return ended


def test_looking_at_progress_reads_only_what_is_new(tmp_path: Path) -> None:
    sweep = Sweep({**SMALL, "schedule": {"rounds": 4, "batch": 20}}, {"seeds.simulation": [1, 2]})
    seen: list[Progress] = []
    run_cells(sweep.cells(), tmp_path, Scripted(looks=4), Forecast({}), seen.append)
    assert [progress.done["simulation=1"] for progress in seen] == [0, 1, 2, 3, 4]
    assert seen[-1].failed == {"simulation=1", "simulation=2"}


def children_of(parent: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


@pytest.mark.deployment
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_comparison_that_is_killed_leaves_no_run_alive(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(
        "base: {schedule: {rounds: 100000}, evaluation: {references: false}}\n"
        "grid: {algorithm.name: [local, global]}\n"
    )
    command = [sys.executable, "-m", "coterie", "compare", "sweep.yaml", "--out", "out", "--workers", "2"]
    comparison = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("out/cells/*/ledger.jsonl")):
        assert comparison.poll() is None
        time.sleep(0.1)
    cells = children_of(comparison.pid)
    assert cells
    comparison.kill()
    comparison.wait()
    latest = time.monotonic() + 5
    try:
        while alive := [pid for pid in cells if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < latest, f"{alive} go on"
            time.sleep(0.1)
    finally:
        for pid in alive:
            os.kill(pid, signal.SIGKILL)


def test_a_process_that_does_not_end_when_asked_is_killed_within_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stubborn.py").write_text(
        "import pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path('deaf').touch()\n"
        "time.sleep(20)\n"
    )
    monkeypatch.chdir(tmp_path)
    start = subprocess.Popen

    def stubborn(command: list[str], **options: object) -> "subprocess.Popen[bytes]":
        return start([sys.executable, "stubborn.py"], **options)  # type: ignore[call-overload, no-any-return]

    cells = Sweep(SMALL, {"seeds.simulation": [1]}).cells()
    executor = LocalProcesses(cells, 2)
    monkeypatch.setattr(subprocess, "Popen", stubborn)
    ended = executor.start({tmp_path / "cell": cells[0].experiment})
    while not (tmp_path / "deaf").exists():
        time.sleep(0.05)
    assert not ended()
    began = time.monotonic()
    executor.close()
    assert time.monotonic() - began < 2.0
