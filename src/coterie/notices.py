"""Notes on stderr beside a result, for whoever sits there.

A refusal is one line: a command holds notes back until its work has begun, and drops them when it refuses.
"""

import logging
import os
import stat
import sys

_LOGGER = logging.getLogger("coterie")
_held: list[str] | None = None


class _Held(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(self.format(record))


_HANDLER = _Held(logging.WARNING)


def hold() -> None:
    """Keep notes, and warnings of the rooms below, until it is known that the command goes on."""
    global _held
    _held = []
    _LOGGER.addHandler(_HANDLER)


def release(*, said: bool = True) -> None:
    """Say what was held back, and from now on everything at once; or say nothing of it."""
    global _held
    _LOGGER.removeHandler(_HANDLER)
    lines, _held = _held or [], None
    for line in lines if said else ():
        note(line)


def tell_here(line: str) -> None:
    """Say what nobody but the holder of the records may know: never into a file, such as a run's log."""
    try:
        in_a_file = stat.S_ISREG(os.fstat(sys.stderr.fileno()).st_mode)
    except (OSError, ValueError):  # a notebook's
        in_a_file = False
    if not in_a_file:
        note(line)


def note(line: str) -> None:
    """Say it on stderr, now or once it is known that the command goes on."""
    if _held is None:
        print(line, file=sys.stderr, flush=True)
    else:
        _held.append(line)
