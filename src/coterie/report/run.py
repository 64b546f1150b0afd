"""The report of one run."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.experiment.claim import RunClaim, with_claim
from coterie.experiment.folder import RunFolder
from coterie.experiment.metrics import Spread
from coterie.files import write_text
from coterie.privacy import Mode, Unit
from coterie.report import words
from coterie.report.clusters import Clusters
from coterie.report.drawing import Figure, chip
from coterie.report.figures import WATCHED, figures_of
from coterie.report.numbers import count, delta, epsilon, fixed, percent, seconds, significant
from coterie.report.outside import (
    LEFT_OUT,
    MUST_NOT,
    MUST_NOT_UNBOUNDED,
    has_outside,
    public_run,
    tells_choices,
    tells_times,
)
from coterie.report.page import Tile, page
from coterie.report.record import RunRecord, mean_over, read_run
from coterie.table import NONE, Table

MANY_CLIENTS = 60
"""From here on the table of clients starts folded."""
FEW_COSTS = 12
"""Up to here the table of everyone's epsilon is open."""
INTROS = {WATCHED: "What the models of its groups tell one worker about another, when the whole plan is run."}


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
    clusters = Clusters(run)
    where = f"between {count(len(run.clients), 'site')}" if run.served else f"on {run.experiment.data.name}"
    noun = {Unit.RECORD: "client", Unit.CLIENT: "population", Unit.WORKER: "worker"}[run.plan.unit]
    return page(
        "run",
        f"{run.experiment.algorithm.name} {where}",
        _lede(run, clusters),
        run.name,
        _footer(run),
        run=run,
        notices=list(_notices(run)),
        whose=_whose(run),
        releases=words.releases(run.guarantee),
        costs=_costs(run, noun),
        costs_of=count(len(run.guarantee.per_client), noun),
        few=FEW_COSTS,
        tiles=list(_tiles(run, clusters)),
        facts=list(words.what_ran(run)),
        figures=figures_of(run),
        intros=INTROS,
        matrix=_matrix(run, clusters),
        clients=_clients(run, clusters),
        many=MANY_CLIENTS,
        sites=_sites(run),
    )


# --- opening ----------------------------------------------------------------------------------------


def _lede(run: RunRecord, clusters: Clusters) -> str:
    accuracy, measure = run.accuracy, run.measure
    who = count(len(run.clients), "client")
    if clusters.true:
        who += f" of {len(clusters.true)} clusters"
    if accuracy is None and run.public:
        return f"{who}; no score is covered by the guarantee, so none is shown."
    if accuracy is None and (run.served or run.finished):
        return f"{who}; no accuracy on held-out records was asked for, or none was told."
    if accuracy is None:
        return f"{who}; nothing has been measured yet."
    reached = (
        f"a client's model gets {measure.text(accuracy.mean)} of its held-out records right on average"
        if measure.is_share
        else f"a client's model scores {measure.text(accuracy.mean)} on its held-out records on average"
    )
    rounds = count(run.rounds[-1].round if run.rounds else 0, "round")
    if accuracy.is_private:
        return f"{who}, {rounds}: {reached} ({_noise_words(run, accuracy)})."
    worst = f"{measure.text(accuracy.min)} for the client served worst"
    return f"{who}, {rounds}: {reached}, {worst} (exact, outside the guarantee)."


def _noise_words(run: RunRecord, accuracy: Spread) -> str:
    """How far a private figure may be off, and why."""
    if accuracy.interval is None:
        return "measured with noise"
    low, high = (run.measure.text(end) for end in accuracy.interval)
    within = ", within the guarantee" if run.has_privacy else ""
    return f"measured with noise{within}: {low} to {high} in 95 of 100 cases"


def _notices(run: RunRecord) -> Iterator[tuple[str, str]]:
    if run.public:
        yield "info", LEFT_OUT
    elif has_outside(run) and (run.served or run.experiment.own_records):
        yield "warn", MUST_NOT if run.has_privacy else MUST_NOT_UNBOUNDED
    if not run.finished:
        done = run.rounds[-1].round if run.rounds else 0
        yield (
            "warn",
            f"Unfinished: {done} of {count(run.planned_rounds, 'round')} are done. "
            "What follows is how far the run has come; the guarantee covers the whole plan.",
        )
    if run.guarantee.mode is Mode.PAPER:
        yield (
            "warn",
            "The noise follows a publication's own arithmetic (privacy.mode: paper). "
            "The guarantee below says what that claims and what is proven.",
        )
    if not run.has_privacy:
        yield "warn", "This run has no privacy: nothing bounds what its releases reveal."
    for warning in run.warnings:
        yield "warn", f"{warning[:1].upper()}{warning[1:]}."


