"""A grid of experiments: every cell an ordinary run, then one table.

On a CPU cells are separate processes, so that one that breaks (or is killed) takes nothing with it, and so
that several run at once on as many cores, each with one thread. A GPU has room for the clients of several
cells in one program: there they share a process.
"""

import csv
import io
import itertools
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from coterie.errors import InputError, LedgerError
from coterie.experiment import folder
from coterie.experiment.composition import Total, total_of
from coterie.experiment.files import SELECTORS, override, read_yaml, to_yaml
from coterie.experiment.folder import RunFolder
from coterie.experiment.integrity import check_folder
from coterie.experiment.memory import RunMemory
from coterie.experiment.metrics import Fairness
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.experiment.seal import Seal
from coterie.experiment.together import beside, fit_together
from coterie.privacy import Unit
from coterie.privacy.units import number_to_json, round_up

POLL_SECONDS = 0.2
CELLS_AT_ONCE = 16
"""Cells whose clients share a GPU: enough to fill it."""

CSV, MARKDOWN = "table.csv", "table.md"
LABEL = "label"
"""The key under which a cell holds the name of its part, where parts have names."""

BUILT_IN = {"base": {}, "grid": {"algorithm.name": ["r-dpcfl", "oracle", "local", "global"]}}
"""The comparison that needs no file and no download."""


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    name: str
    values: Mapping[str, Any]
    experiment: Experiment


