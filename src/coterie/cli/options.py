"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue where an interrupted run stopped.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to write; by default one under runs/.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. schedule.rounds=40."),
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Runs at a time; by default one per core.")
]
RecordAdjacency = Literal["zero-out", "replace-one"]
