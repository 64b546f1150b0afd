"""Who learns how much about whom, drawn: the matrix of a run, and how each worker's epsilon grows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import InputError
from coterie.experiment.folder import read_json
from coterie.report import chart
from coterie.report.chart import Axis, Frame, Key, drawing, label, legend, line, marker
from coterie.report.figures import Figure
from coterie.report.markup import Markup, number, tag
from coterie.report.numbers import delta, epsilon

LEVELS = 24
"""Shades of the matrix."""
SIDE = 320.0


@dataclass(frozen=True)
class Moment:
    """The epsilons of all workers after so many epochs, each against the one that learns most about it."""

    epoch: int
    mean: float
    deviation: float
    largest: float


@dataclass(frozen=True)
class LeakageRecord:
    """`leakage.json` of a run folder."""

    workers: tuple[str, ...]
    structure: str
    threat_model: int
    delta: float
    epsilon: tuple[tuple[float | None, ...], ...]
    """By target (row) and observer; None for pairs outside the threat model."""
    per_worker: Mapping[str, float | None]
    history: tuple[Moment, ...]

    @property
    def largest(self) -> float:
        return max((cell for row in self.epsilon for cell in row if cell is not None), default=0.0)


def read_leakage(path: Path) -> LeakageRecord | None:
    """The record in a file, or None where workers do not watch each other."""
    if not path.exists():
        return None
    content = read_json(path)
    try:
        return _parsed(content)
    except (KeyError, TypeError, ValueError) as mistake:
        raise InputError(f"{path}: not written by this version ({mistake!r})") from None


def _parsed(content: Mapping[str, Any]) -> LeakageRecord:
    return LeakageRecord(
        workers=tuple(content["workers"]),
        structure=str(content["structure"]),
        threat_model=int(content["threat_model"]),
        delta=float(content["delta"]),
        epsilon=tuple(
            tuple(None if cell is None else float(cell) for cell in row) for row in content["epsilon"]
        ),
        per_worker=dict(content["per_worker"]),
        history=tuple(Moment(**moment) for moment in content["history"]),
    )


def matrix(found: LeakageRecord, *, name: str = "", top: float | None = None) -> Figure:
    """Epsilon by target and observer, as shades; one path for each shade keeps the page small.

    Args:
        name: what to call it where there are several.
        top: the epsilon of the darkest shade, to compare several; by default the largest here.
    """
    top = found.largest if top is None else top
    count = len(found.workers)
    blank = Axis(0, 1, (), str)
    frame = Frame(blank, blank, width=500, height=SIDE + 60, left=92, right=88, top=8, bottom=52)
    cell = SIDE / count
    parts: list[Markup] = [
        tag("rect", class_="undefined", x=frame.left, y=frame.top, width=SIDE, height=SIDE)
    ]
    for shade, runs in sorted(_runs(found, top).items()):
        path = "".join(
            f"M{number(frame.left + cell * first)} {number(frame.top + cell * row)}"
            f"h{number(cell * length)}v{number(cell)}h{number(-cell * length)}z"
            for row, first, length in runs
        )
        parts.append(tag("path", class_="known", d=path))
        if shade:
            parts.append(tag("path", class_="heat", d=path, fill_opacity=shade / LEVELS))
    floor = frame.top + SIDE
    for place, who in ((0, found.workers[0]), (count - 1, found.workers[-1])):
        middle = cell * (place + 0.5)
        parts.append(label(frame.left + middle, floor + 17, who, class_="tick mid"))
        parts.append(label(frame.left - 8, frame.top + middle, who, class_="tick end middle"))
    parts.append(
        label(frame.left + SIDE / 2, floor + 40, "observer; downwards the target", class_="tick mid")
    )
    parts += _scale(frame, top)
    worst = max(
        (value, target, observer)
        for target, row in enumerate(found.epsilon)
        for observer, value in enumerate(row)
        if value is not None
    )
    description = (
        f"{found.workers[worst[1]]} leaks most: {epsilon(worst[0])} to {found.workers[worst[2]]}, "
        f"delta {delta(found.delta)}."
    )
    heading = "Who learns how much about whom" + (f": {name}" if name else "")
    return Figure(
        heading,
        drawing(_identifier(name), heading, description, 500, SIDE + 60, parts),
        f"{found.structure[:1].upper()}{found.structure[1:]}. {description} Grey cells are no concern of "
        "the threat model: a worker itself"
        + (", and workers that share a group." if found.threat_model == 2 else "."),
    )


def _identifier(name: str) -> str:
    """An id for the drawing, of letters and digits."""
    return "leakage-" + "".join(letter if letter.isalnum() else "-" for letter in name)


def _runs(found: LeakageRecord, top: float) -> dict[int, list[tuple[int, int, int]]]:
    """Stretches of equal shade in every row: (row, first column, length) for each shade."""
    runs: dict[int, list[tuple[int, int, int]]] = {}
    for row, cells in enumerate(found.epsilon):
        shades = [None if cell is None else _shade(cell, top) for cell in cells]
        first = 0
        for place in range(1, len(shades) + 1):
            if place == len(shades) or shades[place] != shades[first]:
                shade = shades[first]
                if shade is not None:
                    runs.setdefault(shade, []).append((row, first, place - first))
                first = place
    return runs


def _shade(value: float, top: float) -> int:
    """0 only where nothing leaks."""
    if value <= 0 or top <= 0:
        return 0
    return max(1, min(LEVELS, round(LEVELS * value / top)))


def _scale(frame: Frame, top: float) -> Iterator[Markup]:
    left, height = frame.left + SIDE + 22, SIDE / LEVELS
    for shade in range(LEVELS + 1):
        y = frame.top + SIDE - height * shade
        if shade:
            yield tag("rect", class_="known", x=left, y=y, width=14, height=height + 0.4)
            yield tag(
                "rect", class_="heat", x=left, y=y, width=14, height=height + 0.4, fill_opacity=shade / LEVELS
            )
    for tick in chart.nice_ticks(0.0, top, 5):
        y = frame.top + SIDE * (1 - (tick / top if top else 0))
        yield label(left + 20, y, f"{tick:g}", class_="tick middle")


def growth(found: LeakageRecord) -> Figure:
    """Epsilon against epoch: mean over workers, one standard deviation, the most exposed."""
    axis = chart.linear_axis(0.0, 1.02 * max(m.largest for m in found.history), lambda value: f"{value:.4g}")
    frame = Frame(chart.round_axis(max(m.epoch for m in found.history)), axis)
    shown = [moment for moment in found.history if moment.epoch >= 1]
    lows = [frame.at((m.epoch, max(0.0, m.mean - m.deviation))) for m in shown]
    highs = [frame.at((m.epoch, m.mean + m.deviation)) for m in shown]
    parts = frame.axes("epoch")
    parts.append(chart.band(lows, highs))
    parts.append(line([frame.at((m.epoch, m.largest)) for m in shown], "line s1", 1))
    parts.append(line([frame.at((m.epoch, m.mean)) for m in shown], "line ink strong"))
    keys = [
        chart.line_key("mean over workers", "ink strong"),
        Key(
            "one standard deviation", chart.swatch(tag("rect", class_="band", x=1, y=2, width=24, height=10))
        ),
        chart.line_key("most exposed worker", "s1", 1),
    ]
    last = shown[-1]
    description = (
        f"After epoch {last.epoch}: {epsilon(last.mean)} on average, {epsilon(last.largest)} at most."
    )
    heading = "Epsilon of workers against epoch"
    return Figure(
        heading,
        Markup(drawing("growth", heading, description, frame.width, frame.height, parts) + legend(keys)),
        f"Each worker against the one that learns most about it. {description}",
    )


def growths(found: Sequence[tuple[str, LeakageRecord]]) -> Figure:
    """Mean epsilon against epoch of several runs, with one standard deviation over workers at the end."""
    top = max(m.mean + m.deviation for _, record in found for m in record.history)
    epochs = max(m.epoch for _, record in found for m in record.history)
    frame = Frame(chart.round_axis(epochs), chart.linear_axis(0.0, 1.02 * top, lambda value: f"{value:.4g}"))
    parts, keys, ends = frame.axes("epoch"), [], []
    for index, (name, record) in enumerate(found):
        colour, shape = chart.series(index), chart.shape_of(index)
        shown = [moment for moment in record.history if moment.epoch >= 1]
        points = [frame.at((m.epoch, m.mean)) for m in shown]
        last = shown[-1]
        low, high = (
            frame.at_y(max(0.0, last.mean - last.deviation)),
            frame.at_y(last.mean + last.deviation),
        )
        parts.append(
            tag("line", class_=f"error {colour}", x1=points[-1][0], x2=points[-1][0], y1=low, y2=high)
        )
        parts.append(line(points, f"line {colour}", index))
        parts.append(marker(points[-1], shape, f"mark {colour}", 4.5))
        keys.append(chart.line_key(name, colour, index, shape))
        ends.append(f"{name} {epsilon(last.mean)}")
    heading = "Mean epsilon of workers against epoch"
    description = f"At the end: {', '.join(ends)}."
    return Figure(
        heading,
        Markup(drawing("growths", heading, description, frame.width, frame.height, parts) + legend(keys)),
        "Each worker against the one that learns most about it; upright lines are one standard deviation "
        f"over workers. {description}",
    )
