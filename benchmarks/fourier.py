"""Whether random Fourier features help tables: natural federations with them and without.

    python benchmarks/fourier.py --csv FILE [--jobs 2] [--epsilons 3 8]
    python benchmarks/fourier.py --render FILE

A record x of d columns, each scaled by its declared range, becomes cos(W x + b) at 256 random frequencies W,
normal with deviation 1 / (width sqrt(d)), b uniform in a turn: features that come from no data. `global` and
`local` with the numbers of `auto`, the federations and the seeds of `benchmarks/natural.py`.
"""

import argparse
import csv
import math
import statistics
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
from natural import FEDERATIONS, SEEDS, Cell, run
from torch import Tensor, nn

from coterie.data import Task

FREQUENCIES = 256
WIDTHS = {"narrow": 0.5, "wide": 2.0}
FEATURES = ("none", *WIDTHS)
ALGORITHMS = ("global", "local")
COLUMNS = ("federation", "epsilon", "algorithm", "features", "seed", "score", "seconds")


class Fourier(nn.Module):
    """Cosines of a record at public random frequencies."""

    def __init__(self, task: Task, width: float) -> None:
        super().__init__()
        inputs = math.prod(task.shape)
        drawn = torch.Generator().manual_seed(0)
        weights = torch.randn(inputs, FREQUENCIES, generator=drawn) / (width * math.sqrt(inputs))
        self.register_buffer("weights", weights)
        self.register_buffer("phases", 2 * math.pi * torch.rand(FREQUENCIES, generator=drawn))

    def forward(self, records: Tensor) -> Tensor:
        weights, phases = self.get_buffer("weights"), self.get_buffer("phases")
        # Number by number: a matrix product may sum in another order for another number of records.
        angles = (records.flatten(1)[:, :, None] * weights).sum(dim=1) + phases
        return torch.cos(angles)


def narrow(task: Task) -> nn.Module:
    return Fourier(task, WIDTHS["narrow"])


def wide(task: Task) -> nn.Module:
    return Fourier(task, WIDTHS["wide"])


def score(cell: Cell, features: str, seed: int) -> tuple[object, ...]:
    """A line of the file."""
    torch.set_num_threads(1)
    row = run(cell, None, seed, features=f"fourier:{features}" if features in WIDTHS else None)
    return cell.federation, cell.epsilon, cell.algorithm, features, seed, row.score, row.seconds


def render(rows: list[dict[str, str]]) -> None:
    scores: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        key = (row["federation"], row["epsilon"], row["algorithm"])
        scores[key][row["features"]].append(float(row["score"]))
    print("| federation | epsilon | algorithm | columns | Fourier, narrow | Fourier, wide |")
    print("|---|---|---|---|---|---|")
    wins = 0
    for key, own in scores.items():
        means = {name: statistics.mean(own[name]) for name in FEATURES}
        wins += max(means["narrow"], means["wide"]) > means["none"]
        print("| " + " | ".join([*key, *(f"{100 * means[name]:.1f}" for name in FEATURES)]) + " |")
    print(f"\nthe better of both widths is ahead of columns in {wins} of {len(scores)} cells")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--csv", type=Path, help="file for the results")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[3.0])
    parser.add_argument("--only", nargs="*", default=list(FEDERATIONS), choices=list(FEDERATIONS))
    parser.add_argument("--render", type=Path, metavar="CSV")
    given = parser.parse_args()
    if given.render:
        with given.render.open(newline="") as file:
            render(list(csv.DictReader(file)))
        return
    if given.csv is None:
        parser.error("--csv: name a file for the results")
    jobs = list(product(given.only, given.epsilons, ALGORITHMS, FEATURES, SEEDS))
    with (
        ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool,
        given.csv.open("w", newline="") as file,
    ):
        working = [pool.submit(score, Cell(*job[:3]), *job[3:]) for job in jobs]
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for done in as_completed(working):
            writer.writerow(done.result())
            file.flush()
    with given.csv.open(newline="") as file:
        render(sorted(csv.DictReader(file), key=lambda row: (row["federation"], row["epsilon"])))


if __name__ == "__main__":
    main()
