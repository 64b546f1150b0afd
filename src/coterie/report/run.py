"""The report of one run."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from coterie.experiment.claim import RunClaim, with_claim
from coterie.experiment.folder import RunFolder, write_text
from coterie.experiment.metrics import Spread
from coterie.privacy import Mode, Unit
from coterie.privacy.mechanisms import NoisySum
from coterie.report import chart, figures, words
from coterie.report.clusters import Clusters
from coterie.report.leakage import LeakageRecord, growth, matrix, read_leakage
from coterie.report.markup import Child, Markup, tag
from coterie.report.numbers import NONE, count, delta, epsilon, fixed, seconds, significant
from coterie.report.outside import (
    LEFT_OUT,
    MUST_NOT,
    MUST_NOT_UNBOUNDED,
    has_outside,
    public_run,
    tells_choices,
    tells_times,
)
from coterie.report.page import (
    Column,
    Tile,
    badge,
    facts,
    folded,
    header,
    notice,
    page,
    scrolling,
    section,
    side_by_side,
    stacked,
    table,
    tiles,
)
from coterie.report.record import RunRecord, mean_over, read_run

MANY_CLIENTS = 60
"""From here on the table of clients starts folded."""
FEW_WORKERS = 12
"""Beyond these the matrix says it better than a table of their epsilons."""


def write_run_report(folder: Path, *, public: bool = False) -> Path:
    """Write `report.html` of a run, finished or not, and return its path.

    Args:
        public: write `public.html` instead, without any figure outside the guarantee.
    """
    files, run = RunFolder(folder), read_run(folder)
    target = files.public if public else files.report
    page = run_report(public_run(run) if public else run, read_leakage(files.leakage))
    write_text(target, with_claim(page, {run.name: RunClaim.of(folder)}))
    return target


def run_report(run: RunRecord, leakage: LeakageRecord | None = None) -> str:
    """The whole page.

    Args:
        run: what its folder holds.
        leakage: who learns how much about whom, where workers watch each other.
    """
    clusters = Clusters(run)
    where = f"between {count(len(run.clients), 'site')}" if run.served else f"on {run.experiment.data.name}"
    title = f"{run.experiment.algorithm.name} {where}"
    body = [
        header("run", title, _lede(run, clusters), run.name),
        *_notices(run),
        _guarantee(run),
        section("Overview", tiles(list(_tiles(run, clusters)))),
        section("What ran", facts(words.what_ran(run))),
        _rounds(run, clusters),
        _watched(leakage),
        _clusters(run, clusters),
        _served(run, clusters),
        _sites(run),
        _budget(run),
        section(
            "Experiment file",
            folded("Every setting of this run", tag("pre", tag("code", run.experiment_text))),
        ),
    ]
    return page(title, "coterie run", body, _footer(run))


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


def _notices(run: RunRecord) -> Iterator[Markup]:
    if run.public:
        yield notice("info", LEFT_OUT)
    elif has_outside(run) and (run.served or run.experiment.own_records):
        yield notice("warn", MUST_NOT if run.has_privacy else MUST_NOT_UNBOUNDED)
    if not run.finished:
        done = run.rounds[-1].round if run.rounds else 0
        yield notice(
            "warn",
            f"Unfinished: {done} of {count(run.planned_rounds, 'round')} are done. "
            "What follows is how far the run has come; the guarantee covers the whole plan.",
        )
    if run.guarantee.mode is Mode.PAPER:
        yield notice(
            "warn",
            "The noise follows a publication's own arithmetic (privacy.mode: paper). "
            "The guarantee below says what that claims and what is proven.",
        )
    if not run.has_privacy:
        yield notice("warn", "This run has no privacy: nothing bounds what its releases reveal.")
    for warning in run.warnings:
        yield notice("warn", f"{warning[:1].upper()}{warning[1:]}.")


def _guarantee(run: RunRecord) -> Markup:
    promise = run.guarantee
    return tag(
        "section",
        tag("h2", "Guarantee"),
        tag("p", promise.line, class_="sentence"),
        tag("p", promise.text),
        _per_client(run),
        class_="promise",
    )


def _per_client(run: RunRecord) -> Markup:
    """Epsilon, delta and records of everyone: budgets and sizes differ."""
    rows = [
        [
            cost.name,
            NONE if cost.epsilon is None else epsilon(cost.epsilon),
            delta(cost.delta),
            NONE if cost.records is None else f"{cost.records:,}",
        ]
        for cost in run.guarantee.per_client
    ]
    noun = {Unit.RECORD: "client", Unit.CLIENT: "population", Unit.WORKER: "worker"}[run.plan.unit]
    columns = [
        Column(noun.capitalize()),
        Column("Epsilon", figures=True),
        Column("Delta", figures=True),
        Column("Records", figures=True),
    ]
    return folded(
        f"Epsilon and delta of {count(len(rows), noun)}",
        table("What the whole plan costs at most", columns, rows),
        is_open=len(rows) <= FEW_WORKERS,
    )


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
        if release.name == "training" and isinstance(release.mechanism, NoisySum)
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


# --- figures and tables -----------------------------------------------------------------------------


def _rounds(run: RunRecord, clusters: Clusters) -> Markup | None:
    drawn = [
        (figures.accuracy_against_round(run, clusters), run.is_exact),
        (figures.epsilon_against_round(run), False),
    ]
    shown = [figure.html(outside) for figure, outside in drawn if figure is not None]
    return section("Round by round", side_by_side(shown)) if shown else None


def _watched(leakage: LeakageRecord | None) -> Markup | None:
    if leakage is None:
        return None
    drawn = [matrix(leakage).html(), growth(leakage).html()]
    rows = [
        [worker, NONE if value is None else epsilon(value)] for worker, value in leakage.per_worker.items()
    ]
    columns = [Column("Worker"), Column("Epsilon", figures=True)]
    return section(
        "Who learns what about whom",
        side_by_side(drawn),
        folded(
            f"Epsilon of all {count(len(rows), 'worker')}",
            table("Against the worker that learns most about it", columns, rows),
            is_open=len(rows) <= FEW_WORKERS,
        ),
        intro="What the models of its groups tell one worker about another, when the whole plan is run.",
    )


def _clusters(run: RunRecord, clusters: Clusters) -> Markup | None:
    releases = scores = None
    if run.findings is not None:
        releases = figures.first_round_releases(run, clusters, run.findings)
        scores = figures.separation_scores(run.findings)
    beside = [scores.html(not run.has_privacy)] if scores else []
    if clusters.looked_for and run.truth is not None:
        beside.append(_matrix(run, clusters))
    outside = run.truth is not None or not run.has_privacy  # coloured by the true clusters, or no noise
    columns = [*([releases.html(outside)] if releases else []), *([stacked(beside)] if beside else [])]
    return section("Clusters", side_by_side(columns)) if columns else None


def _matrix(run: RunRecord, clusters: Clusters) -> Markup:
    """Clients by true and found cluster, found ones in the order of the true ones they stand for."""
    order = sorted(clusters.found, key=lambda found: (clusters.found_series(found), found))
    head = tag("tr", tag("td"), [tag("th", f"found {found}", scope="col") for found in order])
    rows = []
    for true in clusters.true:
        cells = []
        for found in order:
            here = clusters.counts[true, found]
            kind = "none" if not here else "hit" if clusters.matching.get(found) == true else "miss"
            cells.append(tag("td", str(here), class_=kind))
        rows.append(tag("tr", tag("th", f"true {clusters.true_name(true)}", scope="row"), cells))
    grid = tag("table", tag("thead", head), tag("tbody", rows), class_="matrix")
    return tag(
        "div",
        tag("h3", "Assignment against the truth", badge()),
        scrolling("Clients by true and found cluster", grid),
        tag(
            "p",
            f"{clusters.placed} of {count(len(run.clients), 'client')} are in the found cluster that stands "
            "for their true one.",
            class_="aside",
        ),
        class_="card",
    )


def _served(run: RunRecord, clusters: Clusters) -> Markup | None:
    accuracy, loss = run.accuracy, run.loss
    if accuracy is not None and accuracy.is_private:
        return _scored(run, accuracy)
    if accuracy is None or loss is None:
        return None
    figure = figures.clients_by_group(run, clusters)
    cards = [figure.html()] if figure else []
    cards.append(tag("div", tag("h3", "How evenly"), _fairness(run, accuracy), class_="card"))
    return section(
        "Clients",
        side_by_side(cards),
        _cluster_table(run, clusters, accuracy, loss) if len(clusters.groups) > 1 else None,
        folded(
            f"All {count(len(run.clients), 'client')}",
            _client_table(run, clusters, accuracy, loss),
            is_open=len(run.clients) < MANY_CLIENTS,
        ),
        outside=has_outside(run),
    )


def _scored(run: RunRecord, accuracy: Spread) -> Markup | None:
    """What the clients' noisy scores say of each of them, where anything does."""
    if not accuracy.per_client:
        return None
    measure = run.measure
    columns = [
        Column("Client"),
        *([Column("Model", figures=True)] if run.clusters else []),
        Column("Training records", figures=True),
        Column("Held-out records", figures=True),
        Column(measure.name.capitalize(), figures=True),
        Column("In 95 of 100 cases", figures=True),
    ]
    rows = []
    for client in run.clients:
        interval = accuracy.intervals.get(client.name)
        rows.append(
            [
                client.name,
                *([str(run.clusters[client.name])] if run.clusters else []),
                f"{client.records:,}",
                NONE if client.test_records is None else f"{client.test_records:,}",
                measure.text(accuracy.per_client.get(client.name)),
                NONE if interval is None else " to ".join(measure.text(end) for end in interval),
            ]
        )
    return section(
        "Clients",
        table(f"{measure.name.capitalize()} by client, measured with noise", columns, rows),
        intro="Noisy counts on held-out records, each charged to the records it counts. The interval says "
        "where the exact figure is, given the noise; other held-out records would give another one.",
    )


