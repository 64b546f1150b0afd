"""A figure as an SVG file of its own, with heading, legend and the colours of the page, for documents."""

import re
from collections.abc import Iterator
from importlib import resources
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from coterie.report.figures import Figure
from coterie.report.markup import number

SVG = "http://www.w3.org/2000/svg"
HEAD = 40.0
ROW = 22.0
MARGIN = 22.0
LETTER = 6.6
"""Width of a letter of the legend, on average."""


def file_name(figure: Figure) -> str:
    """The heading as a file name."""
    heading = figure.heading.lower().replace("+", "-plus")  # an algorithm's sign must not get lost
    return re.sub(r"[^a-z0-9]+", "-", heading).strip("-") + ".svg"


def standalone(figure: Figure) -> str:
    """The drawing of a figure, its heading above and its legend beneath, as one SVG document."""
    parts = ElementTree.fromstring(f"<figure>{figure.picture}</figure>")
    drawn = parts.find("svg")
    if drawn is None:
        raise ValueError(f"{figure.heading}: a figure without a drawing")
    _, _, width, height = (float(value) for value in drawn.attrib["viewBox"].split())
    legend = list(_placed(parts.findall("ul/li"), width))
    rows = 1 + max((row for row, _, _ in legend), default=-1)
    total = HEAD + height + ROW * rows + MARGIN
    outer = Element("svg", xmlns=SVG, viewBox=f"0 0 {number(width)} {number(total)}", role="img")
    outer.set("width", number(width))
    outer.set("height", number(total))
    SubElement(outer, "style").text = _style()
    SubElement(outer, "rect", {"class": "paper", "width": "100%", "height": "100%", "rx": "10"})
    heading = SubElement(outer, "text", {"class": "row heading", "x": number(MARGIN), "y": "28"})
    heading.text = figure.heading
    inner = SubElement(outer, "g", transform=f"translate(0 {number(HEAD)})")
    inner.extend(child for child in drawn if child.tag not in ("title", "desc"))
    for row, x, item in legend:
        _entry(outer, item, x, HEAD + height + ROW * row)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(outer, encoding="unicode") + "\n"


def _placed(items: list[Element], width: float) -> Iterator[tuple[int, float, Element]]:
    """Row and left edge of each entry of a legend, as many to a row as fit."""
    row, x = 0, MARGIN
    for item in items:
        needed = 34 + LETTER * len(_text(item)) + 16
        if x > MARGIN and x + needed > width:
            row, x = row + 1, MARGIN
        yield row, x, item
        x += needed


def _entry(outer: Element, item: Element, x: float, y: float) -> None:
    text, sample = _text(item), item.find("svg")
    if sample is not None:
        sample.set("x", number(x))
        sample.set("y", number(y))
        sample.tail = None
        outer.append(sample)
    SubElement(outer, "text", {"x": number(x + 34), "y": number(y + 11)}).text = text


def _text(item: Element) -> str:
    sample = item.find("svg")
    tail = sample.tail if sample is not None else item.text
    return (tail or "").strip()


def _style() -> str:
    """The colours and the rules for drawings, from the style sheet of the page."""
    sheet = resources.files("coterie.report").joinpath("style.css").read_text(encoding="utf-8")
    colours = sheet[: sheet.index("* {")]
    rules = sheet[sheet.index("svg text {") : sheet.index("@media (max-width")]
    own = (
        'svg { font-family: -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }\n'
        ".paper { fill: var(--card); }\n.heading { font-size: 16px; }\n"
    )
    return f"\n{colours}{rules}{own}"
