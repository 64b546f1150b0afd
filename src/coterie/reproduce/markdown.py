"""The table of a reproduction as Markdown, in a file of its own."""

from collections.abc import Sequence

from coterie.experiment.composition import ALONE
from coterie.reproduce.table import Line, Reproduction, setting_text
from coterie.table import Table, plain


def markdown(reproduction: Reproduction) -> str:
    """One table for each setting: ours, and after the stroke what is printed, with the verdict in words."""
    parts: list[str] = []
    for setting, lines in reproduction.by_setting():
        parts += [f"### {plain(setting_text(setting))}", ""] if setting else []
        parts += [_table(reproduction, lines), ""]
    parts += [*reproduction.notes(), "", ALONE, ""]
    parts += [f"- {plain(line.heading)}: {line.guarantee}" for line in reproduction.lines]
    return "\n".join(parts) + "\n"


def _table(reproduction: Reproduction, lines: Sequence[Line]) -> str:
    """The lines of one setting."""
    shown, clusters = reproduction.quantities, reproduction.has_clusters
    headings = ["algorithm", "runs", *(quantity.heading for quantity in shown)]
    headings += [*(["clusters found"] if clusters else []), "charged of planned"]
    rows = []
    for line in lines:
        entries = [entry.both() for entry in line.entries if entry.quantity in shown]
        found = [line.clusters_found] if clusters else []
        rows.append([line.name, str(len(line.runs)), *entries, *found, line.charged])
    return Table(headings, rows).markdown()
