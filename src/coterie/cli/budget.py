"""`coterie budget`: what records have paid over their lifetime, and the most that they may."""

import json as text
from pathlib import Path
from typing import Annotated, Literal

import typer

from coterie.cli.console import print_result, print_table, say
from coterie.cli.options import Json
from coterie.errors import InputError
from coterie.files import check_place, json_text, write_text
from coterie.privacy.units import round_up, short_number

budget_app = typer.Typer(
    name="budget",
    help="What records have paid in all experiments on them, and the most that they may.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Data = Annotated[
    str,
    typer.Option("--data", metavar="FOLDER", help="A folder of records, or package.module:function."),
]


@budget_app.command(help="Everything that was ever charged to these records at this site.")
def show(data: Data, json: Json = False) -> None:
    from coterie.experiment.budgets import account_of

    found = account_of(data)

    def tell() -> None:
        rows = [
            [
                each.plan.time[:10],
                each.plan.kind,
                each.plan.name,
                "finished" if each.finished else "reserved",
                round_up(each.epsilon),
            ]
            for each in found.experiments
        ]
        if rows:
            print_table(["entered", "what", "name", "state", "epsilon alone"], rows)
        spent, limit = found.spent, found.limit
        if spent is None:
            say(f"spent: nothing was ever charged to the records of {found.data}")
        else:
            weak = "".join(f"; {label}" for label in spent.weak)
            say(
                f"spent: (eps={round_up(spent.epsilon)}, delta={short_number(spent.delta)})-DP for one "
                f"{spent.basis.unit}, {spent.basis.adjacency}, composed over {len(spent.experiments)}{weak}"
            )
        if limit is None:
            say("lifetime: no budget is set; --lifetime-epsilon and --lifetime-delta set one")
        else:
            used = "" if spent is None or spent.adaptive is None else f"; {round_up(spent.adaptive)} used"
            allowed = f"epsilon {limit.epsilon:g} at delta {short_number(limit.delta)}"
            say(f"lifetime: {allowed} for one {limit.unit}, {limit.adjacency}, by the filter{used}")
        if found.elsewhere:
            say(f"unknown: entered in {found.elsewhere} other registers, too, which are not counted here")
        say(f"register: {found.register}")

    print_result(found.to_json(), json, tell)


@budget_app.command(help="The same for others, as a JSON file: no fingerprint, no other data set, no path.")
def export(
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="File to write.")],
    json: Json = False,
) -> None:
    from coterie.experiment.budgets import account_of

    check_place(out, "--out", file=True)
    content = account_of(data).to_json(outside=True)
    write_text(out, json_text(content))
    print_result(content, json, lambda: say(f"written: {out}"))


@budget_app.command("set", help="Set, lower or, with a reason that is kept, raise a lifetime budget.")
def set_budget(
    data: Data,
    epsilon: Annotated[float, typer.Option("--lifetime-epsilon", help="The most that one may ever spend.")],
    delta: Annotated[float, typer.Option("--lifetime-delta", help="At this delta.")],
    unit: Annotated[
        Literal["record", "person", "client", "worker"] | None,
        typer.Option("--unit", help="One what; by default record."),
    ] = None,
    adjacency: Annotated[
        Literal["zero-out", "add-remove", "replace-one"] | None,
        typer.Option("--adjacency", help="Between which neighbours; by default zero-out."),
    ] = None,
    reason: Annotated[
        str | None, typer.Option("--reason", help="Why; needed to raise one, and kept for ever.")
    ] = None,
    unknown_history: Annotated[
        bool,
        typer.Option("--unknown-history", help="Accept that charges in other registers are not counted."),
    ] = False,
    json: Json = False,
) -> None:
    from coterie.experiment.budgets import lifetime_of, set_lifetime
    from coterie.privacy import Adjacency, Unit

    budget = lifetime_of(epsilon, delta)
    assert budget is not None
    InputError.when(reason is not None and not reason.strip(), "--reason: empty; allowed: why it is raised")
    line = set_lifetime(
        data,
        budget,
        None if unit is None else Unit(unit),
        None if adjacency is None else Adjacency(adjacency),
        reason=reason,
        unknown_history=unknown_history,
    )
    content = text.loads(text.dumps(line.to_json()))
    told = f"epsilon {line.epsilon:g} at delta {short_number(line.delta)}, one {line.unit}, {line.adjacency}"
    print_result(content, json, lambda: say(f"lifetime budget of {data}: {told}"))
