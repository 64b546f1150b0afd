"""The finished cells of a sweep side by side: one row for each setting, and the tables that are written."""

import csv
import io
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from coterie.errors import InputError
from coterie.experiment.composition import Total, total_of
from coterie.experiment.experiment_file import SELECTORS
from coterie.experiment.result import Fairness, RunResult
from coterie.experiment.scores import SCORES
from coterie.experiment.seal import Seal, require
from coterie.experiment.shown import comparison_html
from coterie.experiment.sweep import Cell, Sweep
from coterie.experiment.tidy import Frame, frame
from coterie.experiment.verdict import ComparisonVerdict, verdict_of
from coterie.files import beside, regular
from coterie.privacy.units import number_to_json, round_up
from coterie.table import NONE, Table, csv_text, plain

CSV, MARKDOWN = "table.csv", "table.md"
COLUMNS = (
    *("runs", "accuracy", "accuracy_std", "worst_client", "best_client", "worst_cluster", "disparity"),
    *("f_acc", "f_loss", "clusters_found", "kind", "epsilon", "noise_multiplier", "seconds", "guarantee"),
)
POOLED = tuple(name for name in SCORES if name != "accuracy")
"""Of the table for machines; tables of earlier versions have the first ones only."""


@dataclass(frozen=True)
class Row:
    """One setting of everything but the seeds: means and spreads over its runs.

    Args:
        reached: accuracy, or a regression's bounded score; so are the figures of clients and clusters.
        scores: of all held-out records together, by name, where every run has them.
        worst_rmse, best_rmse: of a regression's clients.
        clusters_found: runs that found all clusters, where the truth is known.
        kind: how it was judged: private where all of its runs were, exact where one was, or none.
        guarantee, guarantee_text: the line and the paragraph of the run that spent most.
    """

    values: Mapping[str, Any]
    runs: int
    reached: float
    reached_std: float | None
    worst_client: float
    best_client: float
    worst_cluster: float | None
    disparity: float
    f_acc: float | None
    f_loss: float | None
    clusters_found: int | None
    kind: str
    epsilon: float
    noise_multiplier: float
    seconds: float
    guarantee: str
    guarantee_text: str
    scores: Mapping[str, float] = field(default_factory=dict)
    is_regression: bool = False
    worst_rmse: float | None = None
    best_rmse: float | None = None

    @property
    def accuracy(self) -> float:
        """Not a number for a regression, which is judged by its errors."""
        return math.nan if self.is_regression else self.reached

    def figures(self) -> dict[str, Any]:
        """Every figure by the name under which files have it; clients of a regression by their RMSE."""
        told = {key: getattr(self, key) for key in COLUMNS if hasattr(self, key)}
        told |= {"accuracy_std": None if self.is_regression else self.reached_std}
        if self.is_regression:
            told |= {"worst_client": self.worst_rmse, "best_client": self.best_rmse, "worst_cluster": None}
            ends = self.worst_rmse, self.best_rmse
            told |= {"disparity": None if None in ends else ends[0] - ends[1], "f_acc": None}  # type: ignore[operator]
        return {**{key: told[key] for key in COLUMNS}, **{key: self.scores.get(key) for key in POOLED}}

    def to_json(self) -> dict[str, Any]:
        content = {**self.figures(), "epsilon": number_to_json(self.epsilon)}
        return {"values": dict(self.values), **content, "guarantee_text": self.guarantee_text}


