"""What each saving of noise is worth at the same budget: noise and accuracy, one step after the other.

python benchmarks/ablation.py                                     # the plans alone: noise, no data
python benchmarks/ablation.py --run runs/ablation                 # runs what is missing, then prints all
python benchmarks/ablation.py --run runs/ablation --only joint pld    # some steps now, the rest later
python benchmarks/ablation.py --run runs/ablation-digits --quick      # digits on a CPU, 5 seeds, minutes

Every step is an ordinary run of r-dpcfl in a folder of its own (RUN/STEP-SEED) and is resumed where it
stopped. Paper scale: MNIST, 21 clients in clusters of 3, 6, 6, 6 (rotations), 8,000 records each, batch 32,
200 rounds, epsilon 3, delta 1e-4; files are looked for under $COTERIE_DATA. `--csv FILE` keeps the table.
"""

import argparse
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from coterie.algorithms import find_algorithm
from coterie.algorithms.protocol import PublicFacts
from coterie.experiment.experiment_file import override
from coterie.experiment.folder import RunFolder
from coterie.experiment.local import run_together
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.privacy import Budget, Unit, UnitPlan, calibrate

EPSILON = 3.0


@dataclass(frozen=True)
class Step:
    """One row: what changes, and every setting of the algorithm and the promise that it stands for."""

    name: str
    what: str
    mode: str
    first_round_noise: str
    first_round_release: str
    accountant: str
    selection_share: float = 0.03
    """Of epsilon, for each private selection."""

    def settings(self) -> dict[str, Any]:
        return {
            "privacy.mode": self.mode,
            "privacy.accountant": self.accountant,
            "algorithm.first_round_noise": self.first_round_noise,
            "algorithm.first_round_release": self.first_round_release,
            "algorithm.selection_share": self.selection_share,
        }


STEPS = (
    Step("published", "as published: budgets split, one noise", "paper", "shared", "update", "rdp"),
    Step("joint", "accounted for together, choices by counts", "sound", "shared", "update", "rdp"),
    Step("auto", "round 1 has a noise of its own", "sound", "auto", "update", "rdp"),
    Step("sketch", "round 1 releases a sketch", "sound", "auto", "sketch", "rdp"),
    Step("pld", "privacy loss distributions", "sound", "auto", "sketch", "pld"),
    Step("selection", "choices at the published noise", "sound", "auto", "sketch", "pld", 0.015),
)  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """Where the steps are compared."""

    base: Mapping[str, Any]
    seeds: Sequence[int]
    parameters: int
    """Of the model: with few records the noise of a sketch depends on its length, which depends on this."""


PAPER = Scale(
    {
        "data.name": "mnist",
        "model.name": "cnn",
        "federation.sizes": [3, 6, 6, 6],
        "federation.shift": "rotation",
        "federation.records_per_client": 8000,
        "federation.validation_per_client": 2000,
        "federation.test_per_client": 1666,
        "schedule.rounds": 200,
        "schedule.batch": 32,
        "schedule.lr": 0.03,
        "schedule.averaging": 8,
        "privacy.delta": 1e-4,
        "evaluation.every": 20,
    },
    seeds=(0,),
    parameters=28_938,
)
QUICK = Scale(
    {
        "federation.records_per_client": 239,
        "schedule.rounds": 30,
        "schedule.batch": 24,
        "privacy.delta": 1e-3,
        "evaluation.every": 30,
    },
    seeds=(0, 1, 2, 3, 4),
    parameters=650,
)


def experiment(scale: Scale, step: Step, seed: int, device: str) -> Experiment:
    fixed = {
        "algorithm.name": "r-dpcfl",
        "privacy.epsilon": EPSILON,
        "evaluation.references": False,
        "seeds.simulation": seed,
        "engine.device": device,
    }
    return Experiment.model_validate(override({}, {**scale.base, **fixed, **step.settings()}))


