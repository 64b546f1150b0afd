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

import numpy as np
from recipe import SIZES, Array, Drawn, noise_multiplier, table_of

from coterie.experiment.calibrated import default_delta
from coterie.experiment.recipe import AVERAGING, BATCH_SHARE, ROUNDS

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
    for averaging, clip in product((0, 1), range(len(CLIPS[kind]))):
        rules = []
        for power, scale in product(np.arange(0.6, 1.6, 0.1), np.geomspace(0.01, 300, 90)):
            for top in lengths[2:]:
                place = np.interp(
                    np.log(np.clip(scale * noise**-power, lengths[0], top)),
                    np.log(lengths),
                    np.arange(len(lengths)),
                )
                low = np.minimum(place.astype(int), len(lengths) - 2)
                own, part = scores[np.arange(len(every)), averaging, clip], place - low
                reached = own[np.arange(len(every)), low] * (1 - part)
                reached += own[np.arange(len(every)), low + 1] * part
                behind = best - reached
                loss = (behind > FAR).mean() + 3 * np.clip(behind, -0.05, 0.3).mean()
                rules.append((loss, power, scale, top, (behind <= FAR).mean(), behind.mean()))
        _, power, scale, top, near, gap = min(rules)
        served = "means over rounds" if averaging else "the last models"
        print(
            f"{served}, clip {CLIPS[kind][clip]}: {scale:.2g} noise^-{power:.1f} up to {top:g}: within {FAR} "
            f"of the best in {near:.0%}, mean gap {gap:.4f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=list(CLIPS))
    fit(parser.parse_args().kind)
