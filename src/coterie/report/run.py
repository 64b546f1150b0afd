"""The report of one run."""

import math
from pathlib import Path
from typing import Any

from coterie.experiment.folder import RunFolder
from coterie.experiment.result import Spread
from coterie.experiment.scores import SCORES
from coterie.experiment.shown import release_table
from coterie.experiment.verify import RunClaim, with_claim
from coterie.files import write_text
from coterie.privacy import Unit
from coterie.report import words
from coterie.report.clusters import Clusters
from coterie.report.drawing import Figure, chip
from coterie.report.figures import figures_of
from coterie.report.numbers import capitalised, count, delta, epsilon, fixed, percent
from coterie.report.outside import (
    LEFT_OUT,
    MUST_NOT,
    MUST_NOT_UNBOUNDED,
    has_outside,
    public_run,
    tells_choices,
)
from coterie.report.page import page
from coterie.report.record import RunRecord, mean_over, read_run
from coterie.table import NONE, Table


def write_run_report(folder: Path, *, public: bool = False) -> Path:
    """Write `report.html` of a run, finished or not, and return its path.

    Args:
        public: write `public.html` instead, without any figure outside the guarantee.
    """
    files, run = RunFolder(folder), read_run(folder)
    target = files.public if public else files.report
    page = run_report(public_run(run) if public else run)
    write_text(target, with_claim(page, {run.name: RunClaim.of(folder)}))
    return target


def run_figures(folder: Path, *, public: bool = False) -> list[Figure]:
    """The figures of the page, in its order."""
    run = read_run(folder)
    drawn = figures_of(public_run(run) if public else run)
    return [figure for figures in drawn.values() for figure in figures]


def run_report(run: RunRecord) -> str:
    """The whole page of what a run's folder holds."""
    clusters, accuracy, loss = Clusters(run), run.accuracy, run.loss
    where = f"between {count(len(run.clients), 'site')}" if run.served else f"on {run.experiment.data.name}"
    noun = {Unit.CLIENT: "population", Unit.WORKER: "worker"}.get(run.plan.unit, "client")
    outside, known = has_outside(run), any(client.true_cluster is not None for client in run.clients)
    must_not = MUST_NOT if run.has_privacy else MUST_NOT_UNBOUNDED
    scored = accuracy is not None and accuracy.per_client and (loss is not None or accuracy.is_private)
    return page(
        "run",
        f"{run.experiment.algorithm.name} {where}",
        run.name,
        run=run,
        unit=run.plan.unit.value,
        clusters=clusters,
        accuracy=accuracy,
        measure=run.measure,
        points=" points" if run.measure.is_share else "",
        done=run.rounds[-1].round if run.rounds else 0,
        spent=run.rounds[-1].epsilon if run.rounds else 0.0,
        timed=run.result is not None and not math.isnan(run.result.seconds),
        noisy=accuracy and _noise_words(run, accuracy),
        scores=_score_table(run),
        scores_exact=any(score.kind == "exact" for score in run.scores.values()),
        rmse=_score_text(run, "rmse"),
        base_rate=_score_text(run, "base_rate"),
        noise=_training_noise(run),
        who=_name_of,
        LEFT_OUT=LEFT_OUT,
        forbidden=must_not if outside and (run.served or run.experiment.own_records) else "",
        outside=outside,
        truth_known=known,
        not_shown=run.findings is not None and run.findings.clustered is False,
        choices_outside=known or not tells_choices(run),
        releases=release_table(run.guarantee),
        costs=_costs(run, noun),
        costs_of=count(len(run.guarantee.per_client), noun),
        facts=list(words.what_ran(run)),
        figures=figures_of(run),
        matrix=_matrix(run, clusters),
        clients=_client_table(run, clusters, accuracy) if accuracy is not None and scored else None,
        groups=_cluster_table(run, clusters) if len(clusters.groups) > 1 else None,
        worst_cluster=_worst_cluster(run, clusters),
        sites=_sites(run) if run.served and run.result is not None else None,
    )


def _score_text(run: RunRecord, name: str) -> str:
    """The score in words; empty where there is none."""
    return SCORES[name].text(run.scores[name].value) if name in run.scores else ""


def _score_table(run: RunRecord) -> Table | None:
    """Scores of all held-out records together, each with what it says."""
    rows = [
        {
            "Score": capitalised(words.name),
            "Value": words.text(score.value),
            "In 95 of 100 cases": NONE if score.interval is None else words.interval(score.interval),
            "What it is": capitalised(words.meaning),
        }
        for name, words in SCORES.items()
        if (score := run.scores.get(name)) is not None
    ]
    told = "All held-out records together, each judged by the model of its client"
    return Table.of(rows, told, words=["What it is"]).without_empty() if rows else None


def _noise_words(run: RunRecord, accuracy: Spread) -> str:
    """How far a private figure may be off, and why."""
    if accuracy.interval is None:
        return "measured with noise"
    low, high = (run.measure.text(end) for end in accuracy.interval)
    within = ", within the guarantee" if run.has_privacy else ""
    return f"measured with noise{within}: {low} to {high} in 95 of 100 cases"


def _costs(run: RunRecord, noun: str) -> Table:
    """Epsilon, delta and records of everyone: budgets and sizes differ."""
    rows = [
        {
            noun.capitalize(): cost.name,
            "Epsilon": NONE if cost.epsilon is None else epsilon(cost.epsilon),
            "Delta": delta(cost.delta),
            words.counted(run).capitalize(): NONE if cost.records is None else f"{cost.records:,}",
        }
        for cost in run.guarantee.per_client
    ]
    return Table.of(rows, "What the whole plan costs at most")


