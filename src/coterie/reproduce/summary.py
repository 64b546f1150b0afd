"""What of three papers is reproduced: every printed cell has one standing, and the counts follow from these.

`published/papers.yaml` lists the tables and figures of each paper, which reproduction runs them, and why ours
is below where it is.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from importlib import resources
from typing import Any

from pydantic import Field

from coterie.files import parse_yaml
from coterie.reproduce.curves import StoredCurve, read_curves
from coterie.reproduce.declared import PublishedExperiment, ScaleName, find
from coterie.reproduce.printed import Printed, Publication, read_publication
from coterie.reproduce.runs import QUANTITIES, Quantity
from coterie.reproduce.stored import StoredNumber, StoredRow, StoredTable, read_results
from coterie.reproduce.table import is_no_worse
from coterie.settings import Settings

RULE = (
    "A cell is *at least as good* if our mean over seeds, rounded as the printed number is, is no worse"
    " than it: the same figure, at the same epsilon and delta, whatever number of rounds that budget was"
    " spent on. Runs of fewer rounds than the paper says are judged where their average accuracy is no "
    "worse than the printed one. Deviations over seeds are not taken into account; in brackets is how many"
    " of these cells have at least as many seeds as the paper, where it says how many. A cell has *no "
    "verdict* if our runs are shorter and worse on average, if the figure is computed otherwise (F_loss), "
    "or if the printed accuracy is at or below the base rate, which is what always giving the most "
    "frequent answer reaches: being no worse than that means nothing."
)
Results = Mapping[tuple[str, str], StoredTable]
Curves = Mapping[str, Sequence[StoredCurve]]


class Standing(StrEnum):
    """What can be said of a printed cell."""

    NOT_RUN = "not run"
    GOOD = "at least as good"
    WORSE = "worse"
    SHORTER = "fewer rounds"
    OTHERWISE = "computed otherwise"
    MEANINGLESS = "printed at or below the base rate"


NO_VERDICT = (Standing.SHORTER, Standing.OTHERWISE, Standing.MEANINGLESS)


class Reason(Settings):
    """Why cells are below the printed ones; the first that fits a cell is its reason."""

    rows: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    because: str

    def fits(self, row: str, figure: str) -> bool:
        return (not self.rows or row in self.rows) and (not self.figures or figure in self.figures)


class PaperTable(Settings):
    """A printed table, or its part about one data set.

    Args:
        repeats: numbers of tables that print a part of the same cells.
        by: the reproduction that runs it; without one, `not_run` says why.
        base_rate: where nothing has run that would tell it.
        differs: what of ours differs most from the paper's, in a few words.
    """

    table: int
    repeats: tuple[int, ...] = ()
    data: str
    shift: str
    holds: str
    by: str | None = None
    not_run: str = ""
    base_rate: float | None = None
    differs: str = ""
    reasons: tuple[Reason, ...] = ()

    @property
    def label(self) -> str:
        return f"Table {self.table}" + "".join(f" ({number})" for number in self.repeats)


class PaperFigure(Settings):
    """A printed figure without numbers.

    Args:
        by: the reproductions whose pages draw its counterpart.
        files: drawings of it in the documentation.
        panel: of the reproduction's panels, the one whose rows are its curves.
        missing: why there is no counterpart, or what of it is missing.
    """

    figure: str
    shows: str
    by: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    panel: str | None = None
    missing: str = ""


class PaperDrawing(Settings):
    """A chart from stored numbers, in a file that is called as its heading.

    Args:
        figure: which number of a row is drawn.
        against: `epsilon` or `round`, a line for each of `rows`; or what rows such as `B = 12` vary.
        epsilon: against rounds, the budget.
        panel: against rounds, the panel of the reproduction whose rows are drawn.
    """

    heading: str
    by: str
    figure: str = "mean"
    against: str = "epsilon"
    rows: tuple[str, ...] = ()
    epsilon: float | None = None
    panel: str | None = None


class Paper(Settings):
    """A paper: its tables and figures. `source` is the file with the printed numbers."""

    key: str
    name: str
    title: str
    note: str = ""
    source: str | None = None
    tables: tuple[PaperTable, ...] = ()
    figures: tuple[PaperFigure, ...] = Field(min_length=1)
    drawings: tuple[PaperDrawing, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def reproductions(self) -> list[str]:
        """Those with results of their own, in the order of the paper."""
        by_tables = [table.by for table in self.tables if table.by]
        by_figures = [name for figure in self.figures for name in figure.by]
        return list(dict.fromkeys([*by_tables, *self.others, *by_figures]))


@dataclass(frozen=True)
class PaperCell:
    """One printed number and ours."""

    row: str
    epsilon: float
    quantity: Quantity
    printed: Printed
    ours: StoredNumber | None
    standing: Standing
    enough_seeds: bool
    base_rate: float | None

    @property
    def shortfall(self) -> float | None:
        """By how much ours is worse; None where it is not, or where that would mean nothing."""
        if self.ours is None or self.printed.mean is None:
            return None
        if self.standing in (Standing.OTHERWISE, Standing.MEANINGLESS) or is_no_worse(
            self.quantity, self.ours.ours, self.printed.mean
        ):
            return None
        return abs(self.ours.ours - self.printed.mean)

    def to_json(self, reason: str) -> dict[str, Any]:
        return {
            "row": self.row,
            "epsilon": self.epsilon,
            "figure": self.quantity.key,
            "ours": self.ours.ours if self.ours else None,
            "printed": self.printed.mean,
            "by": self.shortfall,
            "rounds": self.ours.rounds if self.ours else None,
            "reason": reason,
        }


@dataclass(frozen=True)
class TableSummary:
    """A printed table beside ours: every readable cell, judged. `seeds` are the paper's, where it says so."""

    table: PaperTable
    cells: tuple[PaperCell, ...]
    unreadable: int
    seeds: int | None

    @cached_property
    def standings(self) -> Counter[Standing]:
        return Counter(cell.standing for cell in self.cells)

    @property
    def were_run(self) -> int:
        return sum(cell.ours is not None for cell in self.cells)

    @property
    def good(self) -> int:
        return self.standings[Standing.GOOD]

    @property
    def with_seeds(self) -> int:
        return sum(cell.standing is Standing.GOOD and cell.enough_seeds for cell in self.cells)

    @property
    def no_verdict(self) -> int:
        """Of the cells that were run."""
        return sum(cell.standing in NO_VERDICT and cell.ours is not None for cell in self.cells)

    @property
    def largest(self) -> PaperCell | None:
        """The cell that is furthest below, or above where less is better."""
        found = [cell for cell in self.cells if cell.shortfall is not None]
        return max(found, key=lambda cell: cell.shortfall or 0.0) if found else None

    @property
    def lacking(self) -> str:
        """Which printed cells nobody ran, in words: whole budgets, else whole rows, else figures."""
        ran = [cell for cell in self.cells if cell.ours is not None]
        left = [cell for cell in self.cells if cell.ours is None]
        budgets = {cell.epsilon for cell in left} - {cell.epsilon for cell in ran}
        left = [cell for cell in left if cell.epsilon not in budgets]
        rows = {cell.row for cell in left} - {cell.row for cell in ran}
        left = [cell for cell in left if cell.row not in rows]
        figures = dict.fromkeys(cell.quantity.heading for cell in left)
        whole = [f"epsilon {', '.join(f'{each:g}' for each in sorted(budgets))}"] if budgets else []
        named = dict.fromkeys(cell.row for cell in self.cells if cell.row in rows)
        return "; ".join([*whole, *named, *([f"some of {', '.join(figures)}"] if figures else [])])

    def reason(self, cell: PaperCell) -> str:
        """Empty where nobody has written one."""
        fits = (each.because for each in self.table.reasons if each.fits(cell.row, cell.quantity.key))
        return next(fits, "")

    def counts(self) -> dict[str, int]:
        return {
            "printed": len(self.cells),
            "run": self.were_run,
            "at_least_as_good": self.good,
            "with_as_many_seeds": self.with_seeds,
            "worse": self.standings[Standing.WORSE],
            "no_verdict": self.no_verdict,
            "not_run": len(self.cells) - self.were_run,
            "meaningless": self.standings[Standing.MEANINGLESS],
            "unreadable": self.unreadable,
        }

    def to_json(self) -> dict[str, Any]:
        largest = self.largest
        return {
            "table": self.table.table,
            "repeats": list(self.table.repeats),
            "holds": self.table.holds,
            "reproduction": self.table.by,
            **self.counts(),
            "largest_shortfall": largest.to_json(self.reason(largest)) if largest else None,
            "not_run_cells": self.lacking or None,
            "reason_not_run": None if self.were_run else self.table.not_run,
            "differs": self.table.differs or None,
        }


