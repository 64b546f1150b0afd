"""Leakage of whole structures: known figures, exact small cases, coalitions, threat models, sentences."""

import itertools
import json
import math

import numpy as np
import pytest
from group_oracles import random_structure
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import CoterieError
from coterie.groups import (
    GroupAlgorithm,
    GroupSchedule,
    Noise,
    Structure,
    Threat,
    clustered,
    global_structure,
    history,
    leakage,
    ring,
    string,
)
from coterie.groups.cuts import Shift, epsilons
from coterie.privacy import Adjacency, Guarantee, Mode, epsilon_of
from coterie.privacy.divergences import ORDERS

PAPER_RUN = {"epoch": 200, "delta": 1e-5}


def schedule_of(groups, period=10, **more):
    return GroupSchedule.of(groups, **{"period": period, "rate": 0.7, "noise": 2.0} | more)


def test_one_group_of_100_workers():
    found = leakage(global_structure(100), schedule_of(1, period=1), **PAPER_RUN)
    assert found.counts[0, 1] == 199
    assert found.per_worker == pytest.approx(np.full(100, 35.834), abs=0.01)


def test_ring_of_four_groups():
    found = leakage(ring(100, 4), schedule_of(4), **PAPER_RUN)
    assert found.counts.max() == 389
    assert np.nanmax(found.epsilon_counts) == pytest.approx(57.088, abs=0.01)
    # The worst pair is a worker in two groups; one of them is behind a cut that one other worker bridges.
    assert np.nanmax(found.epsilon) == pytest.approx(43.425, abs=0.01)
    target, observer = found.most_exposed()
    assert len(found.structure.groups_of(target)) == 2
    assert found.epsilon[target, observer] == np.nanmax(found.epsilon)
    assert np.isnan(np.diag(found.epsilon)).all()


@pytest.mark.parametrize(
    ("groups", "period", "target", "observer", "counts", "by_counts", "best"),
    [
        (10, 25, 5, 55, 75, 19.02, 8.44),
        (4, 25, 5, 30, 175, 32.87, 12.99),
        (4, 10, 5, 30, 190, 34.73, 26.54),
    ],
)
def test_single_group_pairs_on_the_ring(groups, period, target, observer, counts, by_counts, best):
    found = leakage(ring(100, groups), schedule_of(groups, period), **PAPER_RUN)
    assert found.counts[target, observer] == counts
    assert found.epsilon_counts[target, observer] == pytest.approx(by_counts, abs=0.01)
    assert found.epsilon[target, observer] == pytest.approx(best, abs=0.01)


def test_groups_that_share_nobody_leak_nothing_to_each_other():
    found = leakage(clustered(20, 4), schedule_of(4), **PAPER_RUN)
    assert found.epsilon[0, 5] == 0
    assert found.counts[0, 5] == 0
    assert found.epsilon[0, 1] == pytest.approx(35.834, abs=0.01)
    assert math.isinf(found.first_epoch[0, 5])


def linear_gaussian_divergence(structure, period, epoch, target, observer, reactions):
    """Exact R / order when workers react linearly and all take part: means move, covariances stay.

    Every model is a combination of the noises so far and of the target's constant contribution.
    """
    groups = structure.groups
    unit = np.eye(len(groups) * epoch + 1)
    models = [np.zeros(len(unit)) for _ in groups]
    view = []
    for now in range(1, epoch):
        merge = (now - 1) % period == 0
        following = []
        for number, members in enumerate(groups):
            total = unit[number * epoch + now].copy()
            for worker in members:
                mine = sorted(structure.groups_of(worker))
                start = np.mean([models[group] for group in mine], axis=0) if merge else models[number]
                total += unit[-1] if worker == target else reactions[worker] * start
            following.append(models[number] + total / len(members))
        models = following
        view += [models[group] for group in sorted(structure.groups_of(observer))]
    if not view:
        return 0.0
    table = np.array(view)
    noise, shift = table[:, :-1], table[:, -1]
    return 0.5 * float(shift @ np.linalg.pinv(noise @ noise.T, rcond=1e-12) @ shift)


