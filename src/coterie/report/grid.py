"""The folder of a comparison as the report reads it: settings, their runs, and what did not finish."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.experiment.comparison import Row, SweepResult
from coterie.experiment.composition import Total
from coterie.experiment.sweep import Cell, Sweep
from coterie.experiment.verdict import ComparisonVerdict
from coterie.report.numbers import count
from coterie.report.record import ACCURACY, SCORE, Measure, RunRecord, read_rounds, read_run


@dataclass(frozen=True)
class Setting:
    """Everything but the seeds, its row of the table and its finished runs."""

    values: Mapping[str, Any]
    row: Row
    runs: tuple[RunRecord, ...]
    colour: int

    def curve(self, kind: str = "accuracy") -> list[tuple[float, float]]:
        return mean_curve(self.runs, kind)


def mean_curve(runs: Sequence[RunRecord], kind: str = "accuracy") -> list[tuple[float, float]]:
    """Mean accuracy, or loss, after each round that all runs measured."""
    known = [
        {line.round: spread.mean for line in run.rounds if (spread := getattr(line, kind)) is not None}
        for run in runs
    ]
    common = sorted(set.intersection(*map(set, known))) if known else []
    return [(number, sum(values[number] for values in known) / len(known)) for number in common]


@dataclass(frozen=True)
class Failure:
    """A cell without a result, how far it came and the last thing it said."""

    cell: Cell
    rounds: int
    reason: str

    def __str__(self) -> str:
        planned = count(self.cell.experiment.schedule.rounds, "round")
        return f"{self.reason} ({self.rounds} of {planned} done)"


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, and what all that have begun spend together.

    Args:
        public: whether what is outside the guarantees was left out.
        verdict: what can be told apart.
    """

    name: str
    sweep: Sweep
    settings: tuple[Setting, ...]
    failures: tuple[Failure, ...]
    total: Total | None
    public: bool = False
    verdict: ComparisonVerdict | None = None

    @property
    def has_privacy(self) -> bool:
        """Whether everything that its runs released, finished or not, is covered by some guarantee."""
        spent = [setting.row.epsilon for setting in self.settings]
        return all(map(math.isfinite, [*spent, *([self.total.epsilon] if self.total else [])]))

    @property
    def measure(self) -> Measure:
        """Per cent only where every run is judged by the records it gets right."""
        return ACCURACY if all(run.measure.is_share for run in self.runs) else SCORE

    @property
    def runs(self) -> list[RunRecord]:
        """Those that finished."""
        return [run for setting in self.settings for run in setting.runs]

    @property
    def is_exact(self) -> bool:
        """Whether figures outside the guarantees are shown."""
        return not self.public and any(setting.row.kind == "exact" for setting in self.settings)

    @property
    def leading(self) -> str | None:
        """The key that colours tell apart."""
        return self.sweep.leading


def read_comparison(path: Path) -> Comparison:
    """Read a comparison folder; cells that did not finish are part of what it tells."""
    loaded = SweepResult.load(path)
    sweep, cells = loaded.sweep, loaded.sweep.cells()
    leading = sweep.leading
    settings = []
    for row in loaded.rows:
        members = [cell for cell in cells if cell.name in loaded.cells and sweep.setting(cell) == row.values]
        colour = list(sweep.grid[leading]).index(row.values[leading]) if leading else 0
        runs = tuple(read_run(loaded.cells[cell.name]) for cell in members)
        settings.append(Setting(row.values, row, runs, colour))
    failures = tuple(
        Failure(cell, len(read_rounds(cell.files(path).metrics)), loaded.failed[cell.name])
        for cell in cells
        if cell.name in loaded.failed
    )
    name = path.resolve().name
    return Comparison(name, sweep, tuple(settings), failures, loaded.total, verdict=loaded.verdict)
