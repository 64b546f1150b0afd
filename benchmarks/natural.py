"""Natural federations: when clustering pays, when local is best, and how the recipe of `auto` does.

python benchmarks/natural.py --prepare runs/natural-data       # once: the tables that the runs need, as files
python benchmarks/natural.py --data runs/natural-data --jobs 2 # all of it: two hours of two cores
python benchmarks/natural.py --quick                           # one federation and budget: a minute of a core
python benchmarks/natural.py --render benchmarks/results/natural.csv

Nine federations whose clients are as they are found (hospitals, schools, carriers, departments, communes,
states), sized for two cores by rules that are public: so many clients, drawn by the seed among those with
enough records, and so many records of each at most, evenly spaced in its table (`FEDERATIONS`). Every run is
an ordinary one of the product, in this process or in one of `--jobs`, with a seed for its noise.

A cell is a federation, an epsilon and an algorithm. In it `auto` (batch, rounds, step size, averaging and
clip by the recipe, which was fitted on other federations) runs on the seeds 0, 1 and 2, and so does the best
of nine settings (`recipe.nine`), which is chosen on the seeds 10 and 11. Scores are those of held-out
records: mean accuracy of the clients, or R^2 of all records. What is finished stands in --out and is not run
again.
"""

import argparse
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import torch
from natural_results import (
    ALGORITHMS,
    FEDERATIONS,
    RECIPE,
    SEEDS,
    TRIED,
    Cell,
    Row,
    append,
    best_of,
    read_rows,
    render,
)
from recipe import Setting, nine

from coterie.data import Federation
from coterie.data.dataset_files import data_root
from coterie.data.r_tables import TABLES, write_table
from coterie.experiment import local
from coterie.experiment.folder import RunFolder
from coterie.experiment.schema import Experiment

EPSILONS = (1.0, 3.0, 8.0)


@dataclass(frozen=True)
class Work:
    """How much of it is run."""

    seeds: tuple[int, ...] = SEEDS
    tried: tuple[int, ...] = TRIED
    epsilons: tuple[float, ...] = EPSILONS
    algorithms: tuple[str, ...] = ALGORITHMS
    federations: tuple[str, ...] = field(default_factory=lambda: tuple(FEDERATIONS))

    def cells(self) -> list[Cell]:
        every = product(self.federations, self.epsilons, self.algorithms)
        return [Cell(*own) for own in every if own[2] != "oracle" or FEDERATIONS[own[0]].known]


QUICK = Work((0, 1), (10,), (3.0,), ("local", "global", "r-dpcfl"), ("heart-disease",))


# --- running ------------------------------------------------------------------------------------------------


def experiment_of(cell: Cell, own: Setting | None, seed: int, *, features: str | None = None) -> Experiment:
    """The experiment of one run; without a setting all numbers are auto."""
    sections = FEDERATIONS[cell.federation].sections(cell.federation)
    if features is not None:
        sections = {**sections, "model": {**sections.get("model", {}), "features": features}}
    auto = dict.fromkeys(("rounds", "batch", "lr", "averaging"), "auto")
    schedule = auto if own is None else {"rounds": own.rounds, "batch": own.batch, "lr": own.lr}
    return Experiment.model_validate(
        {
            **sections,
            "privacy": {"epsilon": cell.epsilon, "clip": "auto" if own is None else own.clip},
            "schedule": schedule,
            "algorithm": {"name": cell.algorithm},
            "engine": {"device": "cpu", "workers": 1},
            "seeds": {"simulation": seed, "noise": seed},
            "evaluation": {"references": False, "every": 30},
        }
    )


@lru_cache(maxsize=8)
def federation_of(name: str, seed: int) -> Federation:
    return local.load_federation(experiment_of(Cell(name, 1.0, "local"), None, seed))


