"""`coterie reproduce`: names, parts of a reproduction, and what a script gets."""

import json
from pathlib import Path

import pytest
from command import coterie

from coterie.reproduce import declared
from coterie.reproduce.declared import PublishedExperiment, parse
from coterie.reproduce.stored import StoredTable


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
        "rdpcfl-mnist --all",
        "rdpcfl-mnist --docs README.md",
        "rdpcfl-mnist --render --docs README.md",
        "--all --docs README.md",
        "--all --epsilon 3",
        "--all --store here",
        "--all --render --scale paper",
        "--all --render --resume",
        "--store here",
        "rdpcfl-noise --render --store /proc/x",
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
    kept = tmp_path / "kept"
    render = ("reproduce", "rdpcfl-mnist", "--render", "--out", str(out))
    again = coterie(capsys, monkeypatch, *render, "--store", str(kept))
    assert again.code == 0
    assert "printed" in again.out
    assert "charged no more than planned" in again.out
    (stored,) = StoredTable.read(kept / "rdpcfl-mnist-quick.csv", "rdpcfl-mnist", "quick").rows
    number = stored.numbers["mean"]
    assert (stored.row, stored.epsilon, number.seeds, number.rounds) == ("oracle", 10, (3,), 2)
    assert number.ours == line["figures"]["mean"]["ours"]
    assert number.base_rate is not None
    assert 5 < number.base_rate < 25
    coterie(capsys, monkeypatch, *render, "--store", str(kept))
    assert StoredTable.read(kept / "rdpcfl-mnist-quick.csv", "rdpcfl-mnist", "quick").rows == (stored,)
    (out / "report.html").unlink()
    assert coterie(capsys, monkeypatch, "report", str(out)).code == 0
    assert (out / "report.html").exists()


def test_all_is_rendered_from_what_is_stored_and_printed_as_one_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    document, out = tmp_path / "notes.md", tmp_path / "pages"
    document.write_text(
        "before\n<!-- coterie reproduce --all --render: counts -->\nold\n<!-- end -->\nafter\n"
    )
    render = ("reproduce", "--all", "--render", "--out", str(out))
    printed = coterie(capsys, monkeypatch, *render, "--docs", str(document), "--json")
    assert printed.code == 0, printed.err
    content = json.loads(printed.out)
    assert {Path(page).name for page in content["pages"]} == {
        "r-dpcfl.md",
        "rr-cluster.md",
        "dp-ogl.md",
        "summary.md",
    }
    counts = content["counts"]
    assert counts["printed"] == counts["run"] + counts["not_run"]
    assert counts["run"] == counts["at_least_as_good"] + counts["worse"] + counts["no_verdict"]
    written = document.read_text()
    assert "old" not in written
    assert f"Of the {counts['printed']} numbers" in written
    assert written.endswith("<!-- end -->\nafter\n")
    assert json.loads((out / "summary.json").read_text())["counts"] == counts
    again = coterie(capsys, monkeypatch, *render)
    assert again.code == 0
    assert f"{counts['not_run']} were not run" in again.out.replace("\n", " ")
    document.write_text("nothing\n")
    refused = coterie(capsys, monkeypatch, *render, "--docs", str(document))
    assert (refused.code, refused.out) == (2, "")
    assert "has no place for the summary" in refused.err


def test_all_of_them_are_run_one_after_the_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two that need no runs stand for all; another file in the way is found before anything is run."""

    def find_any(name: str) -> PublishedExperiment:
        return parse(name, (Path(declared.__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"))

    monkeypatch.setattr(declared, "names", lambda: ["rdpcfl-illustration", "rdpcfl-noise"])
    monkeypatch.setattr("coterie.reproduce.summary.find", find_any)  # papers name all of them
    every = ("reproduce", "--all", "--out", str(tmp_path))
    printed = coterie(capsys, monkeypatch, *every, "--json")
    assert printed.code == 0, printed.err
    content = json.loads(printed.out)
    assert [each["reproduction"] for each in content["reproductions"]] == [
        "rdpcfl-illustration",
        "rdpcfl-noise",
    ]
    assert content["counts"]["run"] == 0
    assert (tmp_path / "reproduce-rdpcfl-noise-quick" / "report.html").exists()
    refused = coterie(capsys, monkeypatch, *every)
    assert refused.code == 2
    assert "exists already; --resume continues it" in refused.err
    assert coterie(capsys, monkeypatch, *every, "--resume").code == 0
