"""Eight sites, their server and the network between them, which go on whatever happens to any of them.

Whoever ended is started again, as a supervisor would do it. What ended without having been told to, and
without a reason that is known, is a problem.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_federation import RealFederation
from relay import Network, Relay
from site_folders import write_sites

from coterie.engines.flower.processes import free_port
from coterie.experiment.folder import RunFolder

NAMES = ("amber", "birch", "cedar", "dune", "elder", "fjord", "gorse", "heath")
TRUTH = {name: place % 2 for place, name in enumerate(NAMES)}
RECORDS = 120
NOISE_SEED = 5
REJOIN, WAIT, FIRST_WAIT = 0.4, 2.0, 20.0
"""How long the server waits for a site that was there, for sites to come when a run goes on, and at first; as
multiples of the time for an answer."""
FRAGILE = Path(__file__).with_name("fragile_site.py")
AGAIN_SECONDS = 1.0
"""Until somebody who ended is started again."""
EXPECTED_ENDS = (
    "no client answered",  # everybody was struck at once
    "did not join",
    "not all clients agree to the plan",
    "no facts",
    "the run is finished",
)
"""Why a server may end by itself: each says what happened, and that --resume goes on."""
_KNOWN_TROUBLES = re.compile(
    "flower-superlink ended|No space left|File too large|cannot listen there|the link"
)


def faketime_library() -> Path | None:
    """Debian's `libfaketime`, by which a process sees another time than the machine's."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    return found[0] if found and shutil.which("faketime") else None


@dataclass
class Place:
    """A site's two ways to the server, one for each port that it may be at."""

    relays: tuple[Relay, Relay]
    state: Path
    clock: int = 0
    start_at: float | None = None
    """When to start it again; None while it runs."""

    @property
    def address(self) -> str:
        return ",".join(f"127.0.0.1:{relay.port}" for relay in self.relays)


