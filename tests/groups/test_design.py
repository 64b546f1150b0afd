"""What would make a pair, or all demands, hold: the answers hold, and a little less does not."""

from dataclasses import replace

import numpy as np
import pytest

from coterie.errors import BudgetError, InputError
from coterie.groups import (
    GroupAlgorithm,
    GroupSchedule,
    Relation,
    Requirement,
    Threat,
    check,
    leakage,
    read_requirements,
    ring,
    search,
    solve_pair,
)
from coterie.privacy.errors import RangeError

RING = ring(24, 4)
SCHEDULE = GroupSchedule.of(4, period=4, rate=0.5, noise=2.0)
RUN = {"epoch": 30, "delta": 1e-5}
FOUND = leakage(RING, SCHEDULE, **RUN)


def pair(schedule, target, observer):
    return leakage(RING, schedule, epoch=30, delta=1e-5).pair_epsilon(target, observer)


def test_noise_and_period_bring_a_pair_under_its_target_and_no_less_does():
    factor, period = solve_pair(FOUND, 2, 9, 3.0)
    assert pair(SCHEDULE, 2, 9) > 3
    assert pair(SCHEDULE.louder(factor), 2, 9) <= 3
    assert pair(SCHEDULE.louder(0.999 * factor), 2, 9) > 3
    assert pair(replace(SCHEDULE, period=period), 2, 9) <= 3
    assert all(pair(replace(SCHEDULE, period=shorter), 2, 9) > 3 for shorter in range(1, period))


def test_no_period_protects_members_of_one_group():
    factor, period = solve_pair(FOUND, 2, 3, 3.0)
    assert period is None
    assert pair(SCHEDULE.louder(factor), 2, 3) <= 3


def test_unreachable_target_is_a_budget_error():
    with pytest.raises(BudgetError, match="worker 2 against worker 3"):
        solve_pair(FOUND, 2, 3, 1e-4)
    with pytest.raises(RangeError):
        solve_pair(FOUND, 2, 3, 0.0)


def test_requirements_choose_their_pairs():
    together = RING.membership.astype(int) @ RING.membership.astype(int).T > 0
    inside = Requirement(1.0, relation=Relation.IN_GROUP).pairs(RING)
    outside = Requirement(1.0, relation=Relation.OUT_OF_GROUP).pairs(RING)
    assert np.array_equal(inside | outside, ~np.eye(24, dtype=bool))
    assert np.array_equal(outside, ~together)
    far = Requirement(1.0, distance=2).pairs(RING)
    assert far[2, 15]
    assert not far[2, 9]
    one = Requirement(1.0, target=2, observer=9).pairs(RING)
    assert np.argwhere(one).tolist() == [[2, 9]]


def test_verdict_names_the_worst_pair():
    found = leakage(RING, SCHEDULE, **RUN)
    met, broken = check(found, [Requirement(1e3), Requirement(1.0, relation=Relation.OUT_OF_GROUP)])
    assert met.met
    assert met.epsilon == np.nanmax(found.epsilon)
    assert not broken.met
    assert found.epsilon[broken.pair] == broken.epsilon


def test_search_finds_the_least_noise_for_all_demands():
    demands = [Requirement(4.0), Requirement(1.0, relation=Relation.OUT_OF_GROUP)]
    designs = search(FOUND, demands, periods=[1, 4, 10])
    assert [design.factor for design in designs] == sorted(design.factor for design in designs)
    for design in designs:
        assert all(v.met for v in check(leakage(RING, design.schedule, **RUN), demands))
        quieter = design.schedule.louder(0.995)
        assert not all(v.met for v in check(leakage(RING, quieter, **RUN), demands))
    assert {design.period for design in designs} == {1, 4, 10}


def test_search_prefers_the_shorter_of_equally_quiet_periods():
    """Members of one group see every release whatever the period, so only they decide."""
    designs = search(FOUND, [Requirement(3.0, target=2, observer=3)], periods=[1, 2, 10])
    assert [design.period for design in designs] == [1, 2, 4, 10]


