"""Charts from plain numbers: lines, bands, marks and bars on axes that hold them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.report.drawing import Axes, Figure, colour, key, look, tips
from coterie.report.record import Measure

Ticks = Callable[[Sequence[float]], Sequence[float]]


@dataclass(frozen=True)
class Series:
    """Named points, joined by a line or not.

    Args:
        colour: its place in the chart unless given; "ink" for the line that the chart is about.
        marks: of which points, by index; of all by default.
        spread: for each point, how far an upright line reaches from it.
        tips: what each mark says when pointed at; by default where it stands.
        printed: whether it is somebody's printed counterpart of the series of the same colour, and so dashed
            with hollow marks; False for that series itself, which is solid; by default the dash of its place.
    """

    name: str
    points: Sequence[tuple[float, float]]
    joined: bool = True
    colour: int | str | None = None
    marks: Sequence[int] | None = None
    spread: Sequence[float] = ()
    tips: Sequence[str] = ()
    printed: bool | None = None

    @property
    def reach(self) -> list[float]:
        """Every height that the axis must hold."""
        heights = [y for _, y in self.points]
        spread = self.spread or [0.0] * len(heights)
        return [*np.subtract(heights, spread).tolist(), *np.add(heights, spread).tolist()]


@dataclass(frozen=True)
class Band:
    """What lies between a lower and an upper line, by place; fainter where it has no name."""

    name: str
    points: Sequence[tuple[float, float, float]]

    @property
    def reach(self) -> list[float]:
        return [end for _, *ends in self.points for end in ends]


@dataclass(frozen=True)
class Scale:
    """How numbers become places on an axis.

    Args:
        places: where the ticks stand, or how they follow from the values; by default at round numbers.
        floor: where the axis begins at the latest.
        margin: how much of its length the axis goes on beyond its first and last tick.
    """

    title: str = ""
    label: Callable[[float], str] = "{:.4g}".format
    places: Sequence[float] | Ticks = ()
    logarithmic: bool = False
    floor: float | None = None
    margin: float = 0.0

    def ticks(self, values: Sequence[float]) -> list[float]:
        if callable(self.places):
            return list(self.places(values))
        low, high = min(values), max(values)
        if self.places or not self.logarithmic:
            return list(self.places) or ticks_around(
                low if self.floor is None else min(low, self.floor), high
            )
        first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
        step = max(1, math.ceil((last - first) / 6))
        return [10.0**power for power in range(first, max(last, first + 1) + 1, step)]

    def text(self, value: float) -> str:
        return self.label(value).replace("-", "−")

    def apply(self, axes: Axes, which: str, values: Sequence[float]) -> None:
        """Set the axis, "x" or "y", such that it begins and ends on its ticks and holds all values."""
        ticks = self.ticks(values)
        low, high = min(*values, *ticks), max(*values, *ticks)
        if low == high:
            low, high = low - 0.5, high + 0.5
        if self.logarithmic:
            axes.set(**{f"{which}scale": "log"})
            beyond = (high / low) ** self.margin
            ends = low / beyond, high * beyond
        else:
            beyond = (high - low) * self.margin
            ends = low - beyond, high + beyond
        labels = list(map(self.text, ticks))
        axes.set(**{f"{which}ticks": ticks, f"{which}ticklabels": labels, f"{which}lim": ends})
        axes.minorticks_off()


def ticks_around(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers that begin at or before a range and end at or after it."""
    from matplotlib.ticker import MaxNLocator

    if high <= low:
        low, high = low - 0.5, high + 0.5
    ticks = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [round(float(tick), 12) for tick in ticks]


def share_ticks(values: Sequence[float]) -> list[float]:
    """Ticks for accuracies: past the data to round numbers, never past 0 and 1."""
    low, high = min(values), max(values)
    margin = max(0.02, 0.05 * (high - low))
    ticks = ticks_around(max(0.0, low - margin), min(1.0, high + margin))
    return [tick for tick in ticks if 0 <= tick <= 1]


def round_ticks(rounds: int) -> list[float]:
    """Rounds to name: always the first and the last."""
    inner, gap = ticks_around(0, rounds), 0.1 * rounds
    kept = [tick for tick in inner if tick == int(tick) and 1 + gap <= tick <= rounds - gap]
    return [1.0, *kept, float(rounds)] if rounds > 1 else [1.0]


def shares(measure: Measure) -> Scale:
    """Accuracies or scores, between 0 and 1."""
    return Scale(measure.name, measure.tick, share_ticks)


def rounds(last: int, title: str = "round") -> Scale:
    return Scale(title, "{:.0f}".format, round_ticks(last))


