"""Running the cells of a sweep: which of them share a process, where it runs, and how far each cell is.

On a CPU cells are separate processes, so that one that breaks (or is killed) takes nothing with it, and so
that several run at once on as many cores, each with one thread. A GPU has room for the clients of several
cells in one program: there they share a process. Processes run on this machine, or as tasks of a Ray cluster.
"""

import fcntl
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from coterie.engines.feature_cache import FeatureCache
from coterie.engines.features import featured
from coterie.engines.workers import cores
from coterie.errors import InputError, one_line
from coterie.experiment import folder
from coterie.experiment.cluster import RayCluster
from coterie.experiment.comparison import CSV, MARKDOWN, SweepResult, table_csv, table_markdown
from coterie.experiment.experiment_file import to_yaml
from coterie.experiment.folder import RunFolder
from coterie.experiment.forecast import Forecast, TimeLeft, by_rounds, look_ahead
from coterie.experiment.keeper import settle
from coterie.experiment.local import check_finished, fit_together, load_federation
from coterie.experiment.schema import Experiment, refuse
from coterie.experiment.seal import Seal
from coterie.experiment.sweep import Cell, Sweep
from coterie.files import beside, write_text
from coterie.models.settings import NONE

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
GRACE_SECONDS = 1.0
"""For processes that are asked to end, before they are killed."""
CELLS_AT_ONCE = 16
"""Cells whose clients share a GPU: enough to fill it."""


@dataclass(frozen=True)
class Progress:
    """How many of its rounds each cell has completed, and which cells failed.

    Args:
        left: seconds that the rest will take, as far as that is known.
    """

    done: Mapping[str, int]
    rounds: Mapping[str, int]
    failed: frozenset[str]
    left: float | None = None


class LocalProcesses:
    """Cells as processes of this machine: so many at a time, each with a GPU or none."""

    def __init__(self, cells: Sequence[Cell], workers: int | None) -> None:
        self.gpu = torch.cuda.is_available() and all(cell.experiment.engine.device != "cpu" for cell in cells)
        # A core for each cell; a GPU is given to one process at a time.
        self.workers = workers or (1 if self.gpu else max(1, min(len(cells), cores())))
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, runs: Mapping[Path, Experiment]) -> Callable[[], bool]:
        """Begin or resume these runs in one process; the function that is returned says whether it has ended.

        What stops a run is then the last line of the log beside its folder.
        """
        paths = list(runs)
        if len(paths) == 1:
            arguments = ["coterie", "run", "--out", str(paths[0]), "--resume", "--json"]
            arguments += ["--", str(beside(paths[0], ".yaml"))]
        else:
            arguments = ["coterie.experiment.local", *map(str, paths)]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if self.workers > 1 else {}
        with beside(paths[0], ".log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "coterie.experiment.child", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, **threads},
                process_group=0,  # an interrupt at the keyboard is for us, and we end them
            )
        self._processes.append(process)
        return lambda: self._ended(process, paths)

    def _ended(self, process: subprocess.Popen[bytes], paths: Sequence[Path]) -> bool:
        code = process.poll()
        if code is None:
            return False
        if code < 0:  # a process that was killed says nothing itself
            for path in (path for path in paths if not RunFolder(path).finished):
                with beside(path, ".log").open("a", encoding="utf-8") as log:
                    log.write(f"killed by signal {-code}\n")
        self._processes.remove(process)
        process.communicate()  # which closes the pipe
        return True

    def close(self) -> None:
        """Stop whatever still runs: what does not end soon is killed, which costs it one round at most."""
        for process in self._processes:
            process.terminate()
        latest = time.monotonic() + GRACE_SECONDS
        while self._processes:
            process = self._processes[-1]
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, latest - time.monotonic()))
            process.kill()
            process.communicate()
            self._processes.pop()


Executor = LocalProcesses | RayCluster
"""Where cells run."""


def compare(
    sweep: Sweep,
    out: Path,
    *,
    resume: bool = False,
    workers: int | None = None,
    ray: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    forecast: Forecast | None = None,
) -> SweepResult:
    """Run every cell that is not finished yet, then write the table.

    Args:
        workers: processes at a time; by default one for each core, on a cluster as many as it has room for.
        ray: address of a Ray cluster that this machine belongs to; None: cells run on this machine alone.
        forecast: what the cells have to do, where somebody has looked already.
    """
    folder.check_out(out)
    new = not (out.exists() and any(out.iterdir()))
    cells = sweep.checked()
    refuse(
        {
            f"{out}: exists already; --resume continues it, --out names another folder": not (new or resume),
            f"{out}: exists and is not a comparison; --out names another folder": (
                not new and not (out / "sweep.yaml").exists()
            ),
        }
    )
    paths = [cell.files(out).path for cell in cells]
    if forecast is None:
        # Data may lie on other machines of a cluster alone.
        forecast = look_ahead(cells, out) if ray is None else by_rounds(cells)
    executor: Executor = LocalProcesses(cells, workers) if ray is None else RayCluster(ray, cells, workers)
    with closing(executor), _opened(sweep, out, new=new) as seal:

        def remember(reached: Progress) -> None:
            seal.remember(paths, running=True)
            if progress is not None:
                progress(reached)

        try:
            seal.remember(paths, running=True)  # what a comparison that was killed had begun
            if ray is None and not executor.gpu:
                compute_features([cell for cell in cells if not cell.files(out).finished])
            run_cells(cells, out, executor, forecast, remember)
        finally:
            executor.close()
            seal.remember(paths, running=False)
        result = SweepResult.load(out)
        done = sorted(result.cells)
        seal.write_text(out / CSV, table_csv(result.rows), cells=done)
        seal.write_text(out / MARKDOWN, table_markdown(result.rows, result.total, result.verdict), cells=done)
        return result


