"""`coterie compare`: a grid of runs side by side."""

from pathlib import Path

import typer

from coterie import api
from coterie.cli.console import ProgressBar, err, out, print_json, print_table
from coterie.experiment.folder import finite, newest_first, next_free
from coterie.experiment.sweep import BRIEF, OUTSIDE, Progress, Sweep, SweepResult, table_columns


def compare(path: Path | None, *, resume: bool, out: Path | None, workers: int | None, json: bool) -> None:
    sweep = Sweep.read(path)
    target = out or _folder_for(sweep, path, resume)
    total = sum(cell.experiment.schedule.rounds for cell in sweep.cells())
    with ProgressBar("comparing", total) as bar:

        def watch(progress: Progress) -> None:
            finished = sum(progress.done[name] == progress.rounds[name] for name in progress.done)
            status = f"{finished} of {len(progress.done)} runs done"
            if progress.failed:
                status += f", {len(progress.failed)} failed"
            bar.update(sum(progress.done.values()), status)

        result = api.compare(sweep, target, resume=resume, workers=workers, watch=watch)
    if json:
        print_json(finite(result.to_json()))
    else:
        show(result)
    if result.failed:
        raise typer.Exit(1)


def show(result: SweepResult) -> None:
    headings, body = table_columns(result.rows, BRIEF)
    print_table(headings, body)
    if any(row.kind == "exact" for row in result.rows):
        out.print(OUTSIDE, markup=False, highlight=False, soft_wrap=True)
    if result.total is not None:
        out.print(result.total.text, markup=False, highlight=False, soft_wrap=True)
    for row in result.rows:
        label = ", ".join(str(value) for value in row.values.values())
        out.print(f"{label}: {row.guarantee}", markup=False, highlight=False, soft_wrap=True)
    for name, reason in result.failed.items():
        err.print(f"failed: {name}: {reason}", style="red", markup=False, soft_wrap=True)
    out.print(f"report: {result.report}", markup=False, highlight=False, soft_wrap=True)


def _folder_for(sweep: Sweep, path: Path | None, resume: bool) -> Path:
    base, name = Path("runs"), f"compare-{path.stem if path else 'built-in'}"
    if resume:
        for candidate in newest_first(base.glob(f"{name}-*")):
            if (candidate / "sweep.yaml").exists() and Sweep.read(candidate / "sweep.yaml") == sweep:
                return candidate
    return next_free(base, name)