def test_counts_bound_exact_divergences_of_linear_workers():
    """Exact divergences never exceed one Gaussian per counted release, and vanish where the count is 0."""
    rng = np.random.default_rng(4)
    reached = 0.0
    for _ in range(12):
        structure = random_structure(rng, most_workers=6, most_groups=4)
        period, epoch = int(rng.integers(1, 4)), int(rng.integers(2, 8))
        schedule = GroupSchedule.of(len(structure.groups), period=period, rate=1.0, noise=1.0)
        counts = leakage(structure, schedule, epoch=epoch, delta=1e-5).counts
        reactions = rng.uniform(-1, 1, structure.workers)
        for target, observer in itertools.permutations(range(structure.workers), 2):
            exact = linear_gaussian_divergence(structure, period, epoch, target, observer, reactions)
            bound = counts[target, observer] / 2
            assert exact <= bound * (1 + 1e-9) + 1e-12
            assert (exact > 1e-15) == (bound > 0)
            reached = max(reached, exact / bound if bound else 0.0)
    assert reached == pytest.approx(1, rel=1e-6)


def test_coalition_sees_what_its_members_see_together():
    structure = string(9, 4)
    schedule = schedule_of(4, period=2)
    counts, by_counts, best = leakage(structure, schedule, epoch=9, delta=1e-5).coalition({0, 8})
    single = leakage(structure, schedule, epoch=9, delta=1e-5)
    for worker in range(9):
        if worker in (0, 8):
            assert counts[worker] == -1
            assert np.isnan(best[worker])
            continue
        assert counts[worker] >= max(single.counts[worker, 0], single.counts[worker, 8])
        assert best[worker] >= max(single.epsilon[worker, 0], single.epsilon[worker, 8]) * (1 - 1e-9)
        assert best[worker] <= by_counts[worker]
    # Alone neither end sees all of the middle worker's two groups; together they see both at distance 1.
    assert structure.groups_of(4) == {1, 2}
    assert (single.counts[4, 0], single.counts[4, 8], counts[4]) == (6 + 4, 4 + 6, 6 + 6)


def test_coalition_of_one_is_a_single_observer():
    structure = ring(12, 4)
    schedule = schedule_of(4, period=3)
    single = leakage(structure, schedule, epoch=30, delta=1e-5)
    counts, by_counts, best = leakage(structure, schedule, epoch=30, delta=1e-5).coalition([5])
    others = np.arange(12) != 5
    assert np.array_equal(counts[others], single.counts[others, 5])
    assert by_counts[others] == pytest.approx(single.epsilon_counts[others, 5])
    assert best[others] == pytest.approx(single.epsilon[others, 5])


def test_threat_model_2_leaves_members_of_a_common_group_out():
    structure = ring(12, 4)
    plus = schedule_of(4, period=3, algorithm=GroupAlgorithm.DP_OGL_PLUS)
    found = leakage(structure, plus, epoch=30, delta=1e-5)
    assert found.threat is Threat.OUTSIDERS
    shared = structure.membership.astype(int) @ structure.membership.astype(int).T > 0
    assert np.array_equal(np.isnan(found.epsilon), shared)
    everyone = leakage(structure, plus, epoch=30, delta=1e-5, threat=Threat.ANYONE)
    assert everyone.counts[1, 2] == 9
    assert np.array_equal(found.epsilon[~shared], everyone.epsilon[~shared])
    with pytest.raises(CoterieError, match="threat model 2"):
        found.guarantee(1, 2)
    published = schedule_of(4, period=3, algorithm=GroupAlgorithm.DP_OGL_PLUS, mode=Mode.PAPER)
    with pytest.raises(CoterieError, match="threat model"):
        leakage(structure, published, epoch=30, delta=1e-5, threat=Threat.ANYONE)


def test_one_group_has_no_outsiders():
    plus = schedule_of(1, algorithm=GroupAlgorithm.DP_OGL_PLUS)
    found = leakage(global_structure(3), plus, epoch=30, delta=1e-5)
    assert np.isnan(found.per_worker).all()
    assert found.most_exposed() is None
    assert found.sees_most() is None


def test_the_guarantee_of_a_pair_names_unit_adjacency_observer_and_accountant():
    structure = ring(100, 4)
    found = leakage(structure, schedule_of(4), **PAPER_RUN)
    promise = found.guarantee(0, 1)
    assert promise.line.startswith("(eps=43.02, delta=1e-5)-DP for worker 0 of 100, zero-out (replace-one ")
    assert promise.line.endswith("; against worker 1, trusting the group masters")
    for part in ("worker 1, seeing every model of group 0 up to index 200", "RDP, cut at group 3"):
        assert part in promise.text
    assert [row.times for row in promise.releases] == [199, 17]
    assert all(0 < row.epsilon < promise.epsilon for row in promise.releases)
    together = found.guarantee(0, 1, 30).line
    assert "workers 1 and 30 (2 colluding)" in together


