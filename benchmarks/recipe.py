"""How the recipe for `auto` does against the best of nine settings, on federations that are drawn.

python benchmarks/recipe.py --csv benchmarks/results/recipe.csv          # some minutes of one core
python benchmarks/recipe.py --only digits

Federations are made by scikit-learn's generators (features in [-1, 1], as declared ranges make them), of its
digits and of drawn glyphs. The steps are not the product's own but a rewrite of them in numpy, where a run
takes a fraction of a second: noise multipliers are those of Poisson batches by the product's accountant,
every record is clipped, noise is added to the sum and models are averaged once a round; but batches have a
fixed size and are drawn with replacement, which that accountant does not cover: these records are drawn, and
nobody's. `together` is `global`, `alone` is `local`.
The nine settings are step sizes of 0.1, 0.5 and 2 and clips of 0.1, 0.3 and 1, in 30 rounds with batches of
32 (fewer where clients are small); the best of them is chosen on other seeds than those that are compared.
"""

import argparse
import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits, make_classification, make_regression

from coterie.data.glyphs import draw_glyphs
from coterie.data.records import Task
from coterie.experiment.calibrated import default_delta
from coterie.experiment.recipe import sized
from coterie.experiment.schema import SIZED, Experiment
from coterie.privacy import Budget
from coterie.privacy.plans import RecordRun

Array = NDArray[Any]
HELD_OUT = 200
TRIED, COMPARED = (10, 11), (0, 1)
"""Seeds on which the best of nine is chosen, and others on which it is compared."""


@dataclass(frozen=True)
class Setting:
    """What the recipe decides."""

    batch: int
    lr: float
    clip: float = 1.0
    rounds: int = 30
    averaging: float = 0.0

    @property
    def name(self) -> str:
        return f"lr {self.lr:g}, clip {self.clip:g}"


def nine(records: int) -> list[Setting]:
    """What somebody may try: three step sizes and three clips, with batches of 32.

    Args:
        records: of the client that has fewest; the batch is halved until it fits twice.
    """
    batch = next(batch for batch in (32, 16, 8, 4, 2, 1) if 2 * batch <= records or batch == 1)
    return [Setting(batch, lr, clip) for lr, clip in product((0.1, 0.5, 2.0), (0.1, 0.3, 1.0))]


