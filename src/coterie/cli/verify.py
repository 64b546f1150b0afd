"""`coterie verify`: is a run, a comparison or a page as it was written, and does its epsilon follow?"""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import complain, print_json, say
from coterie.cli.options import Json
from coterie.experiment.verify import HOLDS
from coterie.experiment.verify import verify as verify_path
from coterie.privacy.units import round_up

NOT_HELD = 4
"""The exit code for a claim that does not hold."""


def verify(
    path: Annotated[Path, typer.Argument(help="A run folder, the folder of a comparison, or a report.html.")],
    json: Json = False,
) -> None:
    found = verify_path(path)
    if json:
        print_json(found.to_json())
    else:
        state = "finished" if found.finished else "not finished"
        lines = [f"verdict: {found.verdict} ({state})"]
        if found.epsilon_claimed is not None:
            lines.append(f"epsilon claimed: {round_up(found.epsilon_claimed)}")
        if found.epsilon_recounted is not None:
            lines.append(f"epsilon counted again: {round_up(found.epsilon_recounted)}")
        if found.ledger_head is not None:
            lines.append(f"ledger: {found.ledger_head.count} lines, the last {found.ledger_head.hash}")
        if found.epsilon_total is not None:
            lines.append(f"epsilon of all runs together: {round_up(found.epsilon_total)}")
        if found.runs:
            lines.append(f"runs: {len(found.runs)}")
        for line in lines:
            say(line)
    for problem in found.problems:
        complain(f"{found.verdict}: {problem}")
    if found.verdict != HOLDS:
        raise typer.Exit(NOT_HELD)
