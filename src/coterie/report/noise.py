"""How training noise depends on the budget, the batch and the first round (R-DPCFL, Figures 3, 4, 14)."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.privacy.lemmas import update_noise_variance
from coterie.privacy.mechanisms import Multiplier, NoiseRule
from coterie.privacy.units import Mode
from coterie.report.drawing import colour, look, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NoiseAt = Callable[[float, int, Multiplier | None, Mode], float | None]
"""Training noise for (epsilon, batch, first-round noise or None for no such round, mode), if any does."""

_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
_FIRST_ROUND_NOISES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0, 40.0)


def draw_noise(
    path: Path, noise_at: NoiseAt, *, epsilon: float, records: int, batch: int, caption: str
) -> None:
    """Draw training noise against epsilon, batch and first-round noise, and the noise left in an update."""
    shared, sound = NoiseRule.SHARED, Mode.SOUND
    batches = sorted({batch, *(size for size in (8, 16, 32, 64, 128, 256, 512) if size <= records)})
    epsilons = [factor * epsilon for factor in _FACTORS]
    full = [noise_at(epsilon, size, shared, sound) for size in batches]
    training = "noise multiplier of training"

    def against_epsilon(axes: "Axes") -> None:
        curves: dict[str, tuple[Multiplier | None, Mode]] = {
            "full first round": (shared, sound),
            "no such round": (None, sound),
            "first round, auto noise": (NoiseRule.AUTO, sound),
            "as published": (shared, Mode.PAPER),
        }
        for index, (name, (first, mode)) in enumerate(curves.items()):
            _plot(axes, index, epsilons, [noise_at(x, batch, first, mode) for x in epsilons], name)
        axes.set(title="Noise against epsilon", xlabel="epsilon", ylabel=training)

    def against_batch(axes: "Axes") -> None:
        _plot(axes, 0, batches, full, "full first round")
        bare = [noise_at(epsilon, size, None, sound) for size in batches]
        _plot(axes, 1, batches, bare, "no such round")
        axes.set(title="Noise against batch", xlabel="batch", ylabel=training, xscale="log")

    def against_first_round(axes: "Axes") -> None:
        first = [noise_at(epsilon, batch, noise, sound) for noise in _FIRST_ROUND_NOISES]
        _plot(axes, 0, _FIRST_ROUND_NOISES, first, "given first-round noise")
        alone = noise_at(epsilon, batch, None, sound)
        if alone is not None:
            axes.axhline(alone, linestyle=":", color=colour("soft"), label="no such round")
        axes.set(title="Noise against first-round noise", xlabel="noise multiplier of the first round")
        axes.set(ylabel=training, xscale="log")

    def in_an_update(axes: "Axes") -> None:
        _plot(axes, 0, batches, [_spread(records, records, z) for z in full], "full-batch first round")
        later = [_spread(records, size, z) for size, z in zip(batches, full, strict=True)]
        _plot(axes, 1, batches, later, "a later round")
        axes.set(title="Noise in an update", xlabel="batch of the later rounds", xscale="log", yscale="log")
        axes.set(ylabel="std per parameter / (learning rate x clip)")

    def ratio(axes: "Axes") -> None:
        for index, size in enumerate(batches[:: max(1, len(batches) // 4)]):
            pairs = [(noise_at(x, size, shared, sound), noise_at(x, size, None, sound)) for x in epsilons]
            ratios = [a / b if a is not None and b is not None else None for a, b in pairs]
            _plot(axes, index, epsilons, ratios, f"batch {size}")
        axes.set(title="Full first round over small batches only", xlabel="epsilon", ylabel="ratio of noise")

    panels(path, [against_epsilon, against_batch, against_first_round, in_an_update, ratio], caption)


def _spread(records: int, batch: int, noise: float | None) -> float | None:
    """Standard deviation of the noise in one parameter of an update, per learning rate and clip."""
    if noise is None:
        return None
    variance = update_noise_variance(
        records=records,
        batch=batch,
        noise_multiplier=noise,
        epochs=1,
        learning_rate=1.0,
        parameters=1,
        clip=1.0,
    )
    return math.sqrt(variance)


def _plot(axes: "Axes", series: int, xs: Sequence[float], ys: Sequence[float | None], name: str) -> None:
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    if points:
        axes.plot(*zip(*points, strict=True), **{**look(series, name), "markersize": 5})