def test_search_without_a_demand_is_refused():
    with pytest.raises(InputError, match="requirements: none were given"):
        search(FOUND, [])


def test_zero_means_nothing_may_arrive():
    designs = search(FOUND, [Requirement(0.0, target=2, observer=15)])
    # Two hops: nothing arrives before model 2 S + 2, so S = 15 is the shortest of those tried.
    assert min(design.period for design in designs) == 15
    with pytest.raises(BudgetError, match="requirements"):
        search(FOUND, [Requirement(0.0, target=2, observer=3)])


def test_a_demand_about_members_of_a_group_is_not_met_by_trusting_them():
    plus = replace(SCHEDULE, algorithm=GroupAlgorithm.DP_OGL_PLUS)
    inside, anyone = Requirement(1e-3, relation=Relation.IN_GROUP), Requirement(1e3)
    found = leakage(RING, plus, **RUN)
    assert found.threat is Threat.OUTSIDERS
    for ask in (lambda: check(found, [anyone, inside]), lambda: search(found, [inside])):
        with pytest.raises(InputError, match=r"in-group worker: .* threat model 2 trusts"):
            ask()
    (verdict,) = check(found, [anyone])
    assert verdict.met
    assert verdict.trusted == inside.pairs(RING).sum() > 0
    (verdict,) = check(leakage(RING, plus, **RUN, threat=Threat.ANYONE), [inside])
    assert (verdict.met, verdict.trusted) == (False, 0)


def test_where_nothing_arrives_any_noise_will_do():
    designs = search(FOUND, [Requirement(1.0, target=2, observer=15)], periods=[1, 15])
    assert {design.period: design.any_noise for design in designs} == {1: False, 4: False, 15: True}


def test_a_requirement_may_be_infinite(tmp_path):
    for path, text in (("r.yaml", "- {epsilon: .inf}"), ("r.json", '[{"epsilon": Infinity}]')):
        (tmp_path / path).write_text(text)
        (any_noise,) = read_requirements(tmp_path / path, RING)
        assert any_noise.epsilon == np.inf
        assert check(FOUND, [any_noise])[0].met


def test_requirements_come_from_a_file(tmp_path):
    path = tmp_path / "demands.yaml"
    path.write_text(
        "- {epsilon: 8}\n"
        "- {target: 3, observer: out-of-group, epsilon: 2}\n"
        "- {observer: 5, distance: 2, epsilon: 1}\n"
    )
    first, second, third = read_requirements(path, RING)
    assert first == Requirement(8.0)
    assert second == Requirement(2.0, target=3, relation=Relation.OUT_OF_GROUP)
    assert third == Requirement(1.0, observer=5, distance=2)
    assert second.text(RING) == "worker 3 against any out-of-group worker: epsilon at most 2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "a list of requirements"),
        ("- 3", "requirement 1: 3 is not allowed, an object is"),
        ("- {target: 3}", "missing or unknown fields: epsilon"),
        ("- {epsilon: -1}", "epsilon: -1"),
        ("- {epsilon: .nan}", "epsilon: nan is not allowed"),
        ("- {epsilon: true}", "epsilon: True is not allowed"),
        ("- {epsilon: inf}", "epsilon: 'inf' is not allowed, a number is"),
        ("- {epsilon: '1'}", "epsilon: '1' is not allowed, a number is"),
        ("- {epsilon: 1.0e+300}", "epsilon: 1e.300 is not allowed"),
        ("- {epsilon: 1, distance: 99999999999999999999}", "distance: 9+ is not allowed"),
        ("- {epsilon: 1, distance: 1.5}", "distance: 1.5 is not allowed"),
        ("- {epsilon: 1, target: 99}", "'99' is unknown"),
        ("- {epsilon: 1, observer: everyone}", "'everyone' is unknown"),
        ("- {epsilon: 1, distance: -2}", "distance: -2"),
        ("- {epsilon: 1, worker: 2}", "unknown fields: worker"),
    ],
)
def test_broken_requirements_are_refused(tmp_path, text, words):
    path = tmp_path / "demands.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        read_requirements(path, RING)