def _costs(run: RunRecord, noun: str) -> Table:
    """Epsilon, delta and records of everyone: budgets and sizes differ."""
    rows = [
        {
            noun.capitalize(): cost.name,
            "Epsilon": NONE if cost.epsilon is None else epsilon(cost.epsilon),
            "Delta": delta(cost.delta),
            "Records": NONE if cost.records is None else f"{cost.records:,}",
        }
        for cost in run.guarantee.per_client
    ]
    return Table.of(rows, "What the whole plan costs at most")


def _tiles(run: RunRecord, clusters: Clusters) -> Iterator[Tile]:
    accuracy, measure = run.accuracy, run.measure
    if accuracy is not None:
        how = _noise_words(run, accuracy) if accuracy.is_private else "over clients, held-out records"
        yield Tile(f"Mean {measure.name}", measure.text(accuracy.mean), how, not accuracy.is_private)
        if accuracy.min is not None and accuracy.max is not None and not accuracy.is_private:
            yield Tile("Worst client", measure.text(accuracy.min), _name_of(accuracy, accuracy.min), True)
            yield Tile("Best client", measure.text(accuracy.max), _name_of(accuracy, accuracy.max), True)
    if run.clusters:
        known = any(client.true_cluster is not None for client in run.clients)
        yield replace(_cluster_tile(run, clusters), outside=known or not tells_choices(run))
    budget = run.experiment.privacy.epsilon
    spent = run.rounds[-1].epsilon if run.rounds else 0.0
    yield Tile(
        "Epsilon" if run.finished else "Epsilon so far",
        epsilon(spent) if spent else "0",
        f"of {epsilon(budget)}, delta {delta(run.guarantee.delta)}",
    )
    training = [
        release.mechanism.multiplier
        for unit in run.plan.units
        for release in unit.releases
        if release.name == "training" and release.mechanism.multiplier is not None
    ]
    if training:
        low, high = min(training), max(training)
        noise = f"{low:.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.2f}–{high:.2f}"
        yield Tile("Noise", noise, "standard deviation over clip, in training")


def _cluster_tile(run: RunRecord, clusters: Clusters) -> Tile:
    models = len(clusters.found)
    if run.knows_truth:
        return Tile("Clusters", str(models), "the true ones, given")
    if not clusters.looked_for:
        shared = "the means of their groups'" if models < len(run.clients) else "one for each client"
        return Tile("Models", str(models), "one for all clients" if models == 1 else shared)
    if run.truth is None:
        if run.public:
            return Tile("Clusters found", str(models), "from what was released")
        single = any(client.true_cluster is not None for client in run.clients)
        return Tile("Clusters found", str(models), "in truth there is one" if single else "truth not known")
    clients = len(run.clients)
    if clusters.placed == clients and models == len(clusters.true):
        return Tile("Clusters found", str(models), f"as in truth, all {clients} clients")
    return Tile(
        "Clusters found",
        f"{models} of {len(clusters.true)}" if models < len(clusters.true) else str(models),
        f"not as in truth: {clusters.placed} of {clients} clients in place",
    )


def _name_of(spread: Spread, value: float) -> str:
    names = [client for client, own in spread.per_client.items() if own == value]
    return names[0] if len(names) == 1 else f"{len(names)} clients"


# --- clients ----------------------------------------------------------------------------------------


def _matrix(run: RunRecord, clusters: Clusters) -> dict[str, Any] | None:
    """Clients by true and found cluster, found ones in the order of the true ones they stand for."""
    if not clusters.looked_for or run.truth is None:
        return None
    order = sorted(clusters.found, key=lambda found: (clusters.found_series(found), found))

    def kind(true: int, found: int) -> str:
        if not clusters.counts[true, found]:
            return "none"
        return "hit" if clusters.matching.get(found) == true else "miss"

    rows = [
        (clusters.true_name(true), [(kind(true, found), clusters.counts[true, found]) for found in order])
        for true in clusters.true
    ]
    return {
        "found": order,
        "rows": rows,
        "placed": f"{clusters.placed} of {count(len(run.clients), 'client')}",
    }


def _clients(run: RunRecord, clusters: Clusters) -> dict[str, Any] | None:
    """How well each client is served, exactly or with noise, where anything is known of them."""
    accuracy, loss = run.accuracy, run.loss
    if accuracy is None or not accuracy.per_client or (loss is None and not accuracy.is_private):
        return None
    shown = {"of": count(len(run.clients), "client"), "table": _client_table(run, clusters, accuracy)}
    if loss is None or accuracy.is_private:
        intro = (
            "Noisy counts on held-out records, each charged to the records it counts. The interval says "
            "where the exact figure is, given the noise; other held-out records would give another one."
        )
        return {**shown, "outside": False, "intro": intro, "fairness": None, "groups": None}
    fairness, note = _fairness(run, accuracy)
    groups = _cluster_table(run, clusters, accuracy, loss) if len(clusters.groups) > 1 else None
    more = {"fairness": fairness, "fairness_note": note, "groups": groups}
    return {**shown, "outside": has_outside(run), "intro": "", **more}


