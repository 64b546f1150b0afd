"""Printing for people (stderr for progress, stdout for results) and for machines (one JSON object)."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

out = Console()
err = Console(stderr=True)


def print_json(content: Mapping[str, Any]) -> None:
    """One object on stdout; infinities, which JSON lacks, become null."""
    print(json.dumps(_finite(content)))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def progress_bar() -> Progress:
    """A bar with room for a few words on how it goes."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=err,
        transient=True,
    )


def print_table(headings: Sequence[str], body: Sequence[Sequence[str]], title: str | None = None) -> None:
    table = Table(title=title, title_justify="left", header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    for cells in body:
        table.add_row(*cells)
    out.print(table)