@contextmanager
def _opened(sweep: Sweep, out: Path, *, new: bool) -> Iterator[Seal]:
    """The seal of the sweep's folder, which no other comparison works in meanwhile.

    Raises:
        InputError, LedgerError: what is there was changed, or begun with cells that the sweep does not have.
    """
    stored = out / "sweep.yaml"
    if new:
        with folder.new_folder(out) as scratch:
            write_text(scratch / stored.name, sweep.to_yaml())
            Seal.create(scratch)
    with Seal(out).lines.path.open("rb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{out}: another comparison is at work in this folder") from None
        seal = Seal(out)
        files = [cell.files(out) for cell in sweep.cells()]
        for run in files:
            settle(run.path)
        for check in seal.checks():
            check()
        if not sweep.contains(Sweep.read(stored)):
            raise InputError(f"{out}: was begun with another sweep; resume it as it was or with more values")
        for run in files:
            if run.finished:
                check_finished(run)
        seal.settle()
        seal.write_text(stored, sweep.to_yaml())
        yield seal


def compute_features(cells: Sequence[Cell]) -> None:
    """Compute what cells would compute for themselves: here with all threads, while none of them waits.

    What stops a cell is told where it runs.
    """

    def of_records(cell: Cell) -> str:
        chosen = cell.experiment
        dealt = (chosen.data, chosen.federation, chosen.privacy.persons, chosen.seeds.simulation)
        return repr((chosen.model.features, *dealt))

    with_features = [cell for cell in cells if cell.experiment.model.features != NONE]
    for _, alike in groupby(sorted(with_features, key=of_records), key=of_records):
        chosen = next(alike).experiment
        try:
            featured(load_federation(chosen), chosen.model.features, torch.device("cpu"), FeatureCache())
        except (Exception, SystemExit) as reason:  # the user's own code may raise anything
            log.info("features are left to the runs: %s", one_line(reason))


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    executor: Executor,
    forecast: Forecast,
    progress: Callable[[Progress], None],
) -> None:
    """Keep the executor busy until every cell has finished or failed; a failure is in its log."""
    waiting = shares([cell for cell in cells if not cell.files(out).finished], gpu=executor.gpu)
    running: list[tuple[list[Cell], Callable[[], bool]]] = []
    failed: set[str] = set()
    rounds = {cell.name: cell.experiment.schedule.rounds for cell in cells}
    metrics = {cell.name: GrowingLines(cell.files(out).metrics) for cell in cells}
    time_left = TimeLeft(forecast, min(executor.workers, len(waiting) or 1))

    def tell() -> None:
        done = {name: lines.count() for name, lines in metrics.items()}
        share = {name: 1.0 if name in failed else done[name] / rounds[name] for name in done}
        progress(Progress(done, rounds, frozenset(failed), time_left.after(share)))

    tell()
    while waiting or running:
        while waiting and len(running) < executor.workers:
            share = waiting.pop(0)
            runs = {cell.files(out).path: cell.experiment for cell in share}
            for path, experiment in runs.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(beside(path, ".yaml"), to_yaml(experiment))
            running.append((share, executor.start(runs)))
        for share, ended in list(running):
            if ended():
                running.remove((share, ended))
                failed |= {cell.name for cell in share if not cell.files(out).finished}
        tell()
        if running:
            time.sleep(POLL_SECONDS)


class GrowingLines:
    """The lines of a file that another process appends to: at each look only what is new is read."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._lines = path, 0, 0

    def count(self) -> int:
        """How many lines are complete."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._read:  # a run was resumed, and repeats a round
            self._read = self._lines = 0
        if size > self._read:
            with self._path.open("rb") as handle:
                handle.seek(self._read)
                new = handle.read(size - self._read)
            self._read += len(new)
            self._lines += new.count(b"\n")
        return self._lines


def shares(cells: Sequence[Cell], *, gpu: bool) -> list[list[Cell]]:
    """Which cells share a process: one alone on a CPU, as many as are alike on a GPU."""
    alike: dict[str, list[Cell]] = {}
    for cell in cells:
        alike.setdefault(fit_together(cell.experiment) if gpu else cell.name, []).append(cell)
    return [share for same in alike.values() for share in _equal_parts(same)]


def _equal_parts(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """In the order that they have, and of equal size as far as that goes."""
    count = math.ceil(len(cells) / CELLS_AT_ONCE)
    for part in range(count):
        first, end = (len(cells) * place // count for place in (part, part + 1))
        yield list(cells[first:end])
