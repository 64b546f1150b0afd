"""Eight sites and a server under a fault every few seconds; then everything that was written down must agree.

    python tests/soak/soak.py --minutes 30 --least 60
    python tests/soak/soak.py --minutes 3 --rounds 8 --seed 4

Real processes with TLS and keys, each site behind relays of its own. Somebody is killed, stopped beyond the
deadline, cut off, frozen, has no room on its disk or another time on its clock, dies with half an answer
pushed; the server is killed, moved, stopped. Whoever ends is started again. When the time (from the first
round on) is over, the run goes on in peace to its end, and

- the ledgers of the server and of all sites agree with each other, with the contracts and with the answers,
- every answer that is missing has its reason recorded,
- a simulation in which exactly those answer who answered reaches the same models, bit for bit, and each site
  has taken home the one that is its own.

As many runs as fit into the time go one after the other. Exit code 1 where anything disagrees, or where fewer
rounds were struck than asked for (`--least`). Stopped by SIGTERM or Ctrl-C, it ends all that it started.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines" / "flower"))

from consortium import NAMES, Consortium, faketime_library
from faults import FAULTS, Fault, next_fault
from real_federation import processes_about
from settlement import Settlement, participation_of, settle

from coterie.engines.flower.server import Participation

ALGORITHMS: tuple[dict[str, Any], ...] = (
    {"name": "r-dpcfl", "clusters": 2},
    {"name": "global"},
    {"name": "dp-ifca", "clusters": 2, "start": "random"},
)
EVERY, ANSWER = 4.0, 12.0
"""Seconds between two faults, on average, and for an answer."""
TICK = 0.1
LEAST_SECONDS = 60.0
"""Of time that is left: with less, no other run is begun."""
START_SECONDS, PEACE_SECONDS = 900.0, 900.0
"""For a run to begin, and to end when nothing strikes it any more."""


class Soak:
    """One run from its start to its end, struck until the time is over."""

    def __init__(self, world: Consortium, draw: random.Random, every: float) -> None:
        self.world, self._draw, self._every = world, draw, every
        self.faults: list[Fault] = []
        self._going_on: list[Fault] = []
        self.rounds_struck, self.seconds = 0, 0.0

    def go(self, seconds: float) -> Settlement:
        """Strike for so many seconds after the first round has begun, or until the run is over."""
        world, began = self.world, time.monotonic()
        strike_at, until = began + self._pause(), began + START_SECONDS
        peace = begun = None
        while not world.over:
            now = time.monotonic()
            world.supervise()
            if begun is None and world.begun:
                begun, until = now, now + seconds
            for fault in [each for each in self._going_on if each.over]:
                fault.close()
                self._going_on.remove(fault)
            if now >= until and peace is None:
                peace = now
                self._make_peace()
            if begun is not None and peace is None and now >= strike_at:
                strike_at = now + self._pause()
                self._strike()
            if peace is not None and now > peace + PEACE_SECONDS:
                return Settlement(problems=[f"did not end: {world.log('server')[-500:]}"])
            time.sleep(TICK)
        if peace is None:
            peace = time.monotonic()
            self._make_peace()
        self.seconds = peace - (begun or peace)
        found = settle(world)
        found.problems += world.strange
        return found

    def _pause(self) -> float:
        return self._draw.expovariate(1.0 / self._every)

    def _strike(self) -> None:
        fault = next_fault(self.world, {each.target for each in self._going_on}, self._draw)
        if fault is not None:
            self.faults.append(fault)
            self._going_on.append(fault)
            said = f"round {fault.rounds[0]}: {fault.name}: {fault.target}"
            print(f"{time.strftime('%H:%M:%S')} {said}", file=sys.stderr, flush=True)

    def _make_peace(self) -> None:
        self.rounds_struck = self.world.rounds()
        for fault in self._going_on:
            fault.close()
        self._going_on.clear()
        self.world.wake_all()


# --- what became of it ------------------------------------------------------------------------------


def became_of(fault: Fault, record: Sequence[Participation]) -> str:
    """Why the target missed something in the rounds that a fault touched, or that it did not."""
    first, last = fault.rounds
    touched = [one for one in record if first <= one.round <= last]
    reasons = {one.missing[fault.target] for one in touched if fault.target in one.missing}
    return "; ".join(sorted(reasons)) if reasons else "nothing was missed"


def table(faults: Iterable[tuple[Fault, str]]) -> str:
    """Faults and what became of them, as markdown."""
    by_kind: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for fault, outcome in faults:
        by_kind[fault.name][outcome] += 1
    lines = [
        "| fault | times | what its target missed in the rounds that it touched |",
        "| --- | ---: | --- |",
    ]
    for kind in FAULTS:
        found = by_kind[kind.name]
        if kind.at_server:
            told = "the run went on" if found else ""
        else:
            told = ", ".join(f"{outcome} ({times})" for outcome, times in found.most_common())
        lines.append(f"| {kind.name} | {found.total()} | {told} |")
    return "\n".join(lines)


def main() -> int:
    options = argparse.ArgumentParser(description="Strike sites and server while they run; then check.")
    options.add_argument("--minutes", type=float, default=30.0)
    options.add_argument("--rounds", type=int, default=20, help="of each run")
    options.add_argument("--every", type=float, default=EVERY, help="seconds between two faults, on average")
    options.add_argument("--answer", type=float, default=ANSWER, help="seconds; more on a busy machine")
    options.add_argument(
        "--least", type=int, default=0, help="rounds that must be reached while faults strike"
    )
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--keep", type=Path, help="folder in which runs, logs and ledgers stay")
    chosen = options.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    if faketime_library() is None:
        print("no clock is changed: Debian's faketime is not installed", file=sys.stderr)
    began = time.monotonic()
    left = 60.0 * chosen.minutes
    settled: list[Settlement] = []
    outcomes: list[tuple[Fault, str]] = []
    struck = ended = 0
    with tempfile.TemporaryDirectory(prefix="coterie-soak-") as scratch:
        place = chosen.keep or Path(scratch)
        os.environ.setdefault("COTERIE_REGISTER", str(place / "register"))
        while not settled or (left > LEAST_SECONDS and not settled[-1].problems):
            number = len(settled)
            draw = random.Random(f"{chosen.seed} {number}")
            algorithm = ALGORITHMS[number % len(ALGORITHMS)]
            folder = place / f"run-{number}"
            with Consortium(folder, algorithm, chosen.rounds, number, chosen.answer) as world:
                soak = Soak(world, draw, chosen.every)
                settled.append(soak.go(left))
                left -= soak.seconds
                record = participation_of(world.files)
                outcomes += [(fault, became_of(fault, record)) for fault in soak.faults]
                struck, ended = struck + soak.rounds_struck, ended + world.ended_by_itself
            alive = processes_about(world.folder)
            settled[-1].check(not alive, f"processes that are still there: {alive}")
            end = settled[-1]
            print(
                f"run {number + 1}, {algorithm['name']}: {end.rounds} rounds, {soak.rounds_struck} of them "
                f"struck, {end.answers} answers, {end.missing.total()} missing, {len(end.problems)} problems",
                file=sys.stderr,
                flush=True,
            )
    _print(settled, outcomes, struck, ended, time.monotonic() - began)
    if struck < chosen.least:
        print(f"too few: {struck} rounds while faults struck, of at least {chosen.least}")
    return 1 if struck < chosen.least or any(each.problems for each in settled) else 0


def _print(
    settled: Sequence[Settlement],
    outcomes: Sequence[tuple[Fault, str]],
    struck: int,
    ended: int,
    seconds: float,
) -> None:
    rounds, requests = sum(each.rounds for each in settled), sum(each.requests for each in settled)
    missing = sum((each.missing for each in settled), Counter[str]())
    print(
        f"{rounds} rounds of {len(settled)} runs between {len(NAMES)} sites in {seconds / 60:.1f} minutes, "
        f"{struck} of them while {len(outcomes)} faults struck; the server ended by itself {ended} times"
    )
    print(table(outcomes))
    print(
        f"{requests} requests: {sum(each.answers for each in settled)} answers, {missing.total()} missing"
        + "".join(f"; {why}: {times}" for why, times in missing.most_common())
    )
    print(
        f"charges: {sum(each.server_charges for each in settled)} in the server's ledgers, "
        f"{sum(each.site_charges for each in settled)} in those of the sites, of which "
        f"{sum(each.in_vain for each in settled)} for answers that did not come in time"
    )
    problems = [problem for each in settled for problem in each.problems]
    for problem in problems:
        print(f"disagrees: {problem}")
    if not problems:
        print("ledgers, charges and answers agree; the simulations that replay them reach the same bits")


if __name__ == "__main__":
    sys.exit(main())
