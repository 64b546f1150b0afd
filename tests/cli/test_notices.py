"""Notes beside a result: none before a refusal, and of records only to whoever holds them."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Printed, coterie

DECLARED = """
task: classification
label: {column: y, classes: 2}
features:
  - {column: age, range: [0, 1]}
  - {column: dose, range: [0, 9], missing: indicator, missing_values: [-1]}
"""
SMALL = ["--set", "algorithm.name=local", "--set", "schedule.rounds=1", "--set", "evaluation.kind=none"]
NOTE = "outside the declared range and clipped: 37 of age, 1 of dose\n"

Run = Callable[..., Printed]


@pytest.fixture
def clinics(tmp_path: Path) -> Path:
    folder = tmp_path / "clinics"
    folder.mkdir()
    (folder / "federation.yaml").write_text(DECLARED)
    rows = [f"{row % 2},{5 if row < 37 else 0.5},{-1 if row else 99}" for row in range(60)]
    (folder / "north.csv").write_text("\n".join(["y,age,dose", *rows]))
    (folder / "south.csv").write_text("\n".join(["y,age,dose", *(f"{row % 2},0.5,9" for row in range(60))]))
    return folder


@pytest.fixture
def run(
    clinics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    monkeypatch.chdir(tmp_path)
    return lambda *more: coterie(capsys, monkeypatch, *arguments(clinics, *more))


def arguments(folder: Path, *more: str) -> list[str]:
    name = ["--set", "data.name=folder", "--set", f"data.path={folder}", "--set", "federation.kind=natural"]
    return ["run", *name, *SMALL, "--out", "out", *more]


def test_how_many_values_were_clipped_is_said_once_and_written_nowhere(run: Run, tmp_path: Path) -> None:
    printed = run("--json")
    assert printed.code == 0, printed.err
    assert NOTE in printed.err
    assert printed.err.count("clipped") == 1
    assert "clipped: " not in printed.out
    texts = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert texts
    assert not any(b"37 of age" in text or b"declared range and" in text for text in texts)


def test_a_log_is_a_file(clinics: Path, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "coterie", *arguments(clinics)]
        subprocess.run(command, stderr=log, stdout=subprocess.PIPE, cwd=tmp_path, check=True)
    assert "clipped" not in (tmp_path / "log").read_text()


def test_a_refusal_is_one_line_whatever_was_noted_before(run: Run) -> None:
    printed = run("--set", "privacy.budgets={nobody: {epsilon: 2}}")
    assert (printed.code, printed.out) == (2, "")
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("error: privacy.budgets")


def test_a_warning_of_a_room_below_comes_before_no_refusal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("coterie.anywhere")

    def warned(*anything: object) -> None:
        log.warning("slower than it could be")

    monkeypatch.setattr("coterie.groups.structures._check_counts", warned)
    ring = ["leakage", "--structure", "ring", "--groups", "2", "--workers", "4", "--epochs", "3"]
    ring += ["--rate", "1", "--noise", "2"]
    good = coterie(capsys, monkeypatch, *ring, "--delta", "1e-5")
    assert (good.code, good.err) == (0, "slower than it could be\n")
    bad = coterie(capsys, monkeypatch, *ring, "--delta", "2")
    assert bad.code == 2
    assert bad.err.count("\n") == 1
    assert bad.err.startswith("error: delta")
