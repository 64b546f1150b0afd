"""`coterie reproduce`: names, parts of a reproduction, and what a script gets."""

import json
from pathlib import Path

import pytest
from command import coterie


def test_without_a_name_all_are_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = coterie(capsys, monkeypatch, "reproduce")
    assert printed.code == 0
    for name in ("rdpcfl-mnist", "rdpcfl-fmnist", "rdpcfl-cifar10-covariate", "rdpcfl-cifar10-concept"):
        assert name in printed.out


def test_the_list_is_one_object_for_machines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = coterie(capsys, monkeypatch, "reproduce", "--json")
    assert "rdpcfl-mnist" in json.loads(printed.out)["experiments"]


@pytest.mark.parametrize(
    "arguments",
    [
        "--render --json",
        "--scale paper",
        "--seeds 3",
        "--out here",
        "rdpcfl-mnist --render --seeds 3",
        "rdpcfl-mnist --render --workers 2",
        "rdpcfl-mnist --render --set schedule.rounds=2",
    ],
)
def test_options_that_cannot_act_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    printed = coterie(capsys, monkeypatch, "reproduce", *arguments.split())
    assert (printed.code, printed.out, printed.err.count("\n")) == (2, "", 1)


def test_an_unknown_name_is_one_line_with_the_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = coterie(capsys, monkeypatch, "reproduce", "rdpcfl-mist")
    assert printed.code == 2
    assert printed.out == ""
    assert printed.err.startswith("error: rdpcfl-mist: no such reproduction; allowed: ")
    assert "rdpcfl-mnist" in printed.err
    assert printed.err.count("\n") == 1


def test_rendering_what_is_not_there_is_a_mistake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = coterie(capsys, monkeypatch, "reproduce", "rdpcfl-mnist", "--render", "--out", str(tmp_path))
    assert printed.code == 2
    assert "not the folder of a reproduction" in printed.err


def test_a_part_on_other_data_runs_through_and_prints_one_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The declared experiment with its data, size and network replaced by ones that need no download."""
    changes = (
        "data={name: digits}",
        "model={name: softmax}",
        "federation={sizes: [2, 3], records_per_client: 60}",
        "schedule={rounds: 2, batch: 20}",
    )
    options = [word for change in changes for word in ("--set", change)]
    part = ["--epsilon", "10", "--algorithms", "oracle", "--seeds", "3"]
    out = tmp_path / "out"
    printed = coterie(
        capsys, monkeypatch, "reproduce", "rdpcfl-mnist", *part, *options, "--out", str(out), "--json"
    )
    assert printed.code == 0, printed.err
    content = json.loads(printed.out)
    (line,) = content["table"]
    assert (line["algorithm"], line["seeds"], line["setting"]) == ("oracle", [3], {"privacy.epsilon": 10})
    assert line["figures"]["mean"]["printed"] == 92.71
    assert line["clusters_found"] == "given"
    assert content["sound"]
    page = (out / "report.html").read_text()
    assert "R-DPCFL on MNIST" in page
    assert "Changed on the command line: data={name: digits}" in page
    assert "exactly as planned" in page
    document = tmp_path / "notes.md"
    document.write_text(
        "before\n<!-- coterie reproduce rdpcfl-mnist --scale quick -->\nold\n<!-- end -->\nafter\n"
    )
    render = ("reproduce", "rdpcfl-mnist", "--render", "--out", str(out))
    again = coterie(capsys, monkeypatch, *render, "--docs", str(document))
    assert again.code == 0
    assert "printed" in again.out
    assert "charged no more than planned" in again.out
    written = document.read_text()
    assert written.startswith("before\n<!-- coterie reproduce rdpcfl-mnist --scale quick -->\n")
    assert written.endswith("<!-- end -->\nafter\n")
    assert "old" not in written
    assert "| oracle | 1 |" in written
    coterie(capsys, monkeypatch, *render, "--docs", str(document))
    assert document.read_text() == written
    document.write_text("nothing\n")
    refused = coterie(capsys, monkeypatch, *render, "--docs", str(document))
    assert refused.code == 2
    assert "has no place for this table" in refused.err
    (out / "report.html").unlink()
    assert coterie(capsys, monkeypatch, "report", str(out)).code == 0
    assert (out / "report.html").exists()
