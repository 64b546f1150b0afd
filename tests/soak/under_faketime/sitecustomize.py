"""Imported by every Python whose clock is shifted: libfaketime 0.9.10 lets `time.sleep` fail or never end.

It takes the end of a sleep, told by a clock that it does not shift, for one of the clock that it does.
"""

import threading
import time


def sleep(seconds: float) -> None:
    threading.Event().wait(seconds)


time.sleep = sleep  # type: ignore[assignment]
