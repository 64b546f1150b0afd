"""Kill `coterie run` and `coterie compare` at random moments, resume them, and compare with unkilled ones.

    python tests/fuzz/kills.py --kills 200

Every experiment is run once in peace. Then it is begun, killed with SIGKILL at a moment drawn from all of its
time (some while after some round, before the first, or after the last), and resumed until it ends, over and
over. After each kill no process of it may be
left. At the end of each run its states, ledger, metrics, plan, guarantee and result must be those of the
peaceful one bit for bit (but for wall-clock times), `coterie verify` must find that it holds, and its folder
must hold no file that the peaceful one does not.
"""

import argparse
import csv
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

COMMON: dict[str, Any] = {
    "schedule": {"rounds": 20, "batch": 10},
    "seeds": {"simulation": 1, "noise": 0},
    "evaluation": {"references": False},
}
UNITS: dict[str, dict[str, Any]] = {
    "record": {
        **COMMON,
        "federation": {"kind": "clusters", "sizes": [2, 3], "records_per_client": 60},
        "algorithm": {"name": "r-dpcfl", "clusters": 2},
    },
    "client": {
        **COMMON,
        "federation": {"kind": "clusters", "sizes": [5, 5], "records_per_client": 30},
        "algorithm": {"name": "dp-ifca", "clusters": 2, "rate": 0.5, "rebalance": {"minimum": 2}},
        "privacy": {"unit": "client", "epsilon": 8, "delta": 0.01, "clip": 0.5},
    },
    "worker": {
        **COMMON,
        "federation": {
            "kind": "groups",
            "structure": "ring",
            "workers": 8,
            "groups": 4,
            "alpha": 1.0,
            "records_per_client": 20,
        },
        "model": {"name": "softmax"},
        "algorithm": {"name": "dp-ogl", "period": 2, "rate": 0.7, "noise": 2.0, "iterations": 2},
        "privacy": {"unit": "worker", "epsilon": 80.0, "delta": 1e-3, "clip": 0.5},
    },
}
SHARE_OF_COMPARE = 0.25
MOST_KILLS = 6
"""Of one run."""
TIMED = ("timing.jsonl", "seal.jsonl", "report.html", "public.html")
"""Files with wall-clock times in them, or made of ones that have."""
CHANGING = ("folder", "report", "seconds", "sample_gradients_per_second")
IMPORTED = (
    *("coterie.api", "coterie.cli.run", "coterie.cli.compare", "coterie.cli.verify"),
    *("torch._dynamo", "coterie.report.page", "jinja2.ext", "matplotlib.figure"),
)
"""What the commands import, before the first of them is begun or while they go on."""
MARK = "COTERIE_KILLS"
"""In the environment of every process that is begun here."""


@dataclass
class Tally:
    """What happened to one kind of command and unit."""

    command: str
    unit: str
    kills: int = 0
    before: int = 0  # kills that came before there was a ledger
    after: int = 0  # that came when there was a result
    resumed: int = 0  # runs that were killed at least once, and ended
    different: int = 0
    broken: int = 0
    leftovers: int = 0
    alive: int = 0

    @property
    def fine(self) -> bool:
        return not (self.different or self.broken or self.leftovers or self.alive)


HEADINGS = (
    *("command", "unit", "kills", "before the ledger", "after the result", "resumed to the end"),
    *("different", "not verified", "leftovers", "live children"),
)


