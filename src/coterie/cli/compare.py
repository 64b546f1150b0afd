"""`coterie compare`: a grid of runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.console import complain, print_result, print_table, progress_of, say
from coterie.cli.options import Json, LifetimeDelta, LifetimeEpsilon, NewRecords, Out, Resume, Workers
from coterie.files import finite

if TYPE_CHECKING:
    from coterie.experiment.comparison import SweepResult


def compare(
    sweep: Annotated[
        Path | None, typer.Argument(help="Sweep file (base and grid); without one, the built-in comparison.")
    ] = None,
    resume: Resume = False,
    out: Out = None,
    workers: Workers = None,
    ray: Annotated[
        str | None,
        typer.Option("--ray", metavar="ADDRESS", help="Run them on this Ray cluster: HOST:PORT, or auto."),
    ] = None,
    lifetime_epsilon: LifetimeEpsilon = None,
    lifetime_delta: LifetimeDelta = None,
    new_records: NewRecords = False,
    json: Json = False,
) -> None:
    with progress_of("comparing", quiet=json) as bar:
        from coterie import api  # takes seconds
        from coterie.experiment.budgets import lifetime_of

        result = api.compare(
            sweep,
            out,
            resume=resume,
            workers=workers,
            ray=ray,
            progress=bar.update_cells,
            lifetime=lifetime_of(lifetime_epsilon, lifetime_delta),
            new_records=new_records,
        )
    # Where some failed, those are what is said.
    for note in result.sweep.notes if not result.failed else ():
        complain(f"note: {note}", style="none")
    print_result(finite(result.to_json()), json, lambda: show(result))
    if json:
        _say_what_failed(result)
    if result.failed:
        raise typer.Exit(1)


def show(result: SweepResult) -> None:
    from coterie.experiment.comparison import BRIEF, OUTSIDE, table_columns

    if result.rows:
        headings, body = table_columns(result.rows, BRIEF)
        print_table(headings, body)
    if any(row.kind == "exact" for row in result.rows):
        say(OUTSIDE)
    for line in result.verdict.lines if result.rows else ():
        say(line)
    if result.total is not None:
        say(result.total.text)
    for row in result.rows:
        label = ", ".join(str(value) for value in row.values.values())
        say(f"{label}: {row.guarantee}")
    _say_what_failed(result)
    if result.rows:
        say(f"report: {result.report}")


def _say_what_failed(result: SweepResult) -> None:
    for name, reason in result.failed.items():
        complain(f"failed: {name}: {reason}")
