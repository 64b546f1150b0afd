"""The structure, who learns how much about whom, and how that grows: one figure."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coterie.groups.leakage import Leakage
from coterie.groups.structures import Floats, Structure
from coterie.report.charts import Series
from coterie.report.drawing import Axes, Figure, colour, panels
from coterie.report.leakage import growth, matrix
from coterie.report.numbers import span
from coterie.report.record import LeakageRecord, Moment

_MOST_GROUP_NAMES = 40
_MOST_WORKERS = 400


def draw(path: Path, found: Leakage, history: Sequence[Leakage], caption: str) -> None:
    """Draw the structure, the matrix of epsilon and epsilon against the epoch into a file."""
    structure, record = found.structure, _record(found, history)
    sizes = [len(members) for members in structure.groups]
    heading = f"{structure.kind}: {structure.workers} workers, {len(sizes)} groups of {span(sizes)}"
    drawn = Figure("structure", heading, "", lambda axes: draw_structure(axes, structure))
    counted = [(each.epoch, each.epsilon_counts, each.published_epsilon) for each in history]
    most = {
        "most exposed, by counts alone": [(epoch, table) for epoch, table, _ in counted],
        "most exposed, as published": [(epoch, table) for epoch, _, table in counted if table is not None],
    }
    beside = [
        Series(name, [(epoch, float(np.nanmax(table))) for epoch, table in tables], marks=[])
        for name, tables in most.items()
        if record.history and tables
    ]
    if not record.history:
        caption = f"No observer in this threat model. {caption}"
    panels(path, [drawn, *matrix(record), *growth(record, *beside)], caption)


def _record(found: Leakage, history: Sequence[Leakage]) -> LeakageRecord:
    """What a run of this structure would write down; without history where nobody observes anybody."""
    rows = [(each.epoch, each.per_worker[np.isfinite(each.per_worker)]) for each in history]
    return LeakageRecord(
        workers=tuple(map(str, range(found.structure.workers))),
        structure=found.structure.summary,
        threat_model=int(found.threat),
        delta=found.delta,
        epsilon=tuple(
            tuple(None if np.isnan(cell) else cell for cell in row) for row in found.epsilon.tolist()
        ),
        per_worker={},
        history=tuple(Moment(t, row.mean(), row.std(), row.max()) for t, row in rows if len(row)),
    )


def draw_structure(axes: Axes, structure: Structure) -> None:
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
    axes.set(xlabel="dark: workers in several groups", xticks=[], yticks=[], aspect="equal")
    axes.margins(0.05)


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
