"""Who gains and who loses by training in groups: each worker's accuracy, by how common its labels are there.

    python benchmarks/group_labels.py RUN_IN_ONE_GROUP RUN_IN_GROUPS

Both are folders of finished runs (`coterie run`, or a cell of `coterie reproduce ogl-mnist`) with the same
workers. For each worker: the share of its own labels among the records of its groups, over their share among
the records of all; then workers in quarters by that ratio, and the change of accuracy in each.
"""

import argparse
from pathlib import Path

import numpy as np

from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.folder import RunFolder
from coterie.experiment.local import load_federation
from coterie.experiment.result import RunResult


def common_labels(run: Path) -> np.ndarray:
    """For each worker, how much more common its labels are in its groups than among all."""
    federation = load_federation(read_experiment(RunFolder(run).experiment))
    structure = federation.structure
    assert structure is not None, f"{run}: its workers are in no groups"
    targets = [client.train.targets for client in federation.clients]
    labels = 1 + max(int(own.max()) for own in targets)
    mixtures = np.stack([np.bincount(own, minlength=labels) / len(own) for own in targets])
    overall = mixtures.mean(axis=0)
    ratios = []
    for worker, own in enumerate(mixtures):
        groups = structure.groups_of(worker)
        there = np.mean([mixtures[list(structure.groups[group])].mean(axis=0) for group in groups], axis=0)
        ratios.append(there @ own / (overall @ own))
    return np.array(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("one", type=Path, help="the run with one group of all")
    parser.add_argument("several", type=Path, help="the run with groups")
    asked = parser.parse_args()
    one, several = RunResult.load(asked.one), RunResult.load(asked.several)
    workers = list(one.accuracy.per_client)
    if workers != list(several.accuracy.per_client):
        parser.error(f"{asked.one} and {asked.several} have different workers")
    before, after = (
        np.array([[run.accuracy.per_client[name], run.loss.per_client[name]] for name in workers])
        for run in (one, several)
    )
    ratio, change = common_labels(asked.several), 100 * (after - before)[:, 0]
    print(f"workers with a lower loss in groups: {(after[:, 1] < before[:, 1]).sum()} of {len(workers)}")
    print(f"with a lower accuracy: {(change < 0).sum()}; by more than 20 points: {(change < -20).sum()}")
    print(f"correlation of change and ratio: {np.corrcoef(change, ratio)[0, 1]:.2f}")
    print("quarter of workers  ratio  change of accuracy, points")
    for place, quarter in enumerate(np.array_split(np.argsort(ratio), 4)):
        print(f"{place + 1:<19} {ratio[quarter].mean():5.2f}  {change[quarter].mean():+.1f}")


if __name__ == "__main__":
    main()