@dataclass(frozen=True)
class Part:
    """Values that vary together, and what else is set with them: one algorithm, its clip and its seeds."""

    grid: Mapping[str, Sequence[Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys that the base of the sweep does not decide for this part."""
    label: str | None = None
    """What its rows are called where the grid alone does not tell them from those of another part."""

    def to_content(self) -> dict[str, Any]:
        content: dict[str, Any] = {"label": self.label} if self.label is not None else {}
        if self.settings:
            content["set"] = dict(self.settings)
        return {**content, "grid": {key: list(values) for key, values in self.grid.items()}}


@dataclass(frozen=True)
class Sweep:
    """A base experiment and the values that vary: one grid, or several parts with a grid each."""

    base: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]
    """Every value of every varying key, over all parts."""
    parts: tuple[Part, ...] = ()
    """Empty where the grid is all there is."""

    @classmethod
    def of_parts(cls, base: Mapping[str, Any], parts: Sequence[Part]) -> "Sweep":
        """A sweep over several grids with the same keys; cells that stand in two of them are one."""
        grid: dict[str, list[Any]] = {}
        for part in parts:
            values = {LABEL: [part.label]} if part.label is not None else {}
            for key, choices in {**values, **part.grid}.items():
                known = grid.setdefault(key, [])
                known += [choice for choice in choices if choice not in known]
        for part in parts:
            keys = {*part.grid, *([LABEL] if part.label is not None else [])}
            if keys != set(grid):
                missing = min(set(grid) - keys)
                raise InputError(f"parts: '{missing}' varies in one part and is missing in another")
        return cls(base, grid, tuple(parts))

    @classmethod
    def read(cls, path: Path | None) -> "Sweep":
        """The sweep in a file, or the built-in comparison."""
        content = read_yaml(path) if path is not None else BUILT_IN
        unknown = set(content) - {"base", "grid", "parts"}
        if unknown:
            raise InputError(
                f"{path}: unknown key '{min(unknown)}'; a sweep has base and grid, or base and parts"
            )
        base = content.get("base") or {}
        if not isinstance(base, dict):
            raise InputError(f"{path}: base should hold sections of an experiment")
        if "parts" not in content:
            return cls(base, _read_grid(content.get("grid"), f"{path}: "))
        parts = content["parts"]
        if "grid" in content or not isinstance(parts, list) or not parts:
            raise InputError(f"{path}: parts should be a list of grids, in place of grid")
        return cls.of_parts(
            base, [_read_part(part, f"{path}: parts.{number}.") for number, part in enumerate(parts)]
        )

    def cells(self) -> list[Cell]:
        """Every combination, validated before any of them runs."""
        found: dict[str, Cell] = {}
        for part in self.parts or (Part(self.grid),):
            for cell in self._cells_of(part):
                known = found.setdefault(cell.name, cell)
                if known.experiment != cell.experiment:
                    raise InputError(f"parts: {cell.name} stands twice, with different settings")
        return list(found.values())

    def _cells_of(self, part: Part) -> Iterator[Cell]:
        named = {LABEL: part.label} if part.label is not None else {}
        seen: set[str] = set()
        for combination in itertools.product(*part.grid.values()):
            values = dict(zip(part.grid, combination, strict=True))
            ordered = {key: {**named, **values}[key] for key in self.grid}
            name = _cell_name(ordered)
            if name in seen:
                raise InputError(f"grid: {name} stands twice")
            seen.add(name)
            changed = override(self.base, {**part.settings, **values})
            yield Cell(name, ordered, Experiment.model_validate(changed))

    def contains(self, other: "Sweep") -> bool:
        """Whether every cell of the other sweep is one of this, setting for setting."""
        mine = {cell.name: cell.experiment for cell in self.cells()}
        return all(mine.get(cell.name) == cell.experiment for cell in other.cells())

    def joined(self, other: "Sweep") -> "Sweep":
        """The cells of both, which must share their base and what varies."""
        if other.base != self.base:
            raise InputError("two sweeps with different bases cannot be one")
        if self.contains(other):
            return self
        return Sweep.of_parts(
            self.base, [*(self.parts or (Part(self.grid),)), *(other.parts or (Part(other.grid),))]
        )

    @property
    def varying(self) -> list[str]:
        """Keys of the grid that make a row of their own: all but the seeds."""
        return [key for key in self.grid if not key.startswith("seeds.")]

    def setting(self, cell: Cell) -> dict[str, Any]:
        """The cell's values of those keys."""
        return {key: cell.values[key] for key in self.varying}

    def to_yaml(self) -> str:
        content: dict[str, Any] = {"base": dict(self.base)}
        if self.parts:
            content["parts"] = [part.to_content() for part in self.parts]
        else:
            content["grid"] = {key: list(values) for key, values in self.grid.items()}
        return yaml.safe_dump(content, sort_keys=False)


def _read_grid(grid: Any, where: str) -> dict[str, list[Any]]:
    if not isinstance(grid, dict) or not grid:
        raise InputError(f"{where}grid should map keys such as algorithm.name to lists of values")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"{where}grid.{key}: {values!r} is not allowed; allowed: a list of values")
    return grid


def _read_part(part: Any, where: str) -> Part:
    if not isinstance(part, dict) or set(part) - {"label", "set", "grid"}:
        raise InputError(f"{where.rstrip('.')}: {part!r} is not allowed; allowed: label, set and grid")
    settings = part.get("set") or {}
    if not isinstance(settings, dict):
        raise InputError(f"{where}set: {settings!r} is not allowed; allowed: keys such as privacy.clip")
    label = part.get("label")
    return Part(_read_grid(part.get("grid"), where), settings, None if label is None else str(label))


@dataclass(frozen=True)
class Progress:
    """How far each cell is."""

    done: Mapping[str, int]
    """Rounds completed, by cell."""
    rounds: Mapping[str, int]
    failed: frozenset[str]


@dataclass(frozen=True)
class Row:
    """One setting of everything but the seeds: means and spreads over its runs."""

    values: Mapping[str, Any]
    runs: int
    accuracy: float
    accuracy_std: float | None
    worst_client: float
    best_client: float
    worst_cluster: float | None
    disparity: float
    f_acc: float | None
    f_loss: float | None
    clusters_found: int | None
    """Runs that found all clusters, where the truth is known."""
    kind: str
    """How it was judged: private where all of its runs were, exact where one was, or none."""
    epsilon: float
    noise_multiplier: float
    seconds: float
    guarantee: str
    """The line of the run that spent most."""
    guarantee_text: str
    """Its paragraph."""

    def to_json(self) -> dict[str, Any]:
        content = {key: value for key, value in self.__dict__.items() if key != "values"}
        return {"values": dict(self.values), **content, "epsilon": number_to_json(self.epsilon)}


@dataclass(frozen=True)
class SweepResult:
    """The finished cells, the table over them, and what broke."""

    folder: Path
    sweep: Sweep
    rows: tuple[Row, ...]
    cells: Mapping[str, Path]
    failed: Mapping[str, str]
    """Why, for each cell that did not finish."""

    @classmethod
    def load(cls, path: Path) -> "SweepResult":
        """What the folder of a comparison holds now, finished or not."""
        stored = path / "sweep.yaml"
        if not stored.exists():
            raise InputError(f"{path}: not the folder of a comparison, sweep.yaml is missing")
        sweep = Sweep.read(stored)
        cells = sweep.cells()
        finished = {
            cell.name: RunResult.load(_cell_path(path, cell))
            for cell in cells
            if RunFolder(_cell_path(path, cell)).finished
        }
        failed = {
            cell.name: _last_line(path / "cells" / f"{cell.name}.log")
            for cell in cells
            if cell.name not in finished
        }
        rows = tuple(_rows(sweep, cells, finished))
        return cls(path, sweep, rows, {name: result.folder for name, result in finished.items()}, failed)

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @cached_property
    def total(self) -> Total | None:
        """What all cells that have begun spend together, finished or not."""
        return total_of(_cell_path(self.folder, cell) for cell in self.sweep.cells())

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "report": str(self.report),
            "table": [row.to_json() for row in self.rows],
            "cells": {name: str(path) for name, path in self.cells.items()},
            "failed": dict(self.failed),
            "total": None if self.total is None else self.total.to_json(),
        }