def line_figure(
    name: str,
    heading: str,
    series: Sequence[Series | Band],
    x: Scale,
    y: Scale,
    caption: str,
    *,
    milestone: tuple[float, str] | None = None,
    note: str = "",
    outside: bool = False,
) -> Figure:
    """One chart of several series; a milestone is a named vertical line, a note stands above the axes."""

    def paint(axes: Axes) -> None:
        x.apply(axes, "x", [point[0] for each in series for point in each.points] + [*(milestone or ())[:1]])
        y.apply(axes, "y", [value for each in series for value in each.reach])
        axes.set(xlabel=x.title)
        if note:
            axes.annotate(
                note, (0, 1), (-30, 11), xycoords="axes fraction", textcoords="offset points",
                color=colour("soft"),
            )  # fmt: skip
        if milestone is not None:
            _milestone(axes, *milestone)
        for index, each in enumerate(series):
            if isinstance(each, Band):
                alpha, soft = 0.17 if each.name else 0.1, colour("soft")
                places, lows, highs = zip(*each.points, strict=True)
                axes.fill_between(places, lows, highs, color=soft, alpha=alpha, linewidth=0, label=each.name)
            else:
                _line(axes, each, index, x, y)

    return Figure(name, heading, caption, paint, outside)


def _line(axes: Axes, each: Series, index: int, x: Scale, y: Scale) -> None:
    style = look(each.colour if isinstance(each.colour, int) else index, each.name)
    if isinstance(each.colour, str):
        style |= {"color": colour(each.colour), "linestyle": "-", "linewidth": 2.8, "marker": "o"}
        style["zorder"] = 3
    if each.printed is not None:
        style["linestyle"] = (0, (5, 3)) if each.printed else "-"
    if each.printed:
        style |= {
            "markerfacecolor": colour("card"),
            "markeredgecolor": style["color"],
            "markeredgewidth": 1.5,
        }
    if not each.joined:
        style["linestyle"] = "none"
    style |= {"markevery": each.marks} if each.marks != [] else {"marker": None}
    xs, ys = zip(*each.points, strict=True)
    if each.spread:
        ends = np.subtract(ys, each.spread), np.add(ys, each.spread)
        axes.vlines(xs, *ends, color=style["color"], linewidth=1.6, clip_on=False)
    (line,) = axes.plot(xs, ys, clip_on=False, **style)
    if each.marks is None:
        tips(line, each.tips or [f"{each.name}: {x.text(px)}, {y.text(py)}" for px, py in each.points])


def _milestone(axes: Axes, x: float, text: str) -> None:
    """A vertical line with its name above the plot."""
    low, high = axes.get_xlim()
    axes.axvline(x, ymax=1.03, color=colour("soft"), linewidth=1, linestyle=(0, (2, 3)), clip_on=False)
    late = x > (low + high) / 2
    axes.annotate(
        text, (x, 1.04), (-6 if late else 6, 0), xycoords=("data", "axes fraction"),
        textcoords="offset points", ha="right" if late else "left", color=colour("soft"),
    )  # fmt: skip


def bar_figure(
    name: str,
    heading: str,
    groups: Sequence[str],
    series: Sequence[tuple[str, Sequence[float | None]]],
    caption: str,
    x_title: str,
    *,
    label: Callable[[float], str] = "{:.0f}".format,
    chosen: str | None = None,
    outside: bool = False,
) -> Figure:
    """Bars: a group for each place on the axis, in it a bar for each series that has a value.

    Args:
        label: what stands above a bar.
        chosen: the group to show before all others.
    """

    def paint(axes: Axes) -> None:
        given = [value for _, values in series for value in values if value is not None]
        whole = all(isinstance(value, int) for value in given)
        ticks = ticks_around(0.0, 1.08 * max(1, *given), 5)
        Scale(places=[tick for tick in ticks if tick == int(tick) or not whole]).apply(axes, "y", [0.0])
        places = range(len(groups))
        Scale(x_title, lambda place: groups[int(place)], places).apply(axes, "x", places)
        axes.set(xlim=(-0.5, len(groups) - 0.5), xlabel=x_title)
        width = min(0.8 / len(series), 0.064 * len(groups))
        for index, (named, values) in enumerate(series):
            known = {place: value for place, value in enumerate(values) if value is not None}
            at = [place + width * (index - (len(series) - 1) / 2) for place in known]
            face = colour("accent" if chosen else index)
            bars = axes.bar(at, list(known.values()), 0.85 * width, color=face, label=key(named))
            axes.bar_label(bars, list(map(label, known.values())), padding=3, color=colour("soft"))
            for bar, (place, value) in zip(bars, known.items(), strict=True):
                tips(bar, [f"{named}, {groups[place]}: {label(value)}".removeprefix(", ")])
                if chosen not in (None, groups[place]):
                    bar.set(facecolor=colour("soft"), alpha=0.42)

    return Figure(name, heading, caption, paint, outside)
