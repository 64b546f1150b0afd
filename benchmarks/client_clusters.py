"""How surely `dp-sketch-cluster` finds clusters of clients, and what the smallest of them gets.

    python benchmarks/client_clusters.py --out DIR [--processes 2] [--seconds 480] [--only TEXT] [--rounds N]
    python benchmarks/client_clusters.py --out DIR --csv FILE
    python benchmarks/client_clusters.py --render FILE

`--csv` keeps the results of DIR in a table, `--render` prints what documents show of one. A cell is a whole
run with a ledger of its own and noise that nobody chose (no `seeds.noise`), or a search: round 1 alone, for
several noises. Results are lines of DIR/results.jsonl, written as cells end; those that are there are not run
again. Cells are begun in the order of the tables, as long as `--seconds` allow.
"""

import argparse
import csv
import hashlib
import itertools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

import coterie as ct
from coterie.algorithms.client.dp_sketch_cluster import SketchClusterState
from coterie.algorithms.protocol import Cohort, Opened, Reply, Request, Sums
from coterie.algorithms.sketches import SketchStatistic
from coterie.engines.clients import Clients, TrainingFacts
from coterie.engines.driver import drive
from coterie.experiment.experiment_file import experiment_of
from coterie.experiment.local import calibrate
from coterie.privacy import Released, SecretKey, SketchSums
from coterie.training.learner import Batch
from coterie.training.scoring import join

ROUTE = {"rule": "route", "minimum": 8, "memory": 0.8}
# Chosen with clusters known, on federations that no table has (simulation seed 11); no ledger counts that.
CLIP, SERVER_STEP = 0.06, 2.0
# The same where no cluster is small: with less noise longer steps serve.
EVEN_STEPS = {2: 2.0, 4: 4.0, 8: 4.0}
SKETCH: dict[str, Any] = {"name": "dp-sketch-cluster", "server_step": SERVER_STEP}
ORACLE: dict[str, Any] = {"name": "oracle", "server_step": SERVER_STEP}


def ifca(clusters: int) -> dict[str, Any]:
    return {"name": "dp-ifca", "clusters": clusters, "rebalance": ROUTE}


def cell(
    table: str,
    sizes: list[int],
    algorithm: dict[str, Any],
    epsilon: float,
    seed: int,
    draw: int = 0,
    *,
    shift: str = "rotation",
    records: int = 60,
    rate: float = 0.1,
    clip: float = CLIP,
    rounds: int = 150,
    data: str = "fashion-mnist",
    alpha: float | None = None,
) -> dict[str, Any]:
    """One run: its table, its name there, and its experiment."""
    told = algorithm.get("label", algorithm["name"])
    options = {key: value for key, value in algorithm.items() if key != "label"}
    federation = {"sizes": sizes, "shift": shift, "records_per_client": records}
    if alpha is not None:
        federation["alpha"] = alpha
    return {
        "table": table,
        "row": f"{told}, epsilon {epsilon:g}",
        "seed": seed,
        "draw": draw,
        "experiment": {
            "data": {"name": data, "pixels": "standard"},
            "federation": federation,
            "model": {"name": "softmax"},
            "algorithm": {"rate": rate, **options},
            "privacy": {
                "unit": "client",
                "epsilon": epsilon,
                "delta": 1e-3,
                "clip": clip,
                "accountant": "pld",
            },
            "schedule": {"rounds": rounds, "epochs": 2, "batch": 20, "lr": 0.03, "averaging": 3},
            "evaluation": {"references": False, "every": rounds},
            "seeds": {"simulation": seed},
            "engine": {"device": "cpu", "workers": 1},
        },
    }


# Noises for each federation of a search.
DRAWS = 4
UNEQUAL = [480, 240, 60, 60]
# Federations by name: sizes, how many clusters `dp-ifca` is told, and what else differs.
OTHERS: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    "16:1:1:1": ([800, 50, 50, 50], 4, {}),
    "eight equal, label shift": ([105] * 8, 8, {"shift": "label"}),
    "8:4:1:1, 50 records": (UNEQUAL, 4, {"records": 50}),
    "8:4:1:1, q = 0.05": (UNEQUAL, 4, {"rate": 0.05}),
    "8:4:1:1, q = 0.2": (UNEQUAL, 4, {"rate": 0.2}),
    "8:4:1:1, Dirichlet labels": (UNEQUAL, 4, {"alpha": 1.0}),
    "no clusters": ([840], 1, {"shift": "none"}),
}


