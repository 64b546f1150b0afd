"""`make fuzz`: thousands of strange inputs, a table of what became of them, and exit code 1 for a fault."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from case import Case, Outcome
from fuzzing import Tally, fuzz
from watcher import Seen

Counts = Counter[tuple[str, Outcome]]


def _part(number: int, cases: int, seconds: float, log: str) -> tuple[Counts, list[str], float]:
    """The cases of one process: counts, the faults in words, and the seconds of the slowest."""
    began = said = time.monotonic()
    logged = 0

    def tell(tally: Tally, done: int) -> None:
        nonlocal said, logged
        while log and logged < len(tally.kept):
            _write(Path(log), f"{number}-{logged}", *tally.kept[logged])
            logged += 1
        if (now := time.monotonic()) - said > 30:
            said = now
            print(f"part {number}: {done} cases, {len(tally.faults)} faults, {now - began:.0f} s", flush=True)

    with tempfile.TemporaryDirectory(prefix="fuzz-") as root:
        tally = fuzz(Path(root), cases, number, seconds, tell)
    return tally.counts, [told(*fault) for fault in tally.faults], tally.slowest


def _write(log: Path, name: str, case: Case, outcome: Outcome, seen: Seen) -> None:
    """A case to look at: its folder as the command found it, and a text of that name beside it."""
    folder = log / f"{outcome}-{name}".replace(" ", "-")
    folder.mkdir(parents=True)
    case.lay_out(folder)
    folder.with_name(f"{folder.name}.txt").write_text(
        told(case, outcome, seen) + "\n", errors="backslashreplace"
    )


def told(case: Case, outcome: Outcome, seen: Seen) -> str:
    """A case to look at: what was asked, over which files, and what came of it."""
    option = f" {case.option}" if case.option else ""
    smallest = sorted(case.files.items(), key=lambda file: len(file[1] or ""))[:4]
    files = "".join(f"    {name}: {content!r:.400}\n" for name, content in smallest)
    return (
        f"{outcome}{option} ({case.kind}): coterie {' '.join(map(repr, case.arguments))[:600]}\n"
        f"{files}"
        f"    code {seen.code}, {seen.seconds:.1f} s, stderr {seen.err[:500]!r}, new {seen.new[:6]}"
    )


def table(counts: Counts) -> str:
    """A row for each fuzzer, a column for each outcome."""
    kinds = sorted({kind for kind, _ in counts})
    rows = [["", *Outcome, "cases"], ["---"] * (len(Outcome) + 2)]
    for name, own in [*((kind, [kind]) for kind in kinds), ("all", kinds)]:
        found = [sum(counts[kind, outcome] for kind in own) for outcome in Outcome]
        rows.append([name, *(f"{count:,}" for count in [*found, sum(found)])])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz/everything.py", description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many, done or not")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="another number tries other inputs")
    parser.add_argument(
        "--log", default="", help="new folder for every fault and every exit 1, as it was found"
    )
    chosen = parser.parse_args()
    each = -(-chosen.cases // chosen.processes)
    counts: Counts = Counter()
    faults: list[str] = []
    slowest = 0.0
    began = time.monotonic()
    with ProcessPoolExecutor(chosen.processes, multiprocessing.get_context("spawn")) as pool:
        parts = [
            pool.submit(_part, chosen.seed + number, each, chosen.minutes * 60, chosen.log)
            for number in range(chosen.processes)
        ]
        for part in parts:
            found, lines, longest = part.result()
            counts.update(found)
            faults += lines
            slowest = max(slowest, longest)
    print(table(counts))
    took = time.monotonic() - began
    print(f"\n{counts.total():,} cases in {took / 60:.1f} minutes; the slowest took {slowest:.1f} s")
    print("\n".join(faults[:20]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
