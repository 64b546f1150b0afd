"""A table described once, as Markdown, CSV and HTML."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

NONE = "–"


def plain(text: str) -> str:
    """One line of Markdown in which nothing is a tag of a page or the end of a table's cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """A table for machines, in which no text is a formula to a spreadsheet."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_inert(cell) for cell in row] for row in rows)
    return text.getvalue()


def _inert(cell: object) -> object:
    try:
        float(str(cell))
    except ValueError:
        return f"'{cell}" if str(cell).lstrip().startswith(("=", "+", "-", "@")) else cell
    return cell


@dataclass(frozen=True)
class Table:
    """Headings and rows; the first column names the row, figures stand right and line up.

    Args:
        words: headings of further columns that hold words.
        total: a last row that adds up the others.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    words: Sequence[str] = ()
    total: Sequence[str] | None = None

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[str, str]],
        caption: str = "",
        words: Sequence[str] = (),
        total: Sequence[str] | None = None,
    ) -> "Table":
        """From rows that name their cells, all alike; without any there is nothing to add up."""
        headings, cells = list(rows[0]) if rows else [], [list(row.values()) for row in rows]
        return cls(headings, cells, caption, words, total if rows else None)

    def without_empty(self) -> "Table":
        """Less the columns in which no row has anything."""
        kept = [place for place in range(len(self.headings)) if any(row[place] != NONE for row in self.rows)]
        rows = [[row[place] for place in kept] for row in self.rows]
        return Table([self.headings[place] for place in kept], rows, self.caption, self.words, self.total)

    def html(self) -> Markup:
        """The table under its caption, every text escaped; without scripts or styles of its own."""
        # The caption is no <caption>, which would be as wide as the table and scroll away with it.
        caption = Markup('<p class="caption">{}</p>\n').format(self.caption)
        region = Markup('<div class="scroll" tabindex="0" role="region" aria-label="{}">\n')
        headings = [
            Markup('<th scope="col"{}>{}</th>').format(self._kind(place), heading)
            for place, heading in enumerate(self.headings)
        ]
        head = Markup("<thead><tr>{}</tr></thead>\n").format(Markup("").join(headings))
        body = Markup("<tbody>\n{}\n</tbody>\n").format(Markup("\n").join(map(self._cells, self.rows)))
        foot = Markup("<tfoot>{}</tfoot>\n").format(self._cells(self.total)) if self.total else Markup("")
        table = Markup("<table>\n{}</table>\n</div>").format(head + body + foot)
        return caption + region.format(self.caption) + table

    def _kind(self, place: int) -> Markup:
        words = place == 0 or self.headings[place] in self.words
        return Markup("" if words else ' class="num"')

    def _cells(self, row: Sequence[str]) -> Markup:
        first = Markup('<th scope="row">{}</th>').format(row[0])
        rest = [
            Markup("<td{}>{}</td>").format(self._kind(place), cell)
            for place, cell in enumerate(row[1:], start=1)
        ]
        return Markup("<tr>{}{}</tr>").format(first, Markup("").join(rest))

    def markdown(self) -> str:
        """The lines of the table, without the caption."""
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        return "\n".join("| " + " | ".join(map(plain, cells)) + " |" for cells in lines)