def run(cell: Cell, own: Setting | None, seed: int, *, features: str | None = None) -> Row:
    """One run in a folder that is thrown away."""
    begun, federation = perf_counter(), federation_of(cell.federation, seed)
    calibrated = local.calibrate(experiment_of(cell, own, seed, features=features), federation)
    memory = Path("/dev/shm")  # a run is made to survive a crash, and waits for a disk hundreds of times
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        result = local.finish(calibrated, RunFolder(Path(folder) / "run"))
    regression, used = FEDERATIONS[cell.federation].regression, calibrated.experiment
    pooled = result.scores["r2"].value if regression else None
    return Row(
        **asdict(cell),
        setting=RECIPE if own is None else own.name,
        seed=seed,
        score=round(pooled if pooled is not None else result.reached.mean, 5),  # type: ignore[union-attr]
        worst_client=round(result.reached.least, 5),  # type: ignore[union-attr]
        clusters=len(set(result.clusters.values())),
        clusters_found={True: "yes", False: "no", None: ""}[result.clusters_found],
        noise=round(result.noise_multiplier, 4),
        batch=used.schedule.batch,
        lr=used.schedule.lr,
        clip=used.privacy.clip,
        rounds=used.schedule.rounds,
        clients=len(federation.clients),
        records=sum(len(client.train) for client in federation.clients),
        seconds=round(perf_counter() - begun, 2),
    )


def run_cell(cell: Cell, work: Work, out: Path) -> str:
    """Every run of a cell that is not finished; the best of nine is known when all nine have run."""
    torch.set_num_threads(1)
    file = out / f"{cell.name.replace(' ', '-')}.csv"
    done = {(row.setting, row.seed): row for row in read_rows([file])}

    def finished(own: Setting | None, seed: int) -> Row:
        name = RECIPE if own is None else own.name
        if (name, seed) not in done:
            row = run(cell, own, seed)
            done[name, seed] = row
            append(file, row)
        return done[name, seed]

    for seed in work.seeds:
        finished(None, seed)
    if cell.algorithm == "oracle":
        return cell.name
    federation = federation_of(cell.federation, work.seeds[0])
    smallest = min(len(client.train) for client in federation.clients)
    settings = nine(smallest)
    rows = [finished(own, seed) for own in settings for seed in work.tried]
    best = best_of(rows)
    for seed in work.seeds:
        finished(next(own for own in settings if own.name == best), seed)
    return cell.name


def run_all(work: Work, out: Path, jobs: int) -> list[Row]:
    out.mkdir(parents=True, exist_ok=True)
    cells = sorted(work.cells(), key=lambda cell: (cell.algorithm != "r-dpcfl", cell.federation))
    begun = perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        working = [pool.submit(run_cell, cell, work, out) for cell in cells]
        for count, ended in enumerate(as_completed(working), 1):
            print(
                f"{count} of {len(cells)} cells, {perf_counter() - begun:.0f} s: {ended.result()}", flush=True
            )
    files = [out / f"{cell.name.replace(' ', '-')}.csv" for cell in work.cells()]
    return read_rows(files)


def prepare(folder: Path) -> None:
    """The tables that runs read, with the records they use, so that no package is needed later."""
    for name, own in FEDERATIONS.items():
        if name in TABLES:
            print(write_table(name, folder, own.per_client))
            continue
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted((data_root() / name).iterdir()):
            (target / file.name).write_bytes(file.read_bytes())
            print(target / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="write the tables there, and end")
    parser.add_argument(
        "--data", type=Path, help="folder of the tables; by default $COTERIE_DATA and the package"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with one thread")
    parser.add_argument("--out", type=Path, default=Path("runs/natural"), help="where finished runs are kept")
    parser.add_argument("--csv", type=Path, help="file for all runs")
    parser.add_argument("--quick", action="store_true", help="one federation, one budget")
    parser.add_argument("--only", nargs="*", default=list(FEDERATIONS), choices=list(FEDERATIONS))
    parser.add_argument(
        "--render",
        type=Path,
        metavar="CSV",
        help="print the tables of these runs (a file, or the folder of --out), and end",
    )
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments.prepare)
        return
    if arguments.render:
        files = sorted(arguments.render.glob("*.csv")) if arguments.render.is_dir() else [arguments.render]
        print("\n".join(render(read_rows(files))))
        return
    if arguments.data:
        os.environ["COTERIE_DATA"] = str(arguments.data.resolve())
    work = QUICK if arguments.quick else Work(federations=tuple(arguments.only))
    with suppress(KeyboardInterrupt):
        rows = run_all(work, arguments.out, arguments.jobs)
        if arguments.csv:
            arguments.csv.unlink(missing_ok=True)
            for row in rows:
                append(arguments.csv, row)
        print("\n".join(render(rows)))


if __name__ == "__main__":
    main()
