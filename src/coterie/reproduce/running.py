"""Running a reproduction, or a part of it, into one folder that grows.

    reproduction.yaml   which reproduction, at which scale, with which overrides
    runs/               the sweep: every cell an ordinary run folder
    references/         central models for the fairness figures, one file for each seed
    table.md, table.csv our figures beside the printed ones
    report.html         the page

All paths inside are relative: a folder that was filled on one machine is rendered on another.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from coterie.errors import InputError
from coterie.experiment import folder
from coterie.experiment.files import read_yaml
from coterie.experiment.folder import RunFolder
from coterie.experiment.sweep import Progress, Sweep, compare
from coterie.reproduce import (
    EVERYTHING,
    Reproduction,
    Scale,
    ScaleName,
    Selection,
    central,
    find,
    sweep_of,
)
from coterie.reproduce.table import (
    Comparison,
    compare_with_published,
    markdown,
    to_csv,
    to_json,
)

RECORD = "reproduction.yaml"


@dataclass(frozen=True)
class Reproduced:
    """What the folder of a reproduction holds now."""

    folder: Path
    reproduction: Reproduction
    scale_name: ScaleName
    overrides: tuple[str, ...]
    sweep: Sweep | None
    comparison: Comparison | None
    """None for a reproduction without runs."""

    @property
    def scale(self) -> Scale:
        return self.reproduction.scale(self.scale_name)

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def is_sound(self) -> bool:
        """Whether no run spent more than it promised."""
        return self.comparison is None or all(run.charged.holds for run in self.comparison.runs)

    @classmethod
    def load(cls, path: Path) -> "Reproduced":
        content = read_yaml(path / RECORD) if (path / RECORD).exists() else None
        if content is None:
            raise InputError(f"{path}: not the folder of a reproduction, {RECORD} is missing")
        try:
            reproduction, scale = find(str(content["name"])), ScaleName(str(content["scale"]))
            overrides = tuple(str(text) for text in content.get("set") or ())
        except (KeyError, ValueError, TypeError) as mistake:
            raise InputError(f"{path / RECORD}: not written by this version ({mistake!r})") from None
        stored = path / "runs" / "sweep.yaml"
        sweep = Sweep.read(stored) if stored.exists() else None
        comparison = None
        if sweep is not None:
            best_of = reproduction.scale(scale).best_of
            comparison = compare_with_published(reproduction, sweep, path, best_of)
        return cls(path, reproduction, scale, overrides, sweep, comparison)

    def to_json(self) -> dict[str, Any]:
        return {
            "reproduction": self.reproduction.name,
            "scale": self.scale_name.value,
            "folder": str(self.folder),
            "report": str(self.report),
            "sound": self.is_sound,
            "table": to_json(self.comparison) if self.comparison else [],
            "missing": list(self.comparison.missing) if self.comparison else [],
        }


def reproduce(
    reproduction: Reproduction,
    scale: ScaleName,
    out: Path,
    *,
    selection: Selection = EVERYTHING,
    overrides: Sequence[str] = (),
    resume: bool = False,
    workers: int | None = None,
    watch: Callable[[Progress], None] | None = None,
) -> Reproduced:
    """Run what is not finished yet, then write the tables.

    With `resume` a folder goes on with the cells it was given before, and with those of a new selection.
    """
    overrides = _claim(reproduction, scale, out, overrides, resume)
    sweep = _wanted(reproduction, scale, out, selection, overrides)
    if sweep is not None:
        compare(sweep, out / "runs", resume=True, workers=workers, watch=watch)
        _forget_models(sweep, out)
        epochs = reproduction.scale(scale).references
        if epochs:
            finished = [cell for cell in sweep.cells() if _files(out, cell.name).finished]
            central.ensure(out, [cell.experiment for cell in finished], epochs)
    return render(out)


def render(out: Path) -> Reproduced:
    """Write the tables from the runs that are there, running nothing."""
    result = Reproduced.load(out)
    if result.comparison is not None:
        folder.write_text(out / "table.md", markdown(result.comparison))
        folder.write_text(out / "table.csv", to_csv(result.comparison))
    return result


def _claim(
    reproduction: Reproduction, scale: ScaleName, out: Path, overrides: Sequence[str], resume: bool
) -> tuple[str, ...]:
    """Make the folder ours, or check that it is; the overrides it was begun with hold for all its runs."""
    if not out.exists() or not any(out.iterdir()):
        out.mkdir(parents=True, exist_ok=True)
        content = {"name": reproduction.name, "scale": scale.value, "set": list(overrides)}
        folder.write_text(out / RECORD, yaml.safe_dump(content, sort_keys=False))
        return tuple(overrides)
    if not resume:
        raise InputError(f"{out}: exists already; --resume continues it, --out names another folder")
    known = Reproduced.load(out)
    if (known.reproduction.name, known.scale_name) != (reproduction.name, scale):
        raise InputError(
            f"{out}: holds {known.reproduction.name} at scale {known.scale_name}; --out names another folder"
        )
    if overrides and tuple(overrides) != known.overrides:
        begun = " ".join(known.overrides) or "nothing"
        raise InputError(f"{out}: was begun with --set {begun}; --out names another folder")
    return known.overrides


def _wanted(
    reproduction: Reproduction, scale: ScaleName, out: Path, selection: Selection, overrides: Sequence[str]
) -> Sweep | None:
    stored = out / "runs" / "sweep.yaml"
    if not stored.exists():
        return sweep_of(reproduction, scale, selection, overrides)
    known = Sweep.read(stored)
    if selection.is_all:
        return known
    more = sweep_of(reproduction, scale, selection, overrides)
    return known if more is None else known.joined(more)


def _forget_models(sweep: Sweep, out: Path) -> None:
    """Models of finished runs are no part of any table; without them a folder is small enough to carry."""
    for cell in sweep.cells():
        files = _files(out, cell.name)
        if files.finished and files.checkpoint.exists():
            shutil.rmtree(files.checkpoint)


def _files(out: Path, cell: str) -> RunFolder:
    return RunFolder(out / "runs" / "cells" / cell)
