"""The commands people type: what they print, which exit code they leave, what they write and what not."""

import fcntl
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from command import Printed, coterie

from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.schema import Experiment
from coterie.models import OWN_CODE

Run = Callable[..., Printed]
SMALL = ["--set", "federation.sizes=[2,3]", "--set", "federation.records_per_client=60"]
SMALL += ["--set", "schedule.rounds=3", "--set", "schedule.batch=20"]


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Printed]:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: coterie(capsys, monkeypatch, *arguments)


def test_json_is_one_object_with_the_promised_keys(run: Run, tmp_path: Path) -> None:
    printed = run("run", *SMALL, "--out", "out", "--json")
    assert printed.code == 0, printed.err
    content = json.loads(printed.out)
    assert {"mean", "min", "max", "per_client", "kind", "interval"} <= set(content["accuracy"])
    assert {"guarantee", "guarantee_text", "per_client"} <= set(content)
    assert set(content["per_client"]) == set(content["accuracy"]["per_client"])
    for own in content["per_client"].values():
        assert 0 < own["epsilon"] <= content["epsilon"]
        assert own["delta"] <= content["delta"]
        assert own["records"] > 0
    assert set(content["fairness"]) == {"disparity", "f_acc", "f_loss"}
    assert content["fairness"]["f_acc"] is not None
    assert set(content["clusters"]) == set(content["accuracy"]["per_client"])
    assert content["clusters_found"] in (True, False)
    assert 0 < content["epsilon"] <= 8
    assert content["guarantee"].startswith("(eps=")
    assert content["seconds"] > 0
    assert content["sample_gradients_per_second"] > 0
    for name in ("experiment.yaml", "ledger.jsonl", "metrics.jsonl", "guarantee.json", "report.html"):
        assert (tmp_path / "out" / name).exists(), name
    assert not (tmp_path / "out" / "noise.key").exists()


def test_people_get_a_table_the_guarantee_and_the_report(run: Run) -> None:
    printed = run("run", *SMALL)
    assert printed.code == 0, printed.err
    assert "mean accuracy" in printed.out
    assert "guarantee: (eps=" in printed.out
    assert "report: runs/r-dpcfl-digits-1/report.html" in printed.out


def test_clusters_that_noise_hides_are_warned_of(run: Run, tmp_path: Path) -> None:
    hidden = ("--set", "privacy.epsilon=0.5", "--set", "seeds.noise=0")
    printed = run("run", *SMALL, *hidden, "--out", "out")
    assert printed.code == 0, printed.err
    assert printed.err.startswith("warning: ")
    (warning,) = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))["warnings"]
    assert warning in " ".join(printed.err.split())


def test_a_second_run_gets_a_folder_of_its_own(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        assert run("run", *SMALL, "--json").code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "r-dpcfl-digits-1",
        "r-dpcfl-digits-2",
    ]


def test_the_printed_default_runs_as_the_default(run: Run, tmp_path: Path) -> None:
    printed = run("run", "--print-default")
    (tmp_path / "mine.yaml").write_text(printed.out)
    assert read_experiment(tmp_path / "mine.yaml") == Experiment()


def test_report_writes_the_page_anew(run: Run, tmp_path: Path) -> None:
    run("run", *SMALL, "--out", "out", "--json")
    (tmp_path / "out" / "report.html").unlink()
    assert run("report", "out").code == 0
    assert (tmp_path / "out" / "report.html").exists()
    failed = run("report", "nowhere")
    assert (failed.code, failed.err.count("\n")) == (2, 1)


def test_report_counts_the_books_again_and_refuses_a_folder_whose_figures_disagree(
    run: Run, tmp_path: Path
) -> None:
    run("run", *SMALL, "--out", "out", "--json")
    printed = run("report", "out")
    assert re.search(
        r"ledger: \d+ releases charged in \d+ lines of an unbroken chain; counted again", printed.out
    )
    stored = tmp_path / "out" / "guarantee.json"
    content = json.loads(stored.read_text())
    stored.write_text(json.dumps({**content, "epsilon": content["epsilon"] / 2}))
    page = (tmp_path / "out" / "report.html").read_bytes()
    printed = run("report", "out")
    assert (printed.code, printed.out, printed.err.count("\n")) == (4, "", 1)
    assert "guarantee.json" in printed.err
    assert (tmp_path / "out" / "report.html").read_bytes() == page


def test_verify_says_what_holds_and_leaves_four_where_something_does_not(run: Run, tmp_path: Path) -> None:
    run("run", *SMALL, "--out", "out", "--json")
    printed = run("verify", "out", "--json")
    assert (printed.code, printed.err) == (0, "")
    content = json.loads(printed.out)
    assert (content["verdict"], content["finished"], content["problems"]) == ("holds", True, [])
    assert content["epsilon_recounted"] == pytest.approx(content["epsilon_claimed"])
    printed = run("verify", "out/report.html")
    assert printed.code == 0
    assert printed.out.startswith("verdict: holds (finished)\nepsilon claimed: ")
    for name in ("metrics.jsonl", "result.json"):
        path = tmp_path / "out" / name
        path.write_bytes(path.read_bytes().replace(b"0.", b"1.", 1))
    printed = run("verify", "out", "--json")
    assert printed.code == 4
    content = json.loads(printed.out)
    assert content["verdict"] == "broken"
    assert printed.err.splitlines() == [f"broken: {problem}" for problem in content["problems"]]
    assert any("out/metrics.jsonl: line 1 " in problem for problem in content["problems"])
    assert any("out/result.json: changed" in problem for problem in content["problems"])
    assert run("verify", "out").code == 4
    again = run("run", "--resume", "--out", "out", "--json")
    assert (again.code, again.out, again.err.count("\n")) == (4, "", 1)


