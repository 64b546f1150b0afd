"""The figures of a comparison: each a function from it to figures, named in `figures_of`."""

import math
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from coterie.experiment.sweep import LABEL
from coterie.report import words
from coterie.report.charts import Scale, Series, line_figure, rounds, share_ticks, shares
from coterie.report.drawing import COLOURS, Axes, Figure, colour, hollow, look, tips
from coterie.report.grid import Comparison, Setting

MOST_ROWS = 30
MOST_PANELS = 6
MOST_LETTERS = 42
EPSILON = "privacy.epsilon"
ALGORITHM = "algorithm.name"


def accuracy_by_setting(comparison: Comparison) -> Iterator[Figure]:
    """Mean accuracy of each setting, with every seed and the range of clients."""
    scored = [setting for setting in comparison.settings if not math.isnan(setting.row.reached)]
    shown = scored[:MOST_ROWS]
    if not shown:
        return
    measure, step, margins = comparison.measure, 46.0, (24.0, 30.0, 10.0, 44.0)
    reached = [each.row.reached for each in shown]
    ends = [
        float(np.fmin(reached, [each.row.worst_client for each in shown]).min()),
        float(np.fmax(reached, [each.row.best_client for each in shown]).max()),
    ]

    def paint(axes: Axes) -> None:
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

    best = max(shown, key=lambda each: each.row.reached)
    told = f"Highest mean: {words.setting(best.values)}, {measure.text(best.row.reached)}."
    more = f" The table has {len(scored) - len(shown)} more." if len(scored) > len(shown) else ""
    yield Figure(
        "settings",
        f"{measure.name.capitalize()} by setting",
        f"Mean over clients on held-out records. {told}{more}",
        paint,
        comparison.is_exact,
        height=margins[2] + step * len(shown) + margins[3],
        margins=margins,
    )


def _dots(axes: Axes, setting: Setting, comparison: Comparison, y: float) -> None:
    measure, row, style = comparison.measure, setting.row, {**look(setting.colour), "clip_on": False}
    name, face = words.setting(setting.values), style["color"]
    low, high = axes.get_xlim()
    axes.text(low, y - 13, textwrap.shorten(name, MOST_LETTERS, placeholder="…"), weight="bold")
    axes.text(high, y - 13, measure.text(row.reached), weight="bold", ha="right")
    if not math.isnan(row.worst_client + row.best_client):  # else nothing is known of single clients
        axes.hlines(y, row.worst_client, row.best_client, color=colour("soft"), linewidth=1.4)
    if row.reached_std is not None:
        low, high = row.reached - row.reached_std, row.reached + row.reached_std
        axes.hlines(y, low, high, color=face, linewidth=6, alpha=0.35)
        known = [(run.name, run.accuracy.mean) for run in setting.runs if run.accuracy]
        seeds = {**style, **hollow(face, 6.5)}
        (marks,) = axes.plot([mean for _, mean in known], [y] * len(known), **seeds)
        tips(marks, [f"{cell}: {measure.text(mean)}" for cell, mean in known])
    (mark,) = axes.plot(row.reached, y, **{**style, "markersize": 10.5})
    tips(mark, [f"{name}: {measure.text(row.reached)}"])


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
            outside=comparison.is_exact,
        )


Reading = tuple[float, float]
"""A figure of a setting: its mean over runs, and its standard deviation."""


def accuracy_against_epsilon(comparison: Comparison) -> Iterator[Figure]:
    """What privacy costs: one line per value of the leading key, where the grid varies epsilon."""
    rows = [each.row for each in comparison.settings]
    found = [None if math.isnan(row.reached) else (row.reached, row.reached_std or 0.0) for row in rows]
    return _against_epsilon(comparison, found, comparison.measure.name, "against-epsilon")


def minority_against_epsilon(comparison: Comparison) -> Iterator[Figure]:
    """What privacy costs the clients of the smallest true cluster."""
    found: list[Reading | None] = []
    for each in comparison.settings:
        groups = [run.outcome.groups for run in each.runs]
        known = [own.minority for own in groups if own is not None and own.minority is not None]
        spread = statistics.stdev(known) if len(known) > 1 else 0.0
        found.append((statistics.fmean(known), spread) if known and len(known) == len(groups) else None)
    named = f"{comparison.measure.name} of the minority"
    return _against_epsilon(comparison, found, named, "minority-epsilon")


def _against_epsilon(
    comparison: Comparison, found: Sequence[Reading | None], named: str, slug: str
) -> Iterator[Figure]:
    figures = {id(each): one for each, one in zip(comparison.settings, found, strict=True) if one}
    known = [each for each in comparison.settings if id(each) in figures]
    budgets = sorted({float(value) for value in comparison.sweep.grid.get(EPSILON, ())})
    if len(budgets) < 2 or not known:
        return
    measure = comparison.measure
    leading = comparison.leading if comparison.leading != EPSILON else None
    edges = [mean + way * spread for mean, spread in figures.values() for way in (-1, 1)]
    across = Scale(
        "epsilon",
        lambda place: _budget_label(budgets[int(place)]),
        range(len(budgets)),
        margin=0.4 / (len(budgets) - 1),
    )
    for index, (name, members) in enumerate(panels(known, leading, EPSILON)[:MOST_PANELS]):
        lines: dict[int, list[Setting]] = defaultdict(list)
        for each in sorted(members, key=lambda each: float(each.values[EPSILON])):
            lines[each.colour if leading else 0].append(each)
        series = [
            Series(
                _lead(mine[0], comparison) if leading else named,
                [(budgets.index(float(each.values[EPSILON])), figures[id(each)][0]) for each in mine],
                colour=lead,
                spread=[figures[id(each)][1] for each in mine],
                tips=[f"{words.setting(each.values)}: {measure.text(figures[id(each)][0])}" for each in mine],
            )
            for lead, mine in sorted(lines.items())
        ]
        means = [figures[id(each)][0] for each in members]
        yield line_figure(
            f"{slug}-{index}",
            f"{named.capitalize()} against epsilon" + (f": {name}" if name else ""),
            series,
            across,
            replace(shares(measure), places=share_ticks(edges)),
            f"Mean over clients and seeds, from {measure.text(min(means))} to {measure.text(max(means))}; "
            "upright lines one standard deviation over seeds; budgets are spaced evenly.",
            outside=comparison.is_exact,
        )


def _budget_label(value: float) -> str:
    return "∞" if value == float("inf") else f"{value:g}"


def panels(settings: Sequence[Setting], *inside: str | None) -> list[tuple[str, list[Setting]]]:
    """Settings by the values of every key with a choice that is not shown inside a panel."""
    found: dict[str, list[Setting]] = defaultdict(list)
    for setting in settings:
        rest = {key: value for key, value in setting.values.items() if key not in inside}
        found[words.setting(rest) if rest else ""].append(setting)
    return list(found.items())


def _lead(setting: Setting, comparison: Comparison) -> str:
    """What a line is called: its value of the leading key."""
    key = comparison.leading
    return words.setting({key: setting.values[key]}) if key else "all runs"


def figures_of(comparison: Comparison) -> list[Figure]:
    """Everything there is to draw of a comparison."""
    drawn = accuracy_by_setting, accuracy_against_epsilon, curves
    return [figure for draw in drawn for figure in draw(comparison)]
