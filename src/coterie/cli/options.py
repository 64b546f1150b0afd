"""Options that several commands share."""

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from coterie.errors import InputError
from coterie.files import check_place

ALGORITHMS = Path(__file__).resolve().parents[1] / "algorithms"


def complete_setting(incomplete: str) -> list[str]:
    """Algorithms after `algorithm.name=`: the files are looked at, to import them would take a second."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in ALGORITHMS.glob("*/*.py"))
    names = sorted(set(re.findall(r'^    name = "([a-z-]+)"', text, re.MULTILINE)))
    return [key for key in map("algorithm.name={}".format, names) if key.startswith(incomplete)]


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue where an interrupted run stopped.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to write; by default one under runs/.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key, e.g. schedule.rounds=40.",
        autocompletion=complete_setting,
    ),
]
Run = Annotated[Path, typer.Argument(help="The folder of a finished run, or a site's own.")]
Client = Annotated[str | None, typer.Option("--client", help="Use the model of this client of the run.")]
Cluster = Annotated[
    int | None, typer.Option("--cluster", help="Use the model of this cluster, counted from 0.")
]
LifetimeEpsilon = Annotated[
    float | None,
    typer.Option(
        "--lifetime-epsilon", help="The most that a record of these data may ever spend, in all experiments."
    ),
]
LifetimeDelta = Annotated[
    float | None, typer.Option("--lifetime-delta", help="At this delta; goes with --lifetime-epsilon.")
]
NewRecords = Annotated[
    bool,
    typer.Option("--new-records", help="Rows that are new in a known folder are new, and have paid nothing."),
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Runs at a time; by default one per core.")
]
RecordAdjacency = Literal["zero-out", "replace-one"]
PLOT_FORMATS = (".png", ".pdf", ".svg")


def check_plot(path: Path) -> None:
    """Refuse a figure that cannot be written, before anything is worked out for it."""
    if path.suffix.lower() not in PLOT_FORMATS:
        raise InputError(f"--plot: {path} is not allowed, a file ending in {', '.join(PLOT_FORMATS)} is")
    check_place(path, "--plot", file=True)


LogJson = Annotated[
    bool, typer.Option("--log-json", help="Say what happens as one JSON object per line, on stderr.")
]
