"""A federation of real processes on loopback, with TLS and keys; everything it starts, it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from coterie.engines.flower.keys import KeyFolder, make_keys
from coterie.engines.flower.processes import free_port

PATIENCE = 600.0
"""Seconds after which something is broken, on however busy a machine."""
HERE = Path(__file__).parent


def wait_until(what: str, true: Callable[[], Any], seconds: float = PATIENCE) -> None:
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            raise AssertionError(f"still not: {what}")
        time.sleep(0.2)


def processes_about(folder: Path) -> list[int]:
    """Processes of this machine whose command line or environment names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


class RealFederation:
    """One server and its sites, started like a consortium would start them."""

    def __init__(self, folder: Path, sites: dict[str, Path], experiment: dict[str, Any]) -> None:
        self.folder = folder
        self.sites = sites
        self.port = free_port()
        self.run = folder / "run"
        self.experiment = folder / "experiment.yaml"
        self.experiment.write_text(yaml.safe_dump(experiment))
        self.keys: KeyFolder = make_keys(folder / "keys", [], list(sites))
        self.server: subprocess.Popen[bytes] | None = None
        self.joined: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # --- starting and stopping ----------------------------------------------------------------------

    def serve(self, *options: str) -> subprocess.Popen[bytes]:
        """Start (or with --resume, go on) and return once sites can come."""
        told = self.log("server").count("serving on")
        server = self.begin_serving(*options)
        wait_until(
            "the server listens",
            lambda: self.log("server").count("serving on") > told or self.server_ended,
        )
        return server

    def begin_serving(
        self, *options: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start, or with --resume go on, and wait for nothing."""
        arguments = ["serve", str(self.experiment), "--keys", str(self.keys.path), "--port", str(self.port)]
        self.server = self._start(
            "server", ["-m", "coterie", *arguments, "--out", str(self.run), "--json", *options], environment
        )
        return self.server

    @property
    def server_ended(self) -> bool:
        return self.server is not None and self.server.poll() is not None

    def join(
        self,
        name: str,
        *options: str,
        program: Sequence[str] = ("-m", "coterie"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a site, or start it again."""
        self.joined[name] = self._start(
            name,
            [
                *program,
                *("join", "--data", str(self.sites[name]), "--server", f"127.0.0.1:{self.port}"),
                *("--ca", str(self.keys.authority), "--key", str(self.keys.sites / f"{name}.key")),
                *("--epsilon", "8", "--noise-seed", "5", *options),
            ],
            environment,
        )

    def _start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("ab") as out, (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                cwd=self.folder,
                start_new_session=True,
            )

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()

    def wait_for_end(self, seconds: float = PATIENCE) -> None:
        """Until the server and all sites have ended by themselves."""
        assert self.server is not None
        self.server.wait(timeout=seconds)
        for process in self.joined.values():
            process.wait(timeout=seconds)

    def stop(self) -> None:
        """End everything: the sites, then the server, then whatever else names our folder."""
        everything = [*self.joined.values(), *([self.server] if self.server else [])]
        for process in everything:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in everything:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        until = time.monotonic() + 20
        while (left := processes_about(self.folder)) and time.monotonic() < until:
            time.sleep(0.2)
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    # --- looking ------------------------------------------------------------------------------------

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def out(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()

    def rounds(self) -> int:
        """Rounds that are complete, by the server's own account."""
        path = self.run / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait_for_round(self, number: int) -> None:
        def reached() -> bool:
            assert not self.server_ended or self.rounds() >= number, self.log("server")
            return self.rounds() >= number

        wait_until(f"round {number}", reached)
