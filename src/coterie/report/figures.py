"""The figures of one run, by name and by the section of its page that shows them.

A new figure is a function from a run to figures, and a line in `FIGURES`.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from coterie.algorithms.protocol import Findings
from coterie.report import leakage
from coterie.report.charts import (
    Band,
    Scale,
    Series,
    bar_figure,
    line_figure,
    rounds,
    share_ticks,
    shares,
    ticks_around,
)
from coterie.report.clusters import Clusters, first_round_labels
from coterie.report.drawing import MARKERS, WIDTH, Axes, Figure, colour, hollow, look, shape_of, tips
from coterie.report.numbers import epsilon, fixed
from coterie.report.record import RunRecord, mean_over

MOST_LINES = 12
"""More lines than this in one chart say nothing."""
SPREADS = 2
"""Radius of a component's circle, in standard deviations."""
CENTRE = (4, 1, 45)
"""A star of four points."""
SWARM_STEP = 10.0
"""Distance of two marks that would else lie upon each other."""

_LEVELS = (0, 1, -1, 2, -2, 3, -3)

Draw = Callable[[RunRecord], Iterator[Figure]]


# --- round by round ---------------------------------------------------------------------------------


def accuracy_against_round(run: RunRecord) -> Iterator[Figure]:
    measured = [(line.round, line.accuracy) for line in run.rounds if line.accuracy is not None]
    if not measured:
        return
    measure, clusters = run.measure, Clusters(run)
    series: list[Series | Band] = [
        Series(
            "mean of all clients",
            [(number, spread.mean) for number, spread in measured],
            colour="ink",
            marks=[0] if len(measured) == 1 else [],
        ),
        Band("worst to best client", [(number, spread.least, spread.most) for number, spread in measured]),
    ]
    for group in clusters.groups if run.truth and len(clusters.groups) <= MOST_LINES else ():
        known = [(number, mean_over(spread.per_client, group.clients)) for number, spread in measured]
        points = [(number, mean) for number, mean in known if mean is not None]
        if points:
            series.append(Series(f"true cluster {group.name}", points, colour=group.series, marks=[-1]))
    last, reached = measured[-1]
    told = (
        f"Mean {measure.name} of all clients after round {last}: {measure.text(reached.mean)}, "
        f"from {measure.text(reached.min)} to {measure.text(reached.max)}."
    )
    yield line_figure(
        "accuracy",
        f"{measure.name.capitalize()} against round",
        series,
        rounds(run.planned_rounds),
        shares(measure),
        f"On each client's held-out records, with the model it would use after the round. {told}",
        milestone=_switch(run),
        outside=run.is_exact,
    )


def epsilon_against_round(run: RunRecord) -> Iterator[Figure]:
    """What was spent so far; nothing to draw where nothing is bounded."""
    spent = [(line.round, line.epsilon) for line in run.rounds if math.isfinite(line.epsilon)]
    budget = run.experiment.privacy.epsilon
    if not spent or not math.isfinite(budget):
        return
    ends = [(1, budget), (run.planned_rounds, budget)]
    (first, before), (last, after) = spent[0], spent[-1]
    told = f"After round {first}: {epsilon(before)}; after round {last}: {epsilon(after)}; "
    told += f"budget {epsilon(budget)}."
    yield line_figure(
        "epsilon",
        "Epsilon spent against round",
        [
            Series("spent by the client that spent most", spent, colour="ink", marks=[-1]),
            Series("budget", ends, colour=6, marks=[]),
            Band("", [(number, 0.0, value) for number, value in spent]),
        ],
        rounds(run.planned_rounds),
        Scale(places=lambda values: ticks_around(0.0, 1.02 * max(values))),
        f"Everything charged in the ledger so far, composed. {told}",
        milestone=_switch(run),
    )


def _switch(run: RunRecord) -> tuple[float, str] | None:
    """Where the mixture hands over to the clients' own choices."""
    if run.findings is None or not 1 < run.findings.switch_round <= run.planned_rounds:
        return None
    return run.findings.switch_round, "clients start to choose"


# --- round 1 ----------------------------------------------------------------------------------------


