"""What clients that lie as loudly as the server admits do to the others, with each way to aggregate.

    python benchmarks/poisoning.py [--seeds 5] [--rounds 30] [--case 'global']

Mean accuracy of the honest clients on their held-out records, exact, in a simulation on the digits; liars
answer every request for training with 0.999 of the largest admissible values, turned against their update.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "algorithms"))

from liars import lying

from coterie.experiment import local
from coterie.experiment.schema import Experiment

RULES = ("mean", "filtered-mean", "median", "trimmed-mean")
CASES: dict[str, tuple[list[int], str, list[int]]] = {
    "global, 1 of 4": ([4], "global", [0]),
    "global, 2 of 10": ([10], "global", [0, 1]),
    "oracle, clusters of 4 and 4, 1 in each": ([4, 4], "oracle", [0, 4]),
    "oracle, clusters of 2 and 3, 1 in each": ([2, 3], "oracle", [0, 2]),
}


def reached(sizes: list[int], name: str, rule: str, seed: int, rounds: int, liars: list[int]) -> float:
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
    with tempfile.TemporaryDirectory() as folder, lying([names[place] for place in liars]):
        result = local.run(chosen, Path(folder) / "run")
    assert result.accuracy is not None
    found: dict[str, Any] = dict(result.accuracy.per_client)
    return float(np.mean([found[each] for place, each in enumerate(names) if place not in liars]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--case", default="", help="only cases whose names contain this")
    options = parser.parse_args()
    print(f"mean accuracy of the honest over {options.seeds} seeds, {options.rounds} rounds, epsilon 8")
    print("| liars | nobody lies, mean | " + " | ".join(RULES) + " |")
    print("|---" * (2 + len(RULES)) + "|")
    chosen = {case: told for case, told in CASES.items() if options.case in case}
    for case, (sizes, name, liars) in chosen.items():
        seeds = range(options.seeds)

        def over_seeds(rule: str, who: list[int], of: list[int] = sizes, called: str = name) -> str:
            values = [reached(of, called, rule, seed, options.rounds, who) for seed in seeds]  # noqa: B023
            return f"{100 * np.mean(values):.1f} %"

        cells = [over_seeds("mean", []), *(over_seeds(rule, liars) for rule in RULES)]
        print(f"| {case} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
