"""Who learns how much about whom, drawn: the matrix of a run, and how each worker's epsilon grows."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import InputError
from coterie.files import read_json
from coterie.report.drawing import (
    WIDTH,
    Figure,
    band,
    colour,
    look,
    round_axis,
    set_ticks,
    strong,
    ticks_around,
)
from coterie.report.numbers import delta, epsilon

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def matrix(found: LeakageRecord | None, *, name: str = "", top: float | None = None) -> Iterator[Figure]:
    """Epsilon by target and observer, as shades; one path for each shade keeps the page small.

    Args:
        name: what to call it where there are several.
        top: the epsilon of the darkest shade, to compare several; by default the largest here.
    """
    if found is None:
        return
    count, largest = len(found.workers), found.largest if top is None else top

    def paint(axes: "Axes") -> None:
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)
        axes.axvspan(0, count, color=colour("soft"), alpha=0.3, linewidth=0)
        for shade, boxes in sorted(_boxes(found, largest).items()):
            _shaded(axes, boxes, shade)
        scale = 1.07 * count, count / LEVELS
        for shade in range(1, LEVELS + 1):
            _shaded(axes, [(scale[0], count - scale[1] * shade, 0.045 * count, 1.03 * scale[1])], shade)
        for tick in ticks_around(0.0, largest, 5) if largest else (0.0,):
            if tick <= largest:
                at = count * (1 - (tick / largest if largest else 0))
                axes.text(1.135 * count, at, f"{tick:g}", va="center", color=colour("soft"))
        ends, names = [0.5, count - 0.5], [found.workers[0], found.workers[-1]]
        axes.set(
            xlim=(0, count), ylim=(count, 0), xlabel="observer; downwards the target",
            xticks=ends, yticks=ends, xticklabels=names, yticklabels=names,
        )  # fmt: skip

    worst, target, observer = max(
        (value, target, observer)
        for target, row in enumerate(found.epsilon)
        for observer, value in enumerate(row)
        if value is not None
    )
    told = (
        f"{found.workers[target]} leaks most: {epsilon(worst)} to {found.workers[observer]}, "
        f"delta {delta(found.delta)}."
    )
    beside = ", and workers that share a group." if found.threat_model == 2 else "."
    yield Figure(
        "leakage" + "".join(letter if letter.isalnum() else "-" for letter in f"-{name}" if name),
        "Who learns how much about whom" + (f": {name}" if name else ""),
        f"{found.structure[:1].upper()}{found.structure[1:]}. {told} Grey cells are no concern of the threat "
        f"model: a worker itself{beside}",
        paint,
        told,
        height=SIDE + 60,
        margins=(92, WIDTH - SIDE - 92, 8, 52),
    )


Box = tuple[float, float, float, float]
"""Left, top, width, height."""


def _shaded(axes: "Axes", boxes: Sequence[Box], shade: int) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    outline = Outline.make_compound_path(
        *(
            Outline([(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)], closed=True)
            for x, y, w, h in boxes
        )
    )
    style = {"linewidth": 0, "clip_on": False}
    axes.add_patch(PathPatch(outline, facecolor=colour("card"), **style))
    if shade:
        axes.add_patch(
            PathPatch(outline, facecolor=colour(1), alpha=shade / LEVELS, gid=f"shade-{shade}", **style)
        )


def _boxes(found: LeakageRecord, top: float) -> dict[int, list[Box]]:
    """Stretches of equal shade in every row, by shade."""
    boxes: dict[int, list[Box]] = {}
    for row, cells in enumerate(found.epsilon):
        places = range(len(cells))
        for shade, run in itertools.groupby(places, key=lambda place: _shade(cells[place], top)):
            if shade is not None:
                members = list(run)
                boxes.setdefault(shade, []).append((members[0], row, len(members), 1))
    return boxes


def _shade(value: float | None, top: float) -> int | None:
    """0 only where nothing leaks."""
    if value is None:
        return None
    return max(1, min(LEVELS, round(LEVELS * value / top))) if value > 0 and top > 0 else 0


def growth(found: LeakageRecord | None) -> Iterator[Figure]:
    """Epsilon against epoch: mean over workers, one standard deviation, the most exposed."""
    if found is None:
        return
    shown = [moment for moment in found.history if moment.epoch >= 1]
    epochs = [m.epoch for m in shown]

    def paint(axes: "Axes") -> None:
        _growing(axes, epochs, max(m.largest for m in shown))
        strong(axes, epochs, [m.mean for m in shown], "mean over workers")
        lows = [max(0.0, m.mean - m.deviation) for m in shown]
        highs = [m.mean + m.deviation for m in shown]
        band(axes, epochs, lows, highs, "one standard deviation")
        axes.plot(epochs, [m.largest for m in shown], **look(1, "most exposed worker", marks=False))

    last = shown[-1]
    told = f"After epoch {last.epoch}: {epsilon(last.mean)} on average, {epsilon(last.largest)} at most."
    caption = f"Each worker against the one that learns most about it. {told}"
    yield Figure("growth", "Epsilon of workers against epoch", caption, paint, told)


def growths(found: Sequence[tuple[str, LeakageRecord]]) -> Figure:
    """Mean epsilon against epoch of several runs, with one standard deviation over workers at the end."""
    shown = {name: [moment for moment in record.history if moment.epoch >= 1] for name, record in found}

    def paint(axes: "Axes") -> None:
        moments = [moment for each in shown.values() for moment in each]
        _growing(axes, [m.epoch for m in moments], max(m.mean + m.deviation for m in moments))
        for index, (name, each) in enumerate(shown.items()):
            last, style = each[-1], look(index, name)
            ends = max(0.0, last.mean - last.deviation), last.mean + last.deviation
            axes.vlines(last.epoch, *ends, color=style["color"], linewidth=1.6, clip_on=False)
            axes.plot([m.epoch for m in each], [m.mean for m in each], markevery=[-1], clip_on=False, **style)

    told = f"At the end: {', '.join(f'{name} {epsilon(each[-1].mean)}' for name, each in shown.items())}."
    return Figure(
        "growths",
        "Mean epsilon of workers against epoch",
        "Each worker against the one that learns most about it; upright lines are one standard deviation "
        f"over workers. {told}",
        paint,
        told,
    )


def _growing(axes: "Axes", epochs: Sequence[int], top: float) -> None:
    set_ticks(axes, "y", ticks_around(0.0, 1.02 * top), lambda value: f"{value:.4g}")
    round_axis(axes, max(epochs), "epoch")