@pytest.mark.parametrize("rate", [0.7, 1.0])
def test_a_guarantee_behind_a_cut_survives_a_file_and_costs_what_its_events_cost(rate):
    structure, schedule = ring(100, 4), schedule_of(4, rate=rate)
    found = leakage(structure, schedule, **PAPER_RUN)
    for target, observer in ((0, 1), (5, 30), (5, 60), (0, 50)):
        promise = found.guarantee(target, observer)
        again = Guarantee.from_json(json.loads(json.dumps(promise.to_json())))
        assert again == promise
        assert str(again) == str(promise)
        assert "cut at group" in promise.accountant
        assert promise.epsilon == pytest.approx(found.epsilon[target, observer], rel=1e-12)
        cost = epsilon_of(again.event, 1e-5, "rdp", Adjacency.ZERO_OUT)
        assert cost == pytest.approx(promise.epsilon, rel=1e-12)
        # Another cut may be the better one under replacement, never a worse.
        replaced = epsilon_of(again.event, 1e-5, "rdp", Adjacency.REPLACE_ONE)
        assert promise.epsilon_replace_one <= replaced * (1 + 1e-12)


def test_paper_mode_says_what_was_published_and_what_holds():
    schedule = schedule_of(4, mode=Mode.PAPER)
    promise = leakage(ring(100, 4), schedule, epoch=200, delta=1e-5).guarantee(5, 30)
    assert promise.line.startswith("paper: published eps=33.50 (add-remove claimed), sound: (eps=26.54")
    assert "As published: counts blocks that have ended" in promise.text


def test_replace_one_costs_more_than_zero_out_only_where_the_target_itself_is_charged():
    structure, schedule = ring(100, 4), schedule_of(4)
    inside = [
        leakage(structure, schedule, epoch=200, delta=1e-5, adjacency=adjacency).pair_epsilon(0, 1)
        for adjacency in Adjacency
    ]
    zero_out, _, replaced = inside
    assert replaced > zero_out
    assert leakage(structure, schedule, epoch=200, delta=1e-5, adjacency=Adjacency.REPLACE_ONE).pair_epsilon(
        5, 60
    ) == leakage(structure, schedule, epoch=200, delta=1e-5).pair_epsilon(5, 60)


@given(
    noise=st.floats(1.0, 6.0),
    rate=st.floats(0.1, 1.0),
    period=st.integers(1, 6),
    epoch=st.integers(2, 30),
)
@settings(max_examples=20, deadline=None)
def test_more_noise_lower_rate_and_fewer_epochs_leak_less(noise, rate, period, epoch):
    structure = ring(12, 4)

    def worst(noise=noise, rate=rate, epoch=epoch):
        schedule = GroupSchedule.of(4, period=period, rate=rate, noise=noise)
        return leakage(structure, schedule, epoch=epoch, delta=1e-5).epsilon

    base = worst()
    for less in (worst(noise=1.2 * noise), worst(rate=0.8 * rate), worst(epoch=epoch - 1)):
        assert np.nanmax(less - base) <= 1e-9


def test_groups_may_differ_in_rate_and_noise():
    structure = Structure("pair", ((0, 1), (1, 2)), 3)
    loud = GroupSchedule.of(2, period=1, rate=[0.5, 1.0], noise=[4.0, 1.0])
    found = leakage(structure, loud, epoch=10, delta=1e-5)
    assert found.epsilon[0, 1] < found.epsilon[2, 1]
    alike = GroupSchedule.of(2, period=1, rate=0.5, noise=4.0)
    assert found.epsilon[0, 1] == pytest.approx(leakage(structure, alike, epoch=10, delta=1e-5).epsilon[0, 1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"period": 0}, "period: 0"),
        ({"rate": 0.0}, "rate: 0.0"),
        ({"rate": 1.5}, "rate: 1.5"),
        ({"noise": 0.0}, "noise: 0.0"),
        ({"noise": float("nan")}, "noise: nan"),
        ({"noise": 1e300}, r"noise: 1e\+300"),
        ({"noise": [2.0, 2.0, 1e-200, 2.0]}, "noise: 1e-200"),
        ({"rate": [0.5, 0.5, 0.5]}, "rate: 3 numbers"),
    ],
)
def test_impossible_schedules_are_refused(change, words):
    with pytest.raises(CoterieError, match=words) as mistake:
        schedule_of(4, **change)
    assert mistake.value.exit_code == 2


