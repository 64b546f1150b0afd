"""One worker's data change, the coins stay: what others see stays too, bit for bit, until it must not."""

import numpy as np
import pytest
from group_oracles import random_structure
from group_simulation import DIMENSION, dp_ogl, dp_ogl_plus

from coterie.groups import (
    GroupAlgorithm,
    GroupSchedule,
    Threat,
    clustered,
    drawn_labels,
    global_structure,
    label,
    leakage,
    ring,
    string,
)

EPOCHS = 14
RNG = np.random.default_rng(2)
STRUCTURES = [
    global_structure(4),
    ring(8, 4),
    ring(10, 5),
    string(5, 4),
    string(9, 3),
    clustered(6, 2),
    label(drawn_labels(6, 4), 5),
    *(random_structure(RNG) for _ in range(4)),
]


def views(history, structure, observer):
    """Everything the observer has seen when the model of each index has appeared."""
    mine = [number for number, members in enumerate(structure.groups) if observer in members]
    return {epoch: np.concatenate([models[group] for group in mine]) for epoch, models in history.items()}


@pytest.mark.parametrize(
    ("algorithm", "simulate"), [(GroupAlgorithm.DP_OGL, dp_ogl), (GroupAlgorithm.DP_OGL_PLUS, dp_ogl_plus)]
)
@pytest.mark.parametrize("period", [1, 2, 3])
@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: f"{s.kind}-{s.workers}-{len(s.groups)}")
def test_influence_arrives_exactly_when_the_counts_say(structure, period, algorithm, simulate):
    schedule = GroupSchedule.of(
        len(structure.groups), period=period, rate=1.0, noise=1.0, algorithm=algorithm
    )
    predicted = {
        epoch: leakage(structure, schedule, epoch=epoch, delta=1e-5, threat=Threat.ANYONE).counts
        for epoch in range(1, EPOCHS + 1)
    }
    first = leakage(structure, schedule, epoch=2, delta=1e-5, threat=Threat.ANYONE).first_epoch
    data = np.random.default_rng(9).normal(size=(structure.workers, DIMENSION))
    usual = simulate(structure, period, EPOCHS, data, seed=1)
    for target in range(structure.workers):
        other = data.copy()
        other[target] += 1.0
        changed = simulate(structure, period, EPOCHS, other, seed=1)
        for observer in range(structure.workers):
            if observer == target:
                continue
            before, after = views(usual, structure, observer), views(changed, structure, observer)
            for epoch in range(1, EPOCHS + 1):
                same = np.array_equal(before[epoch], after[epoch])
                assert same == (predicted[epoch][target, observer] == 0), (target, observer, epoch)
                assert same == (epoch < first[target, observer])
