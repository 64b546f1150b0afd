"""`coterie report`: write the report of what was run anew."""

import webbrowser
from pathlib import Path

from coterie import api
from coterie.cli.console import out
from coterie.errors import InputError
from coterie.experiment.folder import RunFolder
from coterie.experiment.reproductions.running import RECORD
from coterie.report import write_comparison_report, write_run_report


def report(folder: Path, *, show: bool) -> None:
    if RunFolder(folder).exists:
        written = write_run_report(folder)
    elif (folder / "sweep.yaml").exists():
        written = write_comparison_report(folder)
    elif (folder / RECORD).exists():
        written = api.render(folder).report
    else:
        raise InputError(f"{folder}: neither a run folder nor the folder of a comparison or reproduction")
    out.print(f"report: {written}", markup=False, highlight=False, soft_wrap=True)
    if show:
        webbrowser.open(written.resolve().as_uri())