def compare(
    sweep: Sweep,
    out: Path,
    *,
    resume: bool = False,
    workers: int | None = None,
    watch: Callable[[Progress], None] | None = None,
) -> SweepResult:
    """Run every cell that is not finished yet, then write the table."""
    cells = sweep.cells()
    stored = out / "sweep.yaml"
    if out.exists() and any(out.iterdir()):
        if not resume:
            raise InputError(f"{out}: exists already; --resume continues it, --out names another folder")
        if not stored.exists():
            raise InputError(f"{out}: exists and is not a comparison; --out names another folder")
        seal = Seal(out)
        for check in (*seal.checks(), *RunMemory(seal).checks()):
            check()
        if not sweep.contains(Sweep.read(stored)):
            raise InputError(f"{out}: was begun with another sweep; resume it as it was or with more values")
        for cell in cells:
            if (files := RunFolder(_cell_path(out, cell))).finished:
                check_folder(files)
        seal.settle()
        seal.write_text(stored, sweep.to_yaml())
    else:
        with folder.new_folder(out) as scratch:
            folder.write_text(scratch / stored.name, sweep.to_yaml())
            Seal.create(scratch)
        seal = Seal(out)
    memory, paths = RunMemory(seal), [_cell_path(out, cell) for cell in cells]

    def remember(progress: Progress) -> None:
        memory.note_begun(paths)
        if watch is not None:
            watch(progress)

    try:
        memory.note_begun(paths)  # what a comparison that was killed had begun
        _run_cells(cells, out, workers or _default_workers(cells), remember)
    finally:
        memory.note_all(paths)
    result = SweepResult.load(out)
    done = sorted(result.cells)
    seal.write_text(out / CSV, table_csv(result.rows), cells=done)
    seal.write_text(out / MARKDOWN, table_markdown(result.rows, result.total), cells=done)
    return result


def check_tables(out: Path) -> None:
    """Refuse a table whose rows are not those of the runs that it was made of."""
    if not (out / CSV).exists():
        return
    made_of = [body["cells"] for body in Seal(out).lines.bodies if CSV in body.get("files", {})]
    sweep = Sweep.read(out / "sweep.yaml")
    cells = [cell for cell in sweep.cells() if made_of and cell.name in made_of[-1]]
    results = {cell.name: RunResult.load(_cell_path(out, cell)) for cell in cells}
    counted = _table_lines(table_csv(tuple(_rows(sweep, cells, results))))
    stated = _table_lines((out / CSV).read_text(encoding="utf-8", errors="replace"))
    # A sweep that has grown since has its rows in another order.
    if len(stated) != len(counted) or not all(map(_same_line, sorted(stated), sorted(counted))):
        raise LedgerError(f"{out / CSV}: its rows are not those of the runs that it was made of")


