"""The summary of all papers: a line for each printed table and figure, and the counts in a sentence."""

from collections.abc import Iterator

from coterie.reproduce.summary import RULE, PaperSummary, Summary, TableSummary
from coterie.table import NONE, Table


def counts_text(summary: Summary) -> str:
    """The counts in two sentences."""
    counts, papers = summary.counts(), len(summary.papers)
    return (
        f"Of the {counts['printed']} numbers that the tables of {papers} papers print, {counts['run']} were "
        f"run at the papers' size: {counts['at_least_as_good']} are at least as good "
        f"({counts['with_as_many_seeds']} with as many seeds, where a paper says how many), "
        f"{counts['worse']} are worse and {counts['no_verdict']} allow no verdict; {counts['not_run']} "
        f"were not run. Of {counts['figures']} figures and panels, {counts['figures_drawn']} have a "
        "counterpart."
    )


def summary_text(summary: Summary, folder: str = "") -> str:
    """The counts, the rule, and a line for each table and figure of each paper."""
    table = Table(*summary_rows(summary, folder)).markdown()
    return f"\n{counts_text(summary)}\n\n{RULE}\n\n{table}\n\n"


def summary_rows(summary: Summary, folder: str | None = None) -> tuple[list[str], list[list[str]]]:
    """Headings and rows; papers are links to their pages in this folder, where one is given."""
    headings = ["paper", "table or figure", "cells printed", "run", "at least as good", "worse", "no verdict"]
    rows = []
    for paper in summary.papers:
        own = paper.paper
        name = own.name if folder is None else f"[{own.name}]({folder}{own.key}.md)"
        rows += [[name, *row] for row in (*_all_tables(paper), *_table_rows(paper), *_figure_rows(paper))]
    return [*headings, "largest shortfall, and why; what differs"], rows


def _all_tables(paper: PaperSummary) -> Iterator[list[str]]:
    """The sums of a paper's tables, before each of them."""
    if paper.tables:
        counts = paper.counts()
        seeds = f" ({counts['with_as_many_seeds']})" if any(each.seeds for each in paper.tables) else ""
        judged = [f"{counts['at_least_as_good']}{seeds}", str(counts["worse"]), str(counts["no_verdict"])]
        told = f"{counts['not_run']} cells were not run"
        yield ["**all tables**", str(counts["printed"]), str(counts["run"]), *judged, told]


def _table_rows(paper: PaperSummary) -> Iterator[list[str]]:
    for each in paper.tables:
        counts = each.counts()
        judged = [f"{each.good} ({each.with_seeds})" if each.seeds else str(each.good)]
        judged += [str(counts[key]) for key in ("worse", "no_verdict")]
        yield [
            f"{each.table.label}: {each.table.holds}",
            str(len(each.cells)),
            str(each.were_run),
            *(judged if each.were_run else [NONE] * 3),
            _largest_text(each),
        ]


def _largest_text(each: TableSummary) -> str:
    if not each.were_run:
        return f"not run: {each.table.not_run}"
    cell, text = each.largest, "none"
    if cell is not None and cell.ours is not None and cell.printed.mean is not None:
        reason = each.reason(cell) or "no reason is known"
        ours, printed = cell.quantity.text(cell.ours.ours), cell.quantity.text(cell.printed.mean)
        where = f"{cell.row}, {cell.quantity.heading}, epsilon {cell.epsilon:g}"
        text = f"{ours} instead of {printed} ({where}): {reason}"
    differs = f". Differs: {each.table.differs}" if each.table.differs else ""
    return text + differs + (f". Not run: {each.lacking}" if each.lacking else "")


def _figure_rows(paper: PaperSummary) -> Iterator[list[str]]:
    """Figures with curves one by one; the others in a line for each way in which they are drawn, or not."""
    plain = [each for each in paper.figures if not each.curves]
    shown = [each for each in plain if each.figure.files]
    drawn = [each for each in plain if each.is_drawn and not each.figure.files]
    rest = [each for each in plain if not each.is_drawn]
    for figures, how in ((shown, "on the page"), (drawn, "by their commands"), (rest, NONE)):
        if figures:
            names = ", ".join(each.figure.figure for each in figures)
            lack = [
                f"{each.figure.figure} ({each.figure.missing})" for each in figures if each.figure.missing
            ]
            missing = f"missing: {'; '.join(lack)}" if lack else ""
            yield [f"Figure{'s' if ', ' in names else ''} {names}", "drawings", how, *[NONE] * 3, missing]
    for each in paper.figures:
        if each.curves:
            own = each.figure
            label, curves = f"Figure {own.figure}: {own.shows}", f"{each.curves} curves"
            lacking = f"missing: {own.missing}" if own.missing else ""
            yield [label, curves, str(each.run), *[NONE] * 3, lacking]
