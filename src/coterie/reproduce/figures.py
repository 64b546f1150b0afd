"""Figures of reproductions by name: each from the runs in the folder, or from a computation that has none.

A new figure is a function in `FIGURES`; reproductions name it under `figures`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from coterie.algorithms.findings import Findings
from coterie.data import DataSettings, build_federation, load_dataset
from coterie.errors import InputError
from coterie.experiment.sweep import LABEL
from coterie.report import grid_figures, leakage, words
from coterie.report.charts import Scale, Series, bar_figure, line_figure, rounds
from coterie.report.drawing import Figure
from coterie.report.figures import first_round_releases, sorted_scores
from coterie.report.grid import Setting
from coterie.report.record import LeakageRecord, RunRecord
from coterie.reproduce import illustrations
from coterie.reproduce.declared import EPSILON
from coterie.reproduce.table import Reproduction

Draw = Callable[[Reproduction], Iterator[Figure]]

WORTH_DRAWING = 1000.0
"""Epsilon beyond which a run promises nothing, and would push all others into a corner."""
CLEAR = 2.0
"""Separation from which the publication calls clusters always found."""


def figures_of(result: Reproduction) -> Iterator[Figure]:
    """What the reproduction asks for, as far as its runs allow."""
    for name in result.experiment.figures:
        if name not in FIGURES:
            known = ", ".join(FIGURES)
            raise InputError(f"{result.experiment.name}: no figure is called '{name}'; allowed: {known}")
        yield from FIGURES[name](result)


# --- from runs --------------------------------------------------------------------------------------


def _budgets(result: Reproduction) -> Iterator[Figure]:
    """Accuracy of all and of the minority against epsilon, and how often clusters were found."""
    if result.compared is None or not result.settings:
        return
    yield from grid_figures.accuracy_against_epsilon(result.compared)
    yield from grid_figures.minority_against_epsilon(result.compared)
    for heading, of in (
        ("Runs that found all clusters", lambda run: run.outcome.clusters_found),
        ("Runs that found the minority as a cluster of its own", lambda run: run.outcome.minority_found),
    ):
        yield from _found(result.settings, heading, of)


def _found(
    settings: Sequence[Setting], heading: str, of: Callable[[RunRecord], bool | None]
) -> Iterator[Figure]:
    searching = [
        each
        for each in settings
        if hasattr(each.runs[0].experiment.algorithm, "clusters")
        and all(of(run) is not None for run in each.runs)
    ]
    budgets = sorted({float(each.values[EPSILON]) for each in searching if EPSILON in each.values})
    if not budgets:
        return

    def found(members: Sequence[Setting], budget: float) -> int | None:
        runs = [run for each in members if float(each.values[EPSILON]) == budget for run in each.runs]
        return sum(bool(of(run)) for run in runs) if runs else None

    yield bar_figure(
        heading.split()[-1],
        heading,
        [f"{budget:g}" for budget in budgets],
        [
            (
                f"{name or 'all runs'} (of {max(len(each.runs) for each in members)})",
                [found(members, budget) for budget in budgets],
            )
            for name, members in grid_figures.panels(searching, EPSILON)
        ],
        "Only algorithms that look for clusters; in brackets how many runs there were for each budget.",
        "epsilon",
    )


def _rounds(result: Reproduction) -> Iterator[Figure]:
    """Accuracy against round."""
    if result.compared is not None and result.settings:
        yield from grid_figures.curves(result.compared)


def _clustered(result: Reproduction) -> Iterator[tuple[Setting, RunRecord, Findings]]:
    """Runs that clustered the releases of round 1."""
    for setting in result.settings:
        for run in setting.runs:
            if run.findings is not None:
                yield setting, run, run.findings


def _separation(result: Reproduction) -> Iterator[Figure]:
    """Separation score against the number of clusters tried: a chart per setting, a line per run."""
    charts: dict[str, list[Series]] = defaultdict(list)
    for setting, run, findings in _clustered(result):
        points = [(float(tried), score) for tried, score in sorted_scores(findings.scores)]
        if len(points) > 1:
            seed = f"seed {run.experiment.seeds.simulation}: takes {len(findings.centres)}"
            charts[words.setting(setting.values)].append(Series(seed, points))
    for place, (name, series) in enumerate(charts.items()):
        tried = [x for x, _ in series[0].points]
        yield line_figure(
            f"separation-{place}",
            f"Separation score by number of clusters: {name}",
            series,
            Scale("number of clusters tried", "{:.0f}".format, tried, margin=0.03),
            Scale("", "{:.3g}".format, floor=0.0),
            "Half the distance of the two closest components in units of what blurs the line between them; "
            "one line for each run, and the number of clusters it went on with.",
        )


def _success(result: Reproduction) -> Iterator[Figure]:
    """Whether the clusters were found, against the separation score of round 1: a mark for each run."""
    judged = [(run.outcome.clusters_found, findings.separation) for _, run, findings in _clustered(result)]
    marks = {
        name: [(score, float(found)) for found, score in judged if found is one]
        for name, one in (("found", True), ("not found", False))
    }
    series = [Series(name, points, joined=False) for name, points in marks.items() if points]
    if series:
        yield line_figure(
            "success",
            "All clusters found, against the separation score",
            series,
            Scale("separation score of round 1 (MSS)", "{:.3g}".format, floor=0.0),
            Scale("", lambda value: {0.0: "no", 1.0: "yes"}.get(value, ""), places=(0.0, 1.0), margin=0.03),
            f"One mark for each run. The publication finds all clusters from a score of {CLEAR:g} on.",
            milestone=(CLEAR, "score 2"),
        )


def _releases(result: Reproduction) -> Iterator[Figure]:
    """Releases of round 1 in the plane of their first two principal components, a chart for each run."""
    for place, (setting, run, _) in enumerate(_clustered(result)):
        varied = {key: value for key, value in setting.values.items() if key != "algorithm.name"}
        yield from first_round_releases(run, f"releases-{place}", f"Round 1: {words.setting(varied)}")


def _batches(result: Reproduction) -> Iterator[Figure]:
    """Distance of the closest two centres and separation score, against the batch of round 1."""
    found: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for _, run, findings in _clustered(result):
        batch = getattr(run.experiment.algorithm, "first_round_batch", None)
        if batch is None or len(findings.centres) < 2:
            continue
        size = float(max(client.records for client in run.clients) if batch == "all" else batch)
        centres = np.array(findings.centres)
        apart = np.linalg.norm(centres[:, None] - centres[None], axis=-1)
        closest = float(apart[np.triu_indices(len(centres), 1)].min())
        found[run.experiment.schedule.batch].append((size, closest, findings.separation))
    varied = {later: rows for later, rows in found.items() if len({row[0] for row in rows}) > 1}
    for place, name, heading, up, caption in (
        (
            1,
            "centres",
            "Distance of the closest two centres",
            Scale("", "{:.2g}".format, logarithmic=True),
            "In the plane of the first two principal components. Fewer, larger steps move a model less: the "
            "distance falls about as fast as the batch grows, once it is more than noise.",
        ),
        (
            2,
            "scores-by-batch",
            "Separation score against the batch of round 1",
            Scale("", "{:.3g}".format, floor=0.0),
            "Half the distance of the two closest centres in units of what blurs the line between them.",
        ),
    ):
        series = [
            Series(f"later batches of {later}", sorted((row[0], row[place]) for row in rows))
            for later, rows in varied.items()
        ]
        if series:
            across = Scale("batch of round 1, in records", logarithmic=True)
            yield line_figure(name, heading, series, across, up, caption)


def _panels(result: Reproduction) -> Iterator[Figure]:
    """Accuracy and loss against round of the rows that a publication draws together."""
    by_row = {str(each.values.get(LABEL)): each for each in result.settings}
    for place, (heading, rows) in enumerate(result.scale.panels.items()):
        for kind in ("accuracy", "loss"):
            curves = [Series(row, by_row[row].curve(kind)) for row in rows if row in by_row]
            series = [each for each in curves if len(each.points) > 1]
            if series:
                ends = ", ".join(f"{each.name} {each.points[-1][1]:.3g}" for each in series)
                yield line_figure(
                    f"panel-{place}-{kind}",
                    f"{kind.capitalize()} against round: {heading}",
                    series,
                    rounds(int(max(x for each in series for x, _ in each.points))),
                    Scale(kind, "{:.3g}".format, floor=0.0 if kind == "accuracy" else None),
                    f"Mean over clients on held-out records. At the end: {ends}.",
                )


def _leakage(result: Reproduction) -> Iterator[Figure]:
    """Epsilon of workers against epoch, and the matrix of every row that the reproduction wants drawn."""
    wanted = result.scale.matrices
    found = [(row, record) for row, record, _ in _watched(result) if row in wanted or not wanted]
    if not found:
        return
    # What leaks does not depend on what is learnt: rows that differ in the model alone are one here.
    alike = {(record.epsilon, record.history): (name, record) for name, record in reversed(found)}
    found = list(alike.values())[::-1]
    yield leakage.growths(found)
    top = max(record.largest for _, record in found)
    for name, record in found:
        yield from leakage.matrix(record, name=name, top=top)


def _watched(result: Reproduction) -> Iterator[tuple[str, LeakageRecord, Setting]]:
    """Rows in which workers watch each other, by name."""
    for setting in result.settings:
        record = setting.runs[0].leakage if setting.runs else None
        if record is not None:
            yield str(setting.values.get(LABEL) or words.setting(setting.values)), record, setting


def _exchange(result: Reproduction) -> Iterator[Figure]:
    """What accuracy costs: a mark for each row, by the epsilon of its worst pair and of its mean pair."""
    found = [each for each in _watched(result) if each[1].largest <= WORTH_DRAWING]
    longest = max((setting.runs[0].planned_rounds for _, _, setting in found), default=0)
    marks: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for row, record, setting in found:
        if setting.runs[0].planned_rounds == longest:
            values = [value for line in record.epsilon for value in line if value is not None]
            scores = [run.accuracy.mean for run in setting.runs if run.accuracy]
            marks[row.split()[0]].append((record.largest, float(np.mean(values)), float(np.mean(scores))))
    for place, (name, said) in enumerate(
        (
            ("worst", "the pair of workers of which one learns most about the other"),
            ("mean", "the mean over all pairs that the threat model is about"),
        )
    ):
        series = [
            Series(kind, [(row[place], row[2]) for row in rows], joined=False) for kind, rows in marks.items()
        ]
        if series:
            yield line_figure(
                f"exchange-{name}",
                f"Accuracy against the epsilon of the {name} pair",
                series,
                Scale(f"epsilon of the {name} pair", floor=0.0),
                Scale("", "{:.1%}".format),
                f"One mark for each row of {longest} rounds: its mean accuracy, and {said}. "
                f"Rows that leak more than epsilon {WORTH_DRAWING:g} are left out.",
            )


def _lines(result: Reproduction) -> Iterator[Figure]:
    """Points of four lines and the models that were fitted to them: a model that nobody uses lies astray."""
    pairs = [(setting, run) for setting in result.settings for run in setting.runs]
    for place, (setting, run) in enumerate(pairs):
        experiment, models = run.experiment, run.outcome.models
        data, seed = experiment.data, experiment.seeds.simulation
        if not isinstance(data, DataSettings) or data.name != "lines" or models is None:
            continue
        federation = build_federation(load_dataset(data, seed), experiment.federation, seed)
        points: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for client, cluster in zip(federation.clients, federation.truth or (), strict=True):
            x, y = client.train.features[:2, 0].tolist(), client.train.targets[:2].tolist()
            points[cluster] += zip(x, y, strict=True)
        users = Counter(run.clusters.values())
        series = [Series(f"cluster {cluster}", points[cluster], joined=False) for cluster in sorted(points)]
        series += [
            Series(f"model {row}, {users[row]} clients", [(x, slope * x + shift) for x in (-2.0, 2.0)])
            for row, (slope, shift) in enumerate(models)
        ]
        row = str(setting.values.get(LABEL) or experiment.algorithm.name)
        used = sum(users[model] > 0 for model in range(len(models)))
        yield line_figure(
            f"lines-{place}",
            f"{row}, {data.scenario or 'balanced-easy'}",
            series,
            Scale("x", "{:.1f}".format),
            Scale("", "{:.1f}".format),
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
    "two-clusters": lambda result: illustrations.two_clusters_on_a_line(),
    "noise": lambda result: illustrations.noise_by_batches(),
}
