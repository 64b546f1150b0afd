"""Text from elsewhere: what a site lets into its contract, and how it writes it into its own log."""

import logging
import re
from typing import Any

from coterie.engines.flower.messages import RefusedError

MOST_LETTERS = 300
"""Of any text in a contract."""
MOST_CAVEATS = 16
RELEASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,39}")
"""Names that can stand in a line of the log without saying more than which release it was."""


def check_texts(data: object) -> None:
    """Raise `RefusedError` where a text in plain data, a key or a value, is very long or not printable."""
    waiting = [data]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            waiting += [*found.keys(), *found.values()]
        elif isinstance(found, list):
            waiting += found
        elif isinstance(found, str) and (len(found) > MOST_LETTERS or not found.isprintable()):
            raise RefusedError("words")


def printable(text: str) -> str:
    """One line of a terminal, whatever is in it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class SiteLog(logging.LoggerAdapter[logging.Logger]):
    """A site's log: nothing that came over the network ends a line or moves a cursor."""

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        if self.isEnabledFor(level):
            text = str(msg) % args if args else str(msg)
            super().log(level, "%s", printable(text), **options)


def site_log(name: str) -> SiteLog:
    return SiteLog(logging.getLogger(name), {})
