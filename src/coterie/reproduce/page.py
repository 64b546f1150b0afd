"""The page of a reproduction: the publication's table beside ours, what differs, and what was promised."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from coterie import __version__
from coterie.experiment.composition import ALONE
from coterie.experiment.folder import write_text
from coterie.report import words
from coterie.report.figures import Figure
from coterie.report.grid import Comparison as RunsSideBySide
from coterie.report.grid import read_comparison
from coterie.report.markup import Child, Markup, tag
from coterie.report.numbers import count
from coterie.report.page import Column, facts, header, notice, page, section, side_by_side, table
from coterie.report.standalone import file_name, standalone
from coterie.reproduce.figures import figures_of
from coterie.reproduce.quantities import Quantity
from coterie.reproduce.table import Entry, Line, Reproduction, setting_text


def write_reproduction_report(folder: Path) -> Path:
    """Write `report.html` of a reproduction, and its figures as files; return the page's path."""
    result = Reproduction.load(folder)
    runs = read_comparison(result.sweep_folder) if result.sweep is not None else None
    figures = list(figures_of(result, runs))
    write_text(result.report, _page(result, runs, figures))
    drawings = folder / "figures"
    for figure in figures:
        drawings.mkdir(exist_ok=True)
        write_text(drawings / file_name(figure), standalone(figure))
    return result.report


def _page(result: Reproduction, runs: RunsSideBySide | None, figures: Sequence[Figure]) -> str:
    title = result.experiment.title
    body = [
        header(
            "reproduction", title, _lede(result), f"{result.experiment.name} at {result.scale_name} scale"
        ),
        *_notices(result),
        *(_tables(result) if result.sweep else []),
        _figures(figures),
        _differences(result),
        _ledgers(result) if result.sweep else None,
        _guarantees(result) if result.sweep else None,
        _common(runs),
    ]
    return page(title, "coterie reproduction", body, f"coterie {__version__}")


def _lede(result: Reproduction) -> Child:
    if result.sweep is None:
        return result.experiment.line
    entries = [entry for line in result.lines for entry in line.entries]
    judged = [entry for entry in entries if entry.is_no_worse is not None]
    better = sum(bool(entry.is_no_worse) for entry in judged)
    done = f"{len(result.runs)} of {count(len(result.sweep.cells()), 'run')} finished. "
    if not judged:
        return done + "None of their settings stands in a printed table."
    return done + f"{better} of {count(len(judged), 'printed number')} are reached or bettered."


def _notices(result: Reproduction) -> Iterator[Markup]:
    if not result.is_sound:
        yield notice("warn", "A run spent more than its plan allows; its figures are void.")
    if result.missing:
        yield notice("warn", result.not_finished)


def _tables(result: Reproduction) -> Iterator[Markup]:
    columns = [
        Column("Algorithm"),
        Column("Runs", figures=True),
        *(Column(_heading(result, quantity), figures=True) for quantity in result.quantities),
        *(Column(name, figures=True) for name in _of_clusters(result)),
        Column("Charged of planned", figures=True),
    ]
    for setting, lines in result.by_setting():
        yield section(
            setting_text(setting).capitalize() if setting else "Results",
            table(
                "Ours, and below it the printed number; accuracies in per cent on held-out records",
                columns,
                [_row(line, result) for line in lines],
            ),
        )
    yield tag("section", [tag("p", note, class_="intro") for note in result.notes()])


def _of_clusters(result: Reproduction) -> list[str]:
    """Columns for what was found, where anybody looked for it."""
    return ["Clusters found", "Minority found"] if result.has_clusters else []


def _heading(result: Reproduction, quantity: Quantity) -> str:
    """The figure, and where its printed numbers stand."""
    tables = result.tables(quantity)
    return f"{quantity.heading} (table {tables})" if tables else quantity.heading


def _row(line: Line, result: Reproduction) -> list[Child]:
    name: Child = line.name
    if line.printed_as is not None:
        name = [tag("div", line.name), tag("div", f"printed: {line.printed_as}", class_="theirs")]
    return [
        name,
        str(len(line.runs)),
        *(_cell(entry) for entry in line.entries if entry.quantity in result.quantities),
        *([line.clusters_found, line.minority_found] if _of_clusters(result) else []),
        line.charged,
    ]


def _cell(entry: Entry) -> Child:
    ours = tag("div", tag("strong", entry.text()))
    if not entry.printed_text():
        return ours
    return [
        ours,
        tag("div", entry.printed_text(), class_="theirs"),
        tag("div", entry.verdict, class_="theirs") if entry.verdict else None,
    ]


def _figures(figures: Sequence[Figure]) -> Markup | None:
    return section("Figures", side_by_side(figure.html() for figure in figures)) if figures else None


def _differences(result: Reproduction) -> Markup | None:
    said = list(result.scale.differs)
    said += [f"Changed on the command line: {text}." for text in result.overrides]
    if not said:
        return None
    return section("What differs from the publication", tag("ul", [tag("li", sentence) for sentence in said]))


def _ledgers(result: Reproduction) -> Markup:
    rows = [
        [
            run.cell.name,
            f"{run.charged.executed:,}",
            f"{run.charged.planned:,}",
            f"{run.charged.spent:.4f}",
            f"{run.charged.promised:.4f}",
            "exactly as planned"
            if run.charged.exact
            else "within the plan"
            if run.charged.holds
            else "BROKEN",
        ]
        for run in result.runs
    ]
    columns = [
        Column("Run"),
        Column("Releases charged", figures=True),
        Column("Planned", figures=True),
        Column("Epsilon spent", figures=True),
        Column("Promised", figures=True),
        Column("Ledger against plan"),
    ]
    return section(
        "What was charged",
        table("Every release of every client, counted in the ledger of the run", columns, rows),
    )


def _guarantees(result: Reproduction) -> Markup:
    promises = [
        tag(
            "li",
            tag("strong", line.heading),
            line.guarantee,
        )
        for line in result.lines
    ]
    return tag(
        "section",
        tag("h2", "Guarantee of every row"),
        tag("p", ALONE, class_="intro"),
        tag("ul", promises, class_="sentences"),
        class_="promise",
    )


def _common(runs: RunsSideBySide | None) -> Markup | None:
    if runs is None or runs.example is None:
        return None
    shared = [
        (name, text) for name, text in words.what_ran(runs.example) if name not in ("Algorithm", "Seeds")
    ]
    link = tag("p", tag("a", "All runs side by side", href="runs/report.html"))
    return section("What all runs share", facts(shared), link)
