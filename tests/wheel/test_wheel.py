"""The wheel alone, as a stranger has it: built, installed into an environment with nothing else, and used.

Every wheel that is needed is collected once, by pip and with the repository's constraints; what is installed
from then on comes from that folder, without an index and without the network. `make test-wheel` runs this.
"""

import csv
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie import __version__

pytestmark = pytest.mark.wheel
ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKED = ("pyproject.toml", "README.md", "LICENSE", "src")
"""All that a wheel may need of the repository."""
BLOCKS = [block for _, block in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)]


def called(*command: str | Path, folder: Path, **environment: str) -> str:
    """What a command prints, without anything of this repository or this process on its paths."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COTERIE"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=clean | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the wheel, built from a copy of what it may need, and all that it depends on."""
    place = tmp_path_factory.mktemp("build")
    for name in PACKED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place / name)
    house = place / "wheels"
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", house)
    called(*pip, "--no-deps", place, folder=place)
    constraints = ("--constraint", ROOT / "constraints.txt", "--find-links", house)
    called(*pip, *constraints, f"coterie[pandas]=={__version__}", "uv", folder=place)
    yield house
    shutil.rmtree(place)


@pytest.fixture(scope="session")
def bare(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The programs of an environment that holds coterie, pandas, and nothing else that was asked for."""
    place = tmp_path_factory.mktemp("bare")
    called(sys.executable, "-m", "venv", place / "venv", folder=place)
    programs = place / "venv" / Path(sysconfig.get_path("scripts")).name
    install = ("-m", "pip", "install", "--quiet", "--no-index", "--find-links", wheels)
    called(programs / "python", *install, "coterie[pandas]", folder=place)
    yield programs
    shutil.rmtree(place)


def with_programs(bare: Path) -> dict[str, str]:
    return {"PATH": f"{bare}{os.pathsep}{os.environ['PATH']}"}


def test_what_is_installed_is_the_wheel_with_all_its_files(bare: Path, tmp_path: Path) -> None:
    code = "import coterie; print(coterie.__version__, coterie.__file__)"
    version, file = called(bare / "python", "-c", code, folder=tmp_path).split()
    assert version == __version__
    assert Path(file).is_relative_to(bare.parent)
    inside = {path.relative_to(ROOT / "src") for path in (ROOT / "src" / "coterie").rglob("*.*")}
    shipped = {path for path in inside if "__pycache__" not in path.parts}
    missing = [str(path) for path in shipped if not (Path(file).parents[1] / path).exists()]
    assert not missing


def test_ten_lines_of_the_readme_in_an_empty_folder(bare: Path, tmp_path: Path) -> None:
    [code] = [block for block in BLOCKS if block.startswith("import pandas")]
    promised, *said = called(bare / "python", "-c", code, folder=tmp_path).splitlines()
    assert f"\n> {promised}\n" in README
    answers = re.findall(r"[01]", " ".join(said))
    assert len(answers) == 20
    # 14 of the 20 new rows are benign, so that one answer for all of them is right 14 times at best.
    truth = [*"11111111111110000001"]
    assert sum(map(str.__eq__, answers, truth)) > 14


def test_five_commands_of_the_readme_in_an_empty_folder(bare: Path, tmp_path: Path) -> None:
    [script] = [block for block in BLOCKS if block.startswith("python -c")]
    printed = called("bash", "-euc", script, folder=tmp_path, **with_programs(bare))
    assert "verdict: holds" in printed
    promised = re.search(r"guarantee: (.*)", printed)
    assert promised is not None
    assert f"\n> {promised.group(1)}\n" in README
    with open(tmp_path / "predictions.csv", encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == 20


def test_an_example_of_another_package_runs(bare: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "examples" / "own_algorithm", tmp_path / "own")
    printed = called(bare / "coterie", "compare", "sweep.yaml", "--workers", "2", folder=folder)
    assert "own_algorithm.algorithm:Half" in printed
    assert list((folder / "runs").rglob("report.html"))


def test_it_runs_without_being_installed_as_uvx_does(wheels: Path, tmp_path: Path) -> None:
    """`uvx --from coterie coterie ...`: an environment for this one call, thrown away afterwards."""
    called(sys.executable, "-m", "venv", tmp_path / "tools", folder=tmp_path)
    programs = tmp_path / "tools" / Path(sysconfig.get_path("scripts")).name
    install = ("-m", "pip", "install", "--quiet", "--no-index", "--find-links", wheels, "uv")
    called(programs / "python", *install, folder=tmp_path)
    kept = {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_TOOL_DIR": str(tmp_path / "uv-tools")}
    uvx = (programs / "uvx", "--offline", "--no-index", "--find-links", wheels, "--python", sys.executable)
    run = ("--from", "coterie", "coterie")
    (tmp_path / "empty").mkdir()
    assert called(*uvx, *run, "--version", folder=tmp_path / "empty", **kept).strip() == __version__
    small = ("--set", "schedule.rounds=2", "--set", "algorithm.name=global", "--out", "runs/first")
    printed = called(*uvx, *run, "run", *small, folder=tmp_path / "empty", **kept)
    assert "guarantee: (eps=8.00" in printed
    assert (tmp_path / "empty" / "runs" / "first" / "report.html").exists()
    shutil.rmtree(tmp_path / "cache")
