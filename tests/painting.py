"""What a figure puts on its axes, for tests to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure as Canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    from coterie.report.drawing import Figure


class Painted(dict[str, "Line2D"]):
    """Lines by the name in the legend, and the axes they are on."""

    axes: Axes


def painted(figure: Figure) -> Painted:
    """Paint a figure as a page does."""
    axes = Canvas().add_subplot()
    figure.paint(axes)
    lines = Painted({str(line.get_label()): line for line in axes.lines})
    lines.axes = axes
    return lines
