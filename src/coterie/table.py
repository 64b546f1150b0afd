"""A table described once: Markdown and CSV here, HTML by the template that pages share."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
        """From rows that name their cells, all alike."""
        return cls(list(rows[0]) if rows else [], [list(row.values()) for row in rows], caption, words, total)

    def without_empty(self) -> "Table":
        """Less the columns in which no row has anything."""
        kept = [place for place in range(len(self.headings)) if any(row[place] != NONE for row in self.rows)]
        rows = [[row[place] for place in kept] for row in self.rows]
        return Table([self.headings[place] for place in kept], rows, self.caption, self.words, self.total)

    def markdown(self) -> str:
        """The lines of the table, without the caption."""
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        return "\n".join("| " + " | ".join(map(plain, cells)) + " |" for cells in lines)
