"""What clients that lie do to the others, with each way to aggregate.

    python benchmarks/poisoning.py [--seeds 5] [--rounds 30] [--case 'global'] [--rules mean,filtered-mean]

Mean accuracy of the honest clients on their held-out records, exact, in a simulation on the digits. Liars
answer every request for training, either with 0.999 of the largest admissible values, turned against their
update (loud), or with that update itself, turned around, which no length gives away (quiet).
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "algorithms"))

from liars import lying

from coterie.algorithms.aggregation import Rule
from coterie.experiment import local
from coterie.experiment.schema import Experiment

RULES: tuple[str, ...] = get_args(Rule)
CASES: dict[str, tuple[list[int], str, list[int]]] = {
    "global, 1 of 4": ([4], "global", [0]),
    "global, 2 of 10": ([10], "global", [0, 1]),
    "oracle, clusters of 4 and 4, 1 in each": ([4, 4], "oracle", [0, 4]),
    "oracle, clusters of 2 and 3, 1 in each": ([2, 3], "oracle", [0, 2]),
}


def reached(
    sizes: list[int], name: str, rule: str, seed: int, rounds: int, liars: list[int], quiet: bool = False
) -> float:
    chosen = Experiment.model_validate(
        {
            "federation": {"kind": "clusters", "sizes": sizes, "records_per_client": 140},
            "algorithm": {"name": name},
            "schedule": {"rounds": rounds, "aggregation": rule},
            "seeds": {"simulation": seed, "noise": seed},
            "evaluation": {"every": rounds, "references": False},
        }
    )
    names = [client.name for client in local.load_federation(chosen).clients]
    with tempfile.TemporaryDirectory() as folder, lying([names[place] for place in liars], quiet=quiet):
        result = local.run(chosen, Path(folder) / "run")
    assert result.accuracy is not None
    found: dict[str, Any] = dict(result.accuracy.per_client)
    return float(np.mean([found[each] for place, each in enumerate(names) if place not in liars]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--case", default="", help="only cases whose names contain this")
    parser.add_argument("--rules", default=",".join(RULES), help="with commas")
    options = parser.parse_args()
    rules, seeds = options.rules.split(","), range(options.seeds)
    columns = [(rule, quiet) for quiet in (False, True) for rule in rules]
    print(f"mean accuracy of the honest over {options.seeds} seeds, {options.rounds} rounds, epsilon 8")
    told = [f"{'quiet' if quiet else 'loud'}, {rule}" for rule, quiet in columns]
    print("| liars | nobody lies, mean | " + " | ".join(told) + " |")
    print("|---" * (2 + len(columns)) + "|")
    for case, (sizes, name, liars) in CASES.items():
        if options.case not in case:
            continue
        print(f"| {case} |", end="", flush=True)
        for rule, quiet, who in [("mean", False, []), *((*column, liars) for column in columns)]:
            values = [reached(sizes, name, rule, seed, options.rounds, who, quiet) for seed in seeds]
            print(f" {100 * np.mean(values):.1f} % |", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
