"""Charts of lines, marks and bars from plain numbers, for figures that are not about one run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coterie.report.drawing import Figure, colour, look, milestone, set_ticks, ticks_around, tips

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Series:
    """Named points, joined by a line or not."""

    name: str
    points: Sequence[tuple[float, float]]
    joined: bool = True


@dataclass(frozen=True)
class Scale:
    """How numbers become places on an axis.

    Args:
        places: where the ticks stand; by default at round numbers.
        floor: where the axis begins at the latest.
    """

    title: str
    label: Callable[[float], str]
    logarithmic: bool = False
    places: Sequence[float] = ()
    floor: float | None = None

    def ticks(self, values: Sequence[float]) -> list[float]:
        low, high = min([*values, *([] if self.floor is None else [self.floor])]), max(values)
        if self.places:
            return list(self.places)
        if not self.logarithmic:
            return ticks_around(low, high)
        first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
        return [
            10.0**power for power in range(first, max(last, first + 1) + 1, max(1, -((first - last) // 6)))
        ]

    def apply(self, axes: "Axes", which: str, values: Sequence[float]) -> None:
        """Set the axis, "x" or "y", such that it holds all values."""
        ticks = self.ticks(values)
        if self.logarithmic:
            axes.set(**{f"{which}scale": "log"})
        set_ticks(axes, which, ticks, self.label)
        axes.minorticks_off()
        if self.places:
            low, high = min(*values, ticks[0]), max(*values, ticks[-1])
            margin = (high / low) ** 0.03 if self.logarithmic else 0.03 * (high - low)
            limits = (low / margin, high * margin) if self.logarithmic else (low - margin, high + margin)
            axes.set(**{f"{which}lim": limits})
        elif self.logarithmic:
            axes.set(**{f"{which}lim": (min(ticks[0], *values), max(ticks[-1], *values))})


def line_figure(
    name: str,
    heading: str,
    series: Sequence[Series],
    x: Scale,
    y: Scale,
    caption: str,
    threshold: tuple[float, str] | None = None,
) -> Figure:
    """One chart of several series; `threshold` is a named vertical line."""

    def paint(axes: "Axes") -> None:
        points = [point for each in series for point in each.points]
        x.apply(axes, "x", [px for px, _ in points] + ([threshold[0]] if threshold is not None else []))
        y.apply(axes, "y", [py for _, py in points])
        axes.set(xlabel=x.title)
        if threshold is not None:
            milestone(axes, *threshold)
        for index, each in enumerate(series):
            style = look(index, each.name)
            if not each.joined:
                style["linestyle"] = "none"
            (marks,) = axes.plot(*zip(*each.points, strict=True), clip_on=False, **style)
            tips(marks, [f"{each.name}: {x.label(px)}, {y.label(py)}" for px, py in each.points])

    return Figure(name, heading, caption, paint)


def bar_figure(
    name: str,
    heading: str,
    groups: Sequence[str],
    series: Sequence[tuple[str, Sequence[int | None]]],
    caption: str,
    x_title: str,
) -> Figure:
    """Counts as bars: a group for each place on the axis, in it a bar for each series that has a count."""

    def paint(axes: "Axes") -> None:
        top = max(1, *(value for _, values in series for value in values if value is not None))
        ticks = [tick for tick in ticks_around(0, top, 5) if tick == int(tick)]
        set_ticks(axes, "y", ticks, lambda value: f"{value:.0f}")
        set_ticks(axes, "x", range(len(groups)), lambda place: groups[int(place)])
        axes.set(xlim=(-0.5, len(groups) - 0.5), xlabel=x_title)
        width = min(0.8 / len(series), 0.064 * len(groups))
        for index, (label, values) in enumerate(series):
            known = [(place, value) for place, value in enumerate(values) if value is not None]
            places = [place + width * (index - (len(series) - 1) / 2) for place, _ in known]
            bars = axes.bar(
                places, [value for _, value in known], 0.85 * width, color=colour(index), alpha=0.85,
                label=look(index, label)["label"],
            )  # fmt: skip
            axes.bar_label(bars, padding=3, color=colour("soft"))
            for bar, (place, value) in zip(bars, known, strict=True):
                tips(bar, [f"{label}, {groups[place]}: {value}"])

    return Figure(name, heading, caption, paint)
