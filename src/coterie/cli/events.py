"""What a server and a site say while they work: lines for people, or a JSON object per event."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

from coterie import notices
from coterie.cli.console import log_to, log_to_stderr
from coterie.files import finite


class JsonLines(logging.Formatter):
    """One object per line: when, how grave, what happened, in words, and what belongs to it by name.

    JSON has no line breaks in texts: nothing that came over the network begins a line of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        event, facts = getattr(record, "event", "log"), getattr(record, "facts", {})
        return event_line(record.created, record.levelname.lower(), event, record.getMessage(), facts)


def event_line(at: float, level: str, event: str, message: str, facts: Mapping[str, Any]) -> str:
    """A line of the log; numbers that JSON does not have are null."""
    when = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    known = {"at": when, "level": level, "event": event, "message": message}
    return json.dumps(finite({**known, **facts}), allow_nan=False)


class EventLog:
    """Says what happens on stderr, in one of both ways."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def tell(self, event: str, line: str, **facts: Any) -> None:
        """One event: as a line, or with its facts."""
        if self.as_json:
            print(event_line(time.time(), "info", event, line, facts), file=sys.stderr, flush=True)
        else:
            notices.note(line)

    def logging(self) -> AbstractContextManager[None]:
        """Have what the rooms below log said in the same way."""
        if not self.as_json:
            return log_to_stderr()
        notices.release()
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines())
        return log_to(handler)
