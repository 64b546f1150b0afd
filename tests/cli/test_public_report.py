"""`coterie report --public`: a page for everybody, of a run or a comparison."""

from pathlib import Path

import pytest
from command import coterie

from coterie.reproduce.table import RECORD


def test_the_command_that_reports_writes_a_page_for_everybody(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["federation.sizes=[2,2]", "federation.records_per_client=40", "schedule.rounds=2"]
    options = [part for each in small for part in ("--set", each)]
    done = coterie(capsys, monkeypatch, "run", *options, "--out", "run")
    assert done.code == 0, done.err
    assert "outside every guarantee" in done.out
    written = coterie(capsys, monkeypatch, "report", "run", "--public")
    assert written.code == 0, written.err
    assert "report: run/public.html" in written.out
    assert "Every figure on this page is covered" in (tmp_path / "run" / "public.html").read_text()


def test_a_reproduction_has_no_such_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / RECORD).write_text("name: x\n")
    refused = coterie(capsys, monkeypatch, "report", str(tmp_path), "--public")
    assert refused.code == 2
    assert "--public" in refused.err
    assert "allowed: a run, a comparison" in refused.err
