"""The summary of all papers and a page for each, as Markdown, from stored results.

A document may hold the summary, or its counts in a sentence, between lines such as

    <!-- coterie reproduce --all --render: summary -->
    <!-- end -->

and what stands between them is replaced; the page of a paper is written whole.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from coterie.errors import InputError
from coterie.files import regular, write_json, write_text
from coterie.report.charts import Scale, Series, line_figure
from coterie.report.drawing import Figure, write_figures
from coterie.reproduce.curves import StoredCurve
from coterie.reproduce.declared import EPSILON, ExperimentScale, ScaleName, find
from coterie.reproduce.overview import counts_text, summary_text
from coterie.reproduce.printed import read_publication
from coterie.reproduce.runs import QUANTITIES, Quantity
from coterie.reproduce.stored import StoredRow, StoredTable
from coterie.reproduce.summary import (
    FigureSummary,
    PaperCell,
    PaperDrawing,
    PaperSummary,
    Standing,
    Summary,
    TableSummary,
)
from coterie.reproduce.table import setting_text
from coterie.table import NONE, Table

END = "<!-- end -->"
HOME = "summary.md"
PLACE = "<!-- coterie reproduce --all --render: {} -->"
MARKS = {Standing.SHORTER: " †", Standing.OTHERWISE: " ‡", Standing.MEANINGLESS: " ×"}
LEGEND = (
    "Ours stands before the stroke and the printed number after it; a dash is a cell that was not run. "
    "Ours is bold where it is at least as good. No verdict: † fewer rounds than the publication's, ‡ "
    "computed otherwise, × printed at or below the base rate. Seeds and rounds are ours. *Base rate* is"
    " what always giving the most frequent label of the held-out records reaches."
)
KINDS = {
    ScaleName.PAPER.value: "",
    "features": "On public features",
    ScaleName.QUICK.value: "Quick scale",
}
Cells = Mapping[tuple[str, str, float, str], PaperCell]


def write_pages(summary: Summary, out: Path, home: str = "") -> list[Path]:
    """The page of each paper and their figures, in a folder.

    Args:
        home: path from the folder to the document that has the summary; without one it is written here,
            once more for machines.
    """
    out.mkdir(parents=True, exist_ok=True)
    pages = {f"{paper.paper.key}.md": paper_page(paper, summary, home) for paper in summary.papers}
    if not home:
        pages[HOME] = f"# Printed tables beside ours\n\n{summary_text(summary)}"
        write_json(out / "summary.json", summary.to_json())
    for name, text in pages.items():
        write_text(out / name, text)
    write_figures([figure for paper in summary.papers for figure in drawings(paper, summary)], out)
    return [out / name for name in pages]


def with_places(summary: Summary, text: str, folder: str, named: str) -> str:
    """The text of a document with its places filled in.

    Args:
        folder: path from the document to the papers' pages, for links.
    """
    contents = {"summary": summary_text(summary, folder), "counts": counts_text(summary) + "\n"}
    found = False
    for name, content in contents.items():
        start = PLACE.format(name)
        before, here, rest = text.partition(start)
        _, closed, after = rest.partition(END)
        if here and closed:
            text, found = f"{before}{start}\n{content}{END}{after}", True
    if not found:
        starts = " or ".join(f"'{PLACE.format(name)}'" for name in contents)
        raise InputError(f"{named}: has no place for the summary; put the lines {starts} and '{END}' in it")
    return text


def read_document(document: Path) -> str:
    try:
        return regular(document).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is no text in UTF-8")
        raise InputError(f"{document}: cannot be read ({reason})") from None


# --- the page of a paper ----------------------------------------------------------------------------


def paper_page(paper: PaperSummary, summary: Summary, home: str = "") -> str:
    """Every table of a paper beside ours, and its figures."""
    own = paper.paper
    source, at = read_publication(own.source).source if own.source else "", home or HOME
    parts = [
        f"# {own.name}: printed tables beside ours",
        "<!-- written by: coterie reproduce --all --render; edit published/papers.yaml and reproductions -->",
        f"*{own.title}*. {own.note}",
        (f"Printed numbers: {source}. " if source else "") + f"Summary of all papers: [{at}]({at}).",
        LEGEND if own.tables else "",
    ]
    cells: Cells = {
        (table.table.by, cell.row, cell.epsilon, cell.quantity.key): cell
        for table in paper.tables
        if table.table.by
        for cell in table.cells
    }
    for name in own.reproductions:
        beside = [each for each in paper.tables if each.table.by == name and each.were_run]
        sections = [_judged(beside), *(_section(name, kind, summary, cells) for kind in KINDS)]
        if any(sections) or any(key[0] == name for key in cells):
            parts += [f"## {find(name).title}", *filter(None, sections)]
    without = [each for each in paper.tables if not each.table.by]
    if without:
        lines = [
            f"- {each.table.label}, {each.table.holds}: {len(each.cells)} cells; {each.table.not_run}."
            for each in without
        ]
        parts += ["## Not run", "\n".join(lines)]
    parts += ["## Figures", _figures(paper.figures)]
    told = {f"{each.slug}.svg": f"{each.heading}. {each.caption}" for each in drawings(paper, summary)}
    for figure in (each.figure for each in paper.figures if each.figure.files):
        words = {file: told.get(file, Path(file).stem.replace("-", " ")) for file in figure.files}
        images = " ".join(f"![{text}]({file})" for file, text in words.items())
        title = figure.figure if figure.figure.startswith("Table") else f"Figure {figure.figure}"
        parts += [f"**{title}**: {figure.shows}.", images]
    return "\n\n".join(filter(None, parts)) + "\n"


def _judged(tables: Sequence[TableSummary]) -> str:
    """What of each printed table is at least as good and what is worse, with the reasons."""
    lines = []
    for each in tables:
        own, counts = each.table, each.counts()
        lines.append(
            f"- {own.label}: of {counts['printed']} printed cells {counts['run']} were run: "
            f"{counts['at_least_as_good']} at least as good, {counts['worse']} worse, "
            f"{counts['no_verdict']} without a verdict."
            + (f" Not run: {each.lacking}." if each.lacking else "")
        )
        reasons: dict[str, dict[tuple[str, str], list[float]]] = {}
        for cell in each.cells:
            if cell.standing is Standing.WORSE:
                rows = reasons.setdefault(each.reason(cell) or "no reason is known", {})
                rows.setdefault((cell.row, cell.quantity.heading), []).append(cell.epsilon)
        lines += [
            "  - Worse: "
            + "; ".join(f"{row}, {heading} (epsilon {_budgets(at)})" for (row, heading), at in rows.items())
            + f". Why: {reason}."
            for reason, rows in reasons.items()
        ]
    return "\n".join(lines)


def _budgets(epsilons: Sequence[float]) -> str:
    return ", ".join("infinite" if math.isinf(each) else f"{each:g}" for each in sorted(epsilons))


def _section(name: str, kind: str, summary: Summary, cells: Cells) -> str:
    """The tables of one reproduction at one size, and what differs from the publication."""
    stored, judged = summary.results.get((name, kind)), cells if kind == ScaleName.PAPER.value else {}
    printed = [key for key in judged if key[0] == name]
    if stored is None and not printed:
        return ""
    scale = _scale(name, kind)
    parts = [f"### {KINDS[kind]}"] if KINDS[kind] else []
    if stored is None:
        parts.append("Not run at this size.")
    parts += [_table(name, setting, rows, judged) for setting, rows in _by_setting(name, stored, judged)]
    if kind == ScaleName.QUICK.value:
        parts.insert(
            1, f"`coterie reproduce {name}`: it shows the order of the algorithms, not the printed numbers."
        )
    numbers = [row.numbers.get("clustering") for row in stored.rows] if stored else []
    rates = sorted({f"{each.base_rate:.1f}" for each in numbers if each and each.base_rate is not None})
    notes = [f"- Clustered right: all clients in one cluster are {' or '.join(rates)}."] if rates else []
    notes += [f"- Differs: {sentence}" for sentence in scale.differs]
    return "\n\n".join([*parts, "\n".join(notes)])


def _scale(name: str, kind: str) -> ExperimentScale:
    if kind == "features":
        return find(name).scales[ScaleName.PAPER].on_features()
    return find(name).scales[ScaleName(kind)]


def _by_setting(
    name: str, stored: StoredTable | None, cells: Cells
) -> Iterator[tuple[Mapping[str, str], list[tuple[str, StoredRow | None]]]]:
    """The rows of each setting, those that are printed and were not run at its end."""
    groups: dict[tuple[str, ...], tuple[Mapping[str, str], list[tuple[str, StoredRow | None]]]] = {}
    for row in stored.rows if stored else ():
        groups.setdefault(tuple(row.setting.values()), (row.setting, []))[1].append((row.row, row))
    for by, row_name, epsilon, _ in cells:
        if by == name:
            setting = {EPSILON: f"{epsilon:g}"}
            rows = groups.setdefault(tuple(setting.values()), (setting, []))[1]
            if row_name not in [known for known, _ in rows]:
                rows.append((row_name, None))
    yield from sorted(groups.values(), key=lambda group: _order(group[0]))


def _order(setting: Mapping[str, str]) -> tuple[float, str]:
    return float(setting.get(EPSILON, math.inf)), str(list(setting.values()))


def _table(
    name: str, setting: Mapping[str, str], rows: Sequence[tuple[str, StoredRow | None]], cells: Cells
) -> str:
    epsilon = float(setting.get(EPSILON, math.nan))
    shown = [
        quantity
        for quantity in QUANTITIES
        if any(
            (row and quantity.key in row.numbers) or (name, own, epsilon, quantity.key) in cells
            for own, row in rows
        )
    ]
    clusters = any(row and row.clusters_found != NONE for _, row in rows)
    heading = setting_text(setting) or "row"
    headings = [heading, "seeds", "rounds", "base rate", *(quantity.heading for quantity in shown)]
    headings += [*(["clusters found"] if clusters else []), "charged"]
    body = []
    for own, row in rows:
        found = [_cell(quantity, row, cells.get((name, own, epsilon, quantity.key))) for quantity in shown]
        told = [str(len(row.seeds)), str(row.rounds)] if row else [NONE] * 2
        rates = [number.base_rate for number in row.numbers.values()] if row else []
        rates += [cell.base_rate for key, cell in cells.items() if key[:3] == (name, own, epsilon)]
        told.append(f"{rates[0]:.1f}" if rates and rates[0] is not None else NONE)
        last = [*([row.clusters_found if row else NONE] if clusters else []), _charged(row)]
        label = f"{own} ({row.best})" if row and row.best else own
        body.append([label, *told, *found, *last])
    return Table(headings, body).markdown()


def _cell(quantity: Quantity, row: StoredRow | None, cell: PaperCell | None) -> str:
    number = row.numbers.get(quantity.key) if row else None
    ours = quantity.text(number.ours if number else None)
    if cell is None or cell.printed.mean is None:
        return ours
    if cell.standing is Standing.GOOD:
        ours = f"**{ours}**"
    return f"{ours} / {quantity.text(cell.printed.mean)}{MARKS.get(cell.standing, '')}"


def _charged(row: StoredRow | None) -> str:
    if row is None or row.executed is None or row.planned is None:
        return NONE
    return "as planned" if row.executed == row.planned else f"{row.executed:,} of {row.planned:,}"


def _figures(figures: Sequence[FigureSummary]) -> str:
    rows = []
    for each in figures:
        own = each.figure
        drawn = ", ".join(f"`coterie reproduce {name}`" for name in own.by) if each.is_drawn else NONE
        curves = f"{each.run} of {each.curves}" if each.curves else NONE
        lack = own.missing or ("" if each.is_drawn else "no curve was run")
        rows.append([own.figure, own.shows, drawn, curves, lack])
    headings = ["figure", "shows", "counterpart drawn by", "curves run", "missing"]
    return Table(headings, rows).markdown()


# --- figures from stored numbers --------------------------------------------------------------------


def drawings(paper: PaperSummary, summary: Summary) -> Iterator[Figure]:
    """What the paper's list of drawings asks for, as far as numbers are stored."""
    for drawing in paper.paper.drawings:
        stored = summary.results.get((drawing.by, ScaleName.PAPER.value))
        printed = [cell for table in paper.tables if table.table.by == drawing.by for cell in table.cells]
        quantity = next(each for each in QUANTITIES if each.key == drawing.figure)
        across = Scale(drawing.against, "{:g}".format, margin=0.03)
        if drawing.against == "round":
            series = list(_curves(drawing, quantity, summary.curves.get(drawing.by, ()), printed))
        else:
            series = list(_series(drawing, stored, printed)) if stored else []
            places = sorted({x for each in series for x, _ in each.points})
            across = replace(across, places=places, logarithmic=drawing.against == "epsilon")
        if series:
            note = _note(drawing, quantity, stored, {each.name for each in series})
            also = " Hollow marks and dashes: as printed." if any(each.printed for each in series) else ""
            told = f"{quantity.heading.capitalize()}; {note}.{also}"
            name, upwards = f"{drawing.by}-{drawing.figure}", Scale("", "{:g}".format)
            yield line_figure(name, drawing.heading, series, across, upwards, told, note=note)


