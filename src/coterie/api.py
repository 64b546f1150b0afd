"""Run and report in one call, for notebooks and the command line."""

import logging
from collections.abc import Callable
from pathlib import Path

from coterie.experiment import cells, local
from coterie.experiment.cells import Progress
from coterie.experiment.comparison import SweepResult
from coterie.experiment.folder import RunFolder
from coterie.experiment.result import Callbacks, RunResult
from coterie.experiment.schema import Experiment
from coterie.experiment.sweep import Sweep
from coterie.report.comparison import write_comparison_report
from coterie.report.run import write_run_report

log = logging.getLogger(__name__)


def run(
    experiment: Experiment | str | Path | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    callbacks: Callbacks | None = None,
) -> RunResult:
    """Run an experiment (a file, an object, or the built-in default), write its report, return what it found.

    Example:
        >>> import coterie as ct
        >>> ct.run("experiment.yaml", out="runs/mine")  # doctest: +SKIP
    """
    result = local.run(experiment, out, resume=resume, callbacks=callbacks)
    log.info("writing the report")
    write_run_report(result.folder)
    return result


def compare(
    grid: Sweep,
    out: Path,
    *,
    resume: bool = False,
    workers: int | None = None,
    ray: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> SweepResult:
    """Run a grid of experiments, write the table and one report, return the rows.

    Args:
        ray: address of a Ray cluster whose machines run the cells; None: this one does.
    """
    result = cells.compare(grid, out, resume=resume, workers=workers, ray=ray, progress=progress)
    log.info("writing reports")
    for path in result.cells.values():
        if not RunFolder(path).report.exists():  # of a cell that shared a process, or ran elsewhere
            write_run_report(path)
    write_comparison_report(result.folder)
    return result
