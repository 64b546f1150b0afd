"""The figures of one run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coterie.algorithms.protocol import Findings
from coterie.report import chart
from coterie.report.chart import Axis, Frame, Key, Point, drawing, label, legend, line, marker
from coterie.report.clusters import Clusters, first_round_labels
from coterie.report.markup import Markup, tag
from coterie.report.numbers import epsilon, fixed
from coterie.report.page import badge
from coterie.report.record import Measure, RunRecord, mean_over

MOST_LINES = 12
"""More lines than this in one chart say nothing."""

SPREADS = 2
"""Radius of a component's circle, in standard deviations."""


SWARM_STEP = 10.0
"""Distance of two marks that would else lie upon each other."""

_LEVELS = (0, 1, -1, 2, -2, 3, -3)


@dataclass(frozen=True)
class Figure:
    """A drawing with its heading, its legend and what to see in it."""

    heading: str
    picture: Markup
    caption: str

    def html(self, outside: bool = False) -> Markup:
        """As a card of the page; `outside` marks what no guarantee covers."""
        heading = tag("h3", self.heading, badge() if outside else None)
        return tag("figure", heading, self.picture, tag("figcaption", self.caption), class_="card")


def value_axis(measure: Measure, low: float, high: float) -> Axis:
    """An axis for accuracies: it reaches past the data to round numbers, never past 0 and 1."""
    margin = max(0.02, 0.05 * (high - low))
    axis = chart.linear_axis(max(0.0, low - margin), min(1.0, high + margin), measure.tick)
    return Axis(max(0.0, axis.low), min(1.0, axis.high), tuple(t for t in axis.ticks if t <= 1), axis.label)


def accuracy_against_round(run: RunRecord, clusters: Clusters) -> Figure | None:
    measured = [(line.round, line.accuracy) for line in run.rounds if line.accuracy is not None]
    if not measured:
        return None
    low = min(spread.least for _, spread in measured)
    high = max(spread.most for _, spread in measured)
    frame = Frame(chart.round_axis(run.planned_rounds), value_axis(run.measure, low, high))
    parts = frame.axes("round")
    parts += _switch(frame, run)
    parts.append(
        chart.band(
            [frame.at((number, spread.least)) for number, spread in measured],
            [frame.at((number, spread.most)) for number, spread in measured],
        )
    )
    keys = [
        chart.line_key("mean of all clients", "ink strong"),
        Key("worst to best client", chart.swatch(tag("rect", class_="band", x=1, y=2, width=24, height=10))),
    ]
    groups = clusters.groups if run.truth and len(clusters.groups) <= MOST_LINES else []
    for group in groups:
        colour, shape = chart.series(group.series), chart.shape_of(group.series)
        means_of = [(number, mean_over(spread.per_client, group.clients)) for number, spread in measured]
        points = [frame.at((number, mean)) for number, mean in means_of if mean is not None]
        if not points:
            continue
        parts.append(line(points, f"line {colour}", group.series))
        parts.append(marker(points[-1], shape, f"mark {colour}", 4))
        keys.append(chart.line_key(f"true cluster {group.name}", colour, group.series, shape))
    means = [frame.at((number, spread.mean)) for number, spread in measured]
    parts.append(line(means, "line ink strong"))
    if len(means) == 1:
        parts.append(marker(means[0], 0, "mark ink", 4))
    last = measured[-1]
    what, heading = run.measure.name, f"{run.measure.name.capitalize()} against round"
    description = (
        f"Mean {what} of all clients after round {last[0]}: {run.measure.text(last[1].mean)}, "
        f"from {run.measure.text(last[1].min)} to {run.measure.text(last[1].max)}."
    )
    return Figure(
        heading,
        Markup(drawing("accuracy", heading, description, frame.width, frame.height, parts) + legend(keys)),
        f"On each client's held-out records, with the model it would use after the round. {description}",
    )


