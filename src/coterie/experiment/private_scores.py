"""Scores that people use, from noisy sums over held-out records: all of it computed after the release.

Sums of all clients are added up first. Sums are unbiased, and the size of their noise is public, so a ratio
of two of them has an interval that needs no large numbers (Fieller's): all values for which the difference
between the numerator and that many denominators is within the noise. An average over classes has the
interval that follows from those of the classes, whose noise is independent (Zou and Donner's MOVER); a class
of which the noise leaves nothing to be known may have any value.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from coterie.data.records import Task
from coterie.errors import InputError
from coterie.experiment.scores import PooledScore, in_label_units
from coterie.privacy import Released
from coterie.privacy.joint_scores import BINS, JointScores, Statistic, curves

Floats = NDArray[np.float64]
NORMAL_95 = float(norm.ppf(0.975))
DRAWS = 2000
"""How often noise is drawn again, to see how much larger it makes the largest of several counts."""
GRID = np.linspace(-2.0, 3.0, 5001)
"""Values of a class's score that are tried: beyond 0 and 1, where noise leads without any bias."""

NEEDED: Mapping[str, tuple[Statistic, ...]] = {
    "accuracy": (Statistic.RIGHT,),
    "base_rate": (Statistic.CLASSES,),
    "balanced_accuracy": (Statistic.CLASSES,),
    "f1": (Statistic.CLASSES,),
    "auc": (Statistic.RANKS,),
    "rmse": (Statistic.SQUARED,),
    "mae": (Statistic.ABSOLUTE,),
    "r2": (Statistic.SQUARED, Statistic.LABELS),
}
"""What must be released for each score."""
FIRST = {"classification": "accuracy", "regression": "rmse"}
"""The score of each kind of task that is always released: the other figures of a run are made of it."""


@dataclass(frozen=True)
class Wanted:
    """What private evaluation releases: the scores that were asked for, and the statistics they need."""

    scores: tuple[str, ...]
    statistics: tuple[Statistic, ...]
    classes: int

    @property
    def is_plain(self) -> bool:
        """Whether one bounded number for each record is all."""
        return len(self.statistics) == 1

    @classmethod
    def of(cls, asked: tuple[str, ...] | None, task: Task, label_range: object) -> "Wanted":
        """The scores that an experiment asks for, if this task has them."""
        first = FIRST[task.kind]
        fit = [name for name in NEEDED if (name in ("rmse", "mae", "r2")) == (task.kind == "regression")]
        scores = (first,) if asked is None else asked
        for name in scores:
            if name not in fit:
                raise InputError(
                    f"evaluation.scores: {name} is no score of a {task.kind}; allowed here: {', '.join(fit)}"
                )
        if first not in scores:
            raise InputError(
                f"evaluation.scores: {list(scores)} lacks {first}, which is always released; allowed: a list "
                f"with {first}"
            )
        if "r2" in scores and label_range is None:
            raise InputError("evaluation.scores: r2 needs labels with a declared range; allowed: rmse, mae")
        needed = {statistic for name in scores for statistic in NEEDED[name]}
        return cls(scores, tuple(each for each in Statistic if each in needed), task.classes)


def bounded_rmse(
    total: Released[float], units: float, task: Task, label_range: tuple[float, float] | None
) -> dict[str, PooledScore]:
    """RMSE from the one sum of bounded scores that a regression releases; none for a classification."""
    if task.kind == "classification":
        return {}
    return {"rmse": _rmse(total.value / units, total.noise_std / units, task, label_range)}


def joint_scores(
    wanted: Wanted,
    mechanism: JointScores,
    released: Released[Floats],
    units: float,
    task: Task,
    label_range: tuple[float, float] | None,
) -> dict[str, PooledScore]:
    """Every score but accuracy from a release about so many units, all clients together.

    Args:
        released: centred, as it left the mechanism.
    """
    means = mechanism.natural(released.value, units) / units
    noise = released.noise_std / mechanism.weights / units
    own = {statistic: (means[at], noise[at]) for statistic, at in mechanism.places().items()}
    found = {}
    for name in (name for name in wanted.scores if name != "accuracy"):
        if name == "base_rate":
            found[name] = _base_rate(*own[Statistic.CLASSES])
        elif name in ("balanced_accuracy", "f1"):
            found[name] = _averaged(_of_classes(name, *own[Statistic.CLASSES]))
        elif name == "auc":
            found[name] = _averaged(_areas(*own[Statistic.RANKS], curves(task.classes)))
        elif name == "rmse":
            [mean], [spread] = own[Statistic.SQUARED]
            found[name] = _rmse(mean, spread, task, label_range)
        elif name == "mae":
            [mean], [spread] = own[Statistic.ABSOLUTE]
            found[name] = _mae(mean, spread, task, label_range)
        elif name == "r2":
            found[name] = _explained(own[Statistic.SQUARED], own[Statistic.LABELS], task.error_cap or 0.0)
    return found


# --- one bounded mean ------------------------------------------------------------------------------------


def _bounded(mean: float, spread: float, told: Callable[[float], float]) -> PooledScore:
    """A growing function of a mean in [0, 1]."""
    ends = (mean - NORMAL_95 * spread, mean, mean + NORMAL_95 * spread)
    low, value, high = (float(told(min(max(end, 0.0), 1.0))) for end in ends)
    return PooledScore(value, "private", (low, high))