@dataclass(frozen=True)
class FigureSummary:
    """A printed figure: how many of its curves were run, where it has a panel."""

    figure: PaperFigure
    curves: int
    run: int

    @property
    def is_drawn(self) -> bool:
        return bool(self.figure.files) or bool(self.figure.by and (self.run or not self.curves))

    def to_json(self) -> dict[str, Any]:
        own = self.figure
        return {
            "figure": own.figure,
            "shows": own.shows,
            "drawn_by": list(own.by),
            "files": list(own.files),
            "curves": self.curves or None,
            "curves_run": self.run if self.curves else None,
            "missing": own.missing or None,
        }


@dataclass(frozen=True)
class PaperSummary:
    """One paper, judged table by table."""

    paper: Paper
    tables: tuple[TableSummary, ...]
    figures: tuple[FigureSummary, ...]

    def counts(self) -> dict[str, int]:
        return total([table.counts() for table in self.tables])

    def to_json(self) -> dict[str, Any]:
        return {
            "paper": self.paper.key,
            "title": self.paper.title,
            "tables": [table.to_json() for table in self.tables],
            "figures": [figure.to_json() for figure in self.figures],
            "counts": self.counts(),
        }


@dataclass(frozen=True)
class Summary:
    """All papers, from stored results."""

    papers: tuple[PaperSummary, ...]
    results: Results
    curves: Curves

    def counts(self) -> dict[str, int]:
        figures = [figure for paper in self.papers for figure in paper.figures]
        return {
            **total([paper.counts() for paper in self.papers]),
            "figures": len(figures),
            "figures_drawn": sum(figure.is_drawn for figure in figures),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "at_least_as_good": RULE,
            "counts": self.counts(),
            "papers": [paper.to_json() for paper in self.papers],
        }


