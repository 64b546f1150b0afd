"""Who learns how much about whom, drawn: the matrix of a run, and how each worker's epsilon grows."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from coterie.report.charts import Band, Scale, Series, line_figure, rounds, ticks_around
from coterie.report.drawing import WIDTH, Axes, Figure, colour
from coterie.report.numbers import delta, epsilon
from coterie.report.record import LeakageRecord

LEVELS = 24
"""Shades of the matrix."""
SIDE = 320.0


def matrix(found: LeakageRecord | None, *, name: str = "", top: float | None = None) -> Iterator[Figure]:
    """Epsilon by target and observer, as shades; one path for each shade keeps the page small.

    Args:
        name: what to call it where there are several.
        top: the epsilon of the darkest shade, to compare several; by default the largest here.
    """
    if found is None:
        return
    count, largest = len(found.workers), found.largest if top is None else top
    pairs = [
        (value, target, observer)
        for target, row in enumerate(found.epsilon)
        for observer, value in enumerate(row)
        if value is not None
    ]
    if not pairs:
        return

    def paint(axes: Axes) -> None:
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)
        axes.axvspan(0, count, color=colour("soft"), alpha=0.3, linewidth=0)
        for shade, boxes in sorted(_boxes(found, largest).items()):
            _shaded(axes, boxes, shade)
        step = count / LEVELS
        for shade in range(1, LEVELS + 1):
            _shaded(axes, [(1.07 * count, count - step * shade, 0.045 * count, 1.03 * step)], shade)
        for tick in ticks_around(0.0, largest, 5) if largest else (0.0,):
            if tick <= largest:
                at = count * (1 - tick / (largest or 1.0))
                axes.text(1.135 * count, at, f"{tick:g}", va="center", color=colour("soft"))
        ends, names = [0.5, count - 0.5], [found.workers[0], found.workers[-1]]
        axes.set(
            xlim=(0, count), ylim=(count, 0), xlabel="observer; downwards the target",
            xticks=ends, yticks=ends, xticklabels=names, yticklabels=names,
        )  # fmt: skip

    worst, target, observer = max(pairs)
    most = f"{found.workers[target]} leaks most: {epsilon(worst)} to {found.workers[observer]}"
    told = f"{most}, delta {delta(found.delta)}."
    beside = ", and workers that share a group." if found.threat_model == 2 else "."
    yield Figure(
        "leakage" + "".join(letter if letter.isalnum() else "-" for letter in f"-{name}" if name),
        "Who learns how much about whom" + (f": {name}" if name else ""),
        f"{found.structure[:1].upper()}{found.structure[1:]}. {told} Grey cells are no concern of the threat "
        f"model: a worker itself{beside}",
        paint,
        height=SIDE + 60,
        margins=(92, WIDTH - SIDE - 92, 8, 52),
    )


Box = tuple[float, float, float, float]
"""Left, top, width, height."""


def _shaded(axes: Axes, boxes: Sequence[Box], shade: int) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)] for x, y, w, h in boxes]
    outline = Outline.make_compound_path(*(Outline(box, closed=True) for box in corners))
    style = {"linewidth": 0, "clip_on": False}
    axes.add_patch(PathPatch(outline, facecolor=colour("card"), **style))
    if shade:
        shown = {"facecolor": colour(1), "alpha": shade / LEVELS, "gid": f"shade-{shade}"}
        axes.add_patch(PathPatch(outline, **shown, **style))


def _boxes(found: LeakageRecord, top: float) -> dict[int, list[Box]]:
    """Stretches of equal shade in every row, by shade."""
    boxes: dict[int, list[Box]] = defaultdict(list)
    for row, cells in enumerate(found.epsilon):
        left = 0
        for shade, run in itertools.groupby(_shade(cell, top) for cell in cells):
            width = len(list(run))
            if shade is not None:
                boxes[shade].append((left, row, width, 1))
            left += width
    return boxes


def _shade(value: float | None, top: float) -> int | None:
    """0 only where nothing leaks."""
    if value is None:
        return None
    return max(1, min(LEVELS, round(LEVELS * value / top))) if value > 0 and top > 0 else 0


def growth(found: LeakageRecord | None, *beside: Series) -> Iterator[Figure]:
    """Epsilon against epoch: mean over workers, one standard deviation, the most exposed, others beside."""
    shown = [moment for moment in found.history if moment.epoch >= 1] if found else []
    if not shown:
        return
    last = shown[-1]
    told = f"After epoch {last.epoch}: {epsilon(last.mean)} on average, {epsilon(last.largest)} at most."
    yield line_figure(
        "growth",
        "Epsilon of workers against epoch",
        [
            Series("mean over workers", [(m.epoch, m.mean) for m in shown], colour="ink", marks=[]),
            Series("most exposed worker", [(m.epoch, m.largest) for m in shown], colour=1, marks=[]),
            Band(
                "one standard deviation",
                [(m.epoch, max(0.0, m.mean - m.deviation), m.mean + m.deviation) for m in shown],
            ),
            *beside,
        ],
        rounds(last.epoch, "epoch"),
        Scale(floor=0.0),
        f"Each worker against the one that learns most about it. {told}",
    )


def growths(found: Sequence[tuple[str, LeakageRecord]]) -> Figure:
    """Mean epsilon against epoch of several runs, with one standard deviation over workers at the end."""
    series = []
    for name, record in found:
        shown = [moment for moment in record.history if moment.epoch >= 1]
        spread = [0.0] * (len(shown) - 1) + [shown[-1].deviation]
        series.append(Series(name, [(m.epoch, m.mean) for m in shown], marks=[-1], spread=spread))
    told = f"At the end: {', '.join(f'{each.name} {epsilon(each.points[-1][1])}' for each in series)}."
    return line_figure(
        "growths",
        "Mean epsilon of workers against epoch",
        series,
        rounds(max(int(each.points[-1][0]) for each in series), "epoch"),
        Scale(floor=0.0),
        "Each worker against the one that learns most about it; upright lines are one standard deviation "
        f"over workers. {told}",
    )