class Consortium(RealFederation):
    """A federation behind relays, with a supervisor for each of its processes."""

    def __init__(
        self, folder: Path, algorithm: dict[str, Any], rounds: int, seed: int, answer: float
    ) -> None:
        """Args:
        answer: seconds for an answer; on a busy machine honest ones take long, too.
        """
        folder.mkdir(parents=True)
        sites = write_sites(folder / "data", records=RECORDS, seed=seed, truth=TRUTH)
        experiment = {
            "data": {"name": "folder", "path": str(folder / "data" / "together")},
            "federation": {"kind": "natural"},
            "algorithm": algorithm,
            "privacy": {"epsilon": 8},
            "schedule": {"rounds": rounds, "batch": 30},
        }
        super().__init__(folder, sites, experiment)
        self.planned, self.answer = rounds, answer
        self.ports = (self.port, free_port())
        self.files = RunFolder(self.run)
        self.network = Network()
        self.places = {
            name: Place((self._relay(0), self._relay(1)), path / ".coterie") for name, path in sites.items()
        }
        self.server_clock = 0
        self.server_at: float | None = time.monotonic()
        self.strange: list[str] = []
        """What ended without a reason."""
        self.ended_by_itself = 0
        self._told: set[int] = set()

    def _relay(self, place: int) -> Relay:
        return self.network.relay_to(self.ports[place])

    # --- processes ----------------------------------------------------------------------------------

    def flag(self, name: str) -> Path:
        """The file that lets a site's next answer break."""
        return self.folder / f"{name}.break"

    def start_site(self, name: str) -> None:
        place = self.places[name]
        place.start_at = None
        self.join(
            name,
            *("--server", place.address, "--held-out", "0.2", "--split", f"0:{NAMES.index(name)}"),
            *("--evaluation-epsilon", "1"),
            program=(str(FRAGILE), str(self.flag(name))),
            environment=shifted(place.clock),
        )

    def start_server(self) -> None:
        self.server_at = None
        times = {"answer": 1.0, "rejoin": REJOIN, "wait": WAIT if self.begun else FIRST_WAIT}
        options = [(f"--{name}", f"{times[name] * self.answer:g}") for name in times]
        self.begin_serving(
            *(word for option in options for word in option),
            "--resume",
            environment=shifted(self.server_clock),
        )

    def kill_site(self, name: str, again: float) -> None:
        """Kill it, and start it again after so many seconds."""
        self.kill(self.joined[name])
        self.places[name].start_at = time.monotonic() + again

    def kill_server(self, again: float, *, move: bool = False) -> None:
        assert self.server is not None
        self._told.add(self.server.pid)
        self.kill(self.server)
        if move:
            self.port = self.ports[1 - self.ports.index(self.port)]
        self.server_at = time.monotonic() + again

    def serving(self) -> bool:
        return self.server_at is None and self.server is not None and self.server.poll() is None

    def here(self, name: str) -> bool:
        return name in self.joined and self.joined[name].poll() is None

    def finished(self, name: str) -> bool:
        return (self.places[name].state / "finished.json").exists()

    @property
    def begun(self) -> bool:
        """Whether everybody has agreed, and something was asked."""
        ledger = self.files.ledger
        return ledger.exists() and ledger.read_bytes().count(b"\n") > 1

    @property
    def over(self) -> bool:
        """Whether the run is finished, and everybody has ended."""
        ended = all(self.finished(name) and not self.here(name) for name in NAMES)
        return self.files.finished and ended and not self.serving()

    def supervise(self) -> None:
        """Start again whoever should run and does not."""
        now = time.monotonic()
        for name, place in self.places.items():
            if place.start_at is not None:
                if now >= place.start_at:
                    self.start_site(name)
            elif name not in self.joined:
                self.start_site(name)
            elif (code := self.joined[name].poll()) is not None and not self.finished(name):
                if code != -signal.SIGKILL:  # else it broke in the middle of an answer
                    self._strange(name, code)
                place.start_at = now + random.uniform(0.0, 4.0)
        if self.server_at is not None:
            if now >= self.server_at:
                self.start_server()
        elif self.server is not None and (code := self.server.poll()) is not None:
            waiting = [name for name in NAMES if not self.finished(name)]
            if code != 0 and self.server.pid not in self._told:
                self._told.add(self.server.pid)
                self.ended_by_itself += 1
                said = self._last_words("server")
                if not any(each in said for each in EXPECTED_ENDS) and not _KNOWN_TROUBLES.search(said):
                    self._strange("server", code)
            if waiting or not self.files.finished:
                self.server_at = now + AGAIN_SECONDS

    def _last_words(self, name: str) -> str:
        return " ".join(self.log(name).splitlines()[-6:])

    def _strange(self, name: str, code: int) -> None:
        self.strange.append(f"{name} ended by itself with exit code {code}: {self._last_words(name)[-300:]}")

    def wake_all(self) -> None:
        """End whatever still goes on of faults, and let everybody finish."""
        for place in self.places.values():
            for relay in place.relays:
                self.network.cut(relay, False)
                self.network.freeze(relay, False)
        for name in NAMES:
            self.flag(name).unlink(missing_ok=True)
        for process in [*self.joined.values(), *([self.server] if self.server else [])]:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                lift_limit(process)

    def stop(self) -> None:
        self.wake_all()
        super().stop()
        self.network.close()


def shifted(seconds: int) -> dict[str, str]:
    """The environment in which a process's clock is off."""
    library = faketime_library()
    if not seconds or library is None:
        return {}
    patched = Path(__file__).with_name("under_faketime")
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME": f"{seconds:+d}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # which measures how long something takes
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # with it, threads that wait for the interpreter's lock spin
        "PYTHONPATH": os.pathsep.join([str(patched), os.environ.get("PYTHONPATH", "")]),
    }


def limit_files(process: subprocess.Popen[bytes], size: int) -> None:
    """No file of this process grows beyond so many bytes: to it, the disk is full."""
    _, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, most))


def lift_limit(process: subprocess.Popen[bytes]) -> None:
    try:
        _, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
    except ProcessLookupError:
        pass
