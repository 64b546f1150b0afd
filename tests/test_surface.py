"""The names of the package: what `dir`, `help` and completion show, and that looking costs nothing."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import coterie as ct
from coterie.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
MODULES = {"groups", "privacy", "trackers"}


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    assert dir(ct) == sorted(ct.__all__)
    assert {"run", "compare", "Experiment", "privacy"} <= set(dir(ct))


@pytest.mark.parametrize("name", sorted(set(ct.__all__) - {"__version__"}))
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(ct, name)
    assert found.__doc__
    if name not in MODULES:
        assert ">>>" in found.__doc__, f"{name}: its docstring has no example"


def test_looking_at_the_names_imports_no_torch() -> None:
    code = (
        "import sys, coterie as ct; dir(ct); ct.__version__; ct.privacy; "
        "sys.exit('torch' in sys.modules or 'pandas' in sys.modules or 'sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        ct.rum  # noqa: B018


def test_citation_and_changelog_name_this_version_and_one_date() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == ct.__version__
    heading = f"## {ct.__version__} ({cited['date-released']})"
    sections = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert sections[0] == heading


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda out: ct.run(3, out), "experiment: 3; allowed: a file"),  # type: ignore[arg-type]
        (lambda out: ct.run(None, 3), "out: 3; allowed: a path"),  # type: ignore[arg-type]
        (lambda out: ct.run(None, out, callbacks=print), "callbacks: .*; allowed: Callbacks"),  # type: ignore[arg-type]
        (lambda out: ct.run(None, out, callbacks=[print]), "callbacks: .*; allowed: Callbacks"),  # type: ignore[list-item]
        (lambda out: ct.run(None, out, lifetime=3), "lifetime: 3; allowed: coterie.privacy.Budget"),  # type: ignore[arg-type]
        (lambda out: ct.compare(3, out), "sweep: 3; allowed: a file"),  # type: ignore[arg-type]
        (lambda out: ct.audit(3, out), "experiment: 3; allowed: a file"),  # type: ignore[arg-type]
        (lambda out: ct.audit(None, 3), "out: 3; allowed: a path"),  # type: ignore[arg-type]
        (lambda out: ct.load(None), "path: None; allowed: the folder of a run"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_other_types_are_one_line_that_names_them(
    call: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        call(tmp_path / "out")
    assert not (tmp_path / "out").exists()
