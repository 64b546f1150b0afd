"""The page of a reproduction: the publication's table beside ours, what differs, and what was promised."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

from coterie.experiment.composition import ALONE
from coterie.files import write_text
from coterie.report import words
from coterie.report.drawing import Figure, write_figures
from coterie.report.page import page
from coterie.reproduce.figures import figures_of
from coterie.reproduce.runs import Quantity
from coterie.reproduce.table import Entry, Line, Reproduction, setting_text
from coterie.table import Table


def write_reproduction_report(result: Reproduction) -> Path:
    """Write `report.html` of a reproduction, and its figures as files; return the page's path."""
    figures = list(figures_of(result))
    write_text(result.report, _page(result, figures))
    write_figures(figures, result.folder / "figures")
    return result.report


def _page(result: Reproduction, figures: Sequence[Figure]) -> str:
    entries = [entry for line in result.lines for entry in line.entries]
    example = result.runs[0].record if result.runs else None
    return page(
        "reproduction",
        result.experiment.title,
        f"{result.experiment.name} at {result.scale_name} scale",
        Path(__file__).parent,
        result=result,
        verdicts=[entry.is_no_worse for entry in entries if entry.is_no_worse is not None],
        alone=ALONE,
        promises=[(line.heading, line.guarantee) for line in result.lines],
        tables=list(_tables(result)) if result.compared else [],
        notes=result.notes() if result.compared else [],
        figures=figures,
        differs=[
            *result.scale.differs,
            *(f"Changed on the command line: {each}." for each in result.overrides),
        ],
        charged=_charged(result) if result.compared else None,
        shared=[pair for pair in words.what_ran(example) if pair[0] not in ("Algorithm", "Seeds")]
        if example
        else [],
    )


def _tables(result: Reproduction) -> Iterator[tuple[str, Table]]:
    """A table for each setting, and its heading."""
    caption = "Ours, and below it the printed number; accuracies in per cent on held-out records"
    for setting, lines in result.by_setting():
        heading = setting_text(setting).capitalize() if setting else "Results"
        yield heading, Table.of([_row(line, result) for line in lines], caption)


def _heading(result: Reproduction, quantity: Quantity) -> str:
    """The figure, and where its printed numbers stand."""
    tables = result.tables(quantity)
    return f"{quantity.heading} (table {tables})" if tables else quantity.heading


def _row(line: Line, result: Reproduction) -> dict[str, str]:
    printed = [f"printed: {line.printed_as}"] if line.printed_as is not None else []
    shown = [entry for entry in line.entries if entry.quantity in result.quantities]
    clusters = {"Clusters found": line.clusters_found, "Minority found": line.minority_found}
    return {
        "Algorithm": _stacked(line.name, printed),
        "Runs": str(len(line.runs)),
        **{_heading(result, entry.quantity): _cell(entry) for entry in shown},
        **(clusters if result.has_clusters else {}),
        "Charged of planned": line.charged,
    }


def _cell(entry: Entry) -> Markup:
    theirs = [entry.printed_text(), entry.verdict] if entry.printed_text() else []
    return _stacked(Markup("<strong>{}</strong>").format(entry.text()), theirs)


def _stacked(ours: str, theirs: Sequence[str]) -> Markup:
    """Ours, and beneath it in small letters what the publication has."""
    lines = [Markup('<div class="theirs">{}</div>').format(text) for text in theirs if text]
    return Markup("<div>{}</div>{}").format(ours, Markup("").join(lines))


def _charged(result: Reproduction) -> Table:
    rows = [
        {
            "Run": run.record.name,
            "Releases charged": f"{run.charged.executed:,}",
            "Planned": f"{run.charged.planned:,}",
            "Epsilon spent": f"{run.charged.spent:.4f}",
            "Promised": f"{run.charged.promised:.4f}",
            "Ledger against plan": "exactly as planned"
            if run.charged.exact
            else "within the plan"
            if run.charged.holds
            else "BROKEN",
        }
        for run in result.runs
    ]
    caption = "Every release of every client, counted in the ledger of the run"
    return Table.of(rows, caption, words=["Ledger against plan"])
