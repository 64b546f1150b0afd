"""The page of a run that goes on: what it says, what it must not, and that it is the operator's alone."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coterie.engines.flower.proxy import ServerStatus
from coterie.experiment.callbacks import Callbacks, RoundReport
from coterie.experiment.serving_status import RunStatus
from coterie.report.live import kept_page, live_page


def watched(*names: str) -> tuple[RunStatus, ServerStatus]:
    status, proxy = RunStatus(), ServerStatus()
    transport: Any = SimpleNamespace(nodes=dict.fromkeys(names, 1), is_open=lambda identity: True)
    status.attach(transport, proxy)
    return status, proxy


def after_round(status: RunStatus, round: int, **told: Any) -> None:
    report = RoundReport(round, 5, accuracy=0.5, epsilon=1.0, seconds=2.0, **told)
    on_round = status.watching(Callbacks()).on_round
    assert on_round is not None
    on_round(report)


def test_it_shows_the_round_who_is_here_what_is_left_and_the_last_error() -> None:
    status, proxy = watched("east", "west", "north")
    proxy.last_polls = {"east": time.monotonic(), "west": time.monotonic() - 300}
    proxy.arrivals.update({"east": 1, "west": 3})
    proxy.troubles["north"] = "key revoked"
    left = {"east": 8.0, "west": 8.0}
    spent = {"east": 1.2345, "west": 2.0}
    after_round(status, 3, spent=spent, budget=left, missing={"west": "no answer in time"})
    after_round(status, 4, spent=spent, budget=left)
    shown = live_page(status)
    assert "In round 5 of 5" in shown
    assert "1 of 3 sites here" in shown
    rows = {
        name: row for name in ("east", "west", "north") for row in shown.split("<tr>") if f">{name}<" in row
    }
    assert ">yes<" in rows["east"]
    assert ">6.76<" in rows["east"]  # 6.7655, never more than is left
    assert "no, 5 min" in rows["west"]
    assert "no answer in time (round 3)" in rows["west"]
    assert "never came" in rows["north"]
    assert "key revoked" in rows["north"]
    assert '<meta http-equiv="refresh"' in shown
    assert '<meta http-equiv="refresh"' not in live_page(status, over=True)


def test_nothing_is_fetched_and_what_a_site_is_called_is_escaped() -> None:
    status, _ = watched("<script>alert(1)</script>")
    status.missing["<script>alert(1)</script>"] = "<img src=x>"
    shown = live_page(status)
    assert "<script" not in shown
    assert "<img" not in shown
    assert "http://" not in shown.replace("http://www.w3.org", "")


def test_it_is_kept_while_the_run_goes_on_and_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.report.live.EVERY_SECONDS", 0.05)
    status, _ = watched("east")
    target = tmp_path / "live.html"
    with kept_page(status, target), status.ending():
        assert "Waiting for sites" in target.read_text()
        assert stat.S_IMODE(target.stat().st_mode) == 0o600
        status.state = "in round 2 of 5"
        until = time.monotonic() + 10
        while "In round 2" not in target.read_text() and time.monotonic() < until:
            time.sleep(0.02)
        assert "In round 2 of 5" in target.read_text()
    assert "Finished" in target.read_text()
    with pytest.raises(KeyboardInterrupt), kept_page(status, target), status.ending():
        raise KeyboardInterrupt
    assert "--resume goes on" in target.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["live.html"]


def test_health_has_what_the_page_has() -> None:
    status, _ = watched("east")
    after_round(status, 1, spent={"east": 1.0}, budget={"east": 8.0}, missing={"east": "went away"})
    told = cast(dict[str, Any], status.health())
    assert told["missing"] == {"east": "went away"}
    assert told["epsilon_left"] == {"east": 7.0}
