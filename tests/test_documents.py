"""Every path, module, class, command and anchor that a document names exists; its examples run as written."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import coterie as ct
from coterie.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "coterie"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("docs/reference/*.md"),
    *ROOT.glob("docs/reproduce/*.md"),
    ROOT / "benchmarks/README.md",
    ROOT / "examples/README.md",
    *ROOT.glob("examples/*/README.md"),
]
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
TEST_FILES = {path.name for path in (ROOT / "tests").rglob("*.py")}
ROOMS = "|".join(sorted(path.name for path in PACKAGE.iterdir() if path.is_dir()))


NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.ipynb"))


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


def anchors(text: str) -> set[str]:
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)}


def dead_links(document: Path, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            yield target


def dead_paths(text: str) -> Iterator[str]:
    # A worked example opens with the path of the file that it would be; that one does not exist yet.
    invented = set(re.findall(r"^# (\S+\.py)$", text, re.MULTILINE))
    for path in set(re.findall(r"\b(?:src|tests|docs|benchmarks|examples)/[\w./*-]*[\w*]", text)) - invented:
        if not any(ROOT.glob(path)):
            yield path
    for path in set(re.findall(rf"(?<![\w/])(?:coterie/)?((?:{ROOMS})/[\w./]*\w\.py)\b", text)):
        # NAME stands for what a reader would put there.
        if "NAME" not in path and not (PACKAGE / path).exists():
            yield path
    yield from set(re.findall(r"`(test_\w+\.py)`", text)) - TEST_FILES


def dead_functions(text: str) -> Iterator[str]:
    """Names written as `room/file.py: name`."""
    for path, name in re.findall(r"`([\w/]+\.py): ([\w.]+)`", text):
        code = (PACKAGE / path).read_text(encoding="utf-8")
        if not all(re.search(rf"\b(?:def|class) {part}\b", code) for part in name.split(".")):
            yield f"{path}: {name}"


def dead_modules(text: str) -> Iterator[str]:
    for name in set(re.findall(r"(?<![\w/.@-])coterie(?:\.[a-z_]+)+\b(?!\()", text)):
        module, _, attribute = name.rpartition(".")
        if find_spec(module) is None or (
            find_spec(name) is None and not re.search(rf"\b{attribute}\b", SOURCE)
        ):
            yield name


def dead_classes(text: str) -> Iterator[str]:
    for name in set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", text)):
        if not re.search(rf"\b{name}\b", SOURCE):
            yield name


def dead_commands(text: str) -> Iterator[str]:
    for name in set(re.findall(r"(?:^|`|\$ )coterie ([a-z]+)\b", text, re.MULTILINE)):
        if name not in COMMANDS:
            yield f"coterie {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    dead = [*dead_links(document, text), *dead_paths(text), *dead_functions(text), *dead_modules(text)]
    dead += [*dead_classes(text), *dead_commands(text)]
    assert not dead, f"{document.name} names what does not exist: {', '.join(sorted(dead))}"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_kept_without_outputs_and_names_what_exists(notebook: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    for cell in code:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    text = "\n\n".join("".join(cell["source"]) for cell in cells)
    assert text.startswith("# ")
    dead = [*dead_links(notebook, text), *dead_paths(text), *dead_modules(text), *dead_commands(text)]
    assert not dead, f"{notebook.name} names what does not exist: {', '.join(sorted(dead))}"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    # The site's own file has tags of its plug-ins only where it configures them; the navigation has none.
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    named = set(re.findall(r"[\w/.-]+\.md", json.dumps(nav)))
    patterns = ("docs/*.md", "docs/reference/*.md", "docs/reproduce/*.md", "examples/*/README.md")
    pages = [path for pattern in patterns for path in ROOT.glob(pattern)]
    there = {path.relative_to(ROOT).as_posix() for path in pages}
    there |= {f"docs/notebooks/{notebook.stem}.md" for notebook in NOTEBOOKS}
    missing = sorted(there - named)
    assert not missing, (
        f"mkdocs.yml: nav: add a line for {', '.join(missing)} to the section where it belongs"
    )


def test_contributing_lists_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = re.search(r"## The rooms.*?```\n(.*?)```", text, re.DOTALL)
    assert listed is not None
    named = set(re.findall(r"^(\w+)/ ", listed.group(1), re.MULTILINE))
    assert named == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_the_algorithm_of_contributing_runs_as_written(tmp_path: Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", text, re.DOTALL))
    [own], [test] = (
        [path for path in files if path.startswith(folder)]
        for folder in ("src/coterie/algorithms/record/", "tests/")
    )
    for path in (own, test):
        (tmp_path / Path(path).name).write_text(files[path], encoding="utf-8")
    # In a process of its own: what it registers must not be there for other tests.
    module, checks = Path(own).stem, Path(test).stem
    code = f"""
import sys
sys.path += [{str(ROOT / "tests/algorithms")!r}, {str(tmp_path)!r}]
import coterie.algorithms.record as record
record.__path__.append({str(tmp_path)!r})
import coterie.algorithms.record.{module}, {checks}
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.local import calibrate
found = [each for name, each in vars({checks}).items() if name.startswith("test_")]
for each in found:
    each()
calibrate(read_experiment(None, ["algorithm.name={module}"]))
print(len(found))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/reference/*.md"))
    named = set(re.findall(r"^::: coterie\.(\w+)", pages, re.MULTILINE))
    missing = sorted(set(ct.__all__) - {"__version__"} - named)
    assert not missing, f"docs/reference/python.md: add '::: coterie.{missing[0]}' ({len(missing)} missing)"