def searches() -> Iterator[dict[str, Any]]:
    """Round 1 alone, several times, with the noise that a plan of all rounds gives it."""
    for epsilon in (4, 2):
        for seed in range(5):
            yield cell("8:4:1:1", UNEQUAL, SKETCH, epsilon, seed)
    for seed in range(2):
        for name, (sizes, _, options) in OTHERS.items():
            yield cell(name, sizes, SKETCH, 4, seed, **options)
        for epsilon in (2, 4, 8):
            yield cell("equal", [250] * 4, SKETCH, epsilon, seed, rounds=200)
            yield cell("2:1:1", [500, 250, 250], SKETCH, epsilon, seed, rounds=200)
        for noise in ("auto", 1e-3):
            told = {**SKETCH, "sketch_noise": noise, "label": f"dp-sketch-cluster, noise {noise}"}
            yield cell("CIFAR-10 rotations", [250] * 4, told, 8, seed, data="cifar10", records=50)


def runs() -> Iterator[dict[str, Any]]:
    """Whole runs, those that matter most first."""
    # The schedule of `coterie reproduce rr-fmnist-balanced --scale paper`.
    for epsilon, step in EVEN_STEPS.items():
        own = {**SKETCH, "server_step": step}
        for seed, draw in itertools.product(range(2), range(2)):
            yield cell("equal", [250] * 4, own, epsilon, seed, draw, rounds=200)
            yield cell("2:1:1", [500, 250, 250], own, epsilon, seed, draw, rounds=200)
        if epsilon == 2:
            for seed in range(2):
                for other in (4, 2):
                    yield cell("8:4:1:1", UNEQUAL, SKETCH, other, seed)
                    yield cell("8:4:1:1", UNEQUAL, ORACLE, other, seed)
    for option, told in (
        ({"step_noise": None}, "all step alike"),
        ({"rebalance": {"rule": "route", "minimum": 8}}, "route"),
        ({"rebalance": {"rule": "gmfsc", "minimum": 8}}, "gmfsc"),
    ):
        yield cell("8:4:1:1", UNEQUAL, {**SKETCH, **option, "label": f"{SKETCH['name']}, {told}"}, 4, 0)
    for epsilon in (4, 2):
        yield cell("8:4:1:1", UNEQUAL, ifca(4), epsilon, 0)
    for seed in range(2):
        for name, (sizes, clusters, options) in OTHERS.items():
            yield cell(name, sizes, SKETCH, 4, seed, **options)
            if clusters > 1:
                fair = options.get("rate", 0.1) * sum(sizes) / clusters
                weaker = {**ifca(clusters), "rebalance": {**ROUTE, "minimum": int(min(8, fair / 2))}}
                yield cell(name, sizes, weaker, 4, seed, **options)
            yield cell(name, sizes, ORACLE, 4, seed, **options)
    for epsilon in (4, 2):
        for seed in range(2, 5):
            yield cell("8:4:1:1", UNEQUAL, SKETCH, epsilon, seed)
            yield cell("8:4:1:1", UNEQUAL, ORACLE, epsilon, seed)
        for seed in range(5):
            yield cell("8:4:1:1", UNEQUAL, SKETCH, epsilon, seed, 1)
        for seed in range(1, 5):
            yield cell("8:4:1:1", UNEQUAL, ifca(4), epsilon, seed)


def steps() -> Iterator[dict[str, Any]]:
    """Clips and steps for clusters that are known, all stepping alike: where `step_noise` comes from."""
    tried = {0.06: (0.25, 0.5, 1.0, 2.0), 0.13: (0.5, 1.0, 2.0), 0.03: (1.0, 2.0, 4.0), 0.015: (2.0, 4.0)}
    for epsilon in (2, 4):
        for clip, lengths in tried.items():
            for step in lengths:
                told = {
                    "step_noise": None,
                    "server_step": step,
                    "label": f"oracle, clip {clip:g}, step {step:g}",
                }
                yield cell("8:4:1:1", UNEQUAL, {**ORACLE, **told}, epsilon, 11, clip=clip)
    for epsilon in (4, 8):
        for clip in (0.06, 0.09, 0.13):
            for step in (1.0, 2.0, 4.0):
                told = {"server_step": step, "label": f"oracle, clip {clip:g}, step {step:g}"}
                yield cell("2:1:1", [500, 250, 250], {**ORACLE, **told}, epsilon, 11, clip=clip, rounds=200)


