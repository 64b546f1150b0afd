"""`coterie report`: count the ledgers of what was run again, and write its report anew."""

import webbrowser
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import say
from coterie.errors import InputError
from coterie.files import check_place


def report(
    folder: Annotated[
        Path, typer.Argument(help="A run folder, a site's, or that of a comparison or reproduction.")
    ],
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    public: Annotated[
        bool,
        typer.Option("--public", help="Write public.html, without any figure outside the guarantee."),
    ] = False,
    figures: Annotated[
        Path | None,
        typer.Option("--figures", file_okay=False, help="Also write each figure as a file into this folder."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--format", help="Of these files: svg (by default), pdf or png.")
    ] = None,
) -> None:
    from coterie.experiment.folder import RunFolder
    from coterie.experiment.recorded import check_folder, recount
    from coterie.experiment.site_models import is_site_folder
    from coterie.report.comparison import comparison_figures, write_comparison_report
    from coterie.report.drawing import FORMATS, Figure, write_figures
    from coterie.report.run import run_figures, write_run_report
    from coterie.reproduce.figures import figures_of
    from coterie.reproduce.running import render
    from coterie.reproduce.table import RECORD

    if kind is not None and figures is None:
        raise InputError("--format: says how figures are written; allowed: together with --figures FOLDER")
    if kind not in (None, *FORMATS):
        raise InputError(f"--format: '{kind}' is not allowed, {', '.join(FORMATS)} are")
    if figures is not None:
        check_place(figures, "--figures")
    if RunFolder(folder).exists:
        check_folder(RunFolder(folder))
        counted = recount(folder)
        written = write_run_report(folder, public=public)
        drawn = partial(run_figures, folder, public=public)
        said = "nothing was charged yet" if counted is None else str(counted)
    elif (folder / "sweep.yaml").exists():
        said = _recount_all(folder)
        written = write_comparison_report(folder, public=public)
        drawn = partial(comparison_figures, folder, public=public)
    elif (folder / RECORD).exists():
        if public:
            raise InputError(f"--public: {folder} compares with a publication; allowed: a run, a comparison")
        said = _recount_all(folder / "runs") if (folder / "runs" / "sweep.yaml").exists() else "no runs"
        rendered = render(folder)
        written, drawn = rendered.report, partial(list, figures_of(rendered))
    elif is_site_folder(folder):
        if public or figures is not None:
            raise InputError(f"--public, --figures: {folder} is a site's own; allowed: a run, a comparison")
        from coterie.report.site import write_site_report

        written, drawn = write_site_report(folder), partial(list[Figure], [])
        said = "counted again: no figure differs"
    else:
        raise InputError(f"{folder}: neither a run folder nor the folder of a comparison or reproduction")
    say(f"ledger: {said}")
    say(f"report: {written}")
    if figures is not None:
        files = write_figures(drawn(), figures, kind or "svg")
        say(f"figures: {len(files)} in {figures}")
    if show:
        webbrowser.open(written.resolve().as_uri())


def _recount_all(folder: Path) -> str:
    """The ledger of every finished run of a comparison."""
    from coterie.experiment.comparison import SweepResult
    from coterie.experiment.folder import RunFolder
    from coterie.experiment.recorded import check_folder, recount
    from coterie.experiment.seal import Seal

    for check in Seal(folder).checks():
        check()
    cells = SweepResult.load(folder).cells.values()
    for path in cells:
        check_folder(RunFolder(path))
    counted = [recount(path) for path in cells]
    releases = sum(each.releases for each in counted if each is not None)
    return f"{releases:,} releases of {len(counted):,} finished runs, counted again: no figure differs"