def test_a_run_without_privacy_says_so(run: Run) -> None:
    printed = run("run", *SMALL, "--set", "privacy.epsilon=.inf", "--json")
    assert printed.code == 0, printed.err
    content = json.loads(printed.out)
    assert content["epsilon"] == "inf"
    assert "no privacy" in content["guarantee"]


MISTAKES = {
    "unknown section key": (["run", "--set", "schedule.round=3"], 2, "schedule.round"),
    "unknown algorithm": (["run", "--set", "algorithm.name=fedavg"], 2, "algorithm.name"),
    "unknown dataset": (["run", "--set", "data.name=imagenet"], 2, "data.name"),
    "unknown model": (["run", "--set", "model.name=vit"], 2, "model.name"),
    "unimportable model": (["run", "--set", "model.name=nowhere:net"], 2, "nowhere"),
    "missing file": (["run", "nothing.yaml"], 2, "nothing.yaml"),
    "batch beyond records": (["run", *SMALL, "--set", "schedule.batch=61"], 2, "schedule.batch: 61"),
    "more records than there are": (
        ["run", "--set", "federation.records_per_client=900"],
        2,
        "federation.records_per_client",
    ),
    "selections alone exceed the budget": (
        ["run", *SMALL, "--set", "algorithm.selection_share=0.9", "--set", "schedule.rounds=40"],
        3,
        "selection",
    ),
    "no gpu": (["run", *SMALL, "--set", "engine.device=cuda"], 2, "engine.device"),
    "too many clusters": (["run", *SMALL, "--set", "algorithm.clusters=6"], 2, "algorithm.clusters"),
    "rotation of what is no image": (
        ["run", "--set", "data.name=folder", "--set", "data.path=plain"],
        2,
        "plain",
    ),
    "nothing to verify": (["verify", "nowhere"], 2, "nowhere: not a run folder"),
    "no path to verify": (["verify"], 2, "coterie verify --help"),
    "missing sweep": (["compare", "nothing.yaml"], 2, "nothing.yaml"),
    "unknown command": (["trian"], 2, "'trian'; coterie --help"),
    "a command misspelt": (["rnu"], 2, "'rnu'. Did you mean 'run'?; coterie --help"),
    "unknown option": (["run", "--output", "x"], 2, "coterie run --help says what is allowed"),
    "option without its value": (["run", "--set"], 2, "--set"),
    "argument too many": (["report", "one", "two"], 2, "two"),
    "missing argument": (["report"], 2, "coterie report --help"),
    "missing option": (["plan", "sample", "--batch", "4"], 2, "coterie plan sample --help"),
    "word for a number": (["plan", "sample", "--records", "many"], 2, "--records"),
    "unknown choice": (["reproduce", "rdpcfl-mnist", "--scale", "big"], 2, "--scale"),
    "number out of range": (["compare", "--workers", "0"], 2, "--workers"),
    "default with a change": (["run", "--print-default", "--set", "schedule.rounds=3"], 2, "--print-default"),
    "default as json": (["run", "--print-default", "--json"], 2, "--print-default"),
    "option that cannot act": (
        ["run", *SMALL, "--set", "evaluation.epsilon=0.5"],
        2,
        "evaluation.epsilon: 0.5 has no effect here; it acts with evaluation.kind private",
    ),
    "plan with an option that cannot act": (
        ["plan", "experiment", *SMALL, "--set", "evaluation.epsilon=0.5"],
        2,
        "evaluation.epsilon: 0.5 has no effect here",
    ),
    "usage with json": (["run", "--json", "--output", "x"], 2, "--output"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_leaves_its_exit_code_and_no_folder(mistake: str, run: Run, tmp_path: Path) -> None:
    arguments, code, named = MISTAKES[mistake]
    printed = run(*arguments)
    assert printed.code == code, printed.err
    assert named in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []
    assert printed.err.startswith("error: ")
    assert printed.err.strip().count("\n") == 0


@pytest.mark.parametrize("arguments", [[], ["plan"], ["--help"]])
def test_help_is_no_error(run: Run, arguments: list[str]) -> None:
    printed = run(*arguments)
    assert "Usage: coterie" in printed.out + printed.err
    assert "error" not in printed.err
    assert printed.code == (0 if "--help" in arguments else 2)


def test_a_folder_that_cannot_be_written_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    printed = run("run", *SMALL, "--out", "file/run")
    assert printed.code == 2
    there = tmp_path.resolve() / "file"
    assert printed.err.startswith(f"error: --out: 'file/run' cannot be written ({there} is no folder)")
    assert printed.err.count("\n") == 1


def test_a_link_is_followed_to_where_the_folder_is_wanted(run: Run, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    for name, target in (("link", "disk"), ("dangling", "disk/later"), ("circle", "circle")):
        (tmp_path / name).symlink_to(target)
    assert run("run", *SMALL, "--out", "dangling", "--json").code == 0
    assert (tmp_path / "disk" / "later" / "report.html").exists()
    assert (tmp_path / "dangling").is_symlink()
    refused = run("run", *SMALL, "--out", "link")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "link: exists and is not a run folder" in refused.err
    refused = run("run", *SMALL, "--out", "circle")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert refused.err.startswith("error: --out: 'circle' cannot be written (")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["circle", "dangling", "disk", "link"]


MOODY = """
from pathlib import Path

from torch import nn

class Moody(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, x):
        if Path("out/metrics.jsonl").exists():  # a round is over
            raise RuntimeError(f"tired\\nof {x.shape}")
        return self.layer(x.flatten(1).clone())

def build(task):
    return Moody(task.classes)
"""


def test_a_model_that_breaks_while_it_learns_is_one_line_and_the_run_resumes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "moody.py").write_text(MOODY)
    arguments = ["run", *SMALL, "--set", "model.name=moody:build", "--set", "evaluation.references=false"]
    broken = run(*arguments, "--out", "out")
    assert (broken.code, broken.err.count("\n")) == (2, 1)
    place = re.escape(str(tmp_path / "moody.py"))
    assert re.match(rf"error: model.name: moody:build: RuntimeError at {place}:\d+ \(", broken.err)
    assert "tired" not in broken.err  # what it says may tell the size of a batch
    assert "round" in (tmp_path / "out" / "metrics.jsonl").read_text()
    sys.modules["moody"].Moody.forward = lambda self, x: self.layer(x.flatten(1).clone())
    resumed = run(*arguments, "--out", "out", "--resume", "--json")
    assert resumed.code == 0, resumed.err
    assert OWN_CODE in json.loads((tmp_path / "out" / "guarantee.json").read_text())["caveats"]
    assert run("report", "out").code == 0
    del sys.modules["moody"]


def test_a_user_s_own_folder_runs_from_file_to_report(run: Run, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = tmp_path / "mine"
    folder.mkdir()
    declaration = {
        "task": "classification",
        "label": {"classes": 2},
        "features": {"shape": [3], "range": [-4.0, 4.0]},
    }
    (folder / "federation.yaml").write_text(yaml.safe_dump(declaration))
    for client in range(4):
        x = rng.normal(size=(80, 3)).astype(np.float32)
        sign = 1 if client < 2 else -1
        np.savez(folder / f"site{client}.npz", x=x, y=(sign * x[:, 0] > 0).astype(np.int64))
    settings = {
        "data": {"name": "folder", "path": str(folder)},
        "federation": {"kind": "natural"},
        "algorithm": {"name": "r-dpcfl", "clusters": 2},
        "schedule": {"rounds": 4, "batch": 16},
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(settings))
    printed = run("run", "experiment.yaml", "--json")
    assert printed.code == 0, printed.err
    content = json.loads(printed.out)
    assert content["clusters_found"] is None
    assert len(content["clusters"]) == 4


@pytest.mark.deployment
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ending_a_comparison_ends_its_runs(number: signal.Signals, tmp_path: Path) -> None:
    """As a scheduler or a person at the keyboard ends it: no run goes on behind its back, all can resume."""
    (tmp_path / "sweep.yaml").write_text(
        "base: {schedule: {rounds: 100000}, evaluation: {references: false}}\n"
        "grid: {algorithm.name: [local, global]}\n"
    )
    command = [sys.executable, "-m", "coterie", "compare", "sweep.yaml", "--out", "out"]
    comparison = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    ledgers = [tmp_path / "out" / "cells" / f"name={name}" / "ledger.jsonl" for name in ("local", "global")]
    while not any(ledger.exists() for ledger in ledgers):
        assert comparison.poll() is None
        time.sleep(0.1)
    comparison.send_signal(number)
    _, printed = comparison.communicate()
    assert comparison.returncode == 1
    assert b"--resume continues" in printed
    for ledger in ledgers:
        if ledger.exists():  # the lock is free again: nobody works in the folder
            with ledger.open("rb") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


STOPPED = """
import atexit
from coterie.cli import main
atexit.register(print, "taken apart")
def stopped(**_):
    print("so far")
    raise main.Ended
main.app = stopped
main.main()
"""


def test_whoever_stops_a_command_does_not_wait_for_it_to_be_taken_apart() -> None:
    done = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "so far\n", "stopped; --resume continues\n")


def test_resuming_a_folder_that_holds_no_run_begins_nothing(run: Run, tmp_path: Path) -> None:
    printed = run("run", "--resume", "--out", "missing")
    assert printed.code == 2
    assert "--resume: missing holds no run" in printed.err
    assert not (tmp_path / "missing").exists()