def _note(drawing: PaperDrawing, quantity: Quantity, stored: StoredTable | None, drawn: set[str]) -> str:
    """The unit, of how many seeds our numbers are, and what needs no learning."""
    rows = [row for row in stored.rows if row.row in drawn or drawing.against == "B"] if stored else []
    numbers = [row.numbers[quantity.key] for row in rows if quantity.key in row.numbers]
    seeds = sorted({len(number.seeds) for number in numbers})
    rates = sorted({f"{number.base_rate:.1f}" for number in numbers if number.base_rate is not None})
    parts = ["per cent"] if quantity.scale == 100.0 else []
    parts += [f"mean of {_range(seeds)} seeds" if seeds != [1] else "one seed"] if seeds else []
    parts += [f"base rate {_range(rates)}"] if rates else []
    return ", ".join(parts)


def _range(values: Sequence[object]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _curves(
    drawing: PaperDrawing, quantity: Quantity, curves: Sequence[StoredCurve], printed: Sequence[PaperCell]
) -> Iterator[Series]:
    """A curve for each row, and a level line for what is printed of it."""
    panels = find(drawing.by).scales[ScaleName.PAPER].panels
    score = "loss" if quantity.key == "loss" else "accuracy"
    known = {curve.row: curve for curve in curves if curve.epsilon == drawing.epsilon}
    for place, row in enumerate(panels[drawing.panel] if drawing.panel else drawing.rows):
        points = [(x, quantity.scale * y) for x, y in known[row].points[score]] if row in known else []
        levels = [
            cell.printed.mean
            for cell in printed
            if (cell.row, cell.epsilon, cell.quantity) == (row, drawing.epsilon, quantity)
            and cell.printed.mean is not None
        ]
        if points:
            yield Series(row, points, colour=place, printed=False if levels else None)
            for level in levels:
                ends = [(x, level) for x in (points[0][0], points[-1][0])]
                yield Series(f"{row}, printed", ends, colour=place, printed=True)


def _series(drawing: PaperDrawing, stored: StoredTable, printed: Sequence[PaperCell]) -> Iterator[Series]:
    if drawing.against != "epsilon":
        pattern = re.compile(rf"{re.escape(drawing.against)} = (\d+)")
        found = [
            (match, row.numbers.get(drawing.figure))
            for row in stored.rows
            if (match := pattern.fullmatch(row.row))
        ]
        yield Series("ours", sorted((float(match[1]), number.ours) for match, number in found if number))
        return
    for place, name in enumerate(drawing.rows):
        ours = [
            (row.epsilon, row.numbers[drawing.figure].ours)
            for row in stored.rows
            if row.row == name and row.epsilon is not None and drawing.figure in row.numbers
        ]
        theirs = [
            (cell.epsilon, cell.printed.mean)
            for cell in printed
            if (cell.row, cell.quantity.key) == (name, drawing.figure) and cell.printed.mean is not None
        ]
        for label, points in ((name, ours), (f"{name}, printed", theirs)):
            if points:
                yield Series(label, sorted(points), colour=place, printed=points is theirs)
