"""What the README prints is what the commands print."""

import re
from pathlib import Path
from typing import Any

import pytest

from coterie.algorithms import algorithm_names
from coterie.cli.main import app
from coterie.data import DataSettings
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.local import calibrate
from coterie.experiment.schema import Experiment
from coterie.models import ModelSettings
from coterie.privacy import Unit

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_guarantee_beside_the_demo_is_recomputed() -> None:
    promise = calibrate(Experiment()).guarantee
    assert f"> {promise.line}\n" in README


def test_the_printed_plan_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = re.search(r"\$ (coterie plan [^`]*)\n```", README)
    assert block is not None
    command, _, printed = block.group(1).replace("\\\n", " ").partition("\n")
    monkeypatch.setenv("COLUMNS", "100")
    app(command.split()[1:], standalone_mode=False)
    assert capsys.readouterr().out.split() == printed.split()


def test_every_dataset_model_and_algorithm_of_the_readme_exists() -> None:
    for name in [*DataSettings.functions, *ModelSettings.functions]:
        assert f"`{name}`" in README, name
    for name in [*algorithm_names(Unit.RECORD), *algorithm_names(Unit.CLIENT)]:
        assert f"`{name}`" in README, name


def test_the_sweep_of_the_readme_is_valid(tmp_path: Path) -> None:
    from coterie.experiment.sweep import Sweep

    text = re.search(r"A sweep is a base and a grid:\n\n```yaml\n(.*?)```", README, re.DOTALL)
    assert text is not None
    path = tmp_path / "sweep.yaml"
    path.write_text(text.group(1))
    assert len(Sweep.read(path).cells()) == 16


def test_the_overrides_of_the_readme_are_valid() -> None:
    for override in re.findall(r"--set (\S+)", README):
        if not override.startswith("data.path"):
            tree = [override] if not override.startswith("data.name=folder") else [override, "data.path=x"]
            read_experiment(None, tree)


def test_the_two_walks_are_the_files_of_the_example() -> None:
    example = ROOT / "examples" / "breast-cancer"
    ten = (example / "ten_lines.py").read_text(encoding="utf-8")
    five = (example / "five_commands.sh").read_text(encoding="utf-8")
    assert f"```python\n{ten}```" in README
    assert f"```\n{five}```" in README
    assert len([line for line in ten.splitlines() if line]) == 10
    commands = re.findall(r"^(?:python|coterie) ", five, re.MULTILINE)
    assert len(commands) == 5


def test_the_guarantee_of_the_walk_is_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    code = (ROOT / "examples" / "breast-cancer" / "ten_lines.py").read_text(encoding="utf-8")
    before, _, _ = code.partition("run = ct.run(clinics.experiment")
    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {}
    exec(before, made)
    promise = calibrate(read_experiment(made["clinics"].experiment, [])).guarantee
    assert f"> {promise.line}\n" in README