def _training_noise(run: RunRecord) -> str:
    """The noise multiplier of training, or the range of them; empty where none is planned."""
    releases = [release for unit in run.plan.units for release in unit.releases if release.name == "training"]
    noises = sorted(m for release in releases if (m := release.mechanism.multiplier) is not None)
    if not noises:
        return ""
    low, high = fixed(noises[0]), fixed(noises[-1])
    return low if low == high else f"{noises[0]:.2f}–{noises[-1]:.2f}"


def _name_of(spread: Spread, value: float) -> str:
    names = [client for client, own in spread.per_client.items() if own == value]
    return names[0] if len(names) == 1 else f"{len(names)} clients"


# --- clients ----------------------------------------------------------------------------------------


def _matrix(run: RunRecord, clusters: Clusters) -> dict[str, Any] | None:
    """Clients by true and found cluster, found ones in the order of the true ones they stand for."""
    if not clusters.looked_for or run.truth is None:
        return None
    order = sorted(clusters.found, key=lambda found: (clusters.found_series[found], found))

    def cell(true: int, found: int) -> tuple[str, int]:
        here = clusters.counts[true, found]
        return ("none" if not here else "hit" if clusters.matching.get(found) == true else "miss"), here

    rows = [(clusters.true_name(true), [cell(true, found) for found in order]) for true in clusters.true]
    return {"found": order, "rows": rows}


def _client_table(run: RunRecord, clusters: Clusters, accuracy: Spread) -> Table:
    measure, findings, private = run.measure, run.findings, accuracy.is_private
    truth = None if private else run.truth
    sure: dict[str, float] = {}
    rows_of = words.counted(run)
    if findings is not None:
        sure = {name: max(row) for name, row in zip(findings.clients, findings.responsibilities, strict=True)}
    rows = []
    for client in run.clients:
        name, held_out = client.name, client.test_records
        interval = map(measure.text, accuracy.intervals.get(name, ()))
        row = {
            "Client": name,
            "True cluster": clusters.true_chip(truth[name]) if truth else None,
            "Model": str(run.clusters[name]) if run.clusters else None,
            "Certain in round 1": percent(sure.get(name)) if sure else None,
            f"Training {rows_of}": f"{client.records:,}",
            f"Held-out {rows_of}": NONE if held_out is None else f"{held_out:,}",
            measure.name.capitalize(): measure.text(accuracy.per_client.get(name)),
            **{
                capitalised(SCORES[score].name): SCORES[score].text(told.per_client.get(name))
                for score, told in run.scores.items()
                if told.per_client
            },
            "Loss": fixed(run.loss.per_client.get(name)) if run.loss else None,
            "In 95 of 100 cases": (" to ".join(interval) or NONE) if private else None,
        }
        rows.append({heading: cell for heading, cell in row.items() if cell is not None})
    told = "by client, measured with noise" if private else "and loss by client"
    return Table.of(rows, f"{measure.name.capitalize()} {told}", words=["True cluster"])


def _worst_cluster(run: RunRecord, clusters: Clusters) -> tuple[str, str] | None:
    """The lowest mean of a cluster's clients, and the cluster; of exact scores alone."""
    accuracy = run.accuracy
    if accuracy is None or accuracy.is_private or len(clusters.groups) < 2:
        return None
    means = {group.name: mean_over(accuracy.per_client, group.clients) for group in clusters.groups}
    known = {name: mean for name, mean in means.items() if mean is not None}
    worst = min(known, key=known.__getitem__, default=None)
    return None if worst is None else (run.measure.text(known[worst]), worst)


def _cluster_table(run: RunRecord, clusters: Clusters) -> Table | None:
    measure, accuracy, loss = run.measure, run.accuracy, run.loss
    if accuracy is None or loss is None:
        return None
    records = {client.name: client.records for client in run.clients}
    rows = []
    for group in clusters.groups:
        values = [accuracy.per_client[name] for name in group.clients if name in accuracy.per_client]
        used = sorted({run.clusters[name] for name in group.clients if name in run.clusters})
        rows.append(
            {
                "True cluster" if run.truth else "Cluster": chip(group.name, group.series),
                "Clients": str(len(group.clients)),
                f"Training {words.counted(run)}": f"{sum(records[name] for name in group.clients):,}",
                f"Mean {measure.name}": measure.text(mean_over(accuracy.per_client, group.clients)),
                "Worst client": measure.text(min(values, default=None)),
                "Best client": measure.text(max(values, default=None)),
                "Mean loss": fixed(mean_over(loss.per_client, group.clients)),
                "Uses model": ", ".join(map(str, used)) if len(used) <= 4 else f"{len(used)} models",
            }
        )
    reached = [measure.text(value) for value in (accuracy.mean, accuracy.min, accuracy.max)]
    total = ["all", str(len(run.clients)), f"{sum(records.values()):,}", *reached, fixed(loss.mean), ""]
    return Table.of(rows, f"{measure.name.capitalize()} and loss by cluster", total=total)


def _sites(run: RunRecord) -> Table:
    """Who answered how often, and what each was asked to spend: all that a server knows of its sites."""
    answered, asked = run.outcome.participation, run.outcome.asked
    tallies = ("answered", "missed") if answered else ()
    rows = [
        {
            "Site": client.name,
            f"Training {words.counted(run)}": f"{client.records:,}",
            **{kind.capitalize(): f"{answered.get(client.name, {}).get(kind, 0):,}" for kind in tallies},
            "Epsilon asked for": epsilon(asked[client.name]),
        }
        for client in run.clients
    ]
    return Table.of(rows, "What each site was asked for")
