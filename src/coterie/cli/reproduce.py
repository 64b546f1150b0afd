"""`coterie reproduce`: a published experiment, our figures beside the printed ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coterie.cli.console import complain, print_result, print_table, progress_of, say
from coterie.cli.options import Json, Out, Overrides, Resume, Workers
from coterie.errors import InputError
from coterie.files import check_place, finite

if TYPE_CHECKING:
    from coterie.reproduce.table import Line, Reproduction


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="A published experiment; without one, the names are listed.")
    ] = None,
    scale: Annotated[
        Literal["quick", "paper"],
        typer.Option("--scale", help="quick: minutes on a CPU; paper: the publication's size."),
    ] = "quick",
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="Only this budget (several times for more).")
    ] = None,
    algorithms: Annotated[
        list[str] | None, typer.Option("--algorithms", help="Only these, by name, separated by commas.")
    ] = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seeds", help="These seeds for all (several times for more).")
    ] = None,
    overrides: Overrides = None,
    resume: Resume = False,
    render: Annotated[
        bool,
        typer.Option("--render", help="Write tables and pages from the runs that are there; run nothing."),
    ] = False,
    out: Out = None,
    docs: Annotated[
        Path | None, typer.Option("--docs", help="A document whose table of this reproduction is replaced.")
    ] = None,
    workers: Workers = None,
    json: Json = False,
) -> None:
    from coterie.reproduce.declared import ScaleName, Subset, find, names
    from coterie.reproduce.markdown import parted, write_into

    selecting = {"--epsilon": epsilon, "--algorithms": algorithms, "--seeds": seeds, "--set": overrides}
    running_them = {**selecting, "--workers": workers, "--resume": resume}
    if name is None:
        others = {
            **running_them,
            "--render": render,
            "--out": out,
            "--docs": docs,
            "--scale": scale != "quick",
        }
        if idle := [option for option, given in others.items() if given]:
            raise InputError(f"{idle[0]}: of which experiment? allowed: {', '.join(names())}")
        print_result({"experiments": {each: find(each).line for each in names()}}, json, _list)
        return
    if render and (idle := [option for option, given in running_them.items() if given]):
        raise InputError(f"{idle[0]}: nothing is run with --render; allowed: without it")
    published = find(name)
    wanted = tuple(part for text in algorithms or [] for part in text.split(",") if part)
    selection = Subset(tuple(epsilon or ()), wanted, tuple(seeds or ()))
    target = out or Path("runs") / f"reproduce-{name}-{scale}"
    if docs is not None and not render:
        check_place(docs, "--docs", file=True)
        parted(docs, published.name, ScaleName(scale))
    with progress_of(name, quiet=json) as bar:
        from coterie.reproduce import running  # takes seconds

        if render:
            result = running.render(target)
            if result.experiment.name != name:
                raise InputError(f"{target}: holds {result.experiment.name}, not {name}")
        else:
            result = running.reproduce(
                published,
                target,
                scale=ScaleName(scale),
                selection=selection,
                overrides=overrides or [],
                resume=resume,
                workers=workers,
                progress=bar.update_cells,
            )
    if docs is not None:
        write_into(docs, result)
    print_result(finite(result.to_json()), json, lambda: show(result))
    if not result.is_sound or result.missing:
        raise typer.Exit(1)


def _list() -> None:
    from coterie.reproduce.declared import find, names

    width = max(map(len, names())) + 2
    for each in names():
        say(f"{each:<{width}}{find(each).line}")


def show(result: Reproduction) -> None:
    from coterie.experiment.composition import ALONE
    from coterie.reproduce.table import setting_text

    if result.compared is not None:
        headings = ["algorithm", "figure", "ours", "printed", "table", "verdict"]
        for setting, lines in result.by_setting():
            body = [row for line in lines for row in _rows(line)]
            print_table(headings, body, setting_text(setting) or None)
        for note in result.notes():
            say(note)
        for sentence in result.scale.differs:
            say(f"Differs: {sentence}")
        say(ALONE)
        for line in result.lines:
            say(f"{line.heading}: {line.guarantee}")
        for cell in result.missing:
            complain(f"not finished: {cell}")
    say(f"report: {result.report}")


def _rows(line: Line) -> list[list[str]]:
    """A row for each figure; the algorithm is named in the first."""
    rows = [
        [
            entry.quantity.heading,
            entry.text(),
            entry.printed_text(),
            str(entry.printed.table) if entry.printed else "",
            entry.verdict,
        ]
        for entry in line.entries
        if entry.ours is not None
    ]
    rows.append(["clusters found", line.clusters_found, "", "", ""])
    rows.append(["charged of planned", line.charged, "", "", ""])
    return [[line.row if place == 0 else "", *row] for place, row in enumerate(rows)]
