"""Run and report in one call, for notebooks and the command line."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from coterie.errors import InputError
from coterie.experiment import cells, local
from coterie.experiment.callbacks import Callbacks, together
from coterie.experiment.cells import Progress
from coterie.experiment.comparison import SweepResult
from coterie.experiment.experiment_file import ExperimentSource, experiment_of
from coterie.experiment.folder import RunFolder, default_folder
from coterie.experiment.registered import prepare
from coterie.experiment.result import RunResult
from coterie.experiment.sweep import Sweep, SweepSource
from coterie.privacy import Budget
from coterie.report.comparison import write_comparison_report
from coterie.report.run import write_run_report

log = logging.getLogger(__name__)


def run(
    experiment: ExperimentSource = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    callbacks: Callbacks | Sequence[Callbacks] | None = None,
    lifetime: Budget | None = None,
    new_records: bool = False,
) -> RunResult:
    """Run an experiment, write its report, return what it found.

    Args:
        experiment: its file, its sections as a dict, an `Experiment`, or None for the built-in one.
        out: the folder to write; by default a new one under `runs/`.
        resume: go on with the run that the folder holds, where it stopped.
        callbacks: what to call while it goes on: `Callbacks`, a tracker of `coterie.trackers`, or several.
        lifetime: the most that a record of your own data may ever spend, in this run and all others on it;
            once set it binds later runs.
        new_records: records that are new in data which were used before have paid nothing yet.

    Example:
        >>> import coterie as ct
        >>> ct.run("experiment.yaml", out="runs/mine")  # doctest: +SKIP
        >>> ct.run({"privacy": {"epsilon": 3}, "schedule": {"rounds": 20}})  # doctest: +SKIP
    """
    chosen = experiment_of(experiment)
    prepare([chosen], lifetime, new_records=new_records)
    result = local.run(chosen, out, resume=resume, callbacks=together(callbacks))
    log.info("writing the report")
    write_run_report(result.folder)
    return result


def load(path: str | Path) -> RunResult:
    """A finished run from its folder, every file of it checked: the object that `run` returned.

    Example:
        >>> import coterie as ct
        >>> ct.load("runs/mine").predict(frame, client="client-03")  # doctest: +SKIP
    """
    files = RunFolder(InputError.path_of("path", path, "the folder of a run"))
    if not files.finished:
        raise InputError(f"{path}: not the folder of a finished run")
    local.check_finished(files)
    return RunResult.load(files.path)


def compare(
    sweep: SweepSource = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    workers: int | None = None,
    ray: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    lifetime: Budget | None = None,
    new_records: bool = False,
) -> SweepResult:
    """Run a grid of experiments, write the table and one report, return the rows.

    Args:
        sweep: its file, a dict with `base` and `grid`, a `Sweep`, or None for the built-in one.
        out: the folder to write; by default a new one under `runs/`.
        resume: go on with the comparison that the folder holds, where it stopped.
        workers: runs at a time; by default one for each core.
        ray: address of a Ray cluster whose machines run the cells; None: this one does.
        progress: is called now and then with how far every run is.
        lifetime, new_records: as for one run, for the data of all of them.

    Example:
        >>> import coterie as ct
        >>> ct.compare("sweep.yaml")  # doctest: +SKIP
        >>> ct.compare({"grid": {"algorithm.name": ["r-dpcfl", "local"], "seeds.simulation": [0, 1, 2]}})
        ... # doctest: +SKIP
    """
    grid = Sweep.read(sweep)

    def resumable(path: Path) -> bool:
        stored = path / "sweep.yaml"
        return resume and stored.exists() and Sweep.read(stored) == grid

    name = Path(sweep).stem if isinstance(sweep, str | Path) else "built-in" if sweep is None else "sweep"
    named = InputError.path_of("out", out) if out is not None else None
    target = named or default_folder(f"compare-{name}", resumable)
    prepare([cell.experiment for cell in grid.checked()], lifetime, new_records=new_records)
    result = cells.compare(grid, target, resume=resume, workers=workers, ray=ray, progress=progress)
    log.info("writing reports")
    for path in result.cells.values():
        if not RunFolder(path).report.exists():  # of a cell that shared a process, or ran elsewhere
            write_run_report(path)
    write_comparison_report(result.folder)
    return result
