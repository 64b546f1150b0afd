"""`coterie serve`: an experiment between sites that do not trust each other, over Flower."""

from __future__ import annotations

import json as jsonlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.console import ProgressBar, complain, err, print_json, print_table, say
from coterie.cli.events import EventLog
from coterie.cli.options import Json, LogJson, Out, Overrides, Resume
from coterie.cli.run import private_figures
from coterie.engines.flower import require_flower
from coterie.errors import InputError
from coterie.files import check_place, finite, regular
from coterie.privacy.plain import from_plain
from coterie.privacy.ranges import CLUSTERS, Range
from coterie.privacy.units import round_down, round_up

if TYPE_CHECKING:
    from coterie.experiment.callbacks import RoundReport
    from coterie.experiment.result import RunResult
    from coterie.experiment.serving_status import RunStatus


_NUMBERS = Range(0, CLUSTERS.most - 1, whole=True)


def serve(
    experiment: Annotated[Path, typer.Argument(help="Experiment file (YAML); data are the sites' own.")],
    overrides: Overrides = None,
    keys: Annotated[
        Path | None, typer.Option("--keys", help="Folder with ca.crt, server.crt, server.key, sites/*.pub.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Where sites come in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 9443,
    wait: Annotated[
        float, typer.Option("--wait", help="Seconds until all sites must be there and have agreed.")
    ] = 600.0,
    answer: Annotated[
        float, typer.Option("--answer", help="Seconds for an answer; then the site is missing.")
    ] = 600.0,
    rejoin: Annotated[
        float, typer.Option("--rejoin", help="Seconds to wait for a site that was there and is gone.")
    ] = 120.0,
    truth: Annotated[
        Path | None, typer.Option("--truth", help="JSON file with the true cluster of each site, for oracle.")
    ] = None,
    plaintext: Annotated[
        bool, typer.Option("--plaintext", help="No TLS and no keys: for a trial, on loopback only.")
    ] = False,
    sites: Annotated[int, typer.Option("--sites", help="With --plaintext: how many to wait for.")] = 0,
    most_records: Annotated[
        int | None, typer.Option("--most-records", help="Records that a site may claim to have.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--page", help="Keep a page there that shows how far the run is (HTML).")
    ] = None,
    log_json: LogJson = False,
    resume: Resume = False,
    out: Out = None,
    json: Json = False,
) -> None:
    require_flower()
    from coterie.engines.flower.keys import KeyFolder
    from coterie.engines.flower.transport import Timeouts
    from coterie.experiment.callbacks import Callbacks
    from coterie.experiment.experiment_file import read_experiment
    from coterie.experiment.folder import default_folder
    from coterie.experiment.serving import Serving
    from coterie.experiment.serving import serve as serve_experiment
    from coterie.experiment.sites import left_to_sites

    events = EventLog(as_json=log_json)
    if page is not None:
        check_place(page, "--page", file=True)
    proofs = "--keys: needed, unless --plaintext asks for a trial on loopback without any"
    InputError.when((keys is None) != plaintext, proofs)
    chosen = read_experiment(experiment, overrides or [])
    for line in left_to_sites(chosen):
        events.tell("note", line)
    target = out or default_folder(f"{chosen.algorithm.name}-served")
    serving = Serving(
        out=target,
        keys=KeyFolder(keys) if keys is not None else None,
        host=host,
        port=port,
        sites=sites,
        wait=wait,
        timeouts=Timeouts(answer=answer, rejoin=rejoin, consent=wait),
        truth=_read_truth(truth),
        most_records=most_records,
        resume=resume,
        opened=lambda found, names: events.tell(
            "serving",
            f"serving on {host}:{found}" + (f" for {', '.join(names)}" if names else ""),
            port=found,
            sites=list(names),
        ),
        watched=_shown_on(page),
    )
    rows = "records" if chosen.privacy.persons is None else "persons"
    bar = ProgressBar(chosen.algorithm.name, chosen.schedule.rounds, quiet=log_json)
    with events.logging(), bar as progress:
        callbacks = Callbacks(
            on_joined=lambda records: events.tell(
                "joined",
                f"joined: {', '.join(f'{name} ({count} {rows})' for name, count in records.items())}",
                records=dict(records),
            ),
            on_start=lambda start: events.tell("agreed", f"agreed: {start.guarantee}", done=start.done),
            on_round=lambda report: _round(report, progress, events),
        )
        result = serve_experiment(chosen, serving, callbacks)
    from coterie.report.run import write_run_report

    written = write_run_report(result.folder)
    if json:
        print_json(finite(result.to_json()))
    else:
        show(result)
        say(f"report: {written}")


def _shown_on(page: Path | None) -> Callable[[RunStatus], AbstractContextManager[None]]:
    """Whoever keeps the page of a run up to date."""
    if page is None:
        return lambda status: nullcontext()
    from coterie.report.live import kept_page

    return lambda status: kept_page(status, page)


def _round(report: RoundReport, progress: ProgressBar, events: EventLog) -> None:
    left = {name: report.budget[name] - spent for name, spent in report.spent.items()}
    of_all = ", ".join(f"{name} {round_down(epsilon)}" for name, epsilon in left.items())
    missing = "".join(f"; {name} missing ({why})" for name, why in report.missing.items())
    accuracy = f", accuracy {report.accuracy:.1%}" if report.accuracy is not None else ""
    line = f"round {report.round} of {report.rounds}{accuracy}, epsilon left: {of_all}{missing}"
    if err.is_terminal and not events.as_json:
        progress.update(report.round, line)
        return
    events.tell(
        "round",
        line,
        round=report.round,
        rounds=report.rounds,
        seconds=round(report.seconds, 3),
        epsilon_left=left,
        missing=dict(report.missing),
    )


def _read_truth(path: Path | None) -> dict[str, int] | None:
    if path is None:
        return None
    try:
        found = from_plain(dict[str, int], jsonlib.loads(regular(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        raise InputError(f"--truth: {path} is not a JSON object of cluster numbers by client") from None
    for name, cluster in found.items():
        InputError.unless_within(_NUMBERS, f"--truth: {path}: cluster of {name}", cluster)
    return found


def show(result: RunResult) -> None:
    """The result as a person wants to read it."""
    participation = result.participation

    def tally(what: str) -> Callable[[str], str | None]:
        return lambda name: str(participation.get(name, {}).get(what, 0)) if participation else None

    columns: dict[str, Callable[[str], str | None]] = {
        "site": lambda name: name,
        # Where sites choose for themselves, or are sampled in secret, the server does not tell.
        "cluster": lambda name: str(result.clusters[name]) if result.clusters else None,
        "answered": tally("answered"),
        "missed": tally("missed"),
        "epsilon asked": lambda name: round_up(result.asked[name]),
        "accuracy": lambda name: _accuracy(result, name),
    }
    cells = {heading: [value(name) for name in result.asked] for heading, value in columns.items()}
    shown = {heading: column for heading, column in cells.items() if any(cell is not None for cell in column)}
    rows = [tuple(cell or "" for cell in row) for row in zip(*shown.values(), strict=True)]
    print_table(list(shown), rows, title=f"{result.algorithm}, {result.rounds} rounds over Flower")
    if result.reached is not None:
        print_table(["figure", "value"], private_figures(result))
    for warning in result.warnings:
        complain(f"warning: {warning}", style="yellow")
    say(f"guarantee: {result.guarantee}")
    say(f"run folder: {result.folder}")


def _accuracy(result: RunResult, name: str) -> str | None:
    if result.accuracy is None or name not in result.accuracy.per_client:
        return None
    value, interval = result.accuracy.per_client[name], result.accuracy.intervals.get(name)
    if interval is None:
        return f"{value:.1%}"
    # The noise's 95 % interval, the longer half of it where the other is cut off at 0 or 1.
    return f"{value:.1%} ± {math.ceil(1000 * max(value - interval[0], interval[1] - value)) / 10:.1f}"
