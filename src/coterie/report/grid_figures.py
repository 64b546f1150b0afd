"""The figures of a comparison, by name.

A new figure is a function from a comparison to figures, and a line in `FIGURES`.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from coterie.experiment.sweep import LABEL
from coterie.report import words
from coterie.report.charts import Scale, Series, line_figure, rounds, share_ticks, shares
from coterie.report.drawing import COLOURS, Figure, colour, hollow, look, tips
from coterie.report.grid import Comparison, Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROWS = 30
MOST_PANELS = 6
EPSILON = "privacy.epsilon"
ALGORITHM = "algorithm.name"


def accuracy_by_setting(comparison: Comparison) -> Iterator[Figure]:
    """Mean accuracy of each setting, with every seed and the range of clients."""
    scored = [setting for setting in comparison.settings if not math.isnan(setting.row.accuracy)]
    shown = scored[:MOST_ROWS]
    if not shown:
        return
    measure, step, margins = comparison.measure, 46.0, (24.0, 30.0, 10.0, 44.0)
    reached = [each.row.accuracy for each in shown]
    ends = [
        min(np.fmin(reached, [each.row.worst_client for each in shown]).tolist()),
        max(np.fmax(reached, [each.row.best_client for each in shown]).tolist()),
    ]

    def paint(axes: "Axes") -> None:
        shares(measure).apply(axes, "x", ends)
        axes.set(ylim=(step * len(shown), 0), yticks=[], xlabel=measure.name)
        axes.grid(axis="x")
        for index, setting in enumerate(shown):
            _dots(axes, setting, comparison, step * index + 31)
        ink, none = colour("ink"), list[float]()
        axes.plot(none, none, "o", color=ink, label="mean")
        if any(len(setting.runs) > 1 for setting in shown):
            axes.plot(none, none, marker="o", label="one seed", **hollow(ink, 6.5))
            axes.plot(none, none, color=ink, linewidth=6, alpha=0.35, label="± standard deviation")
        axes.plot(none, none, color=colour("soft"), linewidth=1.4, label="worst to best client")

    best = max(shown, key=lambda each: each.row.accuracy)
    told = f"Highest mean: {words.setting(best.values)}, {measure.text(best.row.accuracy)}."
    more = f" The table has {len(scored) - len(shown)} more." if len(scored) > len(shown) else ""
    yield Figure(
        "settings",
        f"{measure.name.capitalize()} by setting",
        f"Mean over clients on held-out records. {told}{more}",
        paint,
        told,
        comparison.is_exact,
        height=margins[2] + step * len(shown) + margins[3],
        margins=margins,
    )


def _dots(axes: "Axes", setting: Setting, comparison: Comparison, y: float) -> None:
    measure, row, style = comparison.measure, setting.row, {**look(setting.colour), "clip_on": False}
    name, face = words.setting(setting.values), style["color"]
    low, high = axes.get_xlim()
    axes.text(low, y - 13, name, weight="bold")
    axes.text(high, y - 13, measure.text(row.accuracy), weight="bold", ha="right")
    if not math.isnan(row.worst_client + row.best_client):  # else nothing is known of single clients
        axes.hlines(y, row.worst_client, row.best_client, color=colour("soft"), linewidth=1.4)
    if row.accuracy_std is not None:
        low, high = row.accuracy - row.accuracy_std, row.accuracy + row.accuracy_std
        axes.hlines(y, low, high, color=face, linewidth=6, alpha=0.35)
        known = [(run.name, run.accuracy.mean) for run in setting.runs if run.accuracy]
        seeds = {**style, **hollow(face, 6.5)}
        (marks,) = axes.plot([mean for _, mean in known], [y] * len(known), **seeds)
        tips(marks, [f"{cell}: {measure.text(mean)}" for cell, mean in known])
    (mark,) = axes.plot(row.accuracy, y, **{**style, "markersize": 10.5})
    tips(mark, [f"{name}: {measure.text(row.accuracy)}"])


def curves(comparison: Comparison) -> Iterator[Figure]:
    """Accuracy against round, settings overlaid; one panel for each value of what colours cannot show."""
    labelled = comparison.leading == LABEL and len(comparison.settings) <= COLOURS
    # The name of a part tells its algorithm; where lines are few they share a panel.
    inside = (LABEL, ALGORITHM) if labelled else (comparison.leading,)
    measure = comparison.measure
    apart = panels(comparison.settings, *inside)[:MOST_PANELS]
    drawn = [(name, [each for each in members if each.curve()]) for name, members in apart]
    # One axis for all: what cannot be compared side by side misleads.
    values = [value for _, members in drawn for each in members for _, value in each.curve()]
    for index, (name, members) in enumerate(drawn):
        if not members:
            continue
        series = [
            Series(_lead(each, comparison), each.curve(), colour=each.colour, marks=[-1]) for each in members
        ]
        ends = ", ".join(f"{each.name} {measure.text(each.points[-1][1])}" for each in series)
        yield line_figure(
            f"curves-{index}",
            f"{measure.name.capitalize()} against round" + (f": {name}" if name else ""),
            series,
            rounds(max(run.planned_rounds for each in members for run in each.runs)),
            replace(shares(measure), places=share_ticks(values)),
            f"Mean over clients and seeds. At the end: {ends}.",
            f"At the end: {ends}.",
            outside=comparison.is_exact,
        )


@dataclass(frozen=True)
class Reading:
    """A figure of a setting: its mean over runs and its standard deviation, None where there is none."""

    name: str
    of: Callable[[Setting], tuple[float, float | None] | None]


def _accuracy(setting: Setting) -> tuple[float, float | None] | None:
    if math.isnan(setting.row.accuracy):
        return None
    return setting.row.accuracy, setting.row.accuracy_std


def _minority(setting: Setting) -> tuple[float, float | None] | None:
    found = [run.outcome.groups.minority if run.outcome.groups else None for run in setting.runs]
    known = [value for value in found if value is not None]
    if not known or len(known) < len(found):
        return None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None


def accuracy_against_epsilon(comparison: Comparison) -> Iterator[Figure]:
    """What privacy costs: one line per value of the leading key, where the grid varies epsilon."""
    return _against_epsilon(comparison, Reading(comparison.measure.name, _accuracy), "against-epsilon")


def minority_against_epsilon(comparison: Comparison) -> Iterator[Figure]:
    """What privacy costs the clients of the smallest true cluster."""
    reading = Reading(f"{comparison.measure.name} of the minority", _minority)
    return _against_epsilon(comparison, reading, "minority-epsilon")


def _against_epsilon(comparison: Comparison, reading: Reading, slug: str) -> Iterator[Figure]:
    known = [(each, value) for each in comparison.settings if (value := reading.of(each)) is not None]
    budgets = sorted({float(value) for value in comparison.sweep.grid.get(EPSILON, ())})
    if len(budgets) < 2 or not known:
        return
    measure, figures = comparison.measure, {id(each): value for each, value in known}
    leading = comparison.leading if comparison.leading != EPSILON else None
    edges = [mean + way * (spread or 0.0) for mean, spread in figures.values() for way in (-1, 1)]
    across = Scale(
        "epsilon",
        lambda place: _budget_label(budgets[int(place)]),
        range(len(budgets)),
        margin=0.4 / (len(budgets) - 1),
    )
    for index, (name, members) in enumerate(panels([e for e, _ in known], leading, EPSILON)[:MOST_PANELS]):
        lines: dict[int, list[Setting]] = {}
        for each in sorted(members, key=lambda each: float(each.values[EPSILON])):
            lines.setdefault(each.colour if leading else 0, []).append(each)
        series = [
            Series(
                _lead(mine[0], comparison) if leading else reading.name,
                [(budgets.index(float(each.values[EPSILON])), figures[id(each)][0]) for each in mine],
                colour=lead,
                spread=[figures[id(each)][1] or 0.0 for each in mine],
                tips=[f"{words.setting(each.values)}: {measure.text(figures[id(each)][0])}" for each in mine],
            )
            for lead, mine in sorted(lines.items())
        ]
        means = [figures[id(each)][0] for each in members]
        yield line_figure(
            f"{slug}-{index}",
            f"{reading.name.capitalize()} against epsilon" + (f": {name}" if name else ""),
            series,
            across,
            replace(shares(measure), places=share_ticks(edges)),
            "Mean over clients and seeds, upright lines one standard deviation over seeds; "
            "budgets are spaced evenly.",
            f"Budgets from {_budget_label(budgets[0])} to {_budget_label(budgets[-1])}; "
            f"mean {reading.name} from {measure.text(min(means))} to {measure.text(max(means))}.",
            outside=comparison.is_exact,
        )


def _budget_label(value: float) -> str:
    return "∞" if value == float("inf") else f"{value:g}"


def panels(settings: Sequence[Setting], *inside: str | None) -> list[tuple[str, list[Setting]]]:
    """Settings by the values of every key with a choice that is not shown inside a panel."""
    panels: dict[str, list[Setting]] = {}
    for setting in settings:
        rest = {key: value for key, value in setting.values.items() if key not in inside}
        panels.setdefault(words.setting(rest) if rest else "", []).append(setting)
    return list(panels.items())


def _lead(setting: Setting, comparison: Comparison) -> str:
    """What a line is called: its value of the leading key."""
    key = comparison.leading
    return words.setting({key: setting.values[key]}) if key else "all runs"


FIGURES: Mapping[str, Callable[[Comparison], Iterator[Figure]]] = {
    "settings": accuracy_by_setting,
    "epsilon": accuracy_against_epsilon,
    "curves": curves,
}


def figures_of(comparison: Comparison) -> list[Figure]:
    """Everything there is to draw of a comparison."""
    return [figure for draw in FIGURES.values() for figure in draw(comparison)]
