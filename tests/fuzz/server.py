"""The process that cases run in: it imports everything once, and each case is a child of its own.

A line of JSON on standard input asks for a case, a line on standard output says what its exit code was.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import IO, Any

MEMORY = 6 * 2**30
"""Bytes that a case may take."""
SMALL = """
federation: {sizes: [2, 2], records_per_client: 40, test_per_client: 10}
schedule: {rounds: 1, batch: 20}
evaluation: {references: false}
engine: {workers: 1}
algorithm: {name: global}
"""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.update(COLUMNS="200", MPLBACKEND="agg", OMP_NUM_THREADS="1", BROWSER="true")
    os.environ.setdefault("COTERIE_REGISTER", tempfile.mkdtemp())  # no case enters records in anybody's home
    _warm_up()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    gc.collect()
    gc.freeze()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.monotonic()
        child = _begun(asked["arguments"], Path(asked["folder"]), asked["room"])
        code = _ended(child, asked["seconds"])
        print(json.dumps({"code": code, "seconds": time.monotonic() - began}), file=answers, flush=True)


def _warm_up() -> None:
    """Import what commands import, and let a small run compile what it compiles."""
    import torch

    torch.set_num_threads(1)
    import coterie.report.comparison
    import coterie.reproduce.running  # noqa: F401
    from coterie.cli.main import COMMANDS, load

    for name in COMMANDS:
        load(name)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "e.yaml").write_text(SMALL)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            code = _command(["run", f"{folder}/e.yaml", "--out", f"{folder}/out"])
    if code != 0:
        raise RuntimeError("the smallest run does not work")


def _begun(arguments: Sequence[str], folder: Path, room: int | None) -> int:
    """The child that runs a command in `folder/work` and prints to `folder/out` and `folder/err`."""

    from coterie.experiment import cells

    def child() -> int:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        for number, name, mode in (
            (0, os.devnull, "rb"),
            (1, folder / "out", "wb"),
            (2, folder / "err", "wb"),
        ):
            with open(name, mode) as file:
                os.dup2(file.fileno(), number)
        os.chdir(folder / "work")
        cells.subprocess = Processes()  # type: ignore[assignment, attr-defined]
        return _command(arguments)

    return _forked(child)


def _forked(work: Callable[[], int]) -> int:
    """A child, the first of a group of processes, that ends with what the function returns."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        with suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    code = 70
    try:
        os.setpgid(0, 0)
        atexit._clear()  # what libraries registered when they were imported takes longer than most cases
        code = work()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code & 255)


def _command(arguments: Sequence[str]) -> int:
    """Run `coterie` as a shell would; what no shell would ever see is printed as Python prints it."""
    from coterie.cli.main import main as coterie

    sys.argv = ["coterie", *arguments]
    try:
        coterie()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _ended(pid: int, seconds: float) -> int | None:
    """The exit code of a child, as a shell would say it; None where its time ran out and it was killed.

    Its time is that of a processor, or time in which it does nothing at all: a busy machine is no hang.
    """
    handle = os.pidfd_open(pid)
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    worked, since, in_time = 0.0, time.monotonic(), False
    while not in_time and worked < seconds and time.monotonic() - since < seconds:
        in_time = bool(waiting.poll(100))
        if not in_time and (now := _worked(pid)) > worked:
            worked, since = now, time.monotonic()
    os.close(handle)
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)  # with whatever it started
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return None if not in_time else code if code >= 0 else 128 - code


def _worked(pid: int) -> float:
    """Seconds of a processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Forked:
    """As much of a `Popen` as a comparison uses: a run as a child of this process, with all its imports."""

    def __init__(self, arguments: Sequence[str], stderr: IO[bytes] | None) -> None:
        def child() -> int:
            if stderr is not None:
                os.dup2(stderr.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return _command(arguments)

        self.pid = _forked(child)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        ends = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > ends:
                raise subprocess.TimeoutExpired("coterie", timeout)
            time.sleep(0.01)
        return code

    def communicate(self) -> None:
        self.wait()

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Processes:
    """The module `subprocess`, but a run of a comparison is a fork, which saves it seconds of imports."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, arguments: Sequence[str], *rest: Any, **named: Any) -> Any:
        if "coterie" in arguments:
            words = arguments[list(arguments).index("coterie") + 1 :]
            return Forked([str(word) for word in words], named.get("stderr"))
        return subprocess.Popen(arguments, *rest, **named)


if __name__ == "__main__":
    main()
