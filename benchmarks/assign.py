"""How surely does a newcomer find its cluster? MNIST, 26 clients of which five are held back from training.

    python benchmarks/assign.py [--draws 200] [--rounds 20] [--out FOLDER]

The others train by r-dpcfl; then each newcomer chooses among the clusters' models by the mechanism of
`coterie assign`, with some of its records and at several epsilons. Printed are the share of draws that lead
to the cluster that its own kind found, and the accuracy of newcomers with the model of that cluster beside
that of the members. Needs MNIST under $COTERIE_DATA.
"""

import argparse
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from coterie.data import Federation, Records
from coterie.experiment import local
from coterie.experiment.assigning import scores
from coterie.experiment.folder import RunFolder
from coterie.experiment.schema import Experiment
from coterie.experiment.trained import TrainedRun
from coterie.privacy import SecretKey
from coterie.privacy.choices import ChargedChoice
from coterie.table import Table

SIZES = (4, 7, 8, 7)
HELD_BACK = (1, 1, 2, 1)
"""Of each cluster, so many of its last clients."""
EPSILONS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
RECORDS = (50, 200, 1000)


def experiment(rounds: int) -> Experiment:
    return Experiment.model_validate(
        {
            "data": {"name": "mnist"},
            "federation": {"kind": "clusters", "sizes": list(SIZES), "records_per_client": 1000},
            "algorithm": {"name": "r-dpcfl", "clusters": len(SIZES)},
            "privacy": {"epsilon": 8, "delta": 1e-4},
            "schedule": {"rounds": rounds, "batch": 100, "lr": 0.5},
            "evaluation": {"references": False, "every": rounds},
        }
    )


def divided(whole: Federation) -> tuple[Federation, Federation]:
    """Those who train, and the newcomers."""
    assert whole.truth is not None
    ends = np.cumsum(SIZES)
    back = {
        int(place) for end, count in zip(ends, HELD_BACK, strict=True) for place in range(end - count, end)
    }

    def only(kept: list[int]) -> Federation:
        truth = whole.truth or ()
        return replace(
            whole,
            clients=tuple(whole.clients[place] for place in kept),
            truth=tuple(truth[place] for place in kept),
        )

    everybody = range(len(whole.clients))
    return only([k for k in everybody if k not in back]), only([k for k in everybody if k in back])


def accuracy(run: TrainedRun, records: Records, cluster: int) -> float:
    right = scores(run, records)[cluster, 0]
    return float(right / len(records))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    chosen = experiment(given.rounds)
    members, newcomers = divided(local.load_federation(chosen))
    with tempfile.TemporaryDirectory() as place:
        files = RunFolder(given.out or Path(place) / "run")
        result = local.finish(local.calibrate(chosen, members), files)
        run = TrainedRun.open(files.path)
        print(f"{result.guarantee}\nclusters found: {result.clusters_found}")
        # The cluster that most members of the same kind ended in.
        kinds = {
            kind: Counter(
                result.clusters[client.name]
                for client, own in zip(members.clients, members.truth or (), strict=True)
                if own == kind
            ).most_common(1)[0][0]
            for kind in set(members.truth or ())
        }
        key, rows = SecretKey.from_os(), []
        for count in RECORDS:
            sums = {c.name: scores(run, c.train.take(slice(count)))[:, 0] for c in newcomers.clients}
            row = {"records": str(count)}
            for epsilon in EPSILONS:
                selection = ChargedChoice(epsilon, "-", len(run.rows), count).selection
                found = []
                for client, kind in zip(newcomers.clients, newcomers.truth or (), strict=True):
                    noise = key.stream(
                        "draws", subject=client.name, round=count, release=str(epsilon), input_hash="-"
                    )
                    drawn = [
                        selection.choose(sums[client.name], sums[client.name], noise)
                        for _ in range(given.draws)
                    ]
                    found.append(float(np.mean(np.array(drawn) == kinds[kind])))
                row[f"epsilon {epsilon:g}"] = f"{100 * np.mean(found):.1f} (worst {100 * min(found):.1f})"
            rows.append(row)
        print(f"share of {given.draws} draws of each of {len(newcomers.clients)} newcomers, in percent")
        print(Table.of(rows).markdown())
        theirs = [
            accuracy(run, client.test, kinds[kind])
            for client, kind in zip(newcomers.clients, newcomers.truth or (), strict=True)
        ]
        assert result.accuracy is not None
        print(
            f"mean accuracy: newcomers {100 * np.mean(theirs):.2f}, members {100 * result.accuracy.mean:.2f}"
        )


if __name__ == "__main__":
    main()
