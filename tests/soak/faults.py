"""What can happen to a site, a server and the network between them, each with its end.

A fault begins at some moment and has an end of its own accord; what became of it is read from the record of
who answered in the rounds that it touched.
"""

from __future__ import annotations

import os
import random
import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from consortium import NAMES, Consortium, faketime_library, lift_limit, limit_files
from real_federation import processes_about

SERVER = "server"
CLOCK_SECONDS = 60
ROOM = 100 * 1024
"""Bytes: an answer needs more room than that, and what else a site writes does not."""


class Fault(ABC):
    """Something that goes wrong, at one site or at the server.

    Args:
        target: a site's name, or `SERVER`.
    """

    name: ClassVar[str]
    at_server: ClassVar[bool] = False
    weight: ClassVar[float] = 1.0

    def __init__(self, world: Consortium, target: str, draw: random.Random) -> None:
        self.world, self.target, self.draw = world, target, draw
        self.began = time.monotonic()
        self.rounds = (world.rounds() + 1, world.rounds() + 1)
        """The first and the last round that it touched."""
        self.until = self.began + self.begin()

    @classmethod
    def possible(cls, world: Consortium, target: str) -> bool:
        """Whether it can happen there now: who is gone cannot be struck."""
        return world.serving() if cls.at_server else world.here(target)

    @abstractmethod
    def begin(self) -> float:
        """Do it; in how many seconds it is over."""

    def end(self) -> None:  # noqa: B027
        """Undo it, where that does not happen by itself."""

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until

    def close(self) -> None:
        self.end()
        self.rounds = (self.rounds[0], self.world.rounds() + 1)


# --- sites ------------------------------------------------------------------------------------------


class SiteKilled(Fault):
    name = "site killed (SIGKILL)"
    weight = 2.0

    def begin(self) -> float:
        again = self.draw.uniform(0.0, 8.0)
        self.world.kill_site(self.target, again)
        return again + 3.0


class SiteStopped(Fault):
    name = "site stopped beyond the deadline (SIGSTOP)"

    def begin(self) -> float:
        self.world.joined[self.target].send_signal(signal.SIGSTOP)
        return self.world.answer * self.draw.uniform(1.05, 1.7)

    def end(self) -> None:
        if self.world.here(self.target):
            self.world.joined[self.target].send_signal(signal.SIGCONT)


class HalfPushed(Fault):
    name = "site dies with its answer half pushed"
    weight = 1.5

    def begin(self) -> float:
        self.world.flag(self.target).write_text(str(self.draw.randint(0, 2)))
        return 2.0 * self.world.answer

    @property
    def over(self) -> bool:
        return super().over or not self.world.flag(self.target).exists()

    def end(self) -> None:
        self.world.flag(self.target).unlink(missing_ok=True)


class DiskFull(Fault):
    name = "site's disk full"

    def begin(self) -> float:
        limit_files(self.world.joined[self.target], ROOM)
        return self.draw.uniform(4.0, self.world.answer)

    def end(self) -> None:
        if self.world.here(self.target):
            lift_limit(self.world.joined[self.target])


class ClockWrong(Fault):
    name = "site back with its clock off by 60 s"

    @classmethod
    def possible(cls, world: Consortium, target: str) -> bool:
        return faketime_library() is not None and super().possible(world, target)

    def begin(self) -> float:
        self.world.places[self.target].clock = self.draw.choice([-CLOCK_SECONDS, 0, CLOCK_SECONDS])
        again = self.draw.uniform(0.0, 2.0)
        self.world.kill_site(self.target, again)
        return again + 5.0


# --- the network ------------------------------------------------------------------------------------


class RelayCut(Fault):
    name = "connection cut"
    weight = 1.5

    def begin(self) -> float:
        self._set(True)
        return self.draw.choice([0.1, self.draw.uniform(1.0, 0.8 * self.world.answer)])

    def end(self) -> None:
        self._set(False)

    def _set(self, cut: bool) -> None:
        for relay in self.world.places[self.target].relays:
            self.world.network.cut(relay, cut)


class RelayFrozen(Fault):
    name = "connection frozen"
    weight = 1.5

    def begin(self) -> float:
        self._set(True)
        return self.draw.uniform(2.0, 1.7 * self.world.answer)

    def end(self) -> None:
        self._set(False)

    def _set(self, frozen: bool) -> None:
        for relay in self.world.places[self.target].relays:
            self.world.network.freeze(relay, frozen)


# --- the server -------------------------------------------------------------------------------------


class ServerKilled(Fault):
    name = "server killed (SIGKILL)"
    at_server = True

    def begin(self) -> float:
        again = self.draw.uniform(0.0, 4.0)
        self.world.kill_server(again)
        return again + 10.0


class ServerMoved(Fault):
    name = "server killed and moved to another port"
    at_server = True

    def begin(self) -> float:
        again = self.draw.uniform(0.0, 4.0)
        self.world.kill_server(again, move=True)
        return again + 10.0


class ServerStopped(Fault):
    name = "server stopped (SIGSTOP)"
    at_server = True
    weight = 0.5

    def begin(self) -> float:
        assert self.world.server is not None
        self._process = self.world.server
        self._process.send_signal(signal.SIGSTOP)
        return self.draw.uniform(3.0, 20.0)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)


class ServerDiskFull(Fault):
    name = "server's disk full"
    at_server = True
    weight = 0.5

    @classmethod
    def possible(cls, world: Consortium, target: str) -> bool:
        return super().possible(world, target) and world.files.ledger.exists()

    def begin(self) -> float:
        assert self.world.server is not None
        self._process = self.world.server
        # In the middle of the line that it will write next.
        limit_files(self._process, self.world.files.ledger.stat().st_size + self.draw.randint(0, 400))
        return self.draw.uniform(3.0, 15.0)

    def end(self) -> None:
        lift_limit(self._process)


class ServerClockWrong(Fault):
    name = "server back with its clock off by 60 s"
    at_server = True
    weight = 0.5

    @classmethod
    def possible(cls, world: Consortium, target: str) -> bool:
        return faketime_library() is not None and super().possible(world, target)

    def begin(self) -> float:
        self.world.server_clock = self.draw.choice([-CLOCK_SECONDS, 0, CLOCK_SECONDS])
        again = self.draw.uniform(0.0, 2.0)
        self.world.kill_server(again)
        return again + 10.0


class LinkKilled(Fault):
    name = "Flower's link killed"
    at_server = True
    weight = 0.5

    def begin(self) -> float:
        for number in processes_about(self.world.folder):
            try:
                words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
                if any(word.endswith(b"flower-superlink") for word in words) and b"--database" in words:
                    os.kill(number, signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError):
                continue
        return 10.0


FAULTS: tuple[type[Fault], ...] = (
    *(SiteKilled, SiteStopped, HalfPushed, DiskFull, ClockWrong, RelayCut, RelayFrozen),
    *(ServerKilled, ServerMoved, ServerStopped, ServerDiskFull, ServerClockWrong, LinkKilled),
)
SERVER_SHARE = 0.05
"""Of all faults: each of them costs everybody a restart."""


def next_fault(world: Consortium, struck: set[str], draw: random.Random) -> Fault | None:
    """Something new, to somebody whom nothing else has struck; None where nobody is left."""
    at_server = draw.random() < SERVER_SHARE
    kinds = [kind for kind in FAULTS if kind.at_server == at_server]
    [kind] = draw.choices(kinds, [kind.weight for kind in kinds])
    target = SERVER if at_server else draw.choice(NAMES)
    if target in struck or not kind.possible(world, target):
        return None
    return kind(world, target, draw)
