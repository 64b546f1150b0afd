"""The guarantee of a whole run: the worst pair, what pooling observers add, budgets of single workers."""

import json

import numpy as np
import pytest

from coterie.errors import InputError
from coterie.groups import (
    GroupAlgorithm,
    GroupSchedule,
    Observer,
    Structure,
    Threat,
    clustered,
    drawn_labels,
    global_structure,
    label,
    leakage,
    ring,
)
from coterie.privacy import Adjacency, Guarantee, Mode, epsilon_of

DELTA = 1e-5


def watched(structure, epochs=199, threat=Threat.ANYONE, **more):
    schedule = GroupSchedule.of(len(structure.groups), **{"period": 10, "rate": 0.7, "noise": 2.0} | more)
    return Observer(structure, schedule, threat, epochs)


def test_the_guarantee_of_a_ring_names_its_worst_pair_and_what_pooling_would_give():
    promise = watched(ring(100, 4)).guarantee(delta=DELTA, caveats=("on made-up data",))
    assert promise.line == (
        "(eps=43.43, delta=1e-5)-DP for any of 100 workers, zero-out (replace-one 96.46); "
        "against any other worker on its own, trusting the group masters; 2 caveats"
    )
    for part in (
        "most for 0 to 25",
        "seeing every model of its groups up to index 200",
        "RDP, cut at group 3",
        "All observers of a worker pooling what they see: eps=58.04.",
        "On made-up data.",
    ):
        assert part in promise.text
    assert [(row.times, row.noise) for row in promise.releases] == [(199, "2 x clip"), (18, "2 x clip")]
    assert [cost.epsilon for cost in promise.per_client] == list(
        watched(ring(100, 4)).leakage(delta=DELTA).per_worker
    )
    assert Guarantee.from_json(json.loads(json.dumps(promise.to_json()))) == promise
    assert epsilon_of(promise.event, DELTA, "rdp", Adjacency.ZERO_OUT) == pytest.approx(promise.epsilon)


def test_one_group_of_all_is_dp_fedavg():
    promise = watched(global_structure(100)).guarantee(delta=DELTA)
    assert promise.epsilon == pytest.approx(35.834, abs=0.01)
    assert "pooling what they see: eps=35.84" in str(promise)


@pytest.mark.parametrize("threat", Threat)
@pytest.mark.parametrize("structure", [ring(12, 4), clustered(6, 2), label(drawn_labels(9, 0), 5)])
def test_what_is_promised_covers_every_pair_and_pooling_costs_no_less(structure, threat):
    run = watched(structure, epochs=30, threat=threat, period=3)
    found = run.leakage(delta=DELTA)
    replaced = leakage(
        structure, run.schedule, epoch=31, delta=DELTA, threat=threat, adjacency=Adjacency.REPLACE_ONE
    )
    if not found.defined.any():
        with pytest.raises(InputError, match="threat model: 2"):
            run.guarantee(delta=DELTA)
        return
    promise = run.guarantee(delta=DELTA)
    assert promise.epsilon == pytest.approx(np.nanmax(found.epsilon))
    assert promise.epsilon_replace_one >= np.nanmax(replaced.epsilon) * (1 - 1e-12)
    assert np.nanmax(found.epsilon - replaced.epsilon) <= 1e-9
    assert run.pooled(DELTA) >= promise.epsilon * (1 - 1e-12)
    # The two figures hold for every pair, so they are no smaller than those of any one.
    for target, observer in np.argwhere(found.defined)[:: max(1, int(found.defined.sum()) // 5)].tolist():
        pair = found.guarantee(target, observer)
        assert pair.meaning.guess <= promise.meaning.guess
        assert pair.meaning.found <= promise.meaning.found


def test_pooling_all_others_is_a_coalition_of_them():
    structure = ring(12, 4)
    run = watched(structure, epochs=30, period=3)
    each = [
        leakage(structure, run.schedule, epoch=31, delta=DELTA).coalition(set(range(12)) - {worker})[2][
            worker
        ]
        for worker in range(12)
    ]
    assert run.pooled(DELTA) == pytest.approx(max(each))


def test_budgets_are_held_worker_by_worker():
    structure = Structure("named", ((0, 1), (1, 2)), 3, names=("a", "b", "c"))
    run = watched(structure, epochs=10, period=2)
    own = run.leakage(delta=DELTA).per_worker
    kept = dict(zip("abc", own, strict=True))
    assert run.excess(kept, delta=DELTA, adjacency=Adjacency.ZERO_OUT) == pytest.approx(1)
    strict = kept | {"c": own[2] / 3}
    assert run.excess(strict, delta=DELTA, adjacency=Adjacency.ZERO_OUT) == pytest.approx(3)


def test_the_published_plus_promises_little_and_says_why():
    run = watched(
        ring(100, 4), threat=Threat.OUTSIDERS, algorithm=GroupAlgorithm.DP_OGL_PLUS, mode=Mode.PAPER
    )
    promise = run.guarantee(delta=DELTA)
    assert promise.published_epsilon < 13
    assert promise.epsilon > 10_000
    assert "members exchange models without noise" in str(promise)
    assert "any worker of other groups on its own" in str(promise)
