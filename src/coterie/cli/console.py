"""Printing for people (stderr for progress, stdout for results) and for machines (one JSON object)."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:  # printing a plan needs no torch
    from coterie.experiment.cells import Progress as CellProgress

out = Console()
err = Console(stderr=True)
LINE_SECONDS = 10.0
"""Time between two lines of progress where there is no terminal to draw a bar on."""


def print_json(content: Mapping[str, Any]) -> None:
    """One object on stdout and nothing else; JSON has no infinity, so the caller spells it out."""
    print(json.dumps(content, allow_nan=False))


def print_result(content: Mapping[str, Any], as_json: bool, show: Callable[[], None]) -> None:
    """A result for machines, or as a person wants to read it."""
    if as_json:
        print_json(content)
    else:
        show()


def say(text: str) -> None:
    """A line of the result, as it is: no colours, no breaks."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def complain(text: str, style: str = "red") -> None:
    """A line beside the result, for people."""
    err.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Progress of a deployment: who, which round, how much. Never a value that came from a record."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("coterie")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


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

    def update_cells(self, progress: "CellProgress") -> None:
        """How far the runs of a sweep are together."""
        finished = sum(progress.done[name] == progress.rounds[name] for name in progress.done)
        failed = f", {len(progress.failed)} failed" if progress.failed else ""
        self.update(sum(progress.done.values()), f"{finished} of {len(progress.done)} runs done{failed}")


def print_table(headings: Sequence[str], body: Sequence[Sequence[str]], title: str | None = None) -> None:
    table = Table(title=title, title_justify="left", header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    for cells in body:
        table.add_row(*cells)
    out.print(table)