class Campaign:
    """One command on one experiment, in a folder of its own."""

    def __init__(self, command: str, unit: str, folder: Path, draw: random.Random) -> None:
        self.tally, self._draw, self._folder = Tally(command, unit), draw, folder
        folder.mkdir(parents=True)
        content = UNITS[unit]
        if command == "compare":
            content = {"base": UNITS[unit], "grid": {"seeds.simulation": [1, 2]}}
        (folder / "experiment.yaml").write_text(yaml.safe_dump(content))
        began = time.monotonic()
        code, said = self._command("whole")
        assert code == 0, said
        self._seconds = time.monotonic() - began
        (folder / "whole").rename(folder.parent / f"{folder.name}-whole")
        self._whole = folder.parent / f"{folder.name}-whole"

    def go(self, kills: int) -> Tally:
        """Kill so often, each run a few times; then let it end."""
        while self.tally.kills < kills:
            before, more = self.tally.kills, self._draw.randint(1, MOST_KILLS)
            enough = min(kills, before + more)
            while not self._attempt(kill=self.tally.kills < enough):
                pass
            self._check(killed=self.tally.kills > before)
            shutil.rmtree(self._folder / "out")
        return self.tally

    def _attempt(self, *, kill: bool) -> bool:
        """Begin or go on, and kill at some moment; whether it ended before."""
        process = self._begin("out")
        ended = self._wait_for_moment(process) if kill else wait_for(process)
        if ended is not None:
            assert ended == 0, self._said()
            return True
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        self.tally.kills += 1
        runs = [*self._folder.glob("out/ledger.jsonl"), *self._folder.glob("out/cells/*/ledger.jsonl")]
        self.tally.before += not runs
        name = "report.html" if self.tally.command == "compare" else "result.json"
        self.tally.after += (self._folder / "out" / name).exists()
        latest = time.monotonic() + 10.0  # a cell ends when it next looks, which a busy machine delays
        while marked() and time.monotonic() < latest:
            time.sleep(0.02)
        for left in marked():
            self.tally.alive += 1
            os.kill(left, signal.SIGKILL)
        return False

    def _wait_for_moment(self, process: int) -> int | None:
        """The exit code, where the process ended before."""
        rounds = COMMON["schedule"]["rounds"] * (2 if self.tally.command == "compare" else 1)
        after = self._draw.randint(0, rounds)
        inside = 0 < after < rounds
        pause = self._draw.uniform(0.0, self._seconds / (rounds if inside else 3))
        while len(self._metrics()) < after:
            if (code := wait_for(process, 0.005)) is not None:
                return code
        return wait_for(process, pause)

    def _metrics(self) -> list[bytes]:
        """What was written down of all rounds, in all cells."""
        found: list[bytes] = []
        for pattern in ("out/metrics.jsonl", "out/cells/*/metrics.jsonl"):
            for path in self._folder.glob(pattern):
                with suppress(FileNotFoundError):
                    found += path.read_bytes().splitlines()
        return found

    def _check(self, *, killed: bool) -> None:
        found, whole = (contents(path) for path in (self._folder / "out", self._whole))
        self.tally.resumed += killed
        for name in sorted(found.keys() - whole.keys()):
            self._problem("leftovers", f"{name} is left")
        beside = {path.name for path in self._folder.iterdir()} - {"out", "experiment.yaml", "said"}
        for name in sorted(beside):
            self._problem("leftovers", f"{name} is left beside the folder")
        for name in sorted(whole.keys() - found.keys()):
            self._problem("different", f"{name} is missing")
        for name in sorted(found.keys() & whole.keys()):
            if found[name] != whole[name]:
                self._problem("different", f"{name} differs")
        if wait_for(self._begin("out", verify=True)) != 0:
            self._problem("broken", self._said())

    def _problem(self, kind: str, text: str) -> None:
        setattr(self.tally, kind, getattr(self.tally, kind) + 1)
        print(f"{self.tally.command} {self.tally.unit}: {text}", file=sys.stderr, flush=True)

    def _command(self, out: str) -> tuple[int | None, str]:
        code = wait_for(self._begin(out))
        return code, self._said()

    def _said(self) -> str:
        return (self._folder / "said").read_text(errors="replace")

    def _begin(self, out: str, *, verify: bool = False) -> int:
        """The command in a process of its own: this one, which has imported all it takes, once more."""
        process = os.fork()
        if process:
            return process
        os.chdir(self._folder)
        with Path("said").open("wb") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        os.environ[MARK] = str(os.getppid())
        command = [self.tally.command, "experiment.yaml", "--out", out, "--resume", "--json"]
        sys.argv = ["coterie", *(["verify", out] if verify else command)]
        from coterie.cli.main import main

        try:
            main()
        except SystemExit as end:
            os._exit(int(end.code or 0))
        os._exit(0)


def wait_for(process: int, seconds: float | None = None) -> int | None:
    """The exit code of a process; None where it takes longer."""
    latest = None if seconds is None else time.monotonic() + seconds
    while latest is None or time.monotonic() < latest:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def marked() -> list[int]:
    """Processes that were begun here and are alive."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={os.getpid()}".encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
        except OSError:
            continue
    return found


def contents(folder: Path) -> dict[str, object]:
    """What every file of a run or a comparison says, but for wall-clock times."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_dir():
            found[name] = None
        elif path.name in TIMED or path.suffix == ".log":
            found[name] = ""
        elif path.name == "result.json":
            figures = json.loads(path.read_text())
            found[name] = {key: value for key, value in figures.items() if key not in CHANGING}
        elif path.name == "table.csv":
            rows = csv.DictReader(path.read_text().splitlines())
            found[name] = [{key: row[key] for key in row if key not in CHANGING} for row in rows]
        elif path.name == "table.md":  # has the same numbers, rounded
            found[name] = ""
        else:
            found[name] = path.read_bytes()
    return found


def table(tallies: Sequence[Tally]) -> str:
    """What was tried and what came of it, as markdown."""
    rows = [astuple(each) for each in tallies]
    total = ("all", "", *(sum(row[place] for row in rows) for place in range(2, len(HEADINGS))))
    lines = [HEADINGS, ("---", "---", *["---:"] * (len(HEADINGS) - 2)), *rows, total]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main() -> int:
    options = argparse.ArgumentParser(description="Kill runs and comparisons, resume them, compare.")
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", choices=("run", "compare"))
    chosen = options.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # a process with threads cannot be forked
    os.environ.setdefault("COTERIE_REGISTER", tempfile.mkdtemp())
    for module in IMPORTED:
        import_module(module)

    compared = round(chosen.kills * SHARE_OF_COMPARE)
    quotas = {"run": chosen.kills - compared, "compare": compared}
    if chosen.only:
        quotas = {chosen.only: chosen.kills}
    tallies = []
    with tempfile.TemporaryDirectory(prefix="coterie-kills-") as scratch:
        for command, quota in quotas.items():
            for place, unit in enumerate(UNITS):
                kills = quota // len(UNITS) + (place < quota % len(UNITS))
                if kills:
                    draw = random.Random(f"{chosen.seed} {command} {unit}")
                    campaign = Campaign(command, unit, Path(scratch) / f"{command}-{unit}", draw)
                    tallies.append(campaign.go(kills))
                    print(f"{command} {unit}: {kills} kills", file=sys.stderr, flush=True)
    print(table(tallies))
    return 0 if all(each.fine for each in tallies) else 1


if __name__ == "__main__":
    sys.exit(main())
