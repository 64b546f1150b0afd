"""The page around every report: one file, no script, nothing fetched."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

from coterie.report.markup import Child, Markup, render, tag


def page(title: str, kind: str, body: Child, footer: str) -> str:
    """A whole document with its style sheet inside."""
    style = resources.files("coterie.report").joinpath("style.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · {kind}"),
        tag("style", Markup(style)),
    )
    return (
        "<!doctype html>\n"
        + tag("html", head, tag("body", tag("main", body), tag("footer", footer)), lang="en")
        + "\n"
    )


def header(kind: str, title: str, lede: Child, folder: str) -> Markup:
    return tag(
        "header",
        tag("p", tag("span", "coterie", class_="brand"), f" {kind} ", tag("code", folder), class_="eyebrow"),
        tag("h1", title),
        tag("p", lede, class_="lede"),
    )


def section(heading: str, *content: Child, intro: str | None = None, outside: bool = False) -> Markup:
    """A part of the page; `outside` marks figures that no guarantee covers."""
    title = tag("h2", heading, badge() if outside else None)
    return tag("section", title, tag("p", intro, class_="intro") if intro else None, *content)


def badge() -> Markup:
    """The mark of a figure that was computed without noise."""
    return tag("span", "outside the guarantee", class_="badge")


def side_by_side(items: Iterable[Child]) -> Markup:
    """Cards that share a row where there is room."""
    return tag("div", *items, class_="pair")


def stacked(items: Iterable[Child]) -> Markup:
    """Cards one above the other, as one column of a pair."""
    return tag("div", *items, class_="stack")


def notice(kind: str, text: Child) -> Markup:
    """A line that must not be missed: `warn`, or `info`."""
    return tag("p", text, class_=f"notice {kind}", role="note")


@dataclass(frozen=True)
class Tile:
    """A key figure."""

    name: str
    value: str
    note: str = ""
    outside: bool = False
    """Whether no guarantee covers it."""


def tiles(items: Sequence[Tile]) -> Markup:
    return tag(
        "dl",
        [
            tag(
                "div",
                tag("dt", item.name),
                tag("dd", item.value, class_="big"),
                tag("dd", item.note, class_="small") if item.note else None,
                tag("dd", badge(), class_="small") if item.outside else None,
            )
            for item in items
        ],
        class_="tiles",
    )


def facts(items: Iterable[tuple[str, Child]]) -> Markup:
    """Names and what they are, as a list that reads like a table."""
    return tag(
        "dl", [tag("div", tag("dt", name), tag("dd", content)) for name, content in items], class_="facts"
    )


@dataclass(frozen=True)
class Column:
    """Heading of a column; figures stand right and line up."""

    name: str
    figures: bool = False


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[Child]],
    total: Sequence[Child] | None = None,
) -> Markup:
    """A table that scrolls inside its own box where the page is narrow; the first column names the row."""
    head = tag("tr", [tag("th", column.name, scope="col", class_=_align(column)) for column in columns])
    body = [_row(columns, cells) for cells in rows]
    foot = tag("tfoot", _row(columns, total)) if total else None
    # Not a <caption>, which would be as wide as the table and scroll away with it.
    return render(
        tag("p", caption, class_="caption"),
        scrolling(caption, tag("table", tag("thead", head), tag("tbody", body), foot)),
    )


def scrolling(name: str, content: Child) -> Markup:
    """A box that is never wider than the page; what is wider moves inside, by touch or by keyboard."""
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=name)


def _row(columns: Sequence[Column], cells: Sequence[Child]) -> Markup:
    first, *others = zip(columns, cells, strict=True)
    return tag(
        "tr",
        tag("th", first[1], scope="row"),
        [tag("td", cell, class_=_align(column)) for column, cell in others],
    )


def _align(column: Column) -> str | None:
    return "num" if column.figures else None


def folded(summary: str, *content: Child, is_open: bool = False) -> Markup:
    inner = render(tag("summary", summary), *content)
    return tag("details", inner, open="") if is_open else tag("details", inner)
