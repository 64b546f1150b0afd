"""`coterie reproduce`: a published experiment, our figures beside the printed ones."""

from collections.abc import Sequence
from pathlib import Path

import typer

from coterie import api
from coterie.cli.console import ProgressBar, err, out, print_json, print_table
from coterie.errors import InputError
from coterie.experiment.composition import ALONE
from coterie.experiment.folder import finite
from coterie.experiment.sweep import Progress
from coterie.reproduce import ScaleName, Selection, find, names, sweep_of
from coterie.reproduce.docs import write_into
from coterie.reproduce.running import Reproduced
from coterie.reproduce.table import Line, notes, setting_text


def show_names() -> None:
    """Every reproduction in a line."""
    width = max(len(name) for name in names()) + 2
    for name in names():
        _say(f"{name:<{width}}{find(name).line}")


def reproduce(
    name: str,
    scale_name: str,
    part: tuple[Sequence[float], Sequence[str], Sequence[int]],
    overrides: Sequence[str],
    *,
    resume: bool,
    render: bool,
    out: Path | None,
    docs: Path | None,
    workers: int | None,
    json: bool,
) -> None:
    """Budgets, algorithms and seeds of `part` narrow what is run; an empty one narrows nothing."""
    reproduction, scale, selection = find(name), ScaleName(scale_name), Selection(*part)
    target = out or Path("runs") / f"reproduce-{name}-{scale.value}"
    if render:
        result = api.render(target)
        if result.reproduction.name != name:
            raise InputError(f"{target}: holds {result.reproduction.name}, not {name}")
    else:
        planned = sweep_of(reproduction, scale, selection, overrides)
        total = sum(cell.experiment.schedule.rounds for cell in planned.cells()) if planned else 0
        with ProgressBar(name, total) as bar:

            def watch(progress: Progress) -> None:
                finished = sum(progress.done[cell] == progress.rounds[cell] for cell in progress.done)
                status = f"{finished} of {len(progress.done)} runs done"
                if progress.failed:
                    status += f", {len(progress.failed)} failed"
                bar.update(sum(progress.done.values()), status)

            result = api.reproduce(
                name,
                target,
                scale=scale.value,
                selection=selection,
                overrides=overrides,
                resume=resume,
                workers=workers,
                watch=watch,
            )
    if docs is not None:
        write_into(docs, result)
    if json:
        print_json(finite(result.to_json()))
    else:
        show(result)
    if not result.is_sound or (result.comparison is not None and result.comparison.missing):
        raise typer.Exit(1)


def show(result: Reproduced) -> None:
    if result.comparison is not None:
        headings = ["algorithm", "figure", "ours", "printed", "table", "verdict"]
        for setting in result.comparison.settings:
            lines = [line for line in result.comparison.lines if dict(line.setting) == setting]
            print_table(
                headings, [row for line in lines for row in _rows(line)], setting_text(setting) or None
            )
        for note in notes(result.comparison):
            _say(note)
        for sentence in result.scale.differs:
            _say(f"Differs: {sentence}")
        _say(ALONE)
        for line in result.comparison.lines:
            where = f", {setting_text(line.setting)}" if line.setting else ""
            _say(f"{line.row}{where}: {line.guarantee}")
        for cell in result.comparison.missing:
            err.print(f"not finished: {cell}", style="red", markup=False, soft_wrap=True)
    _say(f"report: {result.report}")


def _rows(line: Line) -> list[list[str]]:
    """A row for each figure; the algorithm is named in the first."""
    rows = [
        [
            entry.measure.heading,
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


def _say(text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)
