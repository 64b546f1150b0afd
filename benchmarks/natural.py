"""Federations as they are found: four hospitals and 139 schools, learning alone, together and in clusters.

python benchmarks/natural.py hospitals            # a minute of one core
python benchmarks/natural.py school               # two minutes of one core
python benchmarks/natural.py hospitals --scale paper --out runs/hospitals

Runs the experiments that `coterie reproduce hospitals` and `coterie reproduce school` declare, one after the
other in this process, and prints what that page does not show: losses, and who was put together with whom.
Finished runs in --out are kept. The data are looked for under $COTERIE_DATA.
"""

import argparse
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from coterie.experiment import local
from coterie.experiment.folder import RunFolder
from coterie.experiment.result import RunResult
from coterie.experiment.sweep import Cell
from coterie.reproduce.declared import EVERYTHING, ScaleName, find, sweep_of


def finished(cell: Cell, out: Path) -> RunResult:
    folder = out / cell.name
    if RunFolder(folder).finished:
        return RunResult.load(folder)
    return local.run(cell.experiment, folder, resume=True)


def row(name: str, results: Sequence[RunResult]) -> str:
    cells = [
        name,
        _percent([result.reached.mean for result in results]),
        _percent([result.reached.min for result in results]),
        f"{np.mean([result.loss.mean for result in results]):.4f}",
        f"{results[0].noise_multiplier:.2f}",
        partitions([result.clusters for result in results]),
    ]
    return "| " + " | ".join(cells) + " |"


def partitions(found: Sequence[Mapping[str, int]]) -> str:
    """Who was put together, and how often; for many clients, sizes alone."""
    counts = Counter(map(_written, found))
    return "; ".join(f"{text} ({times})" if len(found) > 1 else text for text, times in counts.most_common(3))


def _written(cluster_of: Mapping[str, int]) -> str:
    members: dict[int, list[str]] = {}
    for client, cluster in cluster_of.items():
        members.setdefault(cluster, []).append(client)
    if len(cluster_of) > 8:
        sizes = sorted(map(len, members.values()), reverse=True)
        return f"{len(sizes)} of one each" if max(sizes) == 1 else " + ".join(map(str, sizes))
    return " / ".join(" ".join(group) for group in members.values())


def _percent(values: Sequence[float]) -> str:
    mean = f"{100 * np.mean(values):.1f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {100 * np.std(values, ddof=1) / math.sqrt(len(values)):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=["hospitals", "school"])
    parser.add_argument("--scale", type=ScaleName, default=ScaleName.QUICK, choices=list(ScaleName))
    parser.add_argument("--out", type=Path, help="folder of the runs; by default one under runs/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out = arguments.out or Path("runs") / arguments.name
    out.mkdir(parents=True, exist_ok=True)
    sweep = sweep_of(find(arguments.name), arguments.scale, EVERYTHING)
    assert sweep is not None
    by_setting: dict[tuple[str, str], list[RunResult]] = {}
    for cell in sweep.cells():
        key = f"{cell.experiment.privacy.epsilon:g}", cell.experiment.algorithm.name
        by_setting.setdefault(key, []).append(finished(cell, out))
    for epsilon in dict.fromkeys(epsilon for epsilon, _ in by_setting):
        print(f"\nepsilon {epsilon}\n")
        judged = "bounded score" if arguments.name == "school" else "accuracy"
        print(f"| algorithm | {judged} | worst client | loss | noise | clusters |")
        print("| --- | --- | --- | --- | --- | --- |")
        for (own, name), results in by_setting.items():
            if own == epsilon:
                print(row(name, results))


if __name__ == "__main__":
    main()