def _sites(run: RunRecord) -> Markup | None:
    """Who answered how often, and what each was asked to spend: all that a server knows of its sites."""
    if not run.served or run.result is None:
        return None
    answered, asked = run.result.participation, run.result.asked
    columns = [
        Column("Site"),
        Column("Training records", figures=True),
        *([Column("Answered", figures=True), Column("Missed", figures=True)] if answered else []),
        Column("Epsilon asked for", figures=True),
    ]
    rows = []
    for client in run.clients:
        tally = answered.get(client.name, {})
        counts = [f"{tally.get('answered', 0):,}", f"{tally.get('missed', 0):,}"] if answered else []
        rows.append([client.name, f"{client.records:,}", *counts, epsilon(asked[client.name])])
    secret = (
        "" if answered else " Which sites were sampled in which round is a secret that the noise counts on."
    )
    return section(
        "Sites",
        table("What each site was asked for", columns, rows),
        intro=f"What a site spent is in its own books, and never more than it was asked for.{secret}",
    )


def _fairness(run: RunRecord, accuracy: Spread) -> Markup:
    measure = run.measure
    stored = run.result.fairness if run.result else None
    disparity = stored.disparity if stored else accuracy.most - accuracy.least
    items: list[tuple[str, Child]] = [
        ("Disparity", f"{_points(measure.is_share, disparity)} between the best and the worst client")
    ]
    if stored and stored.f_acc is not None and stored.f_loss is not None:
        items += [
            ("F_acc", _points(measure.is_share, stored.f_acc)),
            ("F_loss", fixed(stored.f_loss)),
        ]
        note = (
            "Smaller is fairer. F compares what each client's model lacks to the best model of its cluster, "
            "trained centrally without privacy: the largest difference between two clients."
        )
    else:
        note = "Smaller is fairer."
        note += " No central models were trained to compare with." if run.finished else ""
    return Markup(facts(items) + tag("p", note, class_="aside"))


