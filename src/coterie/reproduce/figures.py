"""Figures of reproductions by name: each from the runs in the folder, or from a computation that has none.

A new figure is a function in `FIGURES`; reproductions name it under `figures`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from coterie.algorithms.findings import Findings
from coterie.data import build_federation, load_dataset
from coterie.errors import InputError
from coterie.experiment.sweep import LABEL
from coterie.report import grid_figures, leakage, words
from coterie.report.charts import Scale, Series, bar_figure, line_figure, rounds
from coterie.report.drawing import Figure
from coterie.report.figures import first_round_releases, sorted_scores
from coterie.report.grid import Comparison, Setting
from coterie.report.record import LeakageRecord, RunRecord
from coterie.reproduce import illustrations
from coterie.reproduce.table import Reproduction

Draw = Callable[[Reproduction, Comparison | None], Iterator[Figure]]
"""From what the reproduction says of its rows, and its runs where it has any."""

EPSILON = "privacy.epsilon"
WORTH_DRAWING = 1000.0
"""Epsilon beyond which a run promises nothing, and would push all others into a corner."""
CLEAR = 2.0
"""Separation from which the publication calls clusters always found."""


def figures_of(result: Reproduction, runs: Comparison | None) -> Iterator[Figure]:
    """What the reproduction asks for, as far as its runs allow."""
    for name in result.experiment.figures:
        if name not in FIGURES:
            known = ", ".join(FIGURES)
            raise InputError(f"{result.experiment.name}: no figure is called '{name}'; allowed: {known}")
        yield from FIGURES[name](result, runs)


# --- from runs --------------------------------------------------------------------------------------


def _budgets(result: Reproduction, runs: Comparison | None) -> Iterator[Figure]:
    """Accuracy of all and of the minority against epsilon, and how often clusters were found."""
    if runs is None or not runs.settings:
        return
    yield from grid_figures.accuracy_against_epsilon(runs)
    yield from grid_figures.minority_against_epsilon(runs)
    yield from _found(runs, "Runs that found all clusters", lambda run: run.outcome.clusters_found)
    yield from _found(
        runs, "Runs that found the minority as a cluster of its own", lambda run: run.outcome.minority_found
    )


def _found(runs: Comparison, heading: str, of: Callable[[RunRecord], bool | None]) -> Iterator[Figure]:
    searching = [
        each
        for each in runs.settings
        if hasattr(each.runs[0].experiment.algorithm, "clusters")
        and all(of(run) is not None for run in each.runs)
    ]
    budgets = sorted({float(each.values[EPSILON]) for each in searching if EPSILON in each.values})
    if not budgets:
        return
    by_name: dict[str, dict[float, Setting]] = {}
    for each in searching:
        rest = {key: value for key, value in each.values.items() if key != EPSILON}
        by_name.setdefault(words.setting(rest), {})[float(each.values[EPSILON])] = each
    series = [
        (
            f"{name} (of {max(len(each.runs) for each in known.values())})",
            [sum(bool(of(run)) for run in known[e].runs) if e in known else None for e in budgets],
        )
        for name, known in by_name.items()
    ]
    yield bar_figure(
        heading.split()[-1],
        heading,
        [f"{budget:g}" for budget in budgets],
        series,
        "Only algorithms that look for clusters; in brackets how many runs there were for each budget.",
        "epsilon",
    )


def _rounds(result: Reproduction, runs: Comparison | None) -> Iterator[Figure]:
    """Accuracy against round."""
    if runs is not None and runs.settings:
        yield from grid_figures.curves(runs)


def _clustered(runs: Comparison | None) -> Iterator[tuple[Setting, RunRecord, Findings]]:
    """Runs that clustered the releases of round 1."""
    for setting in runs.settings if runs is not None else ():
        for run in setting.runs:
            if run.findings is not None:
                yield setting, run, run.findings


def _separation(result: Reproduction, runs: Comparison | None) -> Iterator[Figure]:
    """Separation score against the number of clusters tried: a chart per setting, a line per run."""
    charts: dict[str, list[Series]] = {}
    for setting, run, findings in _clustered(runs):
        points = [(float(tried), score) for tried, score in sorted_scores(findings.scores)]
        if len(points) > 1:
            seed = f"seed {run.experiment.seeds.simulation}: takes {len(findings.centres)}"
            charts.setdefault(words.setting(setting.values), []).append(Series(seed, points))
    for place, (name, series) in enumerate(charts.items()):
        tried = [x for x, _ in series[0].points]
        yield line_figure(
            f"separation-{place}",
            f"Separation score by number of clusters: {name}",
            series,
            Scale("number of clusters tried", lambda value: f"{value:.0f}", places=tried, margin=0.03),
            Scale("", lambda value: f"{value:.3g}", floor=0.0),
            "Half the distance of the two closest components in units of what blurs the line between them; "
            "one line for each run, and the number of clusters it went on with.",
        )


def _success(result: Reproduction, runs: Comparison | None) -> Iterator[Figure]:
    """Whether the clusters were found, against the separation score of round 1: a mark for each run."""
    marks: dict[str, list[tuple[float, float]]] = {"found": [], "not found": []}
    for _, run, findings in _clustered(runs):
        found = run.outcome.clusters_found
        if found is not None:
            marks["found" if found else "not found"].append((findings.separation, float(found)))
    series = [Series(name, points, joined=False) for name, points in marks.items() if points]
    if series:
        yield line_figure(
            "success",
            "All clusters found, against the separation score",
            series,
            Scale("separation score of round 1 (MSS)", lambda value: f"{value:.3g}", floor=0.0),
            Scale("", lambda value: {0.0: "no", 1.0: "yes"}.get(value, ""), places=(0.0, 1.0), margin=0.03),
            f"One mark for each run. The publication finds all clusters from a score of {CLEAR:g} on.",
            milestone=(CLEAR, "score 2"),
        )


def _releases(result: Reproduction, runs: Comparison | None) -> Iterator[Figure]:
    """Releases of round 1 in the plane of their first two principal components, a chart for each run."""
    for place, (setting, run, _) in enumerate(_clustered(runs)):
        varied = {key: value for key, value in setting.values.items() if key != "algorithm.name"}
        yield from first_round_releases(run, f"releases-{place}", f"Round 1: {words.setting(varied)}")


def _batches(result: Reproduction, runs: Comparison | None) -> Iterator[Figure]:
    """Distance of the closest two centres and separation score, against the batch of round 1."""
    distances: dict[int, list[tuple[float, float]]] = {}
    scores: dict[int, list[tuple[float, float]]] = {}
    for _, run, findings in _clustered(runs):
        batch = getattr(run.experiment.algorithm, "first_round_batch", None)
        if batch is None or len(findings.centres) < 2:
            continue
        size = float(max(client.records for client in run.clients) if batch == "all" else batch)
        centres = np.array(findings.centres)
        apart = np.linalg.norm(centres[:, None] - centres[None], axis=-1)
        later = run.experiment.schedule.batch
        distances.setdefault(later, []).append((size, float(apart[np.triu_indices(len(centres), 1)].min())))
        scores.setdefault(later, []).append((size, findings.separation))
    varied = [later for later, points in distances.items() if len({size for size, _ in points}) > 1]
    if not varied:
        return
    batch_axis = Scale("batch of round 1, in records", lambda value: f"{value:.4g}", logarithmic=True)
    yield line_figure(
        "centres",
        "Distance of the closest two centres",
        [Series(f"later batches of {later}", sorted(distances[later])) for later in varied],
        batch_axis,
        Scale("", lambda value: f"{value:.2g}", logarithmic=True),
        "In the plane of the first two principal components. Fewer, larger steps move a model less: the "
        "distance falls about as fast as the batch grows, once it is more than noise.",
    )
    yield line_figure(
        "scores-by-batch",
        "Separation score against the batch of round 1",
        [Series(f"later batches of {later}", sorted(scores[later])) for later in varied],
        batch_axis,
        Scale("", lambda value: f"{value:.3g}", floor=0.0),
        "Half the distance of the two closest centres in units of what blurs the line between them.",
    )


def _panels(result: Reproduction, runs: Comparison | None) -> Iterator[Figure]:
    """Accuracy and loss against round of the rows that a publication draws together."""
    by_row = {} if runs is None else {str(each.values.get(LABEL)): each for each in runs.settings}
    for place, (heading, rows) in enumerate(result.scale.panels.items()):
        for kind in ("accuracy", "loss"):
            series = [
                Series(row, points)
                for row in rows
                if row in by_row and len(points := by_row[row].curve(kind)) > 1
            ]
            if series:
                ends = ", ".join(f"{each.name} {each.points[-1][1]:.3g}" for each in series)
                yield line_figure(
                    f"panel-{place}-{kind}",
                    f"{kind.capitalize()} against round: {heading}",
                    series,
                    rounds(int(max(x for each in series for x, _ in each.points))),
                    Scale(kind, lambda value: f"{value:.3g}", floor=0.0 if kind == "accuracy" else None),
                    f"Mean over clients on held-out records. At the end: {ends}.",
                )


def _leakage(result: Reproduction, runs: Comparison | None) -> Iterator[Figure]:
    """Epsilon of workers against epoch, and the matrix of every row that the reproduction wants drawn."""
    wanted = result.scale.matrices
    found = [(row, record) for row, record, _ in _watched(runs) if row in wanted or not wanted]
    if not found:
        return
    # What leaks does not depend on what is learnt: rows that differ in the model alone are one here.
    alike = {(record.epsilon, record.history): (name, record) for name, record in reversed(found)}
    found = list(alike.values())[::-1]
    yield leakage.growths(found)
    top = max(record.largest for _, record in found)
    for name, record in found:
        yield from leakage.matrix(record, name=name, top=top)


def _watched(runs: Comparison | None) -> Iterator[tuple[str, LeakageRecord, Setting]]:
    """Rows in which workers watch each other, by name."""
    for setting in runs.settings if runs is not None else ():
        record = setting.runs[0].leakage if setting.runs else None
        if record is not None:
            yield str(setting.values.get(LABEL) or words.setting(setting.values)), record, setting


def _exchange(result: Reproduction, runs: Comparison | None) -> Iterator[Figure]:
    """What accuracy costs: a mark for each row, by the epsilon of its worst pair and of its mean pair."""
    found = [(row, record, each) for row, record, each in _watched(runs) if record.largest <= WORTH_DRAWING]
    if not found:
        return
    longest = max(_epochs(setting) for _, _, setting in found)
    found = [each for each in found if _epochs(each[2]) == longest]
    for name, of, said in (
        ("worst", "the worst pair", "the pair of workers of which one learns most about the other"),
        ("mean", "the mean pair", "the mean over all pairs that the threat model is about"),
    ):
        kinds: dict[str, list[tuple[float, float]]] = {}
        for row, record, setting in found:
            values = [value for line in record.epsilon for value in line if value is not None]
            across = record.largest if name == "worst" else sum(values) / len(values)
            scores = [run.accuracy.mean for run in setting.runs if run.accuracy]
            kinds.setdefault(row.split()[0], []).append((across, sum(scores) / len(scores)))
        yield line_figure(
            f"exchange-{name}",
            f"Accuracy against the epsilon of {of}",
            [Series(kind, points, joined=False) for kind, points in kinds.items()],
            Scale(f"epsilon of {of}", lambda value: f"{value:.4g}", floor=0.0),
            Scale("", lambda value: f"{100 * value:.1f}%"),
            f"One mark for each row of {longest} rounds: its mean accuracy, and {said}. "
            f"Rows that leak more than epsilon {WORTH_DRAWING:g} are left out.",
        )


def _epochs(setting: Setting) -> int:
    return setting.runs[0].planned_rounds


def _lines(result: Reproduction, runs: Comparison | None) -> Iterator[Figure]:
    """Points of four lines and the models that were fitted to them: a model that nobody uses lies astray."""
    if runs is None:
        return
    number = Scale("x", lambda value: f"{value:.1f}".replace("-", "−"))
    upward = Scale("", number.label)
    pairs = [(setting, run) for setting in runs.settings for run in setting.runs]
    for place, (setting, run) in enumerate(pairs):
        experiment, models = run.experiment, run.outcome.models
        if experiment.data.name != "lines" or models is None:
            continue
        seed = experiment.seeds.simulation
        federation = build_federation(load_dataset(experiment.data, seed), experiment.federation, seed)
        points: dict[int, list[tuple[float, float]]] = {}
        for client, cluster in zip(federation.clients, federation.truth or (), strict=True):
            x, y = client.train.features[:2, 0].tolist(), client.train.targets[:2].tolist()
            points.setdefault(cluster, []).extend(zip(x, y, strict=True))
        users = Counter(run.clusters.values())
        series = [
            Series(f"cluster {cluster}", spots, joined=False) for cluster, spots in sorted(points.items())
        ]
        series += [
            Series(
                f"model {row}, {users[row]} clients",
                [(x, slope * x + intercept) for x in (-2.0, 2.0)],
            )
            for row, (slope, intercept) in enumerate(models)
        ]
        row = str(setting.values.get(LABEL) or experiment.algorithm.name)
        used = sum(users[model] > 0 for model in range(len(models)))
        yield line_figure(
            f"lines-{place}",
            f"{row}, {experiment.data.scenario or 'balanced-easy'}",
            series,
            number,
            upward,
            f"Two points of each client by its cluster, and the models; {used} of {len(models)} are used.",
        )


FIGURES: Mapping[str, Draw] = {
    "budgets": _budgets,
    "rounds": _rounds,
    "separation": _separation,
    "success": _success,
    "releases": _releases,
    "batches": _batches,
    "lines": _lines,
    "panels": _panels,
    "leakage": _leakage,
    "exchange": _exchange,
    "two-clusters": lambda result, runs: illustrations.two_clusters_on_a_line(),
    "noise": lambda result, runs: illustrations.noise_by_batches(),
}
