"""The report of a run between sites: like any other, without what the server cannot know."""

from __future__ import annotations

from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
from memory_federation import MemoryFederation, experiment
from trusting import TRUSTING, sites_of, trusting

from coterie.cli.report import report
from coterie.engines.flower import messages
from coterie.engines.flower.contract import Limits
from coterie.errors import LedgerError
from coterie.experiment.folder import RunFolder
from coterie.experiment.recorded import recount
from coterie.files import read_json, write_json
from coterie.privacy import Budget, HeldOut

QUICK: dict[str, Any] = {"schedule": {"rounds": 2, "batch": 15, "lr": 0.1}}


def page(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    report(run, show=False)
    assert "counted again" in capsys.readouterr().out
    return RunFolder(run).report.read_text(encoding="utf-8")


def test_accuracies_that_some_sites_told_are_shown_and_the_others_stay_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = experiment(
        algorithm={"name": "global"},
        schedule={"rounds": 2, "batch": 20},
        evaluation={"kind": "private"},
    )
    limits = Limits(Budget(8.0, 1e-3), reported=HeldOut(0, 1.0, 1))
    federation = MemoryFederation(chosen, tmp_path / "sites", limits=limits)
    silent = next(iter(federation.sites))
    serve = federation.sites[silent].handle

    def without_reports(message: Any) -> Any:
        return messages.refusal("failed") if message.metadata.message_type == "evaluate" else serve(message)

    federation.grid.handlers[federation.nodes[silent]] = without_reports
    result = federation.serve(tmp_path / "run")
    federation.close()
    assert result.accuracy is not None
    assert set(result.accuracy.per_client) == set(federation.sites) - {silent}
    html = page(tmp_path / "run", capsys)
    assert escape(result.guarantee) in html
    assert "Each site held its own records and its own noise key" in html
    assert "global between 4 sites" in html
    assert "sites' own" in unescape(html)
    for name in federation.sites:
        assert name in html
    assert f"{100 * result.accuracy.mean:.1f}%" in html


@pytest.mark.parametrize("unit", ["client", "worker"])
def test_a_trusted_server_tells_nothing_of_whom_it_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unit: str
) -> None:
    algorithm = {"name": "dp-ifca", "clusters": 2} if unit == "client" else {"name": "dp-ogl", "period": 2}
    chosen = trusting(unit, algorithm, evaluation={"kind": "none"}, **QUICK)
    federation = sites_of(chosen, tmp_path / "sites", TRUSTING)
    result = federation.serve(tmp_path / "run")
    federation.close()
    assert result.accuracy is None
    html = page(tmp_path / "run", capsys)
    assert "no accuracy on held-out records was asked for" in html
    assert "is a secret that the noise counts on" in html
    assert "Answered" not in html
    assert ("Who learns what about whom" in html) == (unit == "worker")
    report(tmp_path / "run", show=False, public=True)
    public = RunFolder(tmp_path / "run").public.read_text(encoding="utf-8")
    footer = public[public.index("<footer>") :]
    assert " s for 2 rounds" in html[html.index("<footer>") :]
    assert " s for 2 rounds" not in footer, "how long rounds took tells who was sampled"
    counted = recount(tmp_path / "run")
    assert counted is not None
    assert counted.spent == pytest.approx(result.asked[next(iter(federation.sites))])


def test_a_damaged_result_is_one_clear_line(tmp_path: Path) -> None:
    chosen = trusting("client", {"name": "dp-fedavg"}, evaluation={"kind": "none"}, **QUICK)
    federation = sites_of(chosen, tmp_path / "sites", TRUSTING)
    federation.serve(tmp_path / "run")
    federation.close()
    path = RunFolder(tmp_path / "run").result
    content = read_json(path)
    del content["asked"]
    write_json(path, content)
    with pytest.raises(LedgerError, match=r"result\.json: changed since it was written"):
        report(tmp_path / "run", show=False)
