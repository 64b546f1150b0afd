"""Noise for every budget of the R-DPCFL grid, by every way of accounting, and how long `coterie plan` takes.

python benchmarks/plan_grid.py                 # the whole grid by RDP, one PLD column at N=8000, b=32
python benchmarks/plan_grid.py --pld-everywhere
"""

import argparse
import resource
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

from coterie.privacy import Adjacency, Budget, Mode, NoiseRule
from coterie.privacy.plans import SELECTION_SHARE, RecordRun

EPSILONS = (2, 3, 5, 10, 15)
DELTA = 1e-4
ROUNDS, SELECTIONS = 200, 21


def noise(
    records: int,
    batch: int,
    epsilon: float,
    *,
    first: NoiseRule | float | None = NoiseRule.SHARED,
    selections: int = SELECTIONS,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
    mode: Mode = Mode.SOUND,
    accountant: str = "rdp",
) -> str:
    """Training noise, or a dash where none would do."""
    run = RecordRun(
        records=records,
        batch=batch,
        rounds=ROUNDS,
        first_round=first,
        selections=selections,
        selection_epsilon=SELECTION_SHARE * epsilon,
        adjacency=adjacency,
        mode=mode,
    )
    found = run.needed(Budget(epsilon, DELTA), accountant)
    return "-" if found is None else f"{found:.4f}"


def grid(console: Console, records: int, batch: int, pld: bool) -> None:
    columns = [
        "epsilon",
        "no round 1, no selections",
        "round 1",
        "round 1 + selections",
        "z1 = 8",
        "replace-one",
    ]
    columns += ["as published"] + (["PLD"] if pld else [])
    table = Table(title=f"noise, N={records}, b={batch}, E={ROUNDS}, delta={DELTA:g}", title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    started = time.perf_counter()
    for epsilon in EPSILONS:
        row = [
            noise(records, batch, epsilon, first=None, selections=0),
            noise(records, batch, epsilon, selections=0),
            noise(records, batch, epsilon),
            noise(records, batch, epsilon, first=8.0),
            noise(records, batch, epsilon, adjacency=Adjacency.REPLACE_ONE),
            noise(records, batch, epsilon, mode=Mode.PAPER),
        ]
        if pld:
            row.append(noise(records, batch, epsilon, accountant="pld"))
        table.add_row(str(epsilon), *row)
    console.print(table)
    console.print(f"{time.perf_counter() - started:.1f} s")


def children_seconds() -> float:
    """Processor time of finished child processes: what a busy machine does not distort."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def timing(console: Console) -> None:
    table = Table(title="seconds of `coterie plan`, with the start of Python", title_justify="left")
    for column in ("command", "wall", "processor"):
        table.add_column(column)
    sample = "plan sample --records 8000 --batch 32 --rounds 200 --delta 1e-4 --selections 21"
    client = "plan client --clients 1000 --rate 0.1 --rounds 100 --delta 1e-3 --epsilon 4"
    commands = [f"{sample} --epsilon {epsilon}" for epsilon in (2, 15)]
    commands += [f"{sample} --epsilon {epsilon} --accountant pld" for epsilon in (2, 15)]
    commands += [f"{sample} --epsilon 3 --first-round-noise auto", f"{client}", f"{client} --accountant pld"]
    for command in commands:
        started, used = time.perf_counter(), children_seconds()
        arguments = [sys.executable, "-m", "coterie", *command.split(), "--json"]
        subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
        wall, processor = time.perf_counter() - started, children_seconds() - used
        table.add_row(command, f"{wall:.2f}", f"{processor:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pld-everywhere", action="store_true", help="a PLD column in every table (minutes)")
    options = parser.parse_args()
    console = Console(width=140)
    for records in (8000, 6600, 10000):
        for batch in (32, 16, 64):
            grid(console, records, batch, options.pld_everywhere or (records, batch) == (8000, 32))
    timing(console)


if __name__ == "__main__":
    main()
