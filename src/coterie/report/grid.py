"""The folder of a comparison as the report reads it: settings, their runs, and what did not finish."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.algorithms import find_algorithm
from coterie.errors import InputError
from coterie.experiment.folder import RunFolder, read_json
from coterie.experiment.runner import RunResult
from coterie.experiment.sweep import Cell, Row, Sweep
from coterie.report.record import ACCURACY, SCORE, Measure, RoundLine, RunRecord, read_rounds, read_run

SEEDS = "seeds."
LEADING = "algorithm.name"
"""The key whose values share a colour, where a grid has it."""


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
    has_table: bool
    example: RunRecord | None
    """One finished run, for what all of them have in common."""

    @property
    def measure(self) -> Measure:
        """Per cent only where every run is judged by the records it gets right."""
        shares = all(run.measure.is_share for setting in self.settings for run in setting.runs)
        return ACCURACY if shares else SCORE

    @property
    def varying(self) -> list[str]:
        return varying_keys(self.sweep)

    @property
    def leading(self) -> str | None:
        return leading_key(self.sweep)


def varying_keys(sweep: Sweep) -> list[str]:
    """Keys of the grid that make a row of their own."""
    return [key for key in sweep.grid if not key.startswith(SEEDS)]


def leading_key(sweep: Sweep) -> str | None:
    """The key that colours tell apart: the algorithm, else the first with a choice."""
    choices = [key for key in varying_keys(sweep) if len(sweep.grid[key]) > 1]
    if LEADING in choices:
        return LEADING
    return choices[0] if choices else None


def read_comparison(path: Path) -> Comparison:
    """Read a comparison folder; cells that did not finish are part of what it tells."""
    stored = path / "sweep.yaml"
    if not stored.exists():
        raise InputError(f"{path}: not the folder of a comparison, sweep.yaml is missing")
    sweep = Sweep.read(stored)
    cells = sweep.cells()
    keys = varying_keys(sweep)
    runs: dict[tuple[str, ...], list[CellRun]] = {}
    failures = []
    for cell in cells:
        files = RunFolder(path / "cells" / cell.name)
        if not files.finished:
            log = files.path.with_name(f"{cell.name}.log")
            failures.append(Failure(cell, len(read_rounds(files.metrics)), _last_line(log)))
            continue
        task = read_json(files.federation).get("task")
        runs.setdefault(_spelling(cell.values, keys), []).append(
            CellRun(
                cell=cell,
                result=RunResult.load(files.path),
                rounds=read_rounds(files.metrics),
                measure=SCORE if task == "regression" else ACCURACY,
                has_findings=files.findings.exists(),
                has_report=files.report.exists(),
            )
        )
    table = path / "table.csv"
    rows = _read_rows(table, keys) if table.exists() else {}
    leading = leading_key(sweep)
    settings = []
    for spelling, members in runs.items():
        row = rows.get(spelling)
        if row is None:
            continue  # finished after the table was written, which a resumed comparison writes anew
        values = {key: members[0].cell.values[key] for key in keys}
        colour = list(sweep.grid[leading]).index(values[leading]) if leading else 0
        settings.append(Setting(values, row, tuple(members), colour))
    return Comparison(
        name=path.resolve().name,
        sweep=sweep,
        cells=len(cells),
        settings=tuple(settings),
        failures=tuple(failures),
        has_table=table.exists(),
        example=read_run(settings[0].runs[0].result.folder) if settings else None,
    )


def _spelling(values: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, ...]:
    """Values as the table spells them."""
    return tuple("" if values[key] is None else str(values[key]) for key in keys)


def _read_rows(path: Path, keys: Sequence[str]) -> dict[tuple[str, ...], Row]:
    try:
        with path.open(encoding="utf-8", newline="") as handle:
            lines = list(csv.DictReader(handle))
        return {tuple(line[key] for key in keys): _row(line, keys) for line in lines}
    except (KeyError, TypeError, ValueError) as mistake:
        raise InputError(f"{path}: not the table of this comparison ({mistake!r})") from None


def _row(line: Mapping[str, str], keys: Sequence[str]) -> Row:
    def maybe(name: str) -> float | None:
        return float(line[name]) if line[name] else None

    return Row(
        values={key: line[key] for key in keys},
        runs=int(line["runs"]),
        accuracy=float(line["accuracy"]),
        accuracy_std=maybe("accuracy_std"),
        worst_client=float(line["worst_client"]),
        best_client=float(line["best_client"]),
        worst_cluster=maybe("worst_cluster"),
        disparity=float(line["disparity"]),
        f_acc=maybe("f_acc"),
        f_loss=maybe("f_loss"),
        clusters_found=int(line["clusters_found"]) if line["clusters_found"] else None,
        epsilon=float(line["epsilon"]),
        noise_multiplier=float(line["noise_multiplier"]),
        seconds=float(line["seconds"]),
        guarantee=line["guarantee"],
    )


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1].removeprefix("error: ") if lines else ""