@dataclass(frozen=True)
class SweepResult:
    """The finished cells, the table over them, and why other cells did not finish."""

    folder: Path
    sweep: Sweep
    rows: tuple[Row, ...]
    cells: Mapping[str, Path]
    failed: Mapping[str, str]

    @classmethod
    def load(cls, path: Path) -> "SweepResult":
        """What the folder of a comparison holds now, finished or not."""
        stored = path / "sweep.yaml"
        if not stored.exists():
            raise InputError(f"{path}: not the folder of a comparison, sweep.yaml is missing")
        sweep = Sweep.read_recorded(stored)
        runs = {cell.name: cell.files(path) for cell in sweep.cells()}
        done = {name: files.path for name, files in runs.items() if files.finished}
        logs = {name: beside(files.path, ".log") for name, files in runs.items() if name not in done}
        failed = {name: _last_line(log) for name, log in logs.items()}
        return cls(path, sweep, tuple(_rows(sweep, path, done)), done, failed)

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @cached_property
    def total(self) -> Total | None:
        """What all cells that have begun spend together, finished or not."""
        return total_of(cell.files(self.folder).path for cell in self.sweep.cells())

    @property
    def table(self) -> Frame:
        """One row for each setting, with full precision; a data frame where pandas is there.

        Example:
            >>> import coterie as ct
            >>> ct.compare("sweep.yaml").table.sort_values("accuracy")  # doctest: +SKIP
        """
        told = [{**row.to_json(), "epsilon": row.epsilon} for row in self.rows]
        left_out = ("values", "guarantee_text")
        return frame(
            [{**row["values"], **{key: row[key] for key in row if key not in left_out}} for row in told]
        )

    @property
    def brief(self) -> Table:
        """What fits a terminal."""
        exact = any(row.kind == "exact" for row in self.rows)
        return Table(*table_columns(self.rows, BRIEF), OUTSIDE if exact else "")

    @property
    def summary(self) -> str:
        """How many of its runs are finished."""
        runs = f"{len(self.cells)} of {len(self.cells) + len(self.failed)} runs finished"
        return f"{self.folder}: {runs}"

    def __repr__(self) -> str:
        return "\n".join([f"SweepResult({self.summary})", *([self.brief.markdown()] if self.rows else [])])

    def _repr_html_(self) -> str:
        return comparison_html(self)

    @cached_property
    def verdict(self) -> ComparisonVerdict:
        """What can be told apart over seeds, and for which clients federating and clustering paid.

        Example:
            >>> import coterie as ct
            >>> print(ct.compare("sweep.yaml").verdict)  # doctest: +SKIP
        """
        return verdict_of(self.sweep, {name: RunResult.load(path) for name, path in self.cells.items()})

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "report": str(self.report),
            "table": [row.to_json() for row in self.rows],
            "cells": {name: str(path) for name, path in self.cells.items()},
            "failed": dict(self.failed),
            "total": None if self.total is None else self.total.to_json(),
            "verdict": self.verdict.to_json(),
        }


def _last_line(log: Path) -> str:
    said = regular(log).read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = said.strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "not finished"


def check_tables(out: Path) -> None:
    """Refuse a table whose rows are not those of the runs that it was made of."""
    if not (out / CSV).exists():
        return
    made_of = [body["cells"] for body in Seal(out).lines.bodies if CSV in body.get("files", {})] or [()]
    counted = table_csv(tuple(_rows(Sweep.read_recorded(out / "sweep.yaml"), out, made_of[-1])))
    stated = regular(out / CSV).read_text(encoding="utf-8", errors="replace")
    now, then = (list(csv.reader(io.StringIO(text))) for text in (counted, stated))
    if then and now[0] == [*then[0], *POOLED]:  # made before there were these
        now = [line[: -len(POOLED)] for line in now]
    # A sweep that has grown since has its rows in another order.
    lines = [sorted(now), sorted(then)]
    shapes = [[len(line) for line in table] for table in lines]
    same = shapes[0] == shapes[1] and all(map(_same_cell, *map(chain.from_iterable, lines)))
    require(same, out / CSV, "its rows are not those of the runs that it was made of")


def _same_cell(one: str, other: str) -> bool:
    """Other machines add floating-point numbers in another order."""
    try:
        return one == other or math.isclose(float(one), float(other), rel_tol=1e-9)
    except ValueError:
        return False


# --- the table --------------------------------------------------------------------------------------


def _rows(sweep: Sweep, out: Path, names: Collection[str]) -> Iterator[Row]:
    """Those of the cells with these names, which have finished."""
    groups: dict[str, list[Cell]] = {}
    for cell in sweep.cells():
        if cell.name in names:
            groups.setdefault(repr(sweep.setting(cell)), []).append(cell)
    for members in groups.values():
        yield _row(sweep.setting(members[0]), [RunResult.load(cell.files(out).path) for cell in members])


def _row(values: Mapping[str, Any], results: Sequence[RunResult]) -> Row:
    means = [result.reached.mean if result.reached else math.nan for result in results]
    fair = [result.fairness or Fairness(math.nan, None, None) for result in results]
    known = [result.clusters_found for result in results if result.clusters_found is not None]
    worst, errors = max(results, key=lambda result: result.epsilon), [_errors(result) for result in results]
    return Row(
        values=values,
        runs=len(results),
        reached=float(np.mean(means)),
        reached_std=float(np.std(means, ddof=1)) if len(means) > 1 else None,
        worst_client=_mean([result.reached.min if result.reached else None for result in results]),
        best_client=_mean([result.reached.max if result.reached else None for result in results]),
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
        scores=_mean_scores(results),
        is_regression=any(result.bounded_score is not None for result in results),
        worst_rmse=_mean_or_none([max(own, default=None) for own in errors]),
        best_rmse=_mean_or_none([min(own, default=None) for own in errors]),
    )


def _errors(result: RunResult) -> list[float]:
    """RMSE of each client, where a regression tells it."""
    found = result.scores["rmse"].per_client if "rmse" in result.scores else {}
    return [value for value in found.values() if value is not None]


