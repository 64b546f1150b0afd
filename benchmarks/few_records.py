"""Clusters found against records per client: the update and the sketch, one noise for all rounds or its own.

python benchmarks/few_records.py --figure docs/few-records.svg --csv benchmarks/results/few-records.csv
python benchmarks/few_records.py --epsilon 10                      # another budget
python benchmarks/few_records.py --separations docs/few-records-separation.svg   # MSS against epsilon instead

MNIST, 21 clients in clusters of 3, 6, 6 and 6 (rotations), the papers' CNN, delta 1e-4, 200 rounds with 21
private selections, the number of clusters given; two minutes of one core, most of it for gradients, which are
kept in --cache. What few records cost: round 1 is a mean over them, so its noise grows as one over their
number, and batches are a larger share of them, so training needs more noise as well.
"""

import argparse
import csv
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from clustering import CLIP, SEED, Floats, Labels, draw_noise, same_partition
from coterie import __version__
from coterie.algorithms.record.r_dpcfl import default_sketch_dimensions
from coterie.clustering.mixture import fit_mixture
from coterie.data import ClustersFederation, DataSettings, build_federation, load_dataset
from coterie.models import ModelSettings, build_model
from coterie.privacy import (
    Adjacency,
    Budget,
    BudgetError,
    FullBatchSketch,
    FullBatchSteps,
    NoiseRule,
    PlannedRelease,
    PoissonSteps,
    PrivacyPlan,
    PrivateSelection,
    ThreatModel,
    Unit,
    UnitPlan,
    calibrate,
)
from coterie.training.clipping import clip_rows
from coterie.training.learner import Batch, Learner
from coterie.training.parameters import flatten
from coterie.training.sketch import Projection

SIZES = (3, 6, 6, 6)
RECORDS = (100, 200, 400, 800)
ROUNDS, DELTA, SELECTION_SHARE = 200, 1e-4, 0.03
SKETCH = 200
"""Length that `default_sketch_dimensions` gives the CNN's sketch."""


@dataclass(frozen=True)
class Line:
    """One way to run round 1 and the rounds after it."""

    text: str
    release: str
    first_round: NoiseRule
    batch: int


LINES = (
    Line("update, one noise, batch 32 (published)", "update", NoiseRule.SHARED, 32),
    Line("update, one noise, batch 8", "update", NoiseRule.SHARED, 8),
    Line("sketch, one noise, batch 32", "sketch", NoiseRule.SHARED, 32),
    Line("sketch, one noise, batch 8", "sketch", NoiseRule.SHARED, 8),
    Line("update, auto, batch 32", "update", NoiseRule.AUTO, 32),
    Line("sketch, auto, batch 32 (default)", "sketch", NoiseRule.AUTO, 32),
    Line("sketch, auto, batch 8", "sketch", NoiseRule.AUTO, 8),
)


def multipliers(records: int, epsilon: float, line: Line) -> tuple[float, float] | None:
    """Noise of round 1 and of training; None where no noise keeps the promise."""
    common = {"clip": CLIP, "records": records, "adjacency": Adjacency.ZERO_OUT}
    round_1 = (
        FullBatchSketch(noise_multiplier=line.first_round, dimensions=SKETCH, **common)
        if line.release == "sketch"
        else FullBatchSteps(noise_multiplier=line.first_round, epochs=1, **common)
    )
    releases = (
        PlannedRelease("first round", round_1, 1),
        PlannedRelease(
            "training",
            PoissonSteps(noise_multiplier=NoiseRule.SHARED, batch=line.batch, epochs=1, **common),
            ROUNDS - 1,
        ),
        PlannedRelease(
            "selection", PrivateSelection(SELECTION_SHARE * epsilon, Adjacency.ZERO_OUT), ROUNDS // 10 + 1
        ),
    )
    threat = ThreatModel("the server", "every release")
    plan = PrivacyPlan(Unit.RECORD, Adjacency.ZERO_OUT, threat, (UnitPlan("one client", releases),))
    try:
        solved = calibrate(plan, Budget(epsilon, DELTA)).units[0]
    except BudgetError:
        return None
    first, training = (solved.release(name).mechanism for name in ("first round", "training"))
    return first.multiplier, training.multiplier  # type: ignore[attr-defined]


def exact_means(cache: Path) -> tuple[Mapping[tuple[str, int], Floats], Labels]:
    """Mean clipped gradient, and mean clipped projection, of each client's first records, noise-free."""
    file = cache / f"{__version__}-few-records-{SEED}.npz"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        means, truth = _compute()
        scratch = file.with_suffix(f".{os.getpid()}.npz")
        np.savez(
            scratch, truth=truth, **{f"{kind}-{records}": rows for (kind, records), rows in means.items()}
        )
        scratch.rename(file)
    with np.load(file) as stored:
        kinds = {(kind, records): f"{kind}-{records}" for kind in ("update", "sketch") for records in RECORDS}
        return {key: stored[name] for key, name in kinds.items()}, stored["truth"]


def _compute() -> tuple[dict[tuple[str, int], Floats], Labels]:
    settings = ClustersFederation(sizes=SIZES, shift="rotation", records_per_client=max(RECORDS))
    federation = build_federation(load_dataset(DataSettings(name="mnist"), SEED), settings, SEED)
    model = build_model(ModelSettings(name="cnn"), federation.task, SEED)
    learner = Learner(model, federation.task, torch.device("cpu"))
    start, size = torch.from_numpy(flatten(model)), learner.layout.size
    projection = Projection(size, default_sketch_dimensions(size), SEED, learner.device)
    means: dict[tuple[str, int], list[Floats]] = {}
    for client in federation.clients:
        batch = Batch.of(client.train, learner.device)
        sums = {"update": torch.zeros(size).double(), "sketch": torch.zeros(projection.dimensions).double()}
        done = 0
        for records in RECORDS:
            for part in batch.take(slice(done, records)).split(100):
                rows = learner.gradients(start, part)
                sums["sketch"] += clip_rows(projection(rows), CLIP).sum(dim=0)
                sums["update"] += clip_rows(rows, CLIP).sum(dim=0)
            done = records
            for kind, total in sums.items():
                means.setdefault((kind, records), []).append(total.numpy() / records)
    return {key: np.stack(rows) for key, rows in means.items()}, np.asarray(federation.truth)


