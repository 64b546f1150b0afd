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


@pytest.mark.parametrize("kind", ["svg", "pdf", "png"])
def test_figures_are_files_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["federation.sizes=[2,2]", "federation.records_per_client=40", "schedule.rounds=2"]
    options = [part for each in small for part in ("--set", each)]
    assert coterie(capsys, monkeypatch, "run", *options, "--out", "run").code == 0
    written = coterie(capsys, monkeypatch, "report", "run", "--figures", "drawn", "--format", kind)
    assert written.code == 0, written.err
    names = sorted(path.name for path in (tmp_path / "drawn").iterdir())
    assert f"figures: {len(names)} in drawn" in written.out
    assert f"accuracy-against-round.{kind}" in names
    assert f"epsilon-spent-against-round.{kind}" in names
    public = coterie(capsys, monkeypatch, "report", "run", "--public", "--figures", "told", "--format", kind)
    assert public.code == 0, public.err
    told = {path.name for path in (tmp_path / "told").iterdir()}
    assert f"accuracy-against-round.{kind}" not in told, "outside the guarantee"
    assert f"epsilon-spent-against-round.{kind}" in told


def test_a_format_that_is_none_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused = coterie(
        capsys, monkeypatch, "report", str(tmp_path), "--figures", str(tmp_path / "x"), "--format", "gif"
    )
    assert refused.code == 2
    assert "--format: 'gif' is not allowed, svg, pdf, png are" in refused.err
    assert not (tmp_path / "x").exists()


def test_figures_that_cannot_be_files_are_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    for options, said in (
        (["--figures", str(taken)], "is a file"),
        (
            ["--format", "pdf"],
            "--format: says how figures are written; allowed: together with --figures FOLDER",
        ),
    ):
        refused = coterie(capsys, monkeypatch, "report", str(tmp_path), *options)
        assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
        assert said in refused.err
    assert taken.read_text() == "mine"
