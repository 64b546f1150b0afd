"""`coterie verify`: is a run, a comparison or a page as it was written, and does its epsilon follow?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.console import complain, print_json, say
from coterie.cli.options import Json
from coterie.errors import LedgerError
from coterie.privacy.units import round_up

if TYPE_CHECKING:
    from coterie.experiment.verify import Verification


def verify(
    path: Annotated[Path, typer.Argument(help="A run folder, the folder of a comparison, or a report.html.")],
    json: Json = False,
) -> None:
    from coterie.experiment.verify import HOLDS
    from coterie.experiment.verify import verify as verify_path

    found = verify_path(path)
    if json:
        print_json(found.to_json())
    else:
        head, state = found.ledger_head, "finished" if found.finished else "not finished"
        told = {
            "verdict": f"{found.verdict} ({state})",
            "epsilon claimed": _rounded(found.epsilon_claimed),
            "epsilon counted again": _rounded(found.epsilon_recounted),
            "ledger": f"{head.count} lines, the last {head.hash}" if head is not None else None,
            "epsilon of all runs together": _rounded(found.epsilon_total),
            "runs": str(len(found.runs)) if found.runs else None,
            "models": _dropped(found),
        }
        for name, text in told.items():
            if text is not None:
                say(f"{name}: {text}")
    for problem in found.problems:
        complain(f"{found.verdict}: {problem}")
    if found.verdict != HOLDS:
        raise typer.Exit(LedgerError.exit_code)


def _dropped(found: Verification) -> str | None:
    if not found.models_dropped:
        return None
    runs = f" of {found.models_dropped} of {len(found.runs)} runs" if found.runs else ""
    return f"dropped{runs} on purpose, after the result was written"


def _rounded(epsilon: float | None) -> str | None:
    return None if epsilon is None else round_up(epsilon)