def _points(is_share: bool, value: float) -> str:
    return f"{100 * value:.1f} points" if is_share else fixed(value)


def _cluster_table(run: RunRecord, clusters: Clusters, accuracy: Spread, loss: Spread) -> Markup:
    measure = run.measure
    records = {client.name: client.records for client in run.clients}
    rows = []
    for group in clusters.groups:
        values = [accuracy.per_client[client] for client in group.clients if client in accuracy.per_client]
        used = sorted({run.clusters[client] for client in group.clients if client in run.clusters})
        rows.append(
            [
                chart.chip(group.name, group.series),
                str(len(group.clients)),
                f"{sum(records[client] for client in group.clients):,}",
                measure.text(mean_over(accuracy.per_client, group.clients)),
                measure.text(min(values, default=None)),
                measure.text(max(values, default=None)),
                fixed(mean_over(loss.per_client, group.clients)),
                ", ".join(map(str, used)) if len(used) <= 4 else f"{len(used)} models",
            ]
        )
    total = [
        "all",
        str(len(run.clients)),
        f"{sum(records.values()):,}",
        measure.text(accuracy.mean),
        measure.text(accuracy.min),
        measure.text(accuracy.max),
        fixed(loss.mean),
        "",
    ]
    name = "True cluster" if run.truth else "Cluster"
    columns = [
        Column(name),
        Column("Clients", figures=True),
        Column("Training records", figures=True),
        Column(f"Mean {measure.name}", figures=True),
        Column("Worst client", figures=True),
        Column("Best client", figures=True),
        Column("Mean loss", figures=True),
        Column("Uses model", figures=True),
    ]
    return table(f"{measure.name.capitalize()} and loss by cluster", columns, rows, total)


