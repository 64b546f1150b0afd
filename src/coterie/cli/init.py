"""`coterie init`: from a table to a folder that can be run; asks for what must be public."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coterie import notices
from coterie.cli.console import complain, print_result, say
from coterie.cli.options import Json
from coterie.errors import InputError

if TYPE_CHECKING:
    from coterie.experiment.from_table import NewFederation
    from coterie.experiment.interview import Interview


def init(
    data: Annotated[
        Path, typer.Option("--data", help="A CSV or parquet file, or a folder with a file for each client.")
    ],
    client: Annotated[
        str | None, typer.Option(help="Column that says whose record a row is; none for a folder.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Column to predict.")] = None,
    bound: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=BOUND",
            help="What is publicly known of a column: age=18 to 100, seen=2001-01-01 to 2020-12-31, "
            "smoker=no, yes; or COLUMN=data.",
        ),
    ] = None,
    missing: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Column in which values may be missing.")
    ] = None,
    leave_out: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Column that is no feature, an identifier say.")
    ] = None,
    task: Annotated[
        Literal["classification", "regression"] | None,
        typer.Option(help="What to predict, where the label does not tell."),
    ] = None,
    person: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Column that says whose a record is, where a person may have several: protect persons.",
        ),
    ] = None,
    epsilon: Annotated[float, typer.Option(help="Budget of every record, or person.")] = 8.0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write; by default named like the file, or the folder itself."),
    ] = None,
    confirm: Annotated[
        bool,
        typer.Option(
            "--confirm", help="Take what is not declared from the records; every guarantee will say so."
        ),
    ] = False,
    json: Json = False,
) -> None:
    from coterie.experiment.from_table import declared_federation, is_declared
    from coterie.experiment.interview import Interview
    from coterie.privacy.ranges import EPSILON

    EPSILON.check("--epsilon", epsilon)
    if is_declared(data):
        given: dict[str, object] = {"--client": client, "--label": label, "--bound": bound}
        given |= {"--missing": missing, "--leave-out": leave_out, "--task": task, "--out": out}
        given |= {"--person": person, "--confirm": confirm or None}
        for option, value in given.items():
            if value is not None:
                raise InputError(
                    f"{option}: {data} has its declaration already; allowed: --data and --epsilon"
                )
        made = declared_federation(data, epsilon)
    else:
        if label is None:
            raise InputError("--label: missing; name the column to predict")
        asked = _parse_bounds(bound or [])
        drafting = Interview(data, client, label, missing or [], leave_out or [], task, person)
        for column, text in asked.items():
            drafting.answer(column, text)
        if confirm:
            drafting.take_from_records()
        elif _on_a_terminal() and not json:
            notices.release()
            _ask(drafting)
        made = drafting.write(epsilon, out)
    sized, line = _outlook(made)
    content = {**made.to_json(), "sized": sized, "usable": line}
    print_result(content, json, lambda: _show(made, sized, line))


def _outlook(made: NewFederation) -> tuple[dict[str, float], str | None]:
    """The numbers that the recipe finds, and whether the budget is usable; or why no run could begin."""
    if made.fill_in:
        return {}, None
    from coterie.errors import CoterieError
    from coterie.experiment.experiment_file import read_experiment
    from coterie.experiment.local import calibrate
    from coterie.experiment.recipe import usability

    chosen = read_experiment(made.experiment)
    try:
        calibrated = calibrate(chosen)
    except CoterieError as reason:
        return {}, f"no run is possible yet: {reason}"
    usable = usability(calibrated)
    numbers = {key: calibrated.experiment.number(key) for key in chosen.auto}
    return numbers, None if usable is None else usable.line


def _on_a_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _parse_bounds(texts: list[str]) -> dict[str, str]:
    """What is asked for each column, said once."""
    asked: dict[str, str] = {}
    for column, answer in map(_parse_bound, texts):
        if column in asked:
            raise InputError(f"--bound: {column} is given twice, as {asked[column]!r} and {answer!r}")
        asked[column] = answer
    return asked


def _parse_bound(text: str) -> tuple[str, str]:
    column, equals, answer = text.partition("=")
    if not equals or not answer.strip():
        raise InputError(f"--bound: {text!r} is not of the form COLUMN=BOUND, e.g. age=18 to 100")
    return column.strip(), answer


def _ask(drafting: Interview) -> None:
    """Ask for every column that nobody has declared yet, until the answer can be one."""
    from coterie.experiment.interview import HOW

    complain(f"For every column, what is known of it without looking at the records: {HOW}.", style="")
    for question in list(drafting.open_questions()):
        while True:
            text = typer.prompt(f"{question.column} ({question.kind})", err=True)
            try:
                drafting.answer(question.column, text)
                break
            except InputError as mistake:
                complain(str(mistake), style="yellow")
        if question.missing and question.column not in drafting.left_out:
            told = f"values of {question.column} are missing in some rows; may they be?"
            if typer.confirm(told, default=True, err=True):
                drafting.may_be_missing(question.column)


def _show(made: NewFederation, sized: Mapping[str, float], line: str | None) -> None:
    say(f"{made.path}: {len(made.clients)} clients, {sum(made.clients.values()):,} {made.rows}")
    if made.fill_in:
        say(f"to fill in, in {made.declaration}: {', '.join(made.fill_in)}")
        say("no run begins before that: ranges and categories are public, and must not come from the records")
        return
    if made.from_data:
        say("ranges and categories come from the records, and every guarantee will say so")
    if sized:
        say(f"by recipe: {', '.join(f'{key} {number:g}' for key, number in sized.items())}")
    if line is not None:
        say(line)
    say(f"next: coterie plan {made.experiment}, then coterie run {made.experiment}")