def total(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Sums by name."""
    added: Counter[str] = Counter()
    for each in counts:
        added.update(each)
    return dict(added)


def read_papers() -> list[Paper]:
    """Every paper of `published/papers.yaml`."""
    text = resources.files(__package__).joinpath("published", "papers.yaml").read_text(encoding="utf-8")
    return [Paper.model_validate(each) for each in parse_yaml(text)["papers"]]


def summarise(results: Results | None = None) -> Summary:
    """Judge every printed cell by results of the paper's scale; by default by those that are stored."""
    known, curves = (read_results(), read_curves()) if results is None else (results, {})
    return Summary(tuple(_paper(paper, known) for paper in read_papers()), known, curves)


def _paper(paper: Paper, results: Results) -> PaperSummary:
    publication = read_publication(paper.source) if paper.source else None
    tables = [_table(table, publication, results) for table in paper.tables if publication]
    return PaperSummary(paper, tuple(tables), tuple(_figure(each, results) for each in paper.figures))


def _table(table: PaperTable, publication: Publication, results: Results) -> TableSummary:
    experiment = find(table.by) if table.by else None
    stored = results.get((table.by, ScaleName.PAPER.value)) if table.by else None
    cells, unreadable = [], 0
    averages = {
        (row, epsilon): printed.mean
        for row, epsilon, quantity, printed in printed_cells(table, publication, experiment, of_all=True)
        if quantity.key == "mean"
    }
    for row, epsilon, quantity, printed in printed_cells(table, publication, experiment):
        if printed.mean is None:
            unreadable += 1
            continue
        own = stored.find(row, epsilon) if stored else None
        average = averages.get((row, epsilon))
        cells.append(judge(table, row, epsilon, quantity, printed, own, publication, average))
    return TableSummary(table, tuple(cells), unreadable, publication.setting.get("seeds"))


def printed_cells(
    table: PaperTable,
    publication: Publication,
    experiment: PublishedExperiment | None,
    *,
    of_all: bool = False,
) -> Iterator[tuple[str, float, Quantity, Printed]]:
    """Each cell of a printed table under our name of its row; or of all tables about the same runs."""
    source = experiment.publication if experiment else None
    ours = {theirs: row for row, theirs in source.rows.items()} if source else {}
    for (data, shift, algorithm, figure, epsilon), printed in publication.numbers.items():
        if (data, shift) == (table.data, table.shift) and (of_all or printed.table == table.table):
            quantity = next(each for each in QUANTITIES if each.key == figure)
            yield ours.get(algorithm, algorithm), epsilon, quantity, printed


def judge(
    table: PaperTable,
    row: str,
    epsilon: float,
    quantity: Quantity,
    printed: Printed,
    own: StoredRow | None,
    publication: Publication,
    average: float | None = None,
) -> PaperCell:
    """The standing of one cell, by the rule.

    Args:
        average: the printed average accuracy of the same row and budget.
    """
    number = own.numbers.get(quantity.key) if own else None
    rate = number.base_rate if number else table.base_rate if quantity.key == "mean" else None
    rounds, seeds = publication.setting.get("rounds"), publication.setting.get("seeds")
    enough = number is not None and seeds is not None and len(number.seeds) >= seeds
    assert printed.mean is not None
    if rate is not None and printed.mean <= rate:
        standing = Standing.MEANINGLESS
    elif number is None:
        standing = Standing.NOT_RUN
    elif quantity.key in publication.otherwise:
        standing = Standing.OTHERWISE
    elif rounds is not None and number.rounds < rounds and not _is_no_worse_on_average(own, average):
        standing = Standing.SHORTER
    elif is_no_worse(quantity, number.ours, printed.mean):
        standing = Standing.GOOD
    else:
        standing = Standing.WORSE
    return PaperCell(row, epsilon, quantity, printed, number, standing, enough, rate)


def _is_no_worse_on_average(own: StoredRow | None, printed: float | None) -> bool:
    mean = own.numbers.get("mean") if own else None
    quantity = next(each for each in QUANTITIES if each.key == "mean")
    return mean is not None and printed is not None and is_no_worse(quantity, mean.ours, printed)


def _figure(figure: PaperFigure, results: Results) -> FigureSummary:
    if figure.panel is None:
        return FigureSummary(figure, 0, 0)
    (name,) = figure.by
    rows = find(name).scales[ScaleName.PAPER].panels[figure.panel]
    stored = results.get((name, ScaleName.PAPER.value))
    known = {row.row for row in stored.rows} if stored else set()
    return FigureSummary(figure, len(rows), sum(row in known for row in rows))