def _rmse(mean: float, spread: float, task: Task, label_range: tuple[float, float] | None) -> PooledScore:
    """From the mean of scores 1 - error^2 / cap."""
    scale, cap = in_label_units(label_range), task.error_cap or 0.0
    return _bounded(1.0 - mean, spread, lambda error: scale * math.sqrt(cap * error))


def _mae(mean: float, spread: float, task: Task, label_range: tuple[float, float] | None) -> PooledScore:
    """From the mean of absolute errors over their bound, the root of the cap."""
    scale = in_label_units(label_range) * math.sqrt(task.error_cap or 0.0)
    return _bounded(mean, spread, lambda error: scale * error)


def _explained(squared: tuple[Floats, Floats], labels: tuple[Floats, Floats], cap: float) -> PooledScore:
    """R^2: one minus the mean squared error over the labels' variance."""
    error, error_noise = cap * (1.0 - squared[0][0]), cap * squared[1][0]
    (label, square), (label_noise, square_noise) = labels
    variance = square - label**2 + label_noise**2  # the square of a noisy mean is too large by its noise
    spread = math.sqrt(square_noise**2 + 4 * label**2 * label_noise**2 + 2 * label_noise**4)
    # All ratios r with (error - r variance)^2 <= z^2 (error_noise^2 + r^2 spread^2).
    a = variance**2 - (NORMAL_95 * spread) ** 2
    b, c = -2 * error * variance, error**2 - (NORMAL_95 * error_noise) ** 2
    if variance <= 0 or a <= 0:  # noise hides whether labels vary at all
        return PooledScore(None, "private")
    root = math.sqrt(max(b**2 - 4 * a * c, 0.0))
    ratios = (max((-b + root) / (2 * a), 0.0), max(error / variance, 0.0), max((-b - root) / (2 * a), 0.0))
    low, value, high = (1.0 - ratio for ratio in ratios)
    return PooledScore(value, "private", (low, high))


# --- counts by class -------------------------------------------------------------------------------------


def _base_rate(counts: Floats, noise: Floats) -> PooledScore:
    """The largest class; its interval holds for all classes at once, so for whichever is the largest."""
    hits, misses, _ = counts.reshape(3, -1)
    spreads = np.hypot(*noise.reshape(3, -1)[:2])
    labels, least = hits + misses, 1.0 / len(hits)
    largest, reach = float(labels.max()), float(norm.ppf(1 - 0.025 / len(labels)) * spreads.max())
    again = labels + spreads * np.random.default_rng(0).standard_normal((DRAWS, len(labels)))
    value = 2 * largest - float(again.max(axis=1).mean())  # the largest of noisy counts is too large
    low, high = (float(np.clip(end, least, 1.0)) for end in (largest - reach, largest + reach))
    return PooledScore(float(np.clip(value, low, high)), "private", (low, high))


def _of_classes(name: str, counts: Floats, noise: Floats) -> Floats:
    """By class: how far the noise is from each value of the grid, in standard deviations."""
    hits, misses, alarms = counts.reshape(3, -1, 1)
    hit_noise, miss_noise, alarm_noise = noise.reshape(3, -1, 1)
    if name == "f1":  # 2 hits over 2 hits, misses and false alarms
        hits, misses, hit_noise = 2 * hits, misses + alarms, 2 * hit_noise
        miss_noise = np.hypot(miss_noise, alarm_noise)
    found: Floats = (hits * (1 - GRID) - misses * GRID) / np.hypot(hit_noise * (1 - GRID), miss_noise * GRID)
    return found


def _areas(cells: Floats, noise: Floats, number: int) -> Floats:
    """By curve: the same for the share of pairs whose own record has the higher odds; ties are half won.

    With the histograms p and q, of records of the class and of all others, the share is a when p'(M - a)q is
    zero. That is unbiased, since the noise of p and of q is independent; so is the estimate of its variance.
    """
    won = np.tril(np.ones((BINS, BINS)), -1) + np.eye(BINS) / 2.0
    found = []
    for place, own in enumerate(cells.reshape(number, 2, BINS)):
        (mine, others), spread = own, float(noise.reshape(number, -1)[place, 0])
        against, before = won @ others, won.T @ mine
        gap = mine @ against - GRID * mine.sum() * others.sum()
        lengths = [
            np.square(part[:, None] - GRID * total).sum(axis=0)
            for part, total in ((against, others.sum()), (before, mine.sum()))
        ]
        size = np.square(won).sum() - 2 * GRID * won.sum() + np.square(GRID * BINS)
        both = spread**4 * size
        variance = np.maximum(spread**2 * (lengths[0] + lengths[1]) - both, both)
        found.append(gap / np.sqrt(variance))
    return np.stack(found)


def _averaged(distances: Floats) -> PooledScore:
    """The mean over classes of the values that fit best, with the interval that those of the classes give."""
    fits, best = np.abs(distances) <= NORMAL_95, np.abs(distances).argmin(axis=1)
    fits[np.arange(len(fits)), best] = True
    unknown = fits[:, 0] | fits[:, -1]
    if unknown.all():
        return PooledScore(None, "private")
    low, high = GRID[fits.argmax(axis=1)], GRID[len(GRID) - 1 - fits[:, ::-1].argmax(axis=1)]
    value = np.where(unknown, 0.5, GRID[best])
    below, above = (
        (float(np.linalg.norm(part[~unknown])) + 0.5 * float(unknown.sum())) / len(value)
        for part in (value - low, high - value)
    )
    ends = (float(value.mean()) - below, float(value.mean()), float(value.mean()) + above)
    least, mean, most = (min(max(end, 0.0), 1.0) for end in ends)
    return PooledScore(mean, "private", (least, most))