def _client_table(run: RunRecord, clusters: Clusters, accuracy: Spread) -> Table:
    measure, findings = run.measure, run.findings
    truth = None if accuracy.is_private else run.truth
    sure: dict[str, float] = {}
    if findings is not None:
        sure = {name: max(row) for name, row in zip(findings.clients, findings.responsibilities, strict=True)}
    rows = []
    for client in run.clients:
        name = client.name
        interval = accuracy.intervals.get(name)
        row = {"Client": name}
        if truth is not None:
            true = truth[name]
            row["True cluster"] = chip(clusters.true_name(true), clusters.true_series(true))
        if run.clusters:
            row["Model"] = str(run.clusters[name])
        if sure:
            row["Certain in round 1"] = percent(sure.get(name))
        row["Training records"] = f"{client.records:,}"
        row["Held-out records"] = NONE if client.test_records is None else f"{client.test_records:,}"
        row[measure.name.capitalize()] = measure.text(accuracy.per_client.get(name))
        if run.loss is not None:
            row["Loss"] = fixed(run.loss.per_client.get(name))
        if accuracy.is_private:
            row["In 95 of 100 cases"] = " to ".join(map(measure.text, interval)) if interval else NONE
        rows.append(row)
    told = "by client, measured with noise" if accuracy.is_private else "and loss by client"
    return Table.of(rows, f"{measure.name.capitalize()} {told}", words=["True cluster"])


def _cluster_table(run: RunRecord, clusters: Clusters, accuracy: Spread, loss: Spread) -> Table:
    measure = run.measure
    records = {client.name: client.records for client in run.clients}
    rows = []
    for group in clusters.groups:
        values = [accuracy.per_client[name] for name in group.clients if name in accuracy.per_client]
        used = sorted({run.clusters[name] for name in group.clients if name in run.clusters})
        rows.append(
            {
                "True cluster" if run.truth else "Cluster": chip(group.name, group.series),
                "Clients": str(len(group.clients)),
                "Training records": f"{sum(records[name] for name in group.clients):,}",
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


def _fairness(run: RunRecord, accuracy: Spread) -> tuple[list[tuple[str, str]], str]:
    is_share = run.measure.is_share
    stored = run.result.fairness if run.result else None
    disparity = stored.disparity if stored else accuracy.most - accuracy.least
    items = [("Disparity", f"{_points(is_share, disparity)} between the best and the worst client")]
    if stored and stored.f_acc is not None and stored.f_loss is not None:
        items += [("F_acc", _points(is_share, stored.f_acc)), ("F_loss", fixed(stored.f_loss))]
        return items, (
            "Smaller is fairer. F compares what each client's model lacks to the best model of its cluster, "
            "trained centrally without privacy: the largest difference between two clients."
        )
    missing = " No central models were trained to compare with." if run.finished else ""
    return items, f"Smaller is fairer.{missing}"


def _points(is_share: bool, value: float) -> str:
    return f"{100 * value:.1f} points" if is_share else fixed(value)


def _sites(run: RunRecord) -> dict[str, Any] | None:
    """Who answered how often, and what each was asked to spend: all that a server knows of its sites."""
    if not run.served or run.result is None:
        return None
    answered, asked = run.result.participation, run.result.asked
    rows = []
    for client in run.clients:
        tally = answered.get(client.name, {})
        told = {kind.capitalize(): f"{tally.get(kind, 0):,}" for kind in ("answered", "missed")}
        rows.append(
            {
                "Site": client.name,
                "Training records": f"{client.records:,}",
                **(told if answered else {}),
                "Epsilon asked for": epsilon(asked[client.name]),
            }
        )
    secret = (
        "" if answered else " Which sites were sampled in which round is a secret that the noise counts on."
    )
    intro = f"What a site spent is in its own books, and never more than it was asked for.{secret}"
    return {"table": Table.of(rows, "What each site was asked for"), "intro": intro}


# --- what the budget buys ---------------------------------------------------------------------------


def _whose(run: RunRecord) -> str:
    """Whose releases the table lists."""
    most = run.guarantee.most_exposed
    if run.plan.unit is Unit.WORKER:
        return f"This is what tells most about one worker: {most}. No worker sees every release."
    if most is None:
        return f"Every {'client' if run.plan.unit is Unit.RECORD else run.plan.unit} has this plan."
    return f"This is the plan of {most}, who spends most; with other numbers of records the noise is another."


def _footer(run: RunRecord) -> str:
    if run.result is None:
        return f"coterie {run.version}, unfinished run"
    if math.isnan(run.result.seconds):
        return f"coterie {run.version}"
    marked = "" if tells_times(run.plan.unit) else " (outside the guarantee)"
    took = f"coterie {run.version}; {seconds(run.result.seconds)} for {count(run.result.rounds, 'round')}"
    speed = run.result.sample_gradients_per_second
    told = "" if math.isnan(speed) else f", {significant(speed)} sample gradients per second"
    return f"{took}{told}{marked}"
