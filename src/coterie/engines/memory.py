"""Freed memory stays with the process that will want it again."""

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_OPTIONS = {_TRIM_THRESHOLD: 2**30, _TOP_PAD: 2**26, _MMAP_THRESHOLD: 2**28}


@cache
def keep_freed_memory() -> bool:
    """Ask the C library not to hand freed memory back to the kernel; false where there is nothing to ask.

    Only for processes that train: it holds for the whole process.

    A step frees and takes again the same tens of megabytes. By default they go back in between, and a third
    of a step is spent on pages that the kernel hands out anew, filled with zeros.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(option, value) == 1 for option, value in _OPTIONS.items())
