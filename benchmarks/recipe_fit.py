"""Fits the two numbers of the recipe for `auto`: scale and power of the way that all steps go together.

python benchmarks/recipe_fit.py classes               # four minutes of one core
python benchmarks/recipe_fit.py regression

On 40 drawn tables of each kind (`recipe.table_of`, numbers 0 to 39 and 50 to 89), at epsilon 1, 3 and 8, with
one model for all and one for each client, every length of the way is simulated with the same draws, with two
clips, with and without a mean over rounds. Then scale, power and ends of the rule are those with the fewest
cells that fall more than 0.01 behind the best of all that was simulated without a mean, plus three times the
mean shortfall. No natural table is looked at.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from recipe import SIZES, Array, Drawn, noise_multiplier, table_of

from coterie.experiment.calibrated import default_delta
from coterie.experiment.recipe import AVERAGING, BATCH_SHARE, CLASSIFICATION, REGRESSION, ROUNDS

CLIPS = {"classes": (0.25, 1.0), "regression": (0.05, 0.2)}
LENGTHS = {
    "classes": (3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 200.0, 400.0, 800.0),
    "regression": (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
}
TABLES = 40
SEEDS = (0, 1)
FAR = 0.01


@dataclass(frozen=True)
class Tried:
    """One cell: what is left of the noise, and scores by averaging, clip and length."""

    noise: float
    scores: Array


def simulate(drawn: Drawn, clips: Array, lrs: Array, epsilon: float, seed: int, *, together: bool) -> Array:
    """Scores of all settings on the same draws: with the last models, and with means over rounds."""
    rng, x, y = np.random.default_rng(seed), drawn.features, drawn.targets
    clients, records, width = x.shape
    outputs, batch = drawn.classes or 1, batch_of(records)
    models = np.zeros((len(clips), clients, width, outputs), np.float32)
    if drawn.classes:
        models += (rng.uniform(-1, 1, (width, outputs)) / math.sqrt(width - 1)).astype(np.float32)
    means, names = models.copy(), np.eye(outputs, dtype=np.float32)
    std = (noise_multiplier(records, batch, ROUNDS, epsilon) * clips / batch)[:, None, None, None]
    who, steps = np.arange(clients)[:, None], math.ceil(records / batch)
    for step in range(ROUNDS * steps):
        drawn_batch = rng.integers(records, size=(clients, batch))
        rows, targets = x[who, drawn_batch], y[who, drawn_batch]
        found = rows[None] @ models
        if drawn.classes:
            weights = np.exp(found - found.max(-1, keepdims=True))
            errors = weights / weights.sum(-1, keepdims=True) - names[targets][None]
        else:
            errors = found - targets[None, ..., None].astype(np.float32)
        norms = np.sqrt((errors**2).sum(-1) * (rows**2).sum(-1)[None])
        errors *= np.minimum(1, clips[:, None, None] / np.maximum(norms, 1e-12))[..., None]
        noise = std * rng.standard_normal((clients, width, outputs), dtype=np.float32)[None]
        models -= lrs[:, None, None, None] * (np.swapaxes(rows, 1, 2)[None] @ errors / batch + noise)
        if step % steps == steps - 1:
            if together:
                models[:] = models.mean(1, keepdims=True)
            means += np.float32((AVERAGING + 1) / (step // steps + 1 + AVERAGING)) * (models - means)
    return np.stack([scored(drawn, own) for own in (models, means)])


def scored(drawn: Drawn, models: Array) -> Array:
    outputs, targets = drawn.test_features[None] @ models, drawn.test_targets[None]
    if drawn.classes:
        found: Array = (outputs.argmax(-1) == targets).mean((1, 2))
    else:
        found = 1 - ((outputs[..., 0] - targets) ** 2).mean((1, 2)) / targets.var()
    return found


def batch_of(records: int) -> int:
    return max(1, round(BATCH_SHARE * records))


def cells(kind: str) -> Iterator[Tried]:
    clips, lengths = (np.array(own, np.float32) for own in (CLIPS[kind], LENGTHS[kind]))
    for number in range(TABLES):
        first, classes = (0, 2) if kind == "classes" else (50, 0)
        clients, records = SIZES[number % len(SIZES)]
        drawn = table_of(first + number, clients, records, classes)
        steps, width = ROUNDS * math.ceil(records / batch_of(records)), drawn.features.shape[2]
        grid = np.array(list(product(clips, lengths)), np.float32)
        lrs = grid[:, 1] / (grid[:, 0] * steps)
        for epsilon, together in product((1.0, 3.0, 8.0), (True, False)):
            scores = [simulate(drawn, grid[:, 0], lrs, epsilon, seed, together=together) for seed in SEEDS]
            doubled = 2 * math.log(1 / default_delta(records))
            mu = math.sqrt(doubled + 2 * epsilon) - math.sqrt(doubled)
            learners = clients if together else 1
            noise = math.sqrt(width * (classes or 1)) / (records * mu * math.sqrt(learners))
            yield Tried(noise, np.mean(scores, 0).reshape(2, len(clips), len(lengths)))
        print(f"{number + 1} of {TABLES} tables", end="\r", flush=True)


def fit(kind: str) -> None:
    every, lengths = list(cells(kind)), LENGTHS[kind]
    scores = np.clip(np.nan_to_num(np.array([own.scores for own in every]), nan=-9), -9, 1)
    noise, best = np.array([own.noise for own in every]), scores[:, 0].max((1, 2))
    print(
        f"{len(every)} cells; mean of the best by averaging and clip:",
        scores.max(3).mean(0).round(4).tolist(),
    )
    for averaging, (place, clip) in product((0, 1), enumerate(CLIPS[kind])):
        served = "means over rounds" if averaging else "the last models"
        own = scores[:, averaging, place]
        rules = [
            Rule(scale, power, lengths[0], top)
            for scale, power, top in product(
                np.geomspace(0.01, 300, 90), np.arange(0.6, 1.6, 0.1), lengths[2:]
            )
        ]
        found = min(rules, key=lambda rule: rule.loss(own, best, noise, lengths))
        print(f"{served}, clip {clip}: {found.told(own, best, noise, lengths)}")
    way = CLASSIFICATION if kind == "classes" else REGRESSION
    rule = Rule(way.scale, way.power, way.shortest, way.longest)
    own = scores[:, 1, CLIPS[kind].index(way.clip)]
    print(f"the recipe as it stands: {rule.told(own, best, noise, lengths)}")


@dataclass(frozen=True)
class Rule:
    """A length of the way for every noise: scale * noise ** -power between two ends."""

    scale: float
    power: float
    shortest: float
    longest: float

    def behind(self, scores: Array, best: Array, noise: Array, lengths: tuple[float, ...]) -> Array:
        """How far behind the best it is in every cell, between lengths that were simulated."""
        wanted = np.clip(self.scale * noise**-self.power, self.shortest, self.longest)
        place = np.interp(np.log(wanted), np.log(lengths), np.arange(len(lengths)))
        low, cell = np.minimum(place.astype(int), len(lengths) - 2), np.arange(len(scores))
        part = place - low
        found: Array = best - (scores[cell, low] * (1 - part) + scores[cell, low + 1] * part)
        return found

    def loss(self, *tried: Any) -> float:
        behind = self.behind(*tried)
        return float((behind > FAR).mean() + 3 * np.clip(behind, -0.05, 0.3).mean())

    def told(self, *tried: Any) -> str:
        behind = self.behind(*tried)
        return (
            f"{self.scale:.2g} noise^-{self.power:.1f} from {self.shortest:g} to {self.longest:g}: "
            f"within {FAR} of the best in {(behind <= FAR).mean():.0%}, mean gap {behind.mean():.4f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=list(CLIPS))
    fit(parser.parse_args().kind)
