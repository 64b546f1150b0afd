"""Flower's own programs as children of ours: started alike, watched, and never left behind."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from coterie.errors import CoterieError

# Dies with its parent, also when that is killed: the kernel tells it. Elsewhere than on Linux it is only told
# when we end in good order.
_LEASH = (
    "import ctypes, os, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, 15)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)
STOP_SECONDS = 10.0


class ChildEnded(CoterieError):
    """A program of Flower's ended by itself."""


def keep_loopback_direct() -> None:
    """Let no proxy carry what stays on this machine: Flower's clients ask the environment for one."""
    for name in ("NO_PROXY", "no_proxy"):
        kept = [entry for entry in os.environ.get(name, "").split(",") if entry]
        os.environ[name] = ",".join(dict.fromkeys([*kept, "127.0.0.1", "localhost", "::1"]))


def environment(home: Path) -> dict[str, str]:
    """Settings for every program of Flower's: it calls nobody, installs nothing, has a home of its own."""
    ours = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_HOME": str(home),
        "PATH": f"{ours}{os.pathsep}{os.environ.get('PATH', '')}",
    }


class Child:
    """One program, its log in a file; it ends with this process whatever happens."""

    def __init__(self, program: str, arguments: Sequence[str], home: Path, log: Path) -> None:
        keep_loopback_direct()
        settings = environment(home)
        found = shutil.which(program, path=settings["PATH"])
        if found is None:
            raise CoterieError(f"{program}: not found; pip install 'coterie[flower]' brings it")
        home.mkdir(parents=True, exist_ok=True)
        self.program, self.log = program, log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _LEASH, str(os.getpid()), found, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=settings,
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def close(self) -> None:
        """Ask it to end, wait, and insist; with whatever it started itself."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def free_port() -> int:
    """A port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Upstream:
    """Where a program of Flower's listens, and who signed its certificate (None: plaintext)."""

    address: str
    authority: Path | None = None

    @property
    def url(self) -> str:
        return f"{'http' if self.authority is None else 'https'}://{self.address}"

    @property
    def verify(self) -> ssl.SSLContext | bool:
        """How whoever calls it knows that it is the one."""
        return ssl.create_default_context(cafile=str(self.authority)) if self.authority else False


def wait_until_healthy(child: Child, upstream: Upstream, seconds: float = 120.0) -> None:
    """Return once the program answers; an error that names its log if it ends or takes too long."""
    until = time.monotonic() + seconds
    with httpx.Client(verify=upstream.verify, timeout=5, trust_env=False) as client:
        while time.monotonic() < until:
            ChildEnded.when(child.ended, f"{child.program} ended at its start; see {child.log}")
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"{upstream.url}/health").status_code == 200:
                    return
            time.sleep(0.2)
    raise ChildEnded(f"{child.program} does not answer; see {child.log}")


def new_secret(path: Path) -> bytes:
    """A fresh secret for every start, readable by its owner alone."""
    path.unlink(missing_ok=True)
    secret = secrets.token_bytes(32)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    return secret
