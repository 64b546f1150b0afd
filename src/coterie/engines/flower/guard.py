"""The listening socket before the proxy: who may hold how many connections, and for how long unproven.

A connection costs whoever opens it nothing, and the server a little. So connections on which nobody has
proven to be a site yet are few, in all and from each address, and short-lived: where there are too many, the
oldest of them are closed, so that one more of a site's finds room however many strangers hold on. None has to
go before it had the time to prove who it is, or strangers who come fast enough would push out a site that
shares their address: rather the newcomer is turned away, before anything is computed for it, and a site tries
again. Connections of sites that have proven who they are do not count; a site keeps its own open.
"""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

UNPROVEN, UNPROVEN_EACH = 256, 64
"""Connections at a time on which nobody has proven who it is: in all, and from one address."""
UNPROVEN_OF_SITES = 128
"""The same, from an address from which a site has proven who it is and has not left."""
GRACE = 1.0
"""Seconds that a connection has for its proof before it may have to go for another."""
HEARD = 20.0
"""Seconds without a word after which whoever holds a site's connection counts for gone; heartbeats come more
often."""
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
        self._proven: dict[Address, tuple[float, bytes]] = {}
        self.closed = self.turned_away = 0

    def admit(self, connection: CountedSocket, address: Address) -> bool:
        """Whether a new connection may stay; for it an older one without proof may have to go."""
        with self._lock:
            if not self._make_room(address[0]):
                self.turned_away += 1
                return False
            self._unproven[address] = (self._clock(), connection)
        connection.on_close = lambda: self._forget(address)
        return True

    def _make_room(self, host: str) -> bool:
        """Whether there is room for one more from there; somebody may have to go for it."""
        counts = Counter(each for each, _ in self._unproven)
        of_sites = any(each == host for each, _ in self._proven)
        full_here = counts[host] >= (UNPROVEN_OF_SITES if of_sites else UNPROVEN_EACH)
        full = len(self._unproven) >= UNPROVEN or len(self._proven) + len(self._unproven) >= MOST
        if not full_here and not full:
            return True
        if not counts:
            return False
        # Of whoever holds most, the oldest: who has few connections keeps them.
        busiest = host if full_here else max(counts, key=counts.__getitem__)
        oldest = next(each for each in self._unproven if each[0] == busiest)
        had_its_time = self._clock() - self._unproven[oldest][0] >= GRACE
        if had_its_time or counts[busiest] > counts[host] + 1:
            self._end(oldest)
            return True
        return False

    def _end(self, address: Address) -> None:
        """Cut a connection off; whoever serves it sees its end and closes it."""
        _, connection = self._unproven.pop(address)
        self.closed += 1
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def _forget(self, address: Address) -> None:
        with self._lock:
            self._unproven.pop(address, None)
            self._proven.pop(address, None)

    def trust(self, address: Address | None, key: bytes) -> None:
        """The holder of a key proved on this connection to be a site, now."""
        with self._lock:
            if address is None:
                return
            if self._unproven.pop(address, None) is not None or address in self._proven:
                self._proven[address] = (self._clock(), key)

    def in_use(self, key: bytes, but: Address | None) -> bool:
        """Whether somebody with this key has spoken lately on another connection, which is still open."""
        with self._lock:
            since = self._clock() - HEARD
            return any(
                address != but and whose == key and heard >= since
                for address, (heard, whose) in self._proven.items()
            )

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
