"""Printing for people (stderr for progress, stdout for results) and for machines (one JSON object)."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

out = Console()
err = Console(stderr=True)
LINE_SECONDS = 10.0
"""Time between two lines of progress where there is no terminal to draw a bar on."""


def print_json(content: Mapping[str, Any]) -> None:
    """One object on stdout and nothing else; JSON has no infinity, so the caller spells it out."""
    print(json.dumps(content, allow_nan=False))


class ProgressBar:
    """How far a long command is: a bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total = what, total
        self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total, status="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def update(self, done: int, status: str) -> None:
        self._bar.update(self._task, completed=done, status=status)
        if not err.is_terminal and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            print(f"{self.what}: {done} of {self.total} rounds, {status}", file=sys.stderr, flush=True)


def print_table(headings: Sequence[str], body: Sequence[Sequence[str]], title: str | None = None) -> None:
    table = Table(title=title, title_justify="left", header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    for cells in body:
        table.add_row(*cells)
    out.print(table)
