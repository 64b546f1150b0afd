"""Charts of lines and marks from plain numbers, for figures that are not about one run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coterie.report import chart
from coterie.report.chart import Axis, Frame, Point, drawing, legend, line, marker
from coterie.report.figures import Figure
from coterie.report.markup import Markup, tag


@dataclass(frozen=True)
class Series:
    """Named points, joined by a line or not."""

    name: str
    points: Sequence[Point]
    joined: bool = True


@dataclass(frozen=True)
class Scale:
    """How numbers become places on an axis."""

    title: str
    label: Callable[[float], str]
    logarithmic: bool = False
    places: Sequence[float] = ()
    """Where the ticks stand; by default at round numbers."""
    floor: float | None = None
    """Where the axis begins at the latest."""

    def at(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def axis(self, values: Sequence[float]) -> Axis:
        shown = [self.at(value) for value in values]
        low, high = min(shown), max(shown)
        if self.floor is not None:
            low = min(low, self.at(self.floor))
        if self.places:
            ticks = tuple(self.at(place) for place in self.places)
            margin = 0.03 * (max(high, ticks[-1]) - min(low, ticks[0]) or 1.0)
            low, high = min(low, ticks[0]) - margin, max(high, ticks[-1]) + margin
            return Axis(low, high, ticks, self._label)
        if not self.logarithmic:
            return chart.linear_axis(low, high, self._label)
        first, last = math.floor(low + 1e-9), math.ceil(high - 1e-9)
        last = max(last, first + 1)
        step = max(1, math.ceil((last - first) / 6))
        return Axis(first, last, tuple(float(power) for power in range(first, last + 1, step)), self._label)

    def _label(self, place: float) -> str:
        return self.label(10**place if self.logarithmic else place)


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
    points = [point for each in series for point in each.points]
    across = [px for px, _ in points] + ([threshold[0]] if threshold is not None else [])
    frame = Frame(x.axis(across), y.axis([py for _, py in points]))
    parts, keys = frame.axes(x.title), []
    if threshold is not None:
        parts += frame.milestone(x.at(threshold[0]), threshold[1])
    for index, each in enumerate(series):
        colour, shape = chart.series(index), chart.shape_of(index)
        spots = [frame.at((x.at(px), y.at(py))) for px, py in each.points]
        if each.joined and len(spots) > 1:
            parts.append(line(spots, f"line {colour}", index))
        for (px, py), spot in zip(each.points, spots, strict=True):
            said = f"{each.name}: {x.label(px)}, {y.label(py)}"
            parts.append(marker(spot, shape, f"mark {colour}", 4.2, said))
        if each.joined:
            keys.append(chart.line_key(each.name, colour, index, shape))
        else:
            keys.append(chart.marker_key(each.name, shape, f"mark {colour}"))
    picture = drawing(name, heading, caption, frame.width, frame.height, parts)
    return Figure(heading, Markup(picture + legend(keys)), caption)


def bar_figure(
    name: str,
    heading: str,
    groups: Sequence[str],
    series: Sequence[tuple[str, Sequence[int | None]]],
    caption: str,
    x_title: str,
) -> Figure:
    """Counts as bars: a group for each place on the axis, in it a bar for each series that has a count."""
    x_axis = Axis(
        -0.5, len(groups) - 0.5, tuple(map(float, range(len(groups)))), lambda at: groups[round(at)]
    )
    top = max(1, *(value for _, values in series for value in values if value is not None))
    ticks = tuple(tick for tick in chart.nice_ticks(0, top, 5) if tick == int(tick))
    frame = Frame(x_axis, Axis(0.0, float(top), ticks, lambda value: f"{value:.0f}"))
    parts, keys = frame.axes(x_title), []
    half, floor = min(14.0, 0.4 * (frame.at_x(1) - frame.at_x(0)) / len(series)), frame.at_y(0)
    for index, (label, values) in enumerate(series):
        colour = chart.series(index)
        for place, value in enumerate(values):
            if value is None:
                continue
            middle = frame.at_x(place) + 2 * half * (index - (len(series) - 1) / 2)
            y = frame.at_y(value)
            shape = {"x": middle - 0.85 * half, "y": y, "width": 1.7 * half, "height": max(1.0, floor - y)}
            said = tag("title", f"{label}, {groups[place]}: {value}")
            parts.append(tag("rect", said, class_=f"column {colour}", rx=2, **shape))
            parts.append(chart.label(middle, y - 5, str(value), class_="tick mid"))
        sample = chart.swatch(tag("rect", class_=f"column {colour}", x=3, y=2, width=10, height=10), width=16)
        keys.append(chart.Key(label, sample))
    picture = drawing(name, heading, caption, frame.width, frame.height, parts)
    return Figure(heading, Markup(picture + legend(keys)), caption)