def _mean_scores(results: Sequence[RunResult]) -> dict[str, float]:
    """Means over runs of the scores that all of them have."""
    found = {}
    for name in POOLED:
        values = [result.scores[name].value if name in result.scores else None for result in results]
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):
            found[name] = float(np.mean(known))
    return found


def _kind(results: Sequence[RunResult]) -> str:
    # Exact, where some were private.
    return min((result.reached.kind for result in results if result.reached is not None), default="none")


def _mean(values: Sequence[float | None]) -> float:
    """Of figures that may be missing: private evaluation says nothing of single clients of a population."""
    return float(np.mean([math.nan if value is None else value for value in values]))


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    return None if None in values else _mean(values)


def _pooled(name: str, row: Row) -> str:
    value, words = row.scores.get(name), SCORES[name]
    return _percent(value) if words.is_share else words.text(value)


def _of_client(row: Row, name: str) -> str:
    value = row.figures()[name]
    return SCORES["rmse"].text(value) if row.is_regression else _percent(value)


FIGURES: Mapping[str, Callable[[Row], str]] = {
    "accuracy": lambda row: (
        _percent(row.accuracy)
        + ("" if row.reached_std is None or row.is_regression else f" ± {100 * row.reached_std:.1f}")
    ),
    **{words.name: partial(_pooled, name) for name, words in SCORES.items() if name != "accuracy"},
    "worst client": lambda row: _of_client(row, "worst_client"),
    "best client": lambda row: _of_client(row, "best_client"),
    "worst cluster": lambda row: _of_client(row, "worst_cluster"),
    "disparity": lambda row: _of_client(row, "disparity"),
    "F_acc": lambda row: _of_client(row, "f_acc"),
    "F_loss": lambda row: "–" if row.f_loss is None else f"{row.f_loss:.3f}",
    "clusters found": lambda row: (
        "–" if row.clusters_found is None else f"{row.clusters_found} of {row.runs}"
    ),
    "epsilon": lambda row: round_up(row.epsilon),
    "noise": lambda row: f"{row.noise_multiplier:.3f}",
    "seconds": lambda row: f"{row.seconds:.1f}",
}
"""Columns of the table as a person reads it: shares in per cent, errors in the label's units."""

OUTSIDE = "Scores, fairness and clusters found are exact: outside every guarantee."

BRIEF = (
    *("accuracy", "base rate", "RMSE", "MAE", "R²", "worst client", "worst cluster", "clusters found"),
    *("noise", "seconds"),
)
"""Those that fit a terminal."""
OPTIONAL = {words.name for words in SCORES.values()}
"""Left out where no row has them: a regression has no accuracy, and a classification no RMSE."""


def table_columns(
    rows: Sequence[Row], figures: Sequence[str] = tuple(FIGURES)
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the comparison."""
    keys = list(rows[0].values) if rows else []
    empty = {name for name in OPTIONAL if name in FIGURES and all(FIGURES[name](row) == NONE for row in rows)}
    figures = [figure for figure in figures if figure not in empty]
    body = [
        [*(str(row.values[key]) for key in keys), *(FIGURES[figure](row) for figure in figures)]
        for row in rows
    ]
    # In one word: `algorithm` for algorithm.name, `epsilon` for privacy.epsilon.
    headings = [key.rpartition(".")[0 if key in SELECTORS else 2] for key in keys]
    return [*headings, *figures], body


def _percent(value: float | None) -> str:
    return NONE if value is None or math.isnan(value) else f"{100 * value:.1f}"


def table_markdown(rows: Sequence[Row], total: Total | None, verdict: ComparisonVerdict | None = None) -> str:
    """The table with the verdict, what all runs spend together and the guarantee of every row beneath it."""
    exact = [OUTSIDE, ""] if any(row.kind == "exact" for row in rows) else []
    spent = [total.text, ""] if total else []
    settings = [plain(", ".join(f"{key}={value}" for key, value in row.values.items())) for row in rows]
    told = [
        f"- {setting or 'all runs'}: {row.guarantee}" for setting, row in zip(settings, rows, strict=True)
    ]
    said = [line for text in (verdict.lines if verdict else ()) for line in (plain(text), "")]
    return "\n".join([Table(*table_columns(rows)).markdown(), "", *exact, *said, *spent, *told, ""])


def table_csv(rows: Sequence[Row]) -> str:
    """Full precision, one row per setting, for machines."""
    keys = list(rows[0].values) if rows else []
    cells = ([*map(row.values.get, keys), *row.figures().values()] for row in rows)
    return csv_text([[*keys, *COLUMNS, *POOLED], *cells])
