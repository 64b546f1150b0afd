"""The figures of a comparison."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.experiment.sweep import LABEL
from coterie.report import chart, words
from coterie.report.chart import Axis, Frame, Key, drawing, label, legend, line, marker
from coterie.report.figures import Figure, value_axis
from coterie.report.grid import Comparison, Setting
from coterie.report.markup import Markup, tag

MOST_ROWS = 30
MOST_PANELS = 6
EPSILON = "privacy.epsilon"
ALGORITHM = "algorithm.name"


def accuracy_by_setting(comparison: Comparison) -> Figure | None:
    """Mean accuracy of each setting, with every seed and the range of clients."""
    scored = [setting for setting in comparison.settings if not math.isnan(setting.row.accuracy)]
    shown = scored[:MOST_ROWS]
    if not shown:
        return None
    measure = comparison.measure
    step, top, bottom = 46.0, 10.0, 44.0
    height = top + step * len(shown) + bottom
    reached = [each.row.accuracy for each in shown]
    axis = value_axis(
        measure,
        min(np.fmin(reached, [each.row.worst_client for each in shown]).tolist()),
        max(np.fmax(reached, [each.row.best_client for each in shown]).tolist()),
    )
    frame = Frame(axis, Axis(0, 1, (), str), height=height, left=24, right=30, top=top, bottom=bottom)
    floor = height - bottom
    parts = [
        tag("line", class_="grid", x1=frame.at_x(t), x2=frame.at_x(t), y1=top, y2=floor) for t in axis.ticks
    ]
    parts += frame.axes(measure.name)
    for index, setting in enumerate(shown):
        parts += _dots(frame, setting, comparison, top + step * index + 31)
    several = any(len(setting.runs) > 1 for setting in shown)
    keys = [
        chart.marker_key("mean", 0, "mark ink"),
        Key("worst to best client", chart.swatch(tag("line", class_="range", x1=1, x2=25, y1=7, y2=7))),
    ]
    if several:
        keys.insert(1, chart.marker_key("one seed", 0, "mark seed ink"))
        keys.insert(
            2,
            Key(
                "± standard deviation",
                chart.swatch(tag("line", class_="whisker ink", x1=1, x2=25, y1=7, y2=7)),
            ),
        )
    best = max(shown, key=lambda each: each.row.accuracy)
    description = f"Highest mean: {words.setting(best.values)}, {measure.text(best.row.accuracy)}."
    left = len(scored) - len(shown)
    more = f" The table has {left} more." if left else ""
    heading = f"{measure.name.capitalize()} by setting"
    return Figure(
        heading,
        Markup(drawing("settings", heading, description, frame.width, height, parts) + legend(keys)),
        f"Mean over clients on held-out records. {description}{more}",
    )


def _dots(frame: Frame, setting: Setting, comparison: Comparison, y: float) -> Iterator[Markup]:
    measure, row = comparison.measure, setting.row
    colour, shape = chart.series(setting.colour), chart.shape_of(setting.colour)
    name = words.setting(setting.values)
    yield label(frame.left, y - 13, name, class_="row")
    yield label(frame.width - frame.right, y - 13, measure.text(row.accuracy), class_="value end")
    if not math.isnan(row.worst_client + row.best_client):  # else nothing is known of single clients
        ends = frame.at_x(row.worst_client), frame.at_x(row.best_client)
        yield tag("line", class_="range", x1=ends[0], x2=ends[1], y1=y, y2=y)
    if row.accuracy_std is not None:
        low, high = row.accuracy - row.accuracy_std, row.accuracy + row.accuracy_std
        yield tag("line", class_=f"whisker {colour}", x1=frame.at_x(low), x2=frame.at_x(high), y1=y, y2=y)
        for run in setting.runs:
            if run.result.accuracy is None:
                continue
            mean = run.result.accuracy.mean
            words_ = f"{run.cell.name}: {measure.text(mean)}"
            yield marker((frame.at_x(mean), y), shape, f"mark seed {colour}", 3.2, words_)
    yield marker(
        (frame.at_x(row.accuracy), y), shape, f"mark {colour}", 5.5, f"{name}: {measure.text(row.accuracy)}"
    )


def curves(comparison: Comparison) -> list[Figure]:
    """Accuracy against round, settings overlaid; one panel for each value of what colours cannot show."""
    labelled = comparison.leading == LABEL and len(comparison.settings) <= chart.COLOURS
    # The name of a part tells its algorithm; where lines are few they share a panel.
    inside = (LABEL, ALGORITHM) if labelled else (comparison.leading,)
    panels = _panels(comparison.settings, *inside)[:MOST_PANELS]
    drawn = [(name, members, {id(each): each.curve() for each in members}) for name, members in panels]
    values = [value for _, _, known in drawn for points in known.values() for _, value in points]
    if not values:
        return []
    axis = value_axis(comparison.measure, min(values), max(values))
    result = []
    for index, (name, members, known) in enumerate(drawn):
        rounds = max(run.cell.experiment.schedule.rounds for each in members for run in each.runs)
        frame = Frame(chart.round_axis(rounds), axis)
        parts, keys = frame.axes("round"), []
        for setting in members:
            points = [frame.at(point) for point in known[id(setting)]]
            if not points:
                continue
            colour, shape = chart.series(setting.colour), chart.shape_of(setting.colour)
            parts.append(line(points, f"line {colour}", setting.colour))
            parts.append(marker(points[-1], shape, f"mark {colour}", 4.5))
            keys.append(chart.line_key(_lead(setting, comparison), colour, setting.colour, shape))
        heading = f"{comparison.measure.name.capitalize()} against round"
        heading += f": {name}" if name else ""
        ends = ", ".join(
            f"{_lead(each, comparison)} {comparison.measure.text(known[id(each)][-1][1])}"
            for each in members
            if known[id(each)]
        )
        picture = drawing(
            f"curves-{index}", heading, f"At the end: {ends}.", frame.width, frame.height, parts
        )
        result.append(
            Figure(
                heading, Markup(picture + legend(keys)), f"Mean over clients and seeds. At the end: {ends}."
            )
        )
    return result


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
    found = [run.result.groups.minority if run.result.groups else None for run in setting.runs]
    known = [value for value in found if value is not None]
    if not known or len(known) < len(found):
        return None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None


def accuracy_against_epsilon(comparison: Comparison) -> list[Figure]:
    """What privacy costs: one line per value of the leading key, where the grid varies epsilon."""
    return _against_epsilon(comparison, Reading(comparison.measure.name, _accuracy))


def minority_against_epsilon(comparison: Comparison) -> list[Figure]:
    """What privacy costs the clients of the smallest true cluster."""
    return _against_epsilon(comparison, Reading(f"{comparison.measure.name} of the minority", _minority))


def _against_epsilon(comparison: Comparison, reading: Reading) -> list[Figure]:
    settings = {id(each): value for each in comparison.settings if (value := reading.of(each)) is not None}
    shown = [each for each in comparison.settings if id(each) in settings]
    budgets = sorted({float(value) for value in comparison.sweep.grid.get(EPSILON, ())})
    if len(budgets) < 2 or not shown:
        return []
    measure = comparison.measure
    leading = comparison.leading if comparison.leading != EPSILON else None
    edges = [
        edge
        for mean, spread in settings.values()
        for edge in (mean - (spread or 0.0), mean + (spread or 0.0))
    ]
    y_axis = value_axis(measure, min(edges), max(edges))
    places = {budget: float(place) for place, budget in enumerate(budgets)}
    x_axis = Axis(
        -0.4, len(budgets) - 0.6, tuple(places.values()), lambda place: _budget_label(budgets[round(place)])
    )
    frame = Frame(x_axis, y_axis)
    result = []
    for index, (name, members) in enumerate(_panels(shown, leading, EPSILON)[:MOST_PANELS]):
        parts, keys = frame.axes("epsilon"), []
        for lead, points in itertools.groupby(
            sorted(members, key=lambda each: each.colour if leading else 0),
            key=lambda each: each.colour if leading else 0,
        ):
            mine = sorted(points, key=lambda each: float(each.values[EPSILON]))
            colour, shape = chart.series(lead), chart.shape_of(lead)
            spots = [frame.at((places[float(each.values[EPSILON])], settings[id(each)][0])) for each in mine]
            for each, (x, _) in zip(mine, spots, strict=True):
                mean, spread = settings[id(each)]
                if spread:
                    low, high = (frame.at_y(mean + way * spread) for way in (-1, 1))
                    parts.append(tag("line", class_=f"error {colour}", x1=x, x2=x, y1=low, y2=high))
            parts.append(line(spots, f"line {colour}", lead))
            for each, spot in zip(mine, spots, strict=True):
                said = f"{words.setting(each.values)}: {measure.text(settings[id(each)][0])}"
                parts.append(marker(spot, shape, f"mark {colour}", 4.8, said))
            lead_name = _lead(mine[0], comparison) if leading else reading.name
            keys.append(chart.line_key(lead_name, colour, lead, shape))
        heading = f"{reading.name.capitalize()} against epsilon" + (f": {name}" if name else "")
        means = [settings[id(each)][0] for each in members]
        description = (
            f"Budgets from {_budget_label(budgets[0])} to {_budget_label(budgets[-1])}; "
            f"mean {reading.name} from {measure.text(min(means))} to {measure.text(max(means))}."
        )
        slug = "epsilon" if reading.of is _accuracy else "minority-epsilon"
        picture = drawing(f"{slug}-{index}", heading, description, frame.width, frame.height, parts)
        result.append(
            Figure(
                heading,
                Markup(picture + legend(keys)),
                "Mean over clients and seeds, upright lines one standard deviation over seeds; "
                "budgets are spaced evenly.",
            )
        )
    return result


def _budget_label(value: float) -> str:
    return "∞" if value == float("inf") else f"{value:g}"


def _panels(settings: Sequence[Setting], *inside: str | None) -> list[tuple[str, list[Setting]]]:
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
