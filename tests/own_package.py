"""The package of `examples/own_algorithm`, on the path and announced as an installation would do it."""

import os
import sys
import tomllib
from pathlib import Path

import pytest

from coterie import plugins

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "own_algorithm"
MODULE = EXAMPLE.name


def announce(package: Path, folder: Path) -> Path:
    """Write down in a folder what an installer would of a package's name, version and entry points."""
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"{MODULE}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    (info / "top_level.txt").write_text(f"{MODULE}\n", encoding="utf-8")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def forget() -> None:
    """As in a process that has not imported it."""
    plugins._distribution.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == MODULE]:
        del sys.modules[name]
    for name in [name for name in plugins._digests if name.partition(".")[0] == MODULE]:
        del plugins._digests[name]


def put_on_path(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Here, and in processes that are started from here."""
    forget()
    for folder in folders:
        monkeypatch.syspath_prepend(str(folder))
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*map(str, folders), *filter(None, known)]))