def first_round_releases(
    run: RunRecord, name: str = "releases", heading: str = "Releases of round 1"
) -> Iterator[Figure]:
    """The releases of round 1 in the plane of their first two principal components."""
    findings = run.findings
    if findings is None:
        return
    labels, clusters, truth = first_round_labels(findings.responsibilities), Clusters(run), run.truth
    present = [index for index in range(len(findings.points)) if _answered(findings, index)]
    if not present:
        return

    def paint(axes: Axes) -> None:
        from matplotlib.patches import Circle

        axes.set_aspect("equal", adjustable="datalim")
        axes.set(xlabel="first principal component; upwards the second")
        reach, soft, ink = SPREADS * findings.spread, colour("soft"), colour("ink")
        faces = [colour(clusters.found_series[component]) for component in range(len(findings.centres))]
        for component, (centre, face) in enumerate(zip(findings.centres, faces, strict=True)):
            axes.add_patch(
                Circle(centre, reach, facecolor=(face, 0.08), edgecolor=face, linewidth=1.2,
                       linestyle=(0, (4, 3)), clip_on=False)
            )  # fmt: skip
            axes.plot([], [], "o", color=face, label=f"component {component}")
        for index in present:
            client, component = findings.clients[index], labels[index]
            sure = _probability(findings.responsibilities[index][component])
            own = f", true cluster {clusters.true_name(truth[client])}" if truth else ""
            shape = MARKERS[shape_of(clusters.true_series(truth[client]) if truth else 0)]
            face, point = faces[component], findings.points[index]
            (mark,) = axes.plot(*point, shape, color=face, markersize=9, clip_on=False)
            tips(mark, [f"{client}: component {component} with probability {sure}{own}"])
        for true in clusters.true:
            shape = MARKERS[shape_of(clusters.true_series(true))]
            axes.plot([], [], shape, color=soft, label=f"true {clusters.true_name(true)}")
        for component, ((x, y), face) in enumerate(zip(findings.centres, faces, strict=True)):
            (mark,) = axes.plot(x, y, marker=CENTRE, **hollow(face, 14, 2))
            tips(mark, [f"centre of component {component}"])
            # The number says without colour which circle is whose.
            axes.annotate(
                str(component), (x, y + reach), (0, 6), textcoords="offset points", ha="center", color=face,
                weight="bold",
            )  # fmt: skip
        axes.plot([], [], marker=CENTRE, label="centre", **hollow(ink, 9, 2))
        axes.plot([], [], marker="o", label=f"{SPREADS} standard deviations", **hollow(ink, 9, 1))
        axes.margins(0.04)
        axes.locator_params(nbins=5)

    shown = "Colour is the component a release most likely came from, numbered above its circle"
    shown += ", shape the true cluster." if truth else "."
    dimensions = len(findings.centres) - 1
    if dimensions > 2:
        shown += f" The mixture was fitted in {dimensions} dimensions, of which these are the first two."
    score = f"separation score {fixed(findings.separation, 2)}, overlap {_probability(findings.overlap)}"
    caption = (
        f"What the server saw of each client, noise included: {len(present)} releases and the "
        f"{len(findings.centres)} components of the mixture; {score}. {shown}{_moved(run, findings, labels)}"
    )
    # Coloured by the true clusters, or released without noise.
    outside = truth is not None or not run.has_privacy
    yield Figure(name, heading, caption, paint, outside, height=400)


def _answered(findings: Findings, index: int) -> bool:
    """A client that did not answer has no point: it is kept at the origin, with every component alike."""
    row = findings.responsibilities[index]
    return findings.points[index] != (0.0, 0.0) or max(row) > min(row)


def _moved(run: RunRecord, findings: Findings, labels: Sequence[int]) -> str:
    first = zip(findings.clients, labels, strict=True)
    moved = [client for client, component in first if run.clusters.get(client, component) != component]
    if not moved:
        return ""
    some = ", ".join(moved[:6]) + (f" and {len(moved) - 6} more" if len(moved) > 6 else "")
    return f" Later chose another cluster: {some}."


def _probability(value: float) -> str:
    if 0 < value < 0.001:
        return "below 0.001"
    return "above 0.999" if value > 0.999 else f"{value:.3g}"


def sorted_scores(scores: Mapping[str, float]) -> list[tuple[int, float]]:
    """Finite scores by the number of clusters they were tried for."""
    return sorted((int(tried), score) for tried, score in scores.items() if math.isfinite(score))


def separation_scores(run: RunRecord) -> Iterator[Figure]:
    """How far apart the closest two components are, for each number of clusters that was tried."""
    scores = sorted_scores(run.findings.scores) if run.findings else []
    if run.findings is None or len(scores) < 2:
        return
    chosen = len(run.findings.centres)
    told = f"Chosen: {chosen} clusters, with a score of {fixed(run.findings.separation, 2)}."
    if run.findings.clustered is False:
        told = f"None stands out: a single cluster explains round 1 no worse than {chosen}."
    yield bar_figure(
        "scores",
        "Separation score by number of clusters",
        [str(tried) for tried, _ in scores],
        [("", [score for _, score in scores])],
        "Half the distance of the two closest centres, in units of what blurs the line between them, once "
        f"noise and the search are taken off: 0 where noise alone would look the same. {told}",
        "number of clusters",
        label="{:.1f}".format,
        chosen=str(chosen),
        outside=not run.has_privacy,
    )


