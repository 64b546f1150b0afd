"""The structure, who learns how much about whom, and how that grows: one figure."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coterie.groups.leakage import Leakage
from coterie.groups.structures import Floats, Structure
from coterie.report.drawing import band, colour, look, panels, strong

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_GROUP_NAMES = 40
_MOST_WORKERS = 400


def draw(path: Path, found: Leakage, history: Sequence[Leakage], caption: str) -> None:
    """Draw the structure, the matrix of epsilon and epsilon against the epoch into a file."""
    panels(
        path,
        [
            lambda axes: draw_structure(axes, found.structure),
            lambda axes: draw_heatmap(axes, found),
            lambda axes: draw_history(axes, history),
        ],
        caption,
    )


def draw_structure(axes: "Axes", structure: Structure) -> None:
    """Groups on a circle, joined where they share workers; workers beside or between their groups."""
    axes.grid(visible=False)
    centres = _centres(len(structure.groups))
    colours = [colour(number) for number in range(len(structure.groups))]
    for first, second in zip(*np.nonzero(np.triu(structure.shared, 1)), strict=True):
        ends = centres[[first, second]]
        width = 0.6 + 0.4 * math.log1p(structure.shared[first, second])
        axes.plot(ends[:, 0], ends[:, 1], color=colour("rule"), linewidth=width, zorder=1)
    spots = _spots(structure, centres)
    if structure.workers <= _MOST_WORKERS:
        size = 120 / math.sqrt(structure.workers)
        shared = structure.membership.sum(axis=1) > 1
        own = [colours[int(np.argmax(row))] for row in structure.membership]
        shown = [colour("ink") if both else face for both, face in zip(shared, own, strict=True)]
        axes.scatter(spots[:, 0], spots[:, 1], s=size, c=shown, zorder=3)
    for number, (x, y) in enumerate(centres):
        axes.scatter([x], [y], s=900 / math.sqrt(len(centres)), color=colours[number], alpha=0.35, zorder=2)
        if len(centres) <= _MOST_GROUP_NAMES:
            axes.annotate(
                structure.group_name(number), (x, y), ha="center", va="center", fontsize=8, zorder=4
            )
    sizes = [len(members) for members in structure.groups]
    span = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    axes.set(
        title=f"{structure.kind}: {structure.workers} workers, {len(sizes)} groups of {span}",
        xlabel="black: workers in several groups",
        xticks=[],
        yticks=[],
        aspect="equal",
    )


def draw_heatmap(axes: "Axes", found: Leakage) -> None:
    """Epsilon by target and observer; pairs that are not defined stay empty."""
    from matplotlib.colors import LinearSegmentedColormap

    axes.grid(visible=False)
    values = np.ma.masked_invalid(found.epsilon)
    shades = LinearSegmentedColormap.from_list("leakage", [colour("card"), colour(1)])
    image = axes.imshow(values, cmap=shades, vmin=0, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label=f"epsilon at delta {found.delta:g}")
    axes.set(title=f"What observers learn by epoch {found.epoch}", xlabel="observer", ylabel="target")


def draw_history(axes: "Axes", history: Sequence[Leakage]) -> None:
    """Mean and spread over workers of the epsilon against each one's worst observer."""
    epochs = [found.epoch for found in history]
    rows = [found.per_worker[np.isfinite(found.per_worker)] for found in history]
    if not rows or not len(rows[0]):
        axes.set(title="No observer in this threat model", xticks=[], yticks=[])
        return
    mean = np.array([row.mean() for row in rows])
    spread = np.array([row.std() for row in rows])
    strong(axes, epochs, mean.tolist(), "mean over workers")
    band(axes, epochs, (mean - spread).tolist(), (mean + spread).tolist(), "one standard deviation")
    axes.plot(epochs, [row.max() for row in rows], **look(1, "most exposed worker", marks=False))
    by_counts = [np.nanmax(found.epsilon_counts) for found in history]
    axes.plot(epochs, by_counts, **look(2, "most exposed, by counts alone", marks=False))
    published = [found.published_epsilon for found in history]
    if published[0] is not None:
        claimed = [np.nanmax(table) for table in published if table is not None]
        axes.plot(epochs, claimed, **look(3, "most exposed, as published", marks=False))
    axes.set(
        title="Against the worst observer", xlabel="epoch", ylabel=f"epsilon at delta {history[0].delta:g}"
    )


def _centres(groups: int) -> Floats:
    if groups == 1:
        return np.zeros((1, 2))
    angles = np.pi / 2 - 2 * np.pi * np.arange(groups) / groups
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _spots(structure: Structure, centres: Floats) -> Floats:
    """Workers of one group around its centre, workers of several between the centres of these."""
    member = structure.membership.astype(np.float64)
    spots: Floats = member @ centres / member.sum(axis=1, keepdims=True)
    reach = 0.28 if len(centres) == 1 else min(0.28, 1.4 / len(centres))
    for number in range(len(structure.classes)):
        workers = np.flatnonzero(structure.class_of == number)
        if len(workers) > 1 or structure.classes[number].sum() == 1:
            angles = 2 * np.pi * np.arange(len(workers)) / len(workers) + number
            scale = reach if structure.classes[number].sum() == 1 else 0.3 * reach
            spots[workers] += scale * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return spots
