"""The folder of a comparison as the report reads it: settings, their runs, and what did not finish."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.algorithms import find_algorithm
from coterie.experiment.comparison import Row, SweepResult
from coterie.experiment.composition import Total
from coterie.experiment.folder import RunFolder
from coterie.experiment.result import RunResult
from coterie.experiment.sweep import Cell, Sweep
from coterie.files import read_json
from coterie.privacy import Guarantee, Unit
from coterie.report.record import ACCURACY, SCORE, Measure, RoundLine, RunRecord, read_rounds, read_run

LEADING = ("label", "algorithm.name")
"""Keys whose values share a colour, the first of these that a grid varies."""


@dataclass(frozen=True)
class CellRun:
    """A finished cell."""

    cell: Cell
    result: RunResult
    rounds: tuple[RoundLine, ...]
    measure: Measure
    has_findings: bool
    has_report: bool

    @property
    def looked_for_clusters(self) -> bool:
        if self.cell.experiment.privacy.unit is Unit.WORKER:
            return False
        models = len(set(self.result.clusters.values()))
        return self.has_findings or (1 < models < len(self.result.clusters) and not self.knows_truth)

    @property
    def knows_truth(self) -> bool:
        experiment = self.cell.experiment
        return find_algorithm(experiment.privacy.unit, experiment.algorithm.name).needs_truth


@dataclass(frozen=True)
class Setting:
    """Everything but the seeds, its row of the table and its finished runs."""

    values: Mapping[str, Any]
    row: Row
    runs: tuple[CellRun, ...]
    colour: int
    guarantee: Guarantee | None = None
    """Of its first run."""

    def curve(self) -> list[tuple[int, float]]:
        """Mean accuracy after each round that all runs measured."""
        series = [{line.round: line.accuracy for line in run.rounds if line.accuracy} for run in self.runs]
        common = sorted(set.intersection(*(set(values) for values in series)))
        return [(number, sum(values[number].mean for values in series) / len(series)) for number in common]


@dataclass(frozen=True)
class Failure:
    """A cell without a result, how far it came and the last thing it said."""

    cell: Cell
    rounds: int
    reason: str


@dataclass(frozen=True)
class Comparison:
    name: str
    sweep: Sweep
    cells: int
    settings: tuple[Setting, ...]
    failures: tuple[Failure, ...]
    total: Total | None
    """What all runs that have begun spend together."""
    example: RunRecord | None
    """One finished run, for what all of them have in common."""
    public: bool = False
    """Whether what is outside the guarantees was left out."""

    @property
    def has_privacy(self) -> bool:
        """Whether everything that its runs released, finished or not, is covered by some guarantee."""
        spent = [setting.row.epsilon for setting in self.settings]
        return all(map(math.isfinite, [*spent, *([self.total.epsilon] if self.total else [])]))

    @property
    def measure(self) -> Measure:
        """Per cent only where every run is judged by the records it gets right."""
        shares = all(run.measure.is_share for setting in self.settings for run in setting.runs)
        return ACCURACY if shares else SCORE

    @property
    def varying(self) -> list[str]:
        return self.sweep.varying

    @property
    def leading(self) -> str | None:
        return leading_key(self.sweep)


def is_exact(comparison: Comparison) -> bool:
    """Whether figures outside the guarantees are shown."""
    return not comparison.public and any(setting.row.kind == "exact" for setting in comparison.settings)


def leading_key(sweep: Sweep) -> str | None:
    """The key that colours tell apart: the name of a part, the algorithm, else the first with a choice."""
    choices = [key for key in sweep.varying if len(sweep.grid[key]) > 1]
    return next((key for key in (*LEADING, *choices) if key in choices), None)


def read_comparison(path: Path) -> Comparison:
    """Read a comparison folder; cells that did not finish are part of what it tells."""
    loaded = SweepResult.load(path)
    sweep, cells = loaded.sweep, loaded.sweep.cells()
    leading = leading_key(sweep)
    settings = []
    for row in loaded.rows:
        members = [cell for cell in cells if cell.name in loaded.cells and sweep.setting(cell) == row.values]
        colour = list(sweep.grid[leading]).index(row.values[leading]) if leading else 0
        runs = tuple(_read_cell(cell, loaded.cells[cell.name]) for cell in members)
        stored = read_json(RunFolder(runs[0].result.folder).guarantee) if runs else None
        promise = None if stored is None else Guarantee.from_json(stored)
        settings.append(Setting(row.values, row, runs, colour, promise))
    failures = [
        Failure(
            cell, len(read_rounds(RunFolder(path / "cells" / cell.name).metrics)), loaded.failed[cell.name]
        )
        for cell in cells
        if cell.name in loaded.failed
    ]
    return Comparison(
        name=path.resolve().name,
        sweep=sweep,
        cells=len(cells),
        settings=tuple(settings),
        failures=tuple(failures),
        total=loaded.total,
        example=read_run(settings[0].runs[0].result.folder) if settings else None,
    )


def _read_cell(cell: Cell, path: Path) -> CellRun:
    files = RunFolder(path)
    regression = read_json(files.federation).get("task") == "regression"
    return CellRun(
        cell=cell,
        result=RunResult.load(path),
        rounds=read_rounds(files.metrics),
        measure=SCORE if regression else ACCURACY,
        has_findings=files.findings.exists(),
        has_report=files.report.exists(),
    )