def test_a_release_that_costs_everything_is_not_charged_to_views_without_it():
    """None of it costs nothing, one of it leaves no privacy; neither becomes 0 by accident."""

    class Bare:
        def rdp(self, adjacency):
            return np.full_like(ORDERS, np.inf)

    plain = Shift(Noise(0.7, 2.0), 1, 0)
    found = epsilons({Bare(): np.array([0, 1, 0]), plain: np.array([9, 9, 0])}, 1e-5)
    alone = epsilons({plain: np.array([9])}, 1e-5)
    assert found.tolist() == [alone[0], math.inf, 0.0]


def test_nothing_is_said_about_members_of_a_group_that_exchange_without_noise():
    published = schedule_of(4, period=3, algorithm=GroupAlgorithm.DP_OGL_PLUS, mode=Mode.PAPER)
    structure = ring(12, 4)
    assert leakage(structure, published, epoch=30, delta=1e-5).pair_epsilon(1, 7) > 0
    for observers in ([2], [7, 2]):
        with pytest.raises(CoterieError, match="nothing is proven inside a group"):
            leakage(structure, published, epoch=30, delta=1e-5).pair_epsilon(1, *observers)


def test_impossible_questions_are_refused():
    structure, schedule = ring(12, 4), schedule_of(4)
    for call in (
        lambda: leakage(structure, schedule, epoch=0, delta=1e-5),
        lambda: leakage(structure, schedule, epoch=5, delta=0.0),
        lambda: leakage(ring(12, 3), schedule, epoch=5, delta=1e-5),
        lambda: leakage(clustered(10_001, 10_001), schedule_of(10_001), epoch=5, delta=1e-5),
        lambda: leakage(structure, schedule, epoch=5, delta=1e-5).pair_epsilon(3, 3),
        lambda: leakage(structure, schedule, epoch=5, delta=1e-5).pair_epsilon(12, 3),
        lambda: leakage(structure, schedule, epoch=5, delta=1e-5).coalition([99]),
        lambda: leakage(structure, schedule, epoch=5, delta=1e-5).coalition([]),
    ):
        with pytest.raises(CoterieError) as mistake:
            call()
        assert mistake.value.exit_code == 2


@pytest.mark.parametrize("algorithm", GroupAlgorithm)
@pytest.mark.parametrize("mode", Mode)
def test_all_epochs_together_are_each_epoch_alone(algorithm, mode):
    for structure in (ring(20, 5), string(16, 4), Structure("mine", ((0, 1, 2), (2, 3), (3, 4, 0)), 5)):
        schedule = GroupSchedule.of(
            len(structure.groups),
            period=3,
            rate=0.7,
            noise=[1.0, *[2.0] * (len(structure.groups) - 1)],
            algorithm=algorithm,
            mode=mode,
        )
        epochs = [1, 2, 4, 5, 11, 30]
        for epoch, found in zip(
            epochs, history(leakage(structure, schedule, epoch=1, delta=1e-5), epochs), strict=True
        ):
            alone = leakage(structure, schedule, epoch=epoch, delta=1e-5)
            assert (found.epoch, found.threat) == (epoch, alone.threat)
            np.testing.assert_array_equal(found.counts, alone.counts)
            np.testing.assert_allclose(found.epsilon_counts, alone.epsilon_counts, rtol=1e-12)
            np.testing.assert_allclose(found.epsilon, alone.epsilon, rtol=1e-12)
            if mode is Mode.PAPER:
                np.testing.assert_array_equal(found.published_counts, alone.published_counts)
                np.testing.assert_allclose(found.published_epsilon, alone.published_epsilon, rtol=1e-12)
            for target, observer in ((0, 2), (3, 1)):
                if found.defined[target, observer]:
                    pair = leakage(structure, schedule, epoch=epoch, delta=1e-5).pair_epsilon(
                        target, observer
                    )
                    assert pair == pytest.approx(found.epsilon[target, observer], rel=1e-12)


def test_whoever_is_in_no_group_of_the_target_is_kept_out_by_all_of_them_at_once():
    """Hiding one of two groups charges the other in full; hiding both charges the few that leave them."""
    groups = (tuple(range(20)), tuple(range(15, 40)), (0, *range(39, 60)))
    structure = Structure("mine", groups, 60)
    schedule = GroupSchedule.of(3, period=25, rate=0.7, noise=2.0)
    found = leakage(structure, schedule, epoch=201, delta=1e-5)
    assert str(found.guarantee(17, 50)).count("cut at groups 0, 1") == 1
    assert found.epsilon[17, 50] < 0.5 * found.epsilon_counts[17, 50]
