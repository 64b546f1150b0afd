"""Printing for people (stderr for progress, stdout for results) and for machines (one JSON object)."""

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Self

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from coterie import notices

if TYPE_CHECKING:  # printing a plan needs no torch
    from coterie.experiment.cells import Progress as CellProgress

out = Console()
err = Console(stderr=True)
LINE_SECONDS = 60.0
"""Time between two lines of progress where there is no terminal to draw a bar on.

Whoever reads a file wants to know that something goes on, and that a command which failed soon said why and
nothing else.
"""


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


def log_to_stderr() -> AbstractContextManager[None]:
    """Progress of a deployment: who, which round, how much. Never a value that came from a record."""
    notices.release()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    return log_to(handler)


@contextmanager
def log_to(handler: logging.Handler) -> Iterator[None]:
    """Let a handler have everything that the package logs."""
    logger = logging.getLogger("coterie")
    before, others = logger.level, logger.handlers
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers = others
        logger.setLevel(before)


class ProgressBar:
    """How far a long command is: a bar on a terminal, a line every minute elsewhere."""

    def __init__(self, what: str, total: int | None = None, *, quiet: bool = False) -> None:
        """Create; a quiet one says nothing, for machines."""
        self.what, self.total, self.quiet = what, total, quiet
        self._last_line, self._estimated = time.monotonic(), False
        self._first: tuple[int, float] | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TextColumn("{task.fields[left]}"),
            console=err,
            transient=True,
            disable=quiet or not err.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total, status="starting", left="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def begin(self, what: str, total: int) -> None:
        """What is done, in so many rounds, where that was not known from the start."""
        self.what, self.total = what, total
        self._bar.update(self._task, description=what, total=total)

    def step(self, text: str) -> None:
        """What is being done where no round is."""
        self._bar.update(self._task, status=text, left="", refresh=True)
        self._line(text)

    def update(self, done: int, status: str, left: float | None = None) -> None:
        """So many rounds are done, and the others will take so many seconds, or as long as those so far."""
        notices.release()
        first, began = self._first = self._first or (done, time.monotonic())
        if left is None and self.total is not None and done > first:
            left = (time.monotonic() - began) / (done - first) * (self.total - done)
        told = "" if left is None else f"about {duration(left)} left"
        self._bar.update(self._task, completed=done, status=status, left=told)
        self._line(", ".join(filter(None, (f"{done} of {self.total} rounds", status, told))))

    def update_cells(self, progress: "CellProgress") -> None:
        """How far the runs of a sweep are together; before the first begins, how long all will take."""
        if self.total is None:
            self.begin(self.what, sum(progress.rounds.values()))
        finished = sum(progress.done[name] == progress.rounds[name] for name in progress.done)
        if progress.left is not None and not self._estimated and not self.quiet and err.is_terminal:
            self._estimated = True
            runs = f"{len(progress.done) - finished} of {len(progress.done)} runs to do"
            complain(f"{self.what}: {runs}, about {duration(progress.left)}", style="")
        failed = f", {len(progress.failed)} failed" if progress.failed else ""
        status = f"{finished} of {len(progress.done)} runs done{failed}"
        self.update(sum(progress.done.values()), status, progress.left)

    def _line(self, text: str) -> None:
        late = time.monotonic() - self._last_line >= LINE_SECONDS
        if late and not self.quiet and not err.is_terminal:
            self._last_line = time.monotonic()
            print(f"{self.what}: {text}", file=sys.stderr, flush=True)


class StepHandler(logging.Handler):
    """Shows what is being done beside the bar; a warning is a line of its own."""

    def __init__(self, bar: ProgressBar) -> None:
        super().__init__()
        self._bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            notices.note(f"warning: {record.getMessage()}")
        else:
            self._bar.step(record.getMessage())


@contextmanager
def progress_of(what: str, *, quiet: bool) -> Iterator[ProgressBar]:
    """The bar of a command that also says what it does before and after its rounds."""
    with ProgressBar(what, quiet=quiet) as bar, nullcontext() if quiet else log_to(StepHandler(bar)):
        yield bar


def duration(seconds: float) -> str:
    """Roughly: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def print_table(headings: Sequence[str], body: Sequence[Sequence[str]], title: str | None = None) -> None:
    """A table no wider than the terminal of which nothing is cut.

    Cells are broken between words; where that is not enough, lines around cells go, and where that is not
    enough either, each row is a block of lines.
    """
    cells = [list(column) for column in zip(headings, *body, strict=True)]
    framed, bare = _widths(cells, out.width - 3 * len(cells) - 1), _widths(cells, out.width - 2 * len(cells))
    widths = framed or bare
    if widths is None:
        _print_blocks(headings, body, title)
        return
    table = Table(title=title, title_justify="left", header_style="bold")
    if framed is None:
        table.box, table.padding = box.SIMPLE_HEAD, (0, 0, 0, 1)
        table.show_edge = table.pad_edge = False
    for index, (heading, width) in enumerate(zip(headings, widths, strict=True)):
        justify: Literal["left", "right"] = "left" if index == 0 else "right"
        table.add_column(Text(heading), justify=justify, width=width, overflow="fold")
    for row in body:
        table.add_row(*map(Text, row))
    out.print(table)


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """As wide as the texts of each column are, or less where lines break between words; None: no room."""
    widths = [max(cell_len(text) for text in column) for column in columns]
    least = [max(cell_len(word) for text in column for word in _unbroken(text)) for column in columns]
    while sum(widths) > room:
        can = [place for place, width in enumerate(widths) if width > least[place]]
        if not can:
            return None
        widths[max(can, key=lambda place: widths[place])] -= 1
    return widths


def _unbroken(text: str) -> list[str]:
    """What must stay in one line: words, and a figure with its deviation."""
    return re.split(r"(?<!±)\s+(?!±)", text.strip())


def _print_blocks(headings: Sequence[str], body: Sequence[Sequence[str]], title: str | None) -> None:
    for line in filter(None, [title]):
        say(line)
    for row in body:
        say("")
        for heading, cell in zip(headings, row, strict=True):
            say(f"{heading}: {cell}")
    say("")