@cache
def noise_of_search(rounds: int, rate: float, epsilon: float, sizes: tuple[int, ...], records: int) -> float:
    """What a plan of all rounds gives to round 1: a function of public numbers."""
    whole = cell("", list(sizes), SKETCH, epsilon, 0, shift="none", rate=rate, rounds=rounds, records=records)
    (unit,) = calibrate(experiment_of(whole["experiment"])).plan.units
    return float(unit.release(SketchStatistic.MOMENTS.value).mechanism.noise_multiplier)


def searching(experiment: dict[str, Any]) -> dict[str, Any]:
    """The same experiment with a single round of training, and round 1 as noisy as with all of them."""
    own = {key: dict(section) for key, section in experiment.items()}
    federation = own["federation"]
    if own["algorithm"].get("sketch_noise", "auto") == "auto":
        own["algorithm"]["sketch_noise"] = noise_of_search(
            *(own["schedule"]["rounds"], own["algorithm"]["rate"], own["privacy"]["epsilon"]),
            *((sum(federation["sizes"]),), federation["records_per_client"]),
        )
    else:
        own["privacy"]["epsilon"] = 1e9
    own["privacy"]["accountant"] = "rdp"
    own["schedule"].update(rounds=2, averaging=0)
    own["evaluation"]["every"] = 2
    return own


class Searched:
    """Round 1 for clients' sketches that are computed once, under noise that is drawn anew each time.

    Algorithm and contributions are those of a run; nothing is charged, since nothing is released.
    """

    def __init__(self, experiment: dict[str, Any]) -> None:
        self.run = calibrate(experiment_of(searching(experiment)))
        self.state, learner, federation = self.run.start(), self.run.learner, self.run.federation
        assert isinstance(self.state, SketchClusterState)
        assert federation is not None
        names = tuple(client.name for client in federation.clients)
        sizes = tuple(len(client.train) for client in federation.clients)
        key = SecretKey.from_seed(0)
        facts = TrainingFacts(names, sizes, 0.1, key, key, self.run.experiment.seeds.simulation)
        table = join([Batch.of(client.train, learner.device) for client in federation.clients])
        clients, start = Clients(facts, learner, table, 1), self.state.initial
        self.points = [clients.sketch(name, start, len(self.state.middle)) for name in names]
        self.rng = np.random.default_rng()

    def answer(self, request: Request, round: int) -> Reply:
        if isinstance(request, Cohort):
            self.asked = request
            return Opened(request.release, 0)
        sketch = self.asked.job.sketch
        assert sketch is not None
        added = np.sum([sketch.contribution(point) for point in self.points], axis=0)
        std = self.run.plan.planned(SketchSums, self.asked.release, *self.asked.job.members).noise_std
        return Sums(Released((added + std * self.rng.normal(size=len(added)))[None], std))

    def chosen(self) -> np.ndarray:
        """The component of every client after a round 1."""
        after = drive(self.run.algorithm.round(self.state), self, 1)
        return np.array([self.run.algorithm.sketch(after).nearest(point) for point in self.points])


def judged(given: dict[str, Any]) -> list[dict[str, Any]]:
    """What a run found, by true cluster; of a search, once for each draw."""
    began, truth = time.perf_counter(), np.array(given["truth"])
    told: dict[str, Any] = {key: given[key] for key in ("key", "part", "table", "row")}
    if given["part"] == "search":
        searched = Searched(given["experiment"])
        return [{**told, **compared(searched.chosen(), truth), "draw": draw} for draw in range(DRAWS)]
    with tempfile.TemporaryDirectory(prefix="coterie-") as scratch:
        result = ct.run(given["experiment"], out=Path(scratch) / "run")
        chosen = np.array(list(result.clusters.values()))
        accuracy = np.array(list(result.accuracy.per_client.values()))
        warnings = list(result.warnings)
    found = {
        "accuracy": [float(accuracy[truth == k].mean()) for k in range(truth.max() + 1)],
        "mean": float(accuracy.mean()),
        "epsilon": result.epsilon,
        "warnings": warnings,
        "seconds": time.perf_counter() - began,
        "draw": given["draw"],
    }
    return [{**told, **compared(chosen, truth), **found}]