def planned(scale: Scale, step: Step) -> UnitPlan:
    """One client's releases with their noise, as the algorithm declares them, without loading any data."""
    setup = experiment(scale, step, 0, "cpu")
    clients = tuple(f"client {number}" for number in range(sum(setup.federation.sizes)))
    records = dict.fromkeys(clients, int(scale.base["federation.records_per_client"]))
    size = scale.parameters
    facts = PublicFacts(clients, records, size, lambda seed: np.zeros(size, dtype=np.float32))
    algorithm = find_algorithm(Unit.RECORD, "r-dpcfl")(setup.algorithm, setup.schedule, setup.privacy)
    budget = Budget(EPSILON, float(scale.base["privacy.delta"]))
    plan = calibrate(algorithm.plan(facts), budget, accountant=step.accountant, mode=setup.privacy.mode)
    return plan.units[0]


def run_missing(scale: Scale, out: Path, names: Sequence[str], device: str, console: Console) -> None:
    missing = {}
    for step in STEPS:
        for seed in scale.seeds:
            folder = out / f"{step.name}-{seed}"
            if step.name in names and not RunFolder(folder).finished:
                console.print(f"{step.name}, seed {seed}: {step.what}", style="dim")
                missing[folder] = experiment(scale, step, seed, device)
    for folder, failure in run_together(missing).failures.items():
        console.print(f"{folder}: {failure}", style="red")


def finished(scale: Scale, out: Path | None, step: Step) -> list[RunResult]:
    folders = [out / f"{step.name}-{seed}" for seed in scale.seeds] if out else []
    return [RunResult.load(folder) for folder in folders if RunFolder(folder).finished]


def row(step: Step, plan: UnitPlan, results: Sequence[RunResult]) -> dict[str, str]:
    """Noise from the plan; accuracy, where there is a run, from what it found."""
    first, training, selection = (plan.release(n).mechanism for n in ("first round", "training", "selection"))
    cells = {
        "step": step.name,
        "what changes": step.what,
        "round-1 noise": f"{first.multiplier:.3f}",  # type: ignore[attr-defined]
        "training noise": f"{training.multiplier:.4f}",  # type: ignore[attr-defined]
        "Gumbel scale, counts": f"{selection.gumbel_scale:.1f}",  # type: ignore[attr-defined]
    }
    for result in results:
        if not np.isclose(result.noise_multiplier, training.multiplier, rtol=1e-6):  # type: ignore[attr-defined]
            raise SystemExit(f"{result.folder}: ran with noise {result.noise_multiplier}, planned otherwise")
    figures = {
        "accuracy": [result.accuracy.mean for result in results],
        "minority": [r.groups.minority for r in results if r.groups and r.groups.minority is not None],
        "worst client": [result.accuracy.min for result in results],
    }
    for name, values in figures.items():
        cells[name] = _percent(values)
    found = [result.clusters_found for result in results]
    cells["clusters found"] = f"{sum(map(bool, found))} of {len(found)}" if found else "-"
    return cells


def _percent(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = f"{100 * np.mean(values):.1f}"
    error = 100 * np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else None
    return mean if error is None else f"{mean} ± {error:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="folder of the runs; without it, plans alone")
    parser.add_argument("--only", nargs="*", choices=[step.name for step in STEPS], help="run these steps")
    parser.add_argument("--quick", action="store_true", help="digits instead of MNIST at the paper's scale")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--csv", type=Path, help="keep the table in this file, too")
    arguments = parser.parse_args()
    scale, console = QUICK if arguments.quick else PAPER, Console()
    if arguments.run:
        names = arguments.only or [step.name for step in STEPS]
        run_missing(scale, arguments.run, names, arguments.device, Console(stderr=True))
    rows = [row(step, planned(scale, step), finished(scale, arguments.run, step)) for step in STEPS]
    table = Table(*rows[0])
    for cells in rows:
        table.add_row(*cells.values())
    console.print(table)
    if arguments.csv:
        with arguments.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
