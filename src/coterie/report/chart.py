"""Small SVG charts: scales, axes, lines, bands and markers; colours are the style sheet's.

Marks carry classes (`s0`, `s1`, ...) instead of colours, so that light, dark and print agree with the page.
Every series differs from the next in colour and in marker or dash, so that no colour has to be told apart.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from coterie.report.markup import Child, Markup, number, tag

COLOURS = 8
SHAPES = 8
_DASHES = ("none", "7 3", "2 3", "9 3 2 3", "5 2", "12 4", "1 2", "6 2 1 2 1 2")

Point: TypeAlias = tuple[float, float]


# --- axes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """A range of values, where its ticks stand and what they say."""

    low: float
    high: float
    ticks: tuple[float, ...]
    label: Callable[[float], str]


def nice_ticks(low: float, high: float, most: int = 6) -> tuple[float, ...]:
    """Round numbers inside a range, at most so many."""
    if high <= low:
        return (low,)
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10, 20) if power * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(round(index * step, 12) for index in range(first, last + 1))


def linear_axis(low: float, high: float, label: Callable[[float], str], most: int = 6) -> Axis:
    """An axis that ends on the ticks around its data."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    inner = nice_ticks(low, high, most)
    step = inner[1] - inner[0] if len(inner) > 1 else high - low
    start, end = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Axis(start, end, nice_ticks(start, end, most + 2), label)


def round_axis(rounds: int) -> Axis:
    """Rounds 1 to the last; the first and the last are always named."""
    if rounds == 1:
        return Axis(0.5, 1.5, (1.0,), lambda value: f"{value:.0f}")
    inner = [tick for tick in nice_ticks(0, rounds, 6) if tick == int(tick)]
    gap = rounds * 0.07
    kept = [tick for tick in inner if 1 + gap <= tick <= rounds - gap]
    return Axis(1.0, float(rounds), (1.0, *kept, float(rounds)), lambda value: f"{value:.0f}")


@dataclass(frozen=True)
class Frame:
    """Where the axes lie in the drawing."""

    x: Axis
    y: Axis
    width: float = 500
    height: float = 300
    left: float = 52
    right: float = 16
    top: float = 30
    bottom: float = 48

    def at_x(self, value: float) -> float:
        share = (value - self.x.low) / (self.x.high - self.x.low)
        return self.left + share * (self.width - self.left - self.right)

    def at_y(self, value: float) -> float:
        share = (value - self.y.low) / (self.y.high - self.y.low)
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)

    def at(self, point: Point) -> Point:
        return self.at_x(point[0]), self.at_y(point[1])

    def axes(self, x_title: str) -> list[Markup]:
        """Grid, ticks and the title of the horizontal axis; the figure's heading names the vertical one."""
        left, right = self.left, self.width - self.right
        floor = self.height - self.bottom
        parts = []
        for tick in self.y.ticks:
            y = self.at_y(tick)
            parts.append(tag("line", class_="grid", x1=left, x2=right, y1=y, y2=y))
            parts.append(label(left - 8, y, self.y.label(tick), class_="tick end middle"))
        for tick in self.x.ticks:
            x = self.at_x(tick)
            parts.append(tag("line", class_="axis", x1=x, x2=x, y1=floor, y2=floor + 4))
            parts.append(label(x, floor + 17, self.x.label(tick), class_="tick mid"))
        parts.append(tag("line", class_="axis", x1=left, x2=right, y1=floor, y2=floor))
        parts.append(label((left + right) / 2, self.height - 7, x_title, class_="tick mid"))
        return parts

    def milestone(self, value: float, text: str) -> list[Markup]:
        """A vertical line with its name above the plot."""
        x = self.at_x(value)
        past_half = value > (self.x.low + self.x.high) / 2
        return [
            tag("line", class_="milestone", x1=x, x2=x, y1=self.top - 8, y2=self.height - self.bottom),
            label(
                x + (-6 if past_half else 6),
                self.top - 12,
                text,
                class_="note end" if past_half else "note",
            ),
        ]


# --- marks ------------------------------------------------------------------------------------------


def label(x: float, y: float, text: str, class_: str) -> Markup:
    return tag("text", text, class_=class_, x=x, y=y)


