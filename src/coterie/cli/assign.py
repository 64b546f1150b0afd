"""`coterie assign`: a newcomer chooses among the models of a run, privately and by its own records."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import print_result, say
from coterie.cli.options import Json, Run


def assign(
    run: Run,
    data: Annotated[
        Path, typer.Option("--data", help="Folder with the newcomer's one file of labelled records.")
    ],
    epsilon: Annotated[
        float, typer.Option("--epsilon", help="What this choice may cost one record; all choices add up.")
    ],
    json: Json = False,
) -> None:
    from coterie.experiment import assigning
    from coterie.experiment.site_models import open_models

    found = assigning.assign(open_models(run), data, epsilon)

    def show() -> None:
        say(f"cluster: {found.cluster} of {found.candidates}")
        say(f"guarantee: {found.guarantee.line}")
        say(f"choices on these records so far: {found.calls}, in {found.ledger}")
        say(f"history: {found.history.line}")

    print_result(found.to_json(), json, show)