def epsilon_against_round(run: RunRecord) -> Figure | None:
    """What was spent so far; nothing to draw where nothing is bounded."""
    spent = [(line.round, line.epsilon) for line in run.rounds if math.isfinite(line.epsilon)]
    budget = run.experiment.privacy.epsilon
    if not spent or not math.isfinite(budget):
        return None
    top = max(budget, max(value for _, value in spent))
    axis = chart.linear_axis(0.0, top * 1.02, lambda value: f"{value:.4g}")
    frame = Frame(chart.round_axis(run.planned_rounds), axis)
    at_budget = frame.at_y(budget)
    parts = [
        *frame.axes("round"),
        *_switch(frame, run),
        tag("line", class_="budget", x1=frame.left, x2=frame.width - frame.right, y1=at_budget, y2=at_budget),
    ]
    points = [frame.at(point) for point in spent]
    parts.append(
        chart.band([(x, frame.at_y(0)) for x, _ in points], points, class_="band under")
        if len(points) > 1
        else marker(points[0], 0, "mark ink", 4)
    )
    parts.append(line(points, "line ink strong"))
    parts.append(marker(points[-1], 0, "mark ink", 4))
    last_round, last = spent[-1]
    first_round, first = spent[0]
    description = (
        f"After round {first_round}: {epsilon(first)}; after round {last_round}: {epsilon(last)}; "
        f"budget {epsilon(budget)}."
    )
    keys = [
        chart.line_key("spent by the client that spent most", "ink strong"),
        Key("budget", chart.swatch(tag("line", class_="budget", x1=1, x2=25, y1=7, y2=7))),
    ]
    return Figure(
        "Epsilon spent against round",
        Markup(
            drawing("epsilon", "Epsilon spent against round", description, frame.width, frame.height, parts)
            + legend(keys)
        ),
        f"Everything charged in the ledger so far, composed. {description}",
    )


def _switch(frame: Frame, run: RunRecord) -> list[Markup]:
    """Where the mixture hands over to the clients' own choices."""
    if run.findings is None or not 1 < run.findings.switch_round <= run.planned_rounds:
        return []
    return frame.milestone(run.findings.switch_round, "clients start to choose")


# --- round 1 ----------------------------------------------------------------------------------------


def first_round_releases(
    run: RunRecord,
    clusters: Clusters,
    findings: Findings,
    name: str = "releases",
    heading: str = "Releases of round 1",
) -> Figure | None:
    """The releases of round 1 in the plane of their first two principal components."""
    labels = first_round_labels(findings.responsibilities)
    present = [index for index, point in enumerate(findings.points) if _answered(findings, index)]
    if not present:
        return None
    frame = _square_frame(findings, present)
    scale = frame.at_x(findings.spread) - frame.at_x(0.0)
    truth = run.truth
    parts = frame.axes("first principal component; upwards the second")
    for component, centre in enumerate(findings.centres):
        colour = chart.series(clusters.found_series(component))
        x, y = frame.at(centre)
        if findings.spread > 0:
            parts.append(tag("circle", class_=f"halo {colour}", cx=x, cy=y, r=SPREADS * scale))
    for index in present:
        client, component = findings.clients[index], labels[index]
        own = truth[client] if truth else None
        shape = chart.shape_of(clusters.true_series(own)) if own is not None else 0
        sure = findings.responsibilities[index][component]
        words = f"{client}: component {component} with probability {_probability(sure)}"
        words += f", true cluster {clusters.true_name(own)}" if own is not None else ""
        colour = chart.series(clusters.found_series(component))
        parts.append(marker(frame.at(findings.points[index]), shape, f"mark {colour}", 5, words))
    for component, centre in enumerate(findings.centres):
        colour = chart.series(clusters.found_series(component))
        x, y = frame.at(centre)
        parts.append(marker((x, y), 5, f"centre {colour}", 8, f"centre of component {component}"))
        # The number says without colour which circle is whose.
        above = max(12.0, SPREADS * scale + 5)
        parts.append(label(x, max(13.0, y - above), str(component), class_=f"name mid {colour}"))
    keys = [
        chart.marker_key(f"component {k}", 0, f"mark {chart.series(clusters.found_series(k))}")
        for k in range(len(findings.centres))
    ]
    if truth:
        keys += [
            chart.marker_key(
                f"true {clusters.true_name(k)}", chart.shape_of(clusters.true_series(k)), "mark grey"
            )
            for k in clusters.true
        ]
    keys.append(chart.marker_key("centre", 5, "centre ink"))
    keys.append(
        Key(
            f"{SPREADS} standard deviations",
            chart.swatch(tag("circle", class_="halo ink", cx=8, cy=7, r=5.5), width=16),
        )
    )
    description = (
        f"{len(present)} releases and the {len(findings.centres)} components of the mixture; "
        f"separation score {fixed(findings.separation, 2)}, overlap {_probability(findings.overlap)}."
    )
    shown = "Colour is the component a release most likely came from, numbered above its circle"
    shown += ", shape the true cluster." if truth else "."
    dimensions = len(findings.centres) - 1
    more = (
        f" The mixture was fitted in {dimensions} dimensions, of which these are the first two."
        if dimensions > 2
        else ""
    )
    return Figure(
        heading,
        Markup(drawing(name, heading, description, frame.width, frame.height, parts) + legend(keys)),
        f"What the server saw of each client, noise included. {shown}{more}{_moved(run, findings, labels)}",
    )