def series(index: int) -> str:
    """The class that gives a series its colour."""
    return f"s{index % COLOURS}"


def shape_of(index: int) -> int:
    """Marker of a series; where colours repeat, the marker is another one."""
    return (index + index // COLOURS) % SHAPES


def line(points: Sequence[Point], class_: str, dash: int | None = None) -> Markup:
    path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
    return tag(
        "path",
        class_=class_,
        d=path,
        stroke_dasharray=None if dash is None else _DASHES[dash % len(_DASHES)],
    )


def band(lows: Sequence[Point], highs: Sequence[Point], class_: str = "band") -> Markup:
    corners = [*lows, *reversed(highs)]
    return tag("path", class_=class_, d="M" + "L".join(f"{number(x)} {number(y)}" for x, y in corners) + "Z")


def marker(at: Point, shape: int, class_: str, size: float = 4.5, title: str | None = None) -> Markup:
    """A mark of equal weight in every shape; `title` shows when pointed at."""
    inner: Child = tag("title", title) if title is not None else None
    return tag("path", inner, class_=class_, d=_outline(at, shape % SHAPES, size))


def _outline(at: Point, shape: int, size: float) -> str:
    x, y = at
    if shape == 0:
        size *= 1.05
        return (
            f"M{number(x - size)} {number(y)}a{number(size)} {number(size)} 0 1 0 {number(2 * size)} 0"
            f"a{number(size)} {number(size)} 0 1 0 {number(-2 * size)} 0Z"
        )
    corners = [(x + size * dx, y + size * dy) for dx, dy in _CORNERS[shape]]
    return "M" + "L".join(f"{number(px)} {number(py)}" for px, py in corners) + "Z"


def _polygon(corners: int, radius: float, turn: float = 0.0, inner: float | None = None) -> tuple[Point, ...]:
    """Corners of a regular polygon, or of a star where an inner radius is given; the first points upwards."""
    steps = corners if inner is None else 2 * corners
    return tuple(
        (
            (radius if inner is None or step % 2 == 0 else inner)
            * math.sin(2 * math.pi * step / steps + turn),
            -(radius if inner is None or step % 2 == 0 else inner)
            * math.cos(2 * math.pi * step / steps + turn),
        )
        for step in range(steps)
    )


_CORNERS: dict[int, tuple[Point, ...]] = {
    1: _polygon(4, 1.3, math.pi / 4),
    2: _polygon(3, 1.4),
    3: _polygon(4, 1.35),
    4: _polygon(3, 1.4, math.pi),
    5: _polygon(4, 1.4, math.pi / 4, inner=0.5),
    6: _polygon(5, 1.2),
    7: _polygon(5, 1.5, inner=0.62),
}


def drawing(name: str, title: str, description: str, width: float, height: float, *children: Child) -> Markup:
    """An inline SVG that scales with its box and says what it shows."""
    return tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        tag("desc", description, id=f"{name}-desc"),
        *children,
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )


# --- legend -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """One entry of a legend."""

    text: str
    sample: Markup


def swatch(*children: Child, width: float = 26) -> Markup:
    return tag(
        "svg", *children, class_="swatch", viewBox=f"0 0 {number(width)} 14", width=width, height=14,
        aria_hidden="true",
    )  # fmt: skip


def line_key(text: str, class_: str, dash: int | None = None, shape: int | None = None) -> Key:
    end = marker((20, 7), shape, f"mark {class_}", 3.6) if shape is not None else None
    return Key(text, swatch(line([(1, 7), (25, 7)], f"line {class_}", dash), end))


def marker_key(text: str, shape: int, class_: str) -> Key:
    return Key(text, swatch(marker((8, 7), shape, class_, 4.4), width=16))


def legend(keys: Sequence[Key]) -> Markup:
    return tag("ul", [tag("li", key.sample, key.text) for key in keys], class_="legend")


def chip(text: str, index: int) -> Markup:
    """The name of a series beside its mark, for tables."""
    sample = swatch(marker((8, 7), shape_of(index), f"mark {series(index)}", 4.4), width=16)
    return tag("span", sample, text, class_="chip")
