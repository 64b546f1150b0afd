"""The table of a reproduction inside a document, replaced in place whenever it is rendered again.

A document holds, for each reproduction and scale it shows, a pair of lines

    <!-- coterie reproduce rdpcfl-mnist --scale paper -->
    <!-- end -->

and everything between them is written from the run folder.
"""

from pathlib import Path

from coterie.errors import InputError
from coterie.experiment.folder import write_text
from coterie.reproduce.running import Reproduced
from coterie.reproduce.table import NONE, Comparison, Entry, notes, setting_text

END = "<!-- end -->"


def opening(name: str, scale: str) -> str:
    """The line that begins a table."""
    return f"<!-- coterie reproduce {name} --scale {scale} -->"


def write_into(document: Path, result: Reproduced) -> None:
    """Replace the table of this reproduction in a document."""
    start = opening(result.reproduction.name, result.scale_name.value)
    try:
        text = document.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{document}: cannot be read ({error.strerror})") from None
    before, found, rest = text.partition(start)
    old, closed, after = rest.partition(END)
    if not found or not closed or "<!-- coterie reproduce" in old:
        raise InputError(
            f"{document}: has no place for this table; put the lines '{start}' and '{END}' in it"
        )
    write_text(document, f"{before}{start}\n{table(result)}{END}{after}")


def table(result: Reproduced) -> str:
    """The table as a document shows it: ours, a stroke, theirs; ours bold where it is no worse."""
    if result.comparison is None:
        return ""
    lines = [""]
    for setting in result.comparison.settings:
        lines += [*_rows(result.comparison, setting), ""]
    said = [*notes(result.comparison), *(f"Differs: {sentence}" for sentence in result.scale.differs)]
    said += [f"Changed: {text}." for text in result.overrides]
    lines += [f"- {sentence}" for sentence in said]
    return "\n".join(lines) + "\n\n"


def _rows(comparison: Comparison, setting: dict[str, object]) -> list[str]:
    shown = comparison.measures
    headings = [setting_text(setting) or "algorithm", "runs", *(measure.heading for measure in shown)]
    headings += ["clusters found", "charged"] if comparison.has_clusters else ["charged"]
    body = [
        [
            line.row,
            str(len(line.runs)),
            *(_cell(entry) for entry in line.entries if entry.measure in shown),
            *([line.clusters_found] if comparison.has_clusters else []),
            "as planned" if all(run.charged.exact for run in line.runs) else line.charged,
        ]
        for line in comparison.lines
        if dict(line.setting) == setting
    ]
    return ["| " + " | ".join(row) + " |" for row in [headings, ["---"] * len(headings), *body]]


def _cell(entry: Entry) -> str:
    theirs = entry.printed.cell if entry.printed else None
    if entry.ours is None:
        return NONE
    ours = entry.measure.text(entry.ours)
    if theirs is None:
        return ours
    mark = f"**{ours}**" if entry.is_no_worse else ours
    return f"{mark} / {entry.measure.text(theirs.mean)}"