def _table_lines(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def _same_line(one: Sequence[str], other: Sequence[str]) -> bool:
    return len(one) == len(other) and all(map(_same_cell, one, other))


def _same_cell(one: str, other: str) -> bool:
    """Other machines add floating-point numbers in another order."""
    try:
        return one == other or math.isclose(float(one), float(other), rel_tol=1e-9)
    except ValueError:
        return False


# --- running cells ----------------------------------------------------------------------------------


def _run_cells(cells: Sequence[Cell], out: Path, workers: int, watch: Callable[[Progress], None]) -> None:
    """Keep `workers` processes busy until every cell has finished or failed; a failure is in its log."""
    waiting = _shares([cell for cell in cells if not RunFolder(_cell_path(out, cell)).finished])
    running: list[tuple[list[Cell], subprocess.Popen[bytes]]] = []
    failed: set[str] = set()
    rounds = {cell.name: cell.experiment.schedule.rounds for cell in cells}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                share = waiting.pop(0)
                running.append((share, _start(share, out, threads=1 if workers > 1 else None)))
            for share, process in list(running):
                if process.poll() is None:
                    continue
                running.remove((share, process))
                for cell in share:
                    if process.returncode != 0 and not RunFolder(_cell_path(out, cell)).finished:
                        failed.add(cell.name)
                        _note_exit(out / "cells" / f"{cell.name}.log", process.returncode)
            watch(Progress({cell.name: _rounds_done(out, cell) for cell in cells}, rounds, frozenset(failed)))
            if running:
                time.sleep(POLL_SECONDS)
    finally:
        for _, process in running:
            process.terminate()
        for _, process in running:
            process.wait()


def _shares(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Which cells share a process: one alone on a CPU, as many as are alike on a GPU.

    Where units are clients or workers, a cell's own cohorts fill a GPU: there it is alone, too.
    """
    if not _on_gpu(cells):
        return [[cell] for cell in cells]
    alike: dict[str, list[Cell]] = {}
    for cell in cells:
        together = cell.experiment.privacy.unit is Unit.RECORD
        alike.setdefault(fit_together(cell.experiment) if together else cell.name, []).append(cell)
    return [
        same[first : first + CELLS_AT_ONCE]
        for same in alike.values()
        for first in range(0, len(same), CELLS_AT_ONCE)
    ]


def _start(cells: Sequence[Cell], out: Path, threads: int | None) -> subprocess.Popen[bytes]:
    """One process for these cells."""
    paths = [_cell_path(out, cell) for cell in cells]
    for cell, path in zip(cells, paths, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder.write_text(beside(path, ".yaml"), to_yaml(cell.experiment))
    environment = dict(os.environ)
    if threads is not None:
        environment.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    if len(cells) == 1:
        arguments = ["coterie", "run", str(beside(paths[0], ".yaml")), "--out", str(paths[0])]
        arguments += ["--resume", "--json"]
    else:
        arguments = ["coterie.experiment.together", *map(str, paths)]
    with beside(paths[0], ".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments], stdout=subprocess.DEVNULL, stderr=log, env=environment
        )


def _default_workers(cells: Sequence[Cell]) -> int:
    """A core per cell, of those this process may use; a GPU is given to one process at a time."""
    return 1 if _on_gpu(cells) else max(1, min(len(cells), _cores()))


def _cores() -> int:
    """Cores of this process (taskset, a container's set), where the system tells; else of the machine."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _on_gpu(cells: Sequence[Cell]) -> bool:
    return torch.cuda.is_available() and all(cell.experiment.engine.device != "cpu" for cell in cells)


def _cell_path(out: Path, cell: Cell) -> Path:
    return out / "cells" / cell.name


def _cell_name(values: Mapping[str, Any]) -> str:
    parts = (f"{key.rpartition('.')[2]}={value}" for key, value in values.items())
    return re.sub(r"[^A-Za-z0-9.=_+-]+", "-", ",".join(parts).replace(",", "+")).strip("-")


def _rounds_done(out: Path, cell: Cell) -> int:
    return sum(1 for _ in folder.read_lines(RunFolder(_cell_path(out, cell)).metrics))


def _note_exit(log: Path, code: int) -> None:
    """A process that was killed says nothing itself."""
    if code < 0:
        with log.open("a", encoding="utf-8") as handle:
            handle.write(f"killed by signal {-code}\n")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1].removeprefix("error: ") if lines else "not finished"


# --- the table --------------------------------------------------------------------------------------


def _rows(sweep: Sweep, cells: Sequence[Cell], finished: Mapping[str, RunResult]) -> Iterator[Row]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.name in finished:
            groups.setdefault(repr(sweep.setting(cell)), []).append(cell)
    for members in groups.values():
        yield _row(sweep.setting(members[0]), [finished[cell.name] for cell in members])


def _row(values: Mapping[str, Any], results: Sequence[RunResult]) -> Row:
    means = [result.accuracy.mean if result.accuracy else math.nan for result in results]
    fair = [result.fairness or Fairness(math.nan, None, None) for result in results]
    known = [result.clusters_found for result in results if result.clusters_found is not None]
    worst = max(results, key=lambda result: result.epsilon)
    return Row(
        values=values,
        runs=len(results),
        accuracy=float(np.mean(means)),
        accuracy_std=float(np.std(means, ddof=1)) if len(means) > 1 else None,
        worst_client=_mean([result.accuracy.min if result.accuracy else None for result in results]),
        best_client=_mean([result.accuracy.max if result.accuracy else None for result in results]),
        worst_cluster=_mean_or_none(
            [min(result.cluster_accuracy.values()) if result.cluster_accuracy else None for result in results]
        ),
        disparity=_mean([own.disparity for own in fair]),
        f_acc=_mean_or_none([own.f_acc for own in fair]),
        f_loss=_mean_or_none([own.f_loss for own in fair]),
        clusters_found=sum(known) if known else None,
        kind=_kind(results),
        epsilon=worst.epsilon,
        noise_multiplier=max(result.noise_multiplier for result in results),
        seconds=_mean([result.seconds for result in results]),
        guarantee=worst.guarantee,
        guarantee_text=worst.guarantee_text,
    )


def _kind(results: Sequence[RunResult]) -> str:
    reached = [result.accuracy for result in results if result.accuracy is not None]
    if not reached:
        return "none"
    return "private" if all(spread.is_private for spread in reached) else "exact"


def _mean(values: Sequence[float | None]) -> float:
    """Of figures that may be missing: private evaluation says nothing of single clients of a population."""
    return float(np.mean([math.nan if value is None else value for value in values]))


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if len(known) == len(values) else None


FIGURES: Mapping[str, Callable[[Row], str]] = {
    "accuracy": lambda row: _percent(row.accuracy) + _plus_minus(row.accuracy_std),
    "worst client": lambda row: _percent(row.worst_client),
    "best client": lambda row: _percent(row.best_client),
    "worst cluster": lambda row: _percent(row.worst_cluster),
    "disparity": lambda row: _percent(row.disparity),
    "F_acc": lambda row: _percent(row.f_acc),
    "F_loss": lambda row: "–" if row.f_loss is None else f"{row.f_loss:.3f}",
    "clusters found": lambda row: (
        "–" if row.clusters_found is None else f"{row.clusters_found} of {row.runs}"
    ),
    "epsilon": lambda row: round_up(row.epsilon),
    "noise": lambda row: f"{row.noise_multiplier:.3f}",
    "seconds": lambda row: f"{row.seconds:.1f}",
}
"""Columns of the table as a person reads it: accuracies in per cent."""

OUTSIDE = "Scores, fairness and clusters found are exact: outside every guarantee."

BRIEF = ("accuracy", "worst client", "worst cluster", "clusters found", "noise", "seconds")
"""Those that fit a terminal."""


def table_columns(
    rows: Sequence[Row], figures: Sequence[str] = tuple(FIGURES)
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the comparison."""
    keys = list(rows[0].values) if rows else []
    body = [
        [*(str(row.values[key]) for key in keys), *(FIGURES[figure](row) for figure in figures)]
        for row in rows
    ]
    return [*(heading_of(key) for key in keys), *figures], body


def heading_of(key: str) -> str:
    """A key of the grid in one word: `algorithm` for algorithm.name, `epsilon` for privacy.epsilon."""
    section, _, name = key.rpartition(".")
    return section if key in SELECTORS else name


def _plus_minus(std: float | None) -> str:
    return "" if std is None else f" ± {100 * std:.1f}"


def _percent(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{100 * value:.1f}"


def table_markdown(rows: Sequence[Row], total: Total | None) -> str:
    """The table with what all runs spend together and the guarantee of every row beneath it."""
    headings, body = table_columns(rows)
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    lines += ["| " + " | ".join(cells) + " |" for cells in body]
    lines += ["", *([OUTSIDE, ""] if any(row.kind == "exact" for row in rows) else [])]
    lines += [total.text, ""] if total else []
    for row in rows:
        label = ", ".join(f"{key}={value}" for key, value in row.values.items()) or "all runs"
        lines.append(f"- {label}: {row.guarantee}")
    return "\n".join(lines) + "\n"


def table_csv(rows: Sequence[Row]) -> str:
    """Full precision, one row per setting, for machines."""
    text = io.StringIO()
    keys = list(rows[0].values) if rows else []
    figures = [name for name in Row.__dataclass_fields__ if name not in ("values", "guarantee_text")]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*keys, *figures])
    for row in rows:
        writer.writerow([*(row.values[key] for key in keys), *(getattr(row, name) for name in figures)])
    return text.getvalue()
