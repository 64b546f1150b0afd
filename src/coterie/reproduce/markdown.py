"""The table of a reproduction as Markdown: in a file of its own, and inside documents.

A document holds, for each reproduction and scale it shows, a pair of lines

    <!-- coterie reproduce rdpcfl-mnist --scale paper -->
    <!-- end -->

and everything between them is replaced whenever the run folder is rendered again.
"""

from collections.abc import Sequence
from pathlib import Path

from coterie.errors import InputError
from coterie.experiment.composition import ALONE
from coterie.files import regular, write_text
from coterie.reproduce.declared import ScaleName
from coterie.reproduce.table import Line, Reproduction, setting_text
from coterie.table import Table, plain

END = "<!-- end -->"


def markdown_table(
    reproduction: Reproduction, lines: Sequence[Line], first: str = "algorithm", *, brief: bool = False
) -> str:
    """The lines of one setting; the brief form has neither deviations nor verdicts.

    Args:
        first: heading of the column that names the rows.
    """
    shown, clusters = reproduction.quantities, reproduction.has_clusters
    headings = [first, "runs", *(quantity.heading for quantity in shown)]
    headings += ["clusters found"] if clusters else []
    headings.append("charged" if brief else "charged of planned")
    rows = []
    for line in lines:
        entries = [entry for entry in line.entries if entry.quantity in shown]
        as_planned = brief and all(run.charged.exact for run in line.runs)
        rows.append(
            [
                line.row if brief else line.name,
                str(len(line.runs)),
                *(entry.brief() if brief else entry.both() for entry in entries),
                *([line.clusters_found] if clusters else []),
                "as planned" if as_planned else line.charged,
            ]
        )
    return Table(headings, rows).markdown()


def markdown(reproduction: Reproduction) -> str:
    """One table for each setting: ours, and after the stroke what is printed, with the verdict in words."""
    parts: list[str] = []
    for setting, lines in reproduction.by_setting():
        parts += [f"### {plain(setting_text(setting))}", ""] if setting else []
        parts += [markdown_table(reproduction, lines), ""]
    parts += [*reproduction.notes(), "", ALONE, ""]
    parts += [f"- {plain(line.heading)}: {line.guarantee}" for line in reproduction.lines]
    return "\n".join(parts) + "\n"


def write_into(document: Path, result: Reproduction) -> None:
    """Replace the table of this reproduction in a document."""
    before, start, after = parted(document, result.experiment.name, result.scale_name)
    write_text(document, f"{before}{start}\n{_tables(result)}{END}{after}")


def parted(document: Path, name: str, scale: ScaleName) -> tuple[str, str, str]:
    """What stands before and after the table of a reproduction in a document, and the line it begins with."""
    start = f"<!-- coterie reproduce {name} --scale {scale.value} -->"
    try:
        text = regular(document).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is no text in UTF-8")
        raise InputError(f"{document}: cannot be read ({reason})") from None
    before, found, rest = text.partition(start)
    old, closed, after = rest.partition(END)
    if not found or not closed or "<!-- coterie reproduce" in old:
        raise InputError(
            f"{document}: has no place for this table; put the lines '{start}' and '{END}' in it"
        )
    return before, start, after


def _tables(result: Reproduction) -> str:
    """A table for each setting as a document shows it, and below them what a reader must know."""
    if result.compared is None:
        return ""
    lines = [""]
    for setting, rows in result.by_setting():
        heading = setting_text(setting) or "algorithm"
        lines += [markdown_table(result, rows, heading, brief=True), ""]
    lines += [f"- {note}" for note in result.notes()]
    lines += [f"- Differs: {sentence}" for sentence in result.scale.differs]
    lines += [f"- Changed: {plain(text)}." for text in result.overrides]
    return "\n".join(lines) + "\n\n"
