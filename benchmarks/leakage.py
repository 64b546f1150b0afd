"""Time `coterie.groups`: pairwise leakage of 1,000 workers over 200 epochs, in seconds of processor time.

    python benchmarks/leakage.py [--workers 1000] [--epochs 200]

For each structure: counts and both epsilons of all ordered pairs at the last epoch, as matrices; and, where
workers form few classes (those in the same groups leak alike), the same at every epoch.
"""

import argparse
import time

import numpy as np

from coterie.groups import GroupSchedule, Structure, drawn_labels, history, label, leakage, ring, string

MOST_CLASSES = 250


def random_structure(workers: int, groups: int, most: int, seed: int) -> Structure:
    """Every worker in one to `most` random groups."""
    rng = np.random.default_rng(seed)
    members: list[list[int]] = [[] for _ in range(groups)]
    for worker in range(workers):
        for group in rng.choice(groups, size=rng.integers(1, most + 1), replace=False):
            members[group].append(worker)
    return Structure("random", tuple(tuple(group) for group in members if group), workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=200)
    asked = parser.parse_args()
    workers = asked.workers
    structures = [
        ring(workers, max(1, workers // 100)),
        ring(workers, max(1, workers // 10)),
        string(workers, max(1, workers // 10)),
        label(drawn_labels(workers, seed=0), 5),
        label(drawn_labels(workers, seed=0), 10),
        random_structure(workers, max(1, workers // 20), 3, seed=0),
        random_structure(workers, max(1, workers // 5), 3, seed=0),
    ]
    print(f"{workers} workers, {asked.epochs} epochs, merges every 10 epochs, rate 0.7, noise 2, delta 1e-5")
    print("structure     groups  classes  last epoch  all epochs  largest epsilon: by counts, best")
    for structure in structures:
        schedule = GroupSchedule.of(len(structure.groups), period=10, rate=0.7, noise=2.0)
        start = time.process_time()
        found = leakage(structure, schedule, epoch=asked.epochs, delta=1e-5)
        worst = np.nanmax(found.epsilon_counts), np.nanmax(found.epsilon)
        assert found.counts.shape == (workers, workers)
        last = time.process_time() - start
        every = "-"
        if len(structure.classes) <= MOST_CLASSES:
            start = time.process_time()
            history(found, range(1, asked.epochs + 1))
            every = f"{time.process_time() - start:.2f} s"
        print(
            f"{structure.kind:<12}{len(structure.groups):>8}{len(structure.classes):>9}"
            f"{last:>10.2f} s{every:>12}  {worst[0]:.2f}, {worst[1]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
