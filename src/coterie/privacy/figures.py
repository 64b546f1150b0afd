"""How training noise depends on the budget, the batch and the first round (R-DPCFL, Figures 3, 4, 14)."""

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from coterie.privacy.lemmas import update_noise_variance
from coterie.privacy.mechanisms import Multiplier, NoiseRule
from coterie.privacy.units import Mode

FORMATS = (".png", ".pdf", ".svg")

NoiseAt = Callable[[float, int, Multiplier | None, Mode], float | None]
"""Training noise for (epsilon, batch, first-round noise or None for no such round, mode), if any does."""

_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
_FIRST_ROUND_NOISES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0, 40.0)


def draw_noise(
    path: Path, noise_at: NoiseAt, *, epsilon: float, records: int, batch: int, caption: str
) -> None:
    """Draw training noise against epsilon, batch and first-round noise, and the noise left in an update."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(2, 3).ravel()
    shared = NoiseRule.SHARED
    batches = sorted({batch, *(size for size in (8, 16, 32, 64, 128, 256, 512) if size <= records)})
    epsilons = [factor * epsilon for factor in _FACTORS]

    curves: dict[str, tuple[Multiplier | None, Mode]] = {
        "full first round": (shared, Mode.SOUND),
        "no such round": (None, Mode.SOUND),
        "first round, auto noise": (NoiseRule.AUTO, Mode.SOUND),
        "as published": (shared, Mode.PAPER),
    }
    for label, (first_round, mode) in curves.items():
        _plot(axes[0], epsilons, [noise_at(x, batch, first_round, mode) for x in epsilons], label)
    axes[0].set(title="Noise against epsilon", xlabel="epsilon", ylabel="noise multiplier of training")

    full = [noise_at(epsilon, size, shared, Mode.SOUND) for size in batches]
    bare = [noise_at(epsilon, size, None, Mode.SOUND) for size in batches]
    _plot(axes[1], batches, full, "full first round")
    _plot(axes[1], batches, bare, "no such round")
    axes[1].set(
        title="Noise against batch", xlabel="batch", ylabel="noise multiplier of training", xscale="log"
    )

    first = [noise_at(epsilon, batch, noise, Mode.SOUND) for noise in _FIRST_ROUND_NOISES]
    _plot(axes[2], _FIRST_ROUND_NOISES, first, "given first-round noise")
    alone = noise_at(epsilon, batch, None, Mode.SOUND)
    if alone is not None:
        axes[2].axhline(alone, linestyle=":", color="gray", label="no such round")
    axes[2].set(
        title="Noise against first-round noise",
        xlabel="noise multiplier of the first round",
        ylabel="noise multiplier of training",
        xscale="log",
    )

    def spread(size: int, noise: float | None) -> float | None:
        if noise is None:
            return None
        return math.sqrt(
            update_noise_variance(
                records=records,
                batch=size,
                epochs=1,
                learning_rate=1.0,
                parameters=1,
                clip=1.0,
                noise_multiplier=noise,
            )
        )

    _plot(axes[3], batches, [spread(records, z) for z in full], "full-batch first round")
    _plot(axes[3], batches, [spread(size, z) for size, z in zip(batches, full, strict=True)], "a later round")
    axes[3].set(
        title="Noise in an update",
        xlabel="batch of the later rounds",
        ylabel="std per parameter / (learning rate x clip)",
        xscale="log",
        yscale="log",
    )

    for size in batches[:: max(1, len(batches) // 4)]:
        pairs = [
            (noise_at(x, size, shared, Mode.SOUND), noise_at(x, size, None, Mode.SOUND)) for x in epsilons
        ]
        ratios = [a / b if a is not None and b is not None else None for a, b in pairs]
        _plot(axes[4], epsilons, ratios, f"batch {size}")
    axes[4].set(title="Full first round over small batches only", xlabel="epsilon", ylabel="ratio of noise")

    axes[5].axis("off")
    axes[5].text(0.0, 0.95, textwrap.fill(caption, 52), va="top", fontsize=9)
    for ax in axes[:5]:
        ax.grid(alpha=0.3)
        if ax.get_xscale() == "log":
            ax.xaxis.set_major_formatter(ScalarFormatter())
            ax.xaxis.set_minor_formatter(NullFormatter())
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8)
    figure.savefig(path)


def _plot(ax: object, xs: Sequence[float], ys: Sequence[float | None], label: str) -> None:
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    if points:
        ax.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)  # type: ignore[attr-defined]
