"""A module as a program that ends with whoever started it, also where that was killed:

    python -m coterie.experiment.child MODULE ARGUMENT...

Its standard input is a pipe to which nobody writes. When it closes, the other end is gone. Runs are made to
be killed at any moment, so this process then ends at once, and leaves its folder to whoever resumes it.
"""

import os
import runpy
import sys
import threading


def _end_with_the_other() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_other, daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