def _client_table(run: RunRecord, clusters: Clusters, accuracy: Spread, loss: Spread) -> Markup:
    measure, truth, findings = run.measure, run.truth, run.findings
    sure = (
        {client: max(row) for client, row in zip(findings.clients, findings.responsibilities, strict=True)}
        if findings
        else {}
    )
    columns = [
        Column("Client"),
        *([Column("True cluster")] if truth else []),
        *([Column("Model", figures=True)] if run.clusters else []),
        *([Column("Certain in round 1", figures=True)] if findings else []),
        Column("Training records", figures=True),
        Column("Test records", figures=True),
        Column(measure.name.capitalize(), figures=True),
        Column("Loss", figures=True),
    ]
    rows = []
    for client in run.clients:
        rows.append(
            [
                client.name,
                *([_true_chip(clusters, truth[client.name])] if truth else []),
                *([str(run.clusters[client.name])] if run.clusters else []),
                *([_percent(sure.get(client.name))] if findings else []),
                f"{client.records:,}",
                NONE if client.test_records is None else f"{client.test_records:,}",
                measure.text(accuracy.per_client.get(client.name)),
                fixed(loss.per_client.get(client.name)),
            ]
        )
    return table(f"{measure.name.capitalize()} and loss by client", columns, rows)


def _true_chip(clusters: Clusters, cluster: int) -> Markup:
    return chart.chip(clusters.true_name(cluster), clusters.true_series(cluster))


def _percent(value: float | None) -> str:
    if value is None:
        return NONE
    return "> 99.9%" if value > 0.999 else f"{100 * value:.1f}%"


# --- what the budget buys ---------------------------------------------------------------------------


def _budget(run: RunRecord) -> Markup:
    promise = run.guarantee
    rows = [
        [
            f"{release.name}, on held-out records" if release.held_out else release.name,
            tag("span", release.what, class_="wide-text"),
            f"{release.times:,}",
            release.noise,
            epsilon(release.epsilon),
        ]
        for release in promise.releases
    ]
    return section(
        "Where the budget goes",
        table(
            "Every kind of release",
            [
                Column("Part"),
                Column("What is released"),
                Column("Times", figures=True),
                Column("Noise", figures=True),
                Column("Epsilon alone", figures=True),
            ],
            rows,
            ["together", "", "", "", epsilon(promise.epsilon)],
        ),
        intro=f"{_whose(run)} The last column is what a part would cost by itself; composed, parts cost less "
        "than their sum.",
    )


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
