"""Messages between two processes whose large arrays lie in memory that both share.

A model's parameters would otherwise be copied into a pickle, through a socket, and out of a pickle again:
for 11 million of them a third of a second, during which one process or the other waits.
"""

import mmap
import os
import tempfile
from collections.abc import Sequence
from io import BytesIO
from itertools import accumulate
from multiprocessing.reduction import ForkingPickler
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

LARGE = 2**16
"""Bytes from which an array takes the shared memory: smaller ones are quicker through the socket."""
SLOTS = 2
"""Messages that may be under way at a time: the third takes the place of the first."""
_ALIGNED = 64
Parcel = tuple[list[int], bytes]
"""Bytes of each array in the shared memory, and the message around them."""


def nameless_file() -> IO[bytes]:
    """In memory where the system can; it lasts for as long as somebody holds it open."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("coterie"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


class Parcels:
    """One direction between two processes.

    Who packs must know that of all messages before the last, the other side has unpacked each.

    Args:
        handles: of a file for each slot.
    """

    def __init__(self, handles: Sequence[int]) -> None:
        assert len(handles) == SLOTS
        self._handles = list(handles)
        self._maps: list[mmap.mmap | None] = [None] * SLOTS
        self._count = 0

    def pack(self, message: object) -> Parcel:
        """What to send; large arrays stay in the shared memory."""
        arrays: list[NDArray[np.uint8]] = []

        def outside(buffer: Any) -> bool:
            """Keep the array out of the pickle, and say (falsely) that it need not be put into it."""
            flat = np.frombuffer(buffer.raw(), np.uint8)
            if flat.size < LARGE:
                return True
            arrays.append(flat)
            return False

        head = BytesIO()
        ForkingPickler(head, 5, True, outside).dump(message)
        sizes = [array.size for array in arrays]
        if arrays:
            shared = self._slot(_places(sizes)[-1])
            for array, first in zip(arrays, _places(sizes), strict=False):
                shared[first : first + array.size] = array
        self._count += 1
        return sizes, head.getvalue()

    def unpack(self, sent: Parcel) -> Any:
        """The message; its arrays are copies, so that the slot is free again."""
        sizes, head = sent
        found = []
        if sizes:
            shared = self._slot(_places(sizes)[-1])
            places = zip(_places(sizes), sizes, strict=False)
            found = [shared[first : first + size].copy() for first, size in places]
        self._count += 1
        return ForkingPickler.loads(head, buffers=found)

    def _slot(self, size: int) -> NDArray[np.uint8]:
        at = self._count % SLOTS
        mapped = self._maps[at]
        if mapped is None or len(mapped) < size:
            if os.fstat(self._handles[at]).st_size < size:
                os.ftruncate(self._handles[at], size)
            mapped = self._maps[at] = mmap.mmap(self._handles[at], size)
        return np.frombuffer(mapped, np.uint8)


def _places(sizes: Sequence[int]) -> list[int]:
    """Where each array begins, and where the last one ends."""
    return list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