@dataclass(frozen=True)
class Drawn:
    """Clients that hold as many records each; classes 0 is a regression."""

    features: Array
    targets: Array
    test_features: Array
    test_targets: Array
    classes: int

    @classmethod
    def deal(cls, features: Array, targets: Array, clients: int, records: int, classes: int) -> "Drawn":
        held_out = min(HELD_OUT, len(features) // clients - records)
        each = records + held_out
        with_bias = np.c_[features, np.ones(len(features))].astype(np.float32)[: clients * each]
        x, y = with_bias.reshape(clients, each, -1), targets[: clients * each].reshape(clients, each)
        return cls(x[:, :records], y[:, :records], x[:, records:], y[:, records:], classes)

    @property
    def task(self) -> Task:
        shape = (self.features.shape[2] - 1,)
        if self.classes:
            return Task("classification", shape, self.classes)
        return Task("regression", shape, 0, error_cap=0.1)


def scaled(features: Array, width: float) -> Array:
    """As if a range of so many standard deviations to both sides had been declared."""
    centred = (features - features.mean(0)) / (width * features.std(0))
    return np.clip(centred, -1.0, 1.0)


def classes_of(features: int, classes: int, records: int, clients: int, width: float = 3.0) -> Drawn:
    x, y = make_classification(
        clients * (records + HELD_OUT),
        features,
        n_informative=int(0.6 * features) + 1,
        n_redundant=0,
        n_classes=classes,
        n_clusters_per_class=1 if classes > 2 else 2,
        class_sep=1.0 if classes == 2 else 2.0,
        random_state=0,
    )
    return Drawn.deal(scaled(x, width), y, clients, records, classes)


def numbers_of(features: int, noise: float, records: int, clients: int, width: float = 3.0) -> Drawn:
    x, y = make_regression(
        clients * (records + HELD_OUT), features, n_informative=features // 2, noise=noise, random_state=0
    )
    unit = np.clip(0.5 + (y - y.mean()) / (8 * y.std()), 0, 1)
    return Drawn.deal(scaled(x, width), unit, clients, records, 0)


def table_of(seed: int, clients: int, records: int, classes: int = 0) -> Drawn:
    """Records as tables have them: wide ranges around values that are not in their middle, categories by
    indicators, columns that say nothing, clients of different levels, and few of one class."""
    rng, rows = np.random.default_rng(1000 + seed), clients * (records + HELD_OUT)
    columns, signal = [], np.zeros(rows)
    numbers, names = int(rng.integers(1, 8)), int(rng.integers(0, 5))
    for _ in range(numbers):
        values, width, middle = rng.standard_normal(rows), rng.choice([2.5, 4, 6, 9]), rng.uniform(-0.6, 0.6)
        columns.append(np.clip(middle + values / width, -1, 1)[:, None])
        signal += rng.normal() * values * (rng.random() < 0.6)
    for _ in range(names):
        count = int(rng.integers(2, 7))
        chosen = rng.choice(count, rows, p=rng.dirichlet(np.full(count, 1.5)))
        columns.append(np.eye(count)[chosen])
        signal += rng.normal(size=count)[chosen] * (rng.random() < 0.7)
    signal = (signal - signal.mean()) / (signal.std() + 1e-9)
    levels = rng.choice([0, 0.2, 0.5]) * rng.standard_normal(clients)
    signal += np.repeat(levels, records + HELD_OUT)
    features = np.concatenate(columns, 1)
    if classes:
        logits = rng.choice([1.0, 2.0, 4.0]) * signal + rng.choice([-1.5, -1, 0, 0, 1])
        labels = (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.int64)
        return Drawn.deal(features, labels, clients, records, 2)
    explained = rng.choice([0.1, 0.2, 0.45, 0.65])
    target = math.sqrt(explained) * signal + math.sqrt(1 - explained) * rng.standard_normal(rows)
    middle, spread = rng.uniform(0.35, 0.65), rng.choice([0.12, 0.2, 0.3])
    return Drawn.deal(features, np.clip(middle + spread * target, 0, 1), clients, records, 0)


def digits() -> Drawn:
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return Drawn.deal(x[order] / 16.0, y[order], 8, 180, 10)


def glyphs() -> Drawn:
    drawn = draw_glyphs(size=4 * (300 + HELD_OUT), classes=10, seed=0).train
    return Drawn.deal(drawn.features.reshape(len(drawn), -1), drawn.targets, 4, 300, 10)


SIZES = ((4, 180), (8, 100), (15, 240), (20, 150), (24, 120), (30, 90), (40, 40), (60, 30))
"""Clients, and records of each."""
FEDERATIONS: dict[str, Callable[[], Drawn]] = {
    "2 classes, 10 features, 8 x 100": lambda: classes_of(10, 2, 100, 8),
    "2 classes, 10 features, 8 x 600": lambda: classes_of(10, 2, 600, 8, 4.0),
    "2 classes, 30 features, 8 x 60": lambda: classes_of(30, 2, 60, 8),
    "2 classes, 30 features, 12 x 300": lambda: classes_of(30, 2, 300, 12, 5.0),
    "5 classes, 20 features, 8 x 300": lambda: classes_of(20, 5, 300, 8),
    "digits, 8 x 180": digits,
    "glyphs, 4 x 300": glyphs,
    **{
        f"table {number}, 2 classes, {clients} x {records}": partial(table_of, number, clients, records, 2)
        for number, (clients, records) in enumerate(SIZES, 200)
    },
    "regression, 5 features, 8 x 100": lambda: numbers_of(5, 30.0, 100, 8),
    "regression, 10 features, 12 x 300": lambda: numbers_of(10, 80.0, 300, 12),
    "regression, 8 features, 20 x 60": lambda: numbers_of(8, 150.0, 60, 20, 5.0),
    **{
        f"table {number}, regression, {clients} x {records}": partial(table_of, number, clients, records)
        for number, (clients, records) in enumerate(SIZES, 300)
    },
}
"""The tables are others than those on which `recipe_fit.py` fits: those have numbers below 100."""


@lru_cache(None)
def noise_multiplier(records: int, batch: int, rounds: int, epsilon: float) -> float:
    run = RecordRun(records, batch, rounds, first_round=None)
    noise = run.needed(Budget(epsilon, default_delta(records)))
    assert noise is not None
    return noise


def score(drawn: Drawn, own: Setting, epsilon: float, seed: int, *, together: bool) -> float:
    """Accuracy, or R^2, on held-out records after so many rounds."""
    rng, x, y = np.random.default_rng(seed), drawn.features, drawn.targets
    clients, records, width = x.shape
    models = np.zeros((1, width, drawn.classes or 1), np.float32)
    if drawn.classes:
        models = rng.uniform(-1, 1, models.shape).astype(np.float32) / math.sqrt(width - 1)
    models = np.repeat(models, clients, 0)
    served = models
    std = noise_multiplier(records, own.batch, own.rounds, epsilon) * own.clip / own.batch
    who, place = np.arange(clients)[:, None], np.arange(own.batch)[None]
    steps = math.ceil(records / own.batch)
    for step in range(own.rounds * steps):
        batch = rng.integers(records, size=(clients, own.batch))
        rows, outputs = x[who, batch], x[who, batch] @ models
        if drawn.classes:
            weights = np.exp(outputs - outputs.max(-1, keepdims=True))
            errors = weights / weights.sum(-1, keepdims=True)
            errors[who, place, y[who, batch]] -= 1.0
        else:
            errors = outputs - y[who, batch][..., None]
        norms = np.sqrt((errors**2).sum(-1) * (rows**2).sum(-1))
        errors *= np.minimum(1.0, own.clip / np.maximum(norms, 1e-12))[..., None]
        noise = std * rng.standard_normal(models.shape, dtype=np.float32)
        models = models - own.lr * (np.swapaxes(rows, 1, 2) @ errors / own.batch + noise)
        if together and step % steps == steps - 1:
            models = np.repeat(models.mean(0, keepdims=True), clients, 0)
        if step % steps == steps - 1:  # the mean over rounds, where later ones weigh more
            share = (own.averaging + 1) / (step // steps + 1 + own.averaging) if own.averaging else 1.0
            served = served + np.float32(share) * (models - served)
    outputs = drawn.test_features @ served
    if drawn.classes:
        return float((outputs.argmax(-1) == drawn.test_targets).mean())
    return float(1 - ((outputs[..., 0] - drawn.test_targets) ** 2).mean() / drawn.test_targets.var())


def recipe(drawn: Drawn, epsilon: float, *, together: bool) -> Setting:
    """What `auto` comes to."""
    auto = {"schedule": dict.fromkeys(("rounds", "batch", "lr", "averaging"), "auto")}
    experiment = Experiment.model_validate(
        {
            **auto,
            "privacy": {"epsilon": epsilon, "clip": "auto"},
            "algorithm": {"name": "global" if together else "local"},
            "model": {"name": "softmax" if drawn.classes else "linear"},
        }
    )
    records = {str(client): drawn.features.shape[1] for client in range(len(drawn.features))}
    found = sized(experiment, drawn.task, records)
    rounds, batch, lr, averaging, clip = map(found.number, SIZED)
    return Setting(int(batch), lr, clip, int(rounds), averaging)


def cells(names: list[str], epsilons: list[float]) -> Iterator[dict[str, object]]:
    for name in names:
        drawn = FEDERATIONS[name]()
        for epsilon, together in product(epsilons, (True, False)):

            def mean(own: Setting, seeds: tuple[int, ...]) -> float:
                scores = [score(drawn, own, epsilon, seed, together=together) for seed in seeds]  # noqa: B023
                return float(np.mean(scores))

            best = max(nine(drawn.features.shape[1]), key=lambda own: mean(own, TRIED))
            ours = recipe(drawn, epsilon, together=together)
            yield {
                "federation": name,
                "models": "together" if together else "alone",
                "epsilon": epsilon,
                "recipe": f"batch {ours.batch}, lr {ours.lr:g}, clip {ours.clip:g}",
                "score": round(mean(ours, COMPARED), 4),
                "best of nine": best.name,
                "its score": round(mean(best, COMPARED), 4),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="federations whose names hold this")
    parser.add_argument("--epsilon", type=float, nargs="*", default=[1.0, 8.0], help="budgets")
    parser.add_argument("--csv", type=Path, help="file to write the table to")
    arguments = parser.parse_args()
    rows = []
    for row in cells([name for name in FEDERATIONS if arguments.only in name], arguments.epsilon):
        rows.append(row)
        print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
    behind = [float(str(row["its score"])) - float(str(row["score"])) for row in rows]
    near = sum(gap <= 0.01 for gap in behind)
    print(
        f"within 0.01 of the best of nine, or ahead: {near} of {len(rows)} cells; mean gap "
        f"{np.mean(behind):.4f}"
    )
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="", encoding="utf-8") as stream:
            lines = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
            lines.writeheader()
            lines.writerows(rows)


if __name__ == "__main__":
    main()