def cluster_sizes(run: RunRecord) -> Iterator[Figure]:
    """How many clients each cluster has, where a noisy count of them was released."""
    findings = run.findings
    if findings is None or not findings.sizes:
        return
    smallest = min(findings.sizes)
    apart = (
        f"The closest two are {fixed(findings.separation, 1)} spreads from the middle between them: a client "
        f"on the wrong side has a probability of {_probability(findings.overlap / 2)}."
        if len(findings.sizes) > 1
        else "There is one."
    )
    yield bar_figure(
        "sizes",
        "Clients in each cluster",
        [str(cluster) for cluster in range(len(findings.sizes))],
        [("", findings.sizes)],
        f"As counted with noise of standard deviation {fixed(findings.size_noise, 1)} in round 1; the "
        f"smallest has about {smallest:,}. {apart} No client's own cluster was released.",
        "cluster",
        outside=not run.has_privacy,
    )


# --- clients ----------------------------------------------------------------------------------------


def clients_by_group(run: RunRecord) -> Iterator[Figure]:
    """Every client's accuracy as a mark, one line per cluster: who is served worse than others."""
    reached, measure, clusters = run.accuracy, run.measure, Clusters(run)
    if reached is None or run.loss is None or reached.is_private:
        return
    scores = {
        group: {name: reached.per_client[name] for name in group.clients if name in reached.per_client}
        for group in clusters.groups
    }
    ticks, (left, right, top, bottom) = share_ticks([reached.least, reached.most]), (24.0, 30.0, 8.0, 44.0)
    scale = (WIDTH - left - right) / (ticks[-1] - ticks[0])
    swarms = {
        group: _swarm([scale * own for own in known.values()]) for group, known in scores.items() if known
    }
    if not 0 < len(swarms) <= 2 * MOST_LINES:
        return
    heights = [34 + SWARM_STEP * (1 + max(levels) - min(levels)) for levels in swarms.values()]

    def paint(axes: Axes) -> None:
        shares(measure).apply(axes, "x", [reached.least, reached.most])
        axes.set(ylim=(sum(heights), 0), yticks=[], xlabel=measure.name)
        axes.grid(axis="x")
        for above, (group, levels) in zip(
            itertools.accumulate([0.0, *heights]), swarms.items(), strict=False
        ):
            values = list(scores[group].values())
            middle = above + 28 + SWARM_STEP * (0.5 + max(levels))
            kind = "true cluster " if run.truth else ""
            axes.text(ticks[0], above + 17, f"{kind}{group.name} ({len(levels)})", weight="bold")
            axes.hlines(middle, ticks[0], ticks[-1], color=colour("rule"), linewidth=1)
            ends = middle - SWARM_STEP * (0.6 + max(levels)), middle + SWARM_STEP * (0.6 - min(levels))
            axes.vlines(math.fsum(values) / len(values), *ends, color=colour("ink"), linewidth=2.4)
            style = {**look(group.series), "linestyle": "none", "clip_on": False}
            (marks,) = axes.plot(values, [middle - SWARM_STEP * level for level in levels], **style)
            tips(marks, [f"{name}: {measure.text(value)}" for name, value in scores[group].items()])

    spread = f"from {measure.text(reached.min)} to {measure.text(reached.max)}"
    yield Figure(
        "clients",
        f"{measure.name.capitalize()} of every client",
        f"One mark per client, {spread}; the upright bar is the mean of the group.",
        paint,
        height=top + sum(heights) + bottom,
        margins=(left, right, top, bottom),
    )


def _swarm(places: Sequence[float]) -> list[int]:
    """A level for each mark, so that marks at the same place stand above and below each other."""
    levels = [0] * len(places)
    taken: dict[int, float] = {}
    for index in sorted(range(len(places)), key=places.__getitem__):
        free = (level for level in _LEVELS if places[index] - taken.get(level, -math.inf) >= SWARM_STEP)
        levels[index] = next(free, 0)
        taken[levels[index]] = places[index]
    return levels


# --- by name ----------------------------------------------------------------------------------------

ROUNDS, WATCHED, FOUND, CLIENTS = "Round by round", "Who learns what about whom", "Clusters", "Clients"

FIGURES: dict[str, tuple[str, Draw]] = {
    "accuracy": (ROUNDS, accuracy_against_round),
    "epsilon": (ROUNDS, epsilon_against_round),
    "matrix": (WATCHED, lambda run: leakage.matrix(run.leakage)),
    "growth": (WATCHED, lambda run: leakage.growth(run.leakage)),
    "releases": (FOUND, first_round_releases),
    "scores": (FOUND, separation_scores),
    "sizes": (FOUND, cluster_sizes),
    "clients": (CLIENTS, clients_by_group),
}
"""The section of the page, and what draws."""


def figures_of(run: RunRecord) -> dict[str, list[Figure]]:
    """Everything there is to draw of a run, by section; for everybody, what the guarantee covers."""
    drawn: dict[str, list[Figure]] = {section: [] for section, _ in FIGURES.values()}
    for section, draw in FIGURES.values():
        drawn[section] += [figure for figure in draw(run) if not (run.public and figure.outside)]
    return drawn