def _answered(findings: Findings, index: int) -> bool:
    """A client that did not answer has no point: it is kept at the origin, with every component alike."""
    row = findings.responsibilities[index]
    return findings.points[index] != (0.0, 0.0) or max(row) > min(row)


def _moved(run: RunRecord, findings: Findings, labels: Sequence[int]) -> str:
    moved = [
        client
        for client, component in zip(findings.clients, labels, strict=True)
        if run.clusters.get(client, component) != component
    ]
    if not moved:
        return ""
    some = ", ".join(moved[:6]) + (f" and {len(moved) - 6} more" if len(moved) > 6 else "")
    return f" Later chose another cluster: {some}."


def _probability(value: float) -> str:
    if 0 < value < 0.001:
        return "below 0.001"
    return "above 0.999" if value > 0.999 else f"{value:.3g}"


def _square_frame(findings: Findings, present: Sequence[int]) -> Frame:
    """Axes of equal scale around all points and circles, so that a circle is a circle."""
    reach = SPREADS * findings.spread
    corners: list[Point] = [findings.points[index] for index in present]
    corners += [(x + way * reach, y + way * reach) for x, y in findings.centres for way in (-1, 1)]
    xs, ys = [x for x, _ in corners], [y for _, y in corners]
    blank = Axis(0, 1, (), str)
    room = Frame(blank, blank, height=400)
    width = room.width - room.left - room.right
    height = room.height - room.top - room.bottom
    unit = max((max(xs) - min(xs)) / width, (max(ys) - min(ys)) / height, 1e-12) * 1.08
    return Frame(_around(xs, unit * width), _around(ys, unit * height), height=400)


def _around(values: Sequence[float], extent: float) -> Axis:
    middle = (min(values) + max(values)) / 2
    low, high = middle - extent / 2, middle + extent / 2
    return Axis(low, high, chart.nice_ticks(low, high, 5), lambda value: f"{value:.3g}".replace("-", "−"))


def separation_scores(findings: Findings) -> Figure | None:
    """How far apart the closest two components are, for each number of clusters that was tried."""
    scores = {int(tried): score for tried, score in findings.scores.items() if math.isfinite(score)}
    if len(scores) < 2:
        return None
    tried = sorted(scores)
    chosen = len(findings.centres)
    top = max(*scores.values(), 1.0)
    x_axis = Axis(tried[0] - 0.6, tried[-1] + 0.6, tuple(map(float, tried)), lambda value: f"{value:.0f}")
    frame = Frame(x_axis, chart.linear_axis(0.0, top * 1.1, lambda value: f"{value:.3g}"))
    parts = frame.axes("number of clusters")
    half = min(16.0, 0.32 * (frame.at_x(1) - frame.at_x(0)))
    floor = frame.at_y(0)
    for number in tried:
        x, y = frame.at((number, scores[number]))
        bar = "bar chosen" if number == chosen else "bar"
        words = tag("title", f"{number} clusters: {scores[number]:.2f}")
        parts.append(
            tag("rect", words, class_=bar, x=x - half, y=y, width=2 * half, height=max(0.5, floor - y), rx=2)
        )
        if len(tried) <= 12:
            parts.append(
                label(
                    x, y - 6, f"{scores[number]:.1f}", class_="value mid" if number == chosen else "tick mid"
                )
            )
    description = f"Chosen: {chosen} clusters, with a score of {fixed(findings.separation, 2)}."
    return Figure(
        "Separation score by number of clusters",
        drawing("scores", "Separation score", description, frame.width, frame.height, parts),
        "Half the distance of the two closest centres, in units of what blurs the line between them, once "
        f"noise and the search are taken off: 0 where noise alone would look the same. {description}",
    )