def compared(chosen: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """How many clusters were found, and which share of each true one is in the one that matches it."""
    table = np.zeros((chosen.max() + 1, truth.max() + 1), dtype=int)
    np.add.at(table, (chosen, truth), 1)
    found, of = linear_sum_assignment(-table)
    right = [int(table[found[of == k], k].sum()) / int((truth == k).sum()) for k in range(truth.max() + 1)]
    return {"models": len(set(chosen.tolist())), "clusters": int(truth.max() + 1), "right": right}


def prepared(rounds: int | None) -> list[dict[str, Any]]:
    """The cells with a key each, and the truth that they are judged by."""
    found = []
    parts = {"run": runs(), "search": searches(), "steps": steps()}
    for part, each in ((part, each) for part, own in parts.items() for each in own):
        each["part"] = part
        if rounds is not None:
            each["experiment"]["schedule"]["rounds"] = each["experiment"]["evaluation"]["every"] = rounds
        federation = each["experiment"]["federation"]
        single = federation["shift"] == "none"
        sizes = enumerate(federation["sizes"])
        each["truth"] = [0 if single else cluster for cluster, size in sizes for _ in range(size)]
        # Results of other settings than these do not count.
        digest = hashlib.sha256(json.dumps(each["experiment"], sort_keys=True).encode()).hexdigest()[:8]
        each["key"] = " | ".join(
            [part, each["table"], each["row"], f"{each['seed']}", f"{each['draw']}", digest]
        )
        found.append(each)
    return found


def kept(results: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Results as rows of a table."""
    for result in results:
        *_, seed, _, _ = result["key"].split(" | ")
        yield {
            **{key: result[key] for key in ("part", "table", "row")},
            "seed": seed,
            "draw": result["draw"],
            "models": result["models"],
            "clusters": result["clusters"],
            "right": " ".join(f"{value:.4f}" for value in result["right"]),
            "accuracy": " ".join(f"{value:.4f}" for value in result.get("accuracy", ())),
            "mean": f"{result['mean']:.4f}" if "mean" in result else "",
        }


def printed(results: list[dict[str, str]]) -> None:
    """A line for each row: how often clusters were found, and accuracy by true cluster."""
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        numbers = {key: [float(value) for value in result[key].split()] for key in ("right", "accuracy")}
        rows[result["part"], result["table"], result["row"]].append({**result, **numbers})
    print("| part | table | algorithm | runs | found | M right | accuracy by cluster | mean | least right |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (part, table, row), own in rows.items():
        number = sum(each["models"] == each["clusters"] for each in own)
        good = sum(each["models"] == each["clusters"] and min(each["right"]) >= 0.9 for each in own)
        accuracy = mean = ""
        if part != "search":
            means = np.mean([each["accuracy"] for each in own], axis=0)
            accuracy = " / ".join(f"{100 * value:.1f}" for value in means)
            mean = f"{100 * np.mean([float(each['mean']) for each in own]):.1f}"
        least = min(min(each["right"]) for each in own)
        told = (part, table, row, len(own), good, number, accuracy, mean, f"{least:.0%}")
        print("| " + " | ".join(map(str, told)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of results.jsonl")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--only", default="", help="cells whose key contains this")
    parser.add_argument("--rounds", type=int, help="fewer than the tables have: to try it out")
    parser.add_argument("--csv", type=Path, help="keep the results of --out in this table, and run nothing")
    parser.add_argument("--render", type=Path, help="print what documents show of such a table")
    given = parser.parse_args()
    if given.render:
        with given.render.open(newline="") as file:
            printed(list(csv.DictReader(file)))
        return
    if given.out is None:
        parser.error("--out: a folder is needed to run cells or to read their results")
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "results.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if given.csv:
        rows = list(kept(results))
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        return
    known, began = {result["key"] for result in results}, time.monotonic()
    todo = [each for each in prepared(given.rounds) if given.only in each["key"] and each["key"] not in known]
    with ProcessPoolExecutor(given.processes) as pool, path.open("a") as file:
        waiting = iter(todo)
        running = {
            pool.submit(judged, each) for _, each in zip(range(given.processes), waiting, strict=False)
        }
        while running:
            done = next(as_completed(running))
            running.remove(done)
            file.writelines(json.dumps(each) + "\n" for each in done.result())
            file.flush()
            following = next(waiting, None) if time.monotonic() - began < given.seconds else None
            if following is not None:
                running.add(pool.submit(judged, following))


if __name__ == "__main__":
    main()
