"""The real training loop: one worker's records change, the coins stay, and others see it when predicted."""

import numpy as np
import pytest
from group_training import Training, build, workers

from coterie.groups import (
    GroupAlgorithm,
    GroupSchedule,
    Structure,
    Threat,
    clustered,
    drawn_labels,
    label,
    leakage,
    ring,
    string,
)

EPOCHS = 8


def random_structure(seed):
    rng = np.random.default_rng(seed)
    members = [set() for _ in range(4)]
    for worker in range(7):
        for group in rng.choice(4, size=rng.integers(1, 3), replace=False):
            members[group].add(worker)
    return Structure("random", tuple(tuple(sorted(group)) for group in members if group), 7)


CASES = [
    (ring(8, 4), 1),
    (ring(10, 5), 3),
    (string(9, 4), 2),
    (clustered(4, 2), 2),
    (label(drawn_labels(6, 4), 5), 2),
    (random_structure(0), 2),
    (random_structure(5), 3),
]


@pytest.mark.parametrize(
    ("name", "options"),
    [("dp-ogl", {"master": {"optimiser": "momentum", "lr": 0.5}}), ("dp-ogl-plus", {})],
    ids=["dp-ogl", "dp-ogl-plus"],
)
@pytest.mark.parametrize(("structure", "period"), CASES, ids=lambda case: getattr(case, "kind", str(case)))
def test_models_are_bit_identical_until_the_predicted_epoch_and_differ_after_it(
    structure, period, name, options
):
    algorithm = build(name, EPOCHS, period=period, **options)
    schedule = GroupSchedule.of(
        len(structure.groups), period=period, rate=1.0, noise=1.0, algorithm=GroupAlgorithm(name)
    )
    first = leakage(structure, schedule, epoch=2, delta=1e-5, threat=Threat.ANYONE).first_epoch
    usual = Training(algorithm, workers(structure)).models
    for target in (0, structure.workers // 2):
        other = Training(algorithm, workers(structure, changed=target)).models
        for observer in set(range(structure.workers)) - {target}:
            mine = sorted(structure.groups_of(observer))
            for index in range(1, EPOCHS + 2):
                same = usual[index][mine].tobytes() == other[index][mine].tobytes()
                assert same == (index < first[target, observer]), (target, observer, index)