# --- clients ----------------------------------------------------------------------------------------


def clients_by_group(run: RunRecord, clusters: Clusters) -> Figure | None:
    """Every client's accuracy as a mark, one line per cluster: who is served worse than others."""
    reached = run.accuracy
    if reached is None:
        return None
    told = [
        replace(group, clients=tuple(client for client in group.clients if client in reached.per_client))
        for group in clusters.groups
    ]
    groups = [group for group in told if group.clients]
    if not groups or len(groups) > 2 * MOST_LINES:
        return None
    axis = value_axis(run.measure, reached.least, reached.most)
    blank = Axis(0, 1, (), str)
    bottom, left, right, top = 44.0, 24.0, 30.0, 8.0
    width = Frame(axis, blank, left=left, right=right)
    rows = [_swarm([width.at_x(reached.per_client[client]) for client in group.clients]) for group in groups]
    heights = [34 + SWARM_STEP * (1 + max(levels) - min(levels)) for levels in rows]
    height = top + sum(heights) + bottom
    frame = Frame(axis, blank, height=height, left=left, right=right, top=top, bottom=bottom)
    parts = [
        tag("line", class_="grid", x1=frame.at_x(t), x2=frame.at_x(t), y1=top, y2=height - bottom)
        for t in axis.ticks
    ]
    parts += frame.axes(run.measure.name)
    above = top
    for group, levels, row_height in zip(groups, rows, heights, strict=True):
        colour, shape = chart.series(group.series), chart.shape_of(group.series)
        y = above + 28 + SWARM_STEP * (0.5 + max(levels))
        parts.append(label(left, above + 17, _row_label(group.name, len(levels), clusters), class_="row"))
        parts.append(tag("line", class_="track", x1=left, x2=frame.width - right, y1=y, y2=y))
        mean = mean_over(reached.per_client, group.clients)
        assert mean is not None
        x = frame.at_x(mean)
        low, high = y - SWARM_STEP * (0.6 + max(levels)), y + SWARM_STEP * (0.6 - min(levels))
        parts.append(tag("line", class_="mean", x1=x, x2=x, y1=low, y2=high))
        for client, level in zip(group.clients, levels, strict=True):
            value = reached.per_client[client]
            at = frame.at_x(value), y - SWARM_STEP * level
            parts.append(marker(at, shape, f"mark {colour}", 4.5, f"{client}: {run.measure.text(value)}"))
        above += row_height
    spread = f"from {run.measure.text(reached.min)} to {run.measure.text(reached.max)}"
    heading = f"{run.measure.name.capitalize()} of every client"
    return Figure(
        heading,
        drawing(
            "clients", heading, f"{len(reached.per_client)} clients, {spread}.", frame.width, height, parts
        ),
        f"One mark per client, {spread}; the upright bar is the mean of the group.",
    )


def _swarm(places: Sequence[float]) -> list[int]:
    """A level for each mark, so that marks at the same place stand above and below each other."""
    levels = [0] * len(places)
    taken: dict[int, float] = {}
    for index in sorted(range(len(places)), key=places.__getitem__):
        for level in _LEVELS:
            if places[index] - taken.get(level, -math.inf) >= SWARM_STEP:
                break
        else:
            level = 0
        levels[index] = level
        taken[level] = places[index]
    return levels


def _row_label(name: str, clients: int, clusters: Clusters) -> str:
    kind = "true cluster " if clusters.run.truth else ""
    return f"{kind}{name} ({clients})"
