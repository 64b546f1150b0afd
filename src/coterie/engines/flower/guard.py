"""The listening socket before the proxy: who may hold how many connections, and for how long unproven.

A connection costs whoever opens it nothing, and the server a little. So connections on which nobody has
proven to be a site yet are few, in all and from each address, and short-lived: where there are too many, the
oldest of them are closed, so that one more of a site's finds room however many strangers hold on. Connections
of sites that have proven who they are do not count.
"""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

UNPROVEN, UNPROVEN_EACH = 256, 64
"""Connections at a time on which nobody has proven who it is: in all, and from one address."""
MOST = 1024
"""Connections at a time of anybody."""
SECONDS = 15.0
"""For a handshake and the head of a first request; after that a connection that proves nothing is closed."""
Address = tuple[str, int]


class CountedSocket(socket.socket):
    """A connection that tells when it is closed."""

    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        told, self.on_close = self.on_close, None
        super().close()
        if told is not None:
            told()


class Guard:
    """All connections that are open, by where they come from."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._unproven: dict[Address, tuple[float, CountedSocket]] = {}
        self._proven: set[Address] = set()
        self.closed = 0

    def admit(self, connection: CountedSocket, address: Address) -> bool:
        """Whether a new connection may stay; for it an older one without proof may have to go."""
        with self._lock:
            if len(self._proven) + len(self._unproven) >= MOST and not self._unproven:
                return False
            here = [each for each in self._unproven if each[0] == address[0]]
            leaving = here[:1] if len(here) >= UNPROVEN_EACH else []
            if not leaving and len(self._unproven) >= UNPROVEN:
                leaving = [self._oldest_of_most()]
            for each in leaving:
                self._end(each)
            self._unproven[address] = (self._clock(), connection)
        connection.on_close = lambda: self._forget(address)
        return True

    def _oldest_of_most(self) -> Address:
        """Of whoever holds most, the oldest: who has few connections keeps them."""
        [(busiest, _)] = Counter(host for host, _ in self._unproven).most_common(1)
        return next(each for each in self._unproven if each[0] == busiest)

    def _end(self, address: Address) -> None:
        """Cut a connection off; whoever serves it sees its end and closes it."""
        _, connection = self._unproven.pop(address)
        self.closed += 1
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def _forget(self, address: Address) -> None:
        with self._lock:
            self._unproven.pop(address, None)
            self._proven.discard(address)

    def trust(self, address: Address | None) -> None:
        """Somebody proved on this connection to be a site."""
        with self._lock:
            if address is not None and self._unproven.pop(address, None) is not None:
                self._proven.add(address)

    def sweep(self) -> None:
        """Close connections that have proven nothing for too long."""
        with self._lock:
            since = self._clock() - SECONDS
            for address in [each for each, (began, _) in self._unproven.items() if began < since]:
                self._end(address)

    @property
    def counts(self) -> tuple[int, int]:
        """Connections of sites, and those of nobody knows whom."""
        return len(self._proven), len(self._unproven)


class GuardedSocket(socket.socket):
    """A listening socket that asks a guard about every connection."""

    guard: Guard

    def accept(self) -> tuple[socket.socket, Address]:
        handle, address = self._accept()  # type: ignore[attr-defined]
        connection = CountedSocket(self.family, self.type, self.proto, fileno=handle)
        if not self.guard.admit(connection, address[:2]):
            connection.close()
            raise ConnectionAbortedError  # which whoever accepts takes for a visitor that went away
        return connection, address
