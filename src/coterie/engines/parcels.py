"""Messages between two processes whose large arrays lie in memory that both share.

A model's parameters would otherwise be copied into a pickle, through a socket, and out of a pickle again:
for 11 million of them a third of a second, during which one process or the other waits.
"""

import os
import tempfile
from collections.abc import Sequence
from io import BytesIO
from itertools import accumulate
from multiprocessing.reduction import ForkingPickler
from typing import IO, Any

import numpy as np

LARGE = 2**16
"""Bytes from which an array takes the shared memory: smaller ones are quicker through the socket."""
Parcel = tuple[int, list[int], bytes]
"""Where in the shared memory the first array begins, the bytes of each, and the message around them."""


def nameless_file() -> IO[bytes]:
    """In memory where the system can; it lasts for as long as somebody holds it open."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("coterie"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


class Parcels:
    """One direction between two processes.

    Who packs must know that of all messages before the last, the other side has unpacked each.

    Arrays are written and read, and not mapped: every mapping would hold the file open once more, of which a
    process may hold few, and end the process where a file has no more room.

    Args:
        handle: of the file that both share.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._last = range(0)

    def pack(self, message: object) -> Parcel:
        """What to send; large arrays stay in the shared memory."""
        arrays: list[memoryview] = []

        def outside(buffer: Any) -> bool:
            """Keep the array out of the pickle, and say (falsely) that it need not be put into it."""
            flat: memoryview = buffer.raw()
            if flat.nbytes < LARGE:
                return True
            arrays.append(flat)
            return False

        head = BytesIO()
        ForkingPickler(head, 5, True, outside).dump(message)
        sizes = [array.nbytes for array in arrays]
        # Before the last message's arrays if there is room, else behind them.
        first = 0 if sum(sizes) <= self._last.start else self._last.stop
        self._last = range(first, first + sum(sizes))
        for array, place in zip(arrays, _places(first, sizes), strict=True):
            _write(self._handle, array, place)
        return first, sizes, head.getvalue()

    def unpack(self, sent: Parcel) -> Any:
        """The message; its arrays are copies."""
        first, sizes, head = sent
        found = [np.empty(size, np.uint8) for size in sizes]
        for array, place in zip(found, _places(first, sizes), strict=True):
            _read(self._handle, array.data, place)
        return ForkingPickler.loads(head, buffers=found)


def _places(first: int, sizes: Sequence[int]) -> list[int]:
    """Where each array begins."""
    return list(accumulate(sizes, initial=first))[:-1]


def _write(handle: int, array: memoryview, place: int) -> None:
    while array:  # of very large ones, the system takes a part at a time
        written = os.pwrite(handle, array, place)
        array, place = array[written:], place + written


def _read(handle: int, array: memoryview, place: int) -> None:
    while array:
        read = os.preadv(handle, [array], place)
        if read == 0:
            raise EOFError("a message tells of more bytes than the shared memory holds")
        array, place = array[read:], place + read
