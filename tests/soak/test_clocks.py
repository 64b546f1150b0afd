"""A process whose clock is shifted for the soak is one like any other but for the time that it sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines" / "flower"))

pytest.importorskip("flwr")

from consortium import faketime_library, shifted

HANDED_OVER = """
import threading, time
began, used = time.perf_counter(), time.process_time()
for _ in range(50):
    told = threading.Event()
    threading.Timer(0.02, told.set).start()
    told.wait(60)
print((time.process_time() - used) / (time.perf_counter() - began), time.time())
"""


@pytest.mark.skipif(faketime_library() is None, reason="Debian's faketime is not installed")
def test_threads_of_a_process_whose_clock_is_shifted_wait_for_each_other_without_work() -> None:
    """They asked for the interpreter's lock all the time: a server needed ten times as long for a request."""
    shares, times = [], []
    for seconds in (0, 3600):
        ran = subprocess.run(
            [sys.executable, "-c", HANDED_OVER],
            env={**os.environ, **shifted(seconds)},
            capture_output=True,
            text=True,
            check=True,
        )
        share, shown = ran.stdout.split()
        shares.append(float(share))
        times.append(float(shown))
    assert 3000 < times[1] - times[0] < 4200
    # Of the time that passes, what is spent on computing.
    assert shares[1] < 5 * shares[0], shares
