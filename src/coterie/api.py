"""Run and report in one call, for notebooks and the command line."""

from collections.abc import Callable
from pathlib import Path

from coterie.experiment import runner, sweep
from coterie.experiment.runner import RoundReport, RunResult
from coterie.experiment.schema import Experiment
from coterie.experiment.sweep import Progress, Sweep, SweepResult
from coterie.report import write_comparison_report, write_run_report


def run(
    experiment: Experiment | str | Path | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    watch: Callable[[RoundReport], None] | None = None,
) -> RunResult:
    """Run an experiment (a file, an object, or the built-in default), write its report, return what it found.

    Example:
        >>> import coterie as ct
        >>> ct.run("experiment.yaml", out="runs/mine")  # doctest: +SKIP
    """
    result = runner.run(experiment, out, resume=resume, watch=watch)
    write_run_report(result.folder)
    return result


def compare(
    grid: Sweep,
    out: Path,
    *,
    resume: bool = False,
    workers: int | None = None,
    watch: Callable[[Progress], None] | None = None,
) -> SweepResult:
    """Run a grid of experiments, write the table and one report, return the rows."""
    result = sweep.compare(grid, out, resume=resume, workers=workers, watch=watch)
    write_comparison_report(result.folder)
    return result