def found(exact: Floats, truth: Labels, noise: float, draws: int) -> float:
    """Share of noise draws in which every client is put where it belongs."""
    right = [
        same_partition(fit_mixture(draw_noise(exact, noise, seed).released(), len(SIZES), seed).labels, truth)
        for seed in range(draws)
    ]
    return float(np.mean(right))


Measured = Mapping[str, Sequence[tuple[int, float, float, float]]]
"""For each line: records, noise of round 1, noise of training, share found."""


def measure(epsilon: float, draws: int, cache: Path) -> Measured:
    means, truth = exact_means(cache)
    measured: dict[str, list[tuple[int, float, float, float]]] = {}
    for line in LINES:
        for records in RECORDS:
            noise = multipliers(records, epsilon, line)
            if noise is not None:
                share = found(means[line.release, records], truth, noise[0] * CLIP / records, draws)
                measured.setdefault(line.text, []).append((records, *noise, share))
    return measured


EPSILONS = (1.0, 2.0, 3.0, 5.0, 10.0, 15.0)
SMALL, LARGE = RECORDS[-2:]
SEPARATED = (LINES[0], LINES[1], LINES[3], LINES[5])

Separations = Mapping[str, Sequence[tuple[float, float]]]
"""For each line: epsilon, median separation score (MSS)."""


def measure_separations(draws: int, cache: Path) -> Separations:
    """How far apart the clusters of round 1 look, by budget, for two numbers of records."""
    means, _ = exact_means(cache)
    measured: dict[str, list[tuple[float, float]]] = {}
    for line in SEPARATED:
        for records, epsilon in itertools.product((SMALL, LARGE), EPSILONS):
            noise = multipliers(records, epsilon, line)
            if noise is not None:
                exact, deviation = means[line.release, records], noise[0] * CLIP / records
                scores = [
                    fit_mixture(draw_noise(exact, deviation, seed).released(), len(SIZES), seed).separation
                    for seed in range(draws)
                ]
                text = f"{line.text}; {records} records"
                measured.setdefault(text, []).append((epsilon, float(np.median(scores))))
    return measured


def separation_table(measured: Separations) -> str:
    lines = ["| median MSS | " + " | ".join(f"epsilon {epsilon:g}" for epsilon in EPSILONS) + " |"]
    lines.append("| --- " * (1 + len(EPSILONS)) + "|")
    for text, points in measured.items():
        by_epsilon = dict(points)
        cells = [f"{by_epsilon[e]:.2f}" if e in by_epsilon else "-" for e in EPSILONS]
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw_separations(measured: Separations, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5.2), layout="constrained")
    axes = figure.subplots()
    for index, (text, points) in enumerate(measured.items()):
        style = "o-" if text.endswith(f"{LARGE} records") else "s--"
        axes.plot(*zip(*points, strict=True), style, color=f"C{index // 2}", label=text)
    axes.set_xscale("log")
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.set(xlabel="epsilon", ylabel="separation score (MSS)", title="Round 1 on MNIST", ylim=(0, None))
    axes.minorticks_off()
    figure.legend(loc="outside lower center", ncols=2, fontsize="x-small")
    figure.savefig(file)


def table(measured: Measured) -> str:
    lines = ["| round 1 and batches after it | " + " | ".join(f"{n} records" for n in RECORDS) + " |"]
    lines.append("| --- " * (1 + len(RECORDS)) + "|")
    for text, points in measured.items():
        by_records = {records: rest for records, *rest in points}
        cells = [
            f"{100 * by_records[n][2]:.0f} % (z {by_records[n][0]:.2f} / {by_records[n][1]:.2f})"
            if n in by_records
            else "-"
            for n in RECORDS
        ]
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw_figure(measured: Measured, epsilon: float, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for (text, points), line in zip(measured.items(), LINES, strict=False):
        style = "o-" if line.release == "sketch" else "s--"
        axes.plot([point[0] for point in points], [100 * point[3] for point in points], style, label=text)
    axes.set_xscale("log")
    axes.set_xticks(RECORDS, [str(records) for records in RECORDS])
    axes.set(
        xlabel="records per client",
        ylabel="all clusters found, % of noise draws",
        title=f"Round 1 on MNIST at epsilon {epsilon:g}",
        ylim=(-3, 103),
    )
    axes.minorticks_off()
    axes.legend(fontsize="small")
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--separations", type=Path, help="draw MSS against epsilon, and nothing else")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "coterie" / "clustering")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.separations:
        separations = measure_separations(arguments.draws, arguments.cache)
        print(separation_table(separations))
        draw_separations(separations, arguments.separations)
        return
    measured = measure(arguments.epsilon, arguments.draws, arguments.cache)
    print(table(measured))
    if arguments.figure:
        draw_figure(measured, arguments.epsilon, arguments.figure)
    if arguments.csv:
        with arguments.csv.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(["line", "records", "first-round noise", "training noise", "found"])
            writer.writerows([text, *point] for text, points in measured.items() for point in points)


if __name__ == "__main__":
    main()
