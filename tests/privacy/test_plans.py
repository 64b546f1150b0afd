"""The one builder of plans: what it names, and that all who use it get the same plan for the same numbers."""

import pytest

from coterie.privacy import (
    POPULATION,
    Adjacency,
    Budget,
    Mode,
    NoiseRule,
    PlanError,
    Unit,
    calibrate,
    guarantee,
)
from coterie.privacy.plans import (
    CHOICE,
    FIRST_ROUND,
    SELECTION,
    SUMS,
    TRAINING,
    ClientRun,
    CohortReleases,
    RecordReleases,
    RecordRun,
    client_plan,
    noise_of,
    parts_of,
    plan_of,
)
from coterie.privacy.threats import SERVER, THREATS

BUDGET = Budget(4.0, 1e-4)


def test_every_kind_of_unit_fears_its_own_observers_unless_a_plan_says_otherwise():
    own = [RecordReleases(500).steps(TRAINING, 3, 50)]
    assert plan_of(Unit.RECORD, Adjacency.ZERO_OUT, {"a": own}).threat == THREATS[Unit.RECORD]
    assert client_plan(CohortReleases(0.1).sums(), 3).threat == THREATS[Unit.CLIENT]
    assert RecordRun(500, 50, 3).plan().threat == SERVER


def test_a_client_s_releases_share_its_records_clip_and_neighbours():
    own = RecordReleases(500, 2, 0.5, Adjacency.REPLACE_ONE)
    releases = [
        own.steps(FIRST_ROUND, 1, None, NoiseRule.AUTO),
        own.steps(TRAINING, 3, 50),
        *own.selections(0.1, 2),
        own.choices(1),
    ]
    plan = plan_of(Unit.RECORD, Adjacency.REPLACE_ONE, {"a": releases, "b": releases})
    assert [unit.subject for unit in plan.units] == ["a", "b"]
    names = [release.name for release in plan.units[0].releases]
    assert names == [FIRST_ROUND, TRAINING, SELECTION, CHOICE]
    assert {release.mechanism.adjacency for release in releases} == {Adjacency.REPLACE_ONE}
    assert [release.mechanism.clip for release in releases[:2]] == [0.5, 0.5]
    assert own.selections(0.1, 0) == []
    with pytest.raises(PlanError):
        plan_of(Unit.RECORD, Adjacency.ZERO_OUT, {"a": releases})


def test_a_run_in_numbers_needs_the_noise_of_the_releases_it_stands_for():
    run = RecordRun(500, 50, 8, selections=2, selection_epsilon=0.1)
    own = RecordReleases(500)
    releases = [own.steps(FIRST_ROUND, 1, None), own.steps(TRAINING, 7, 50), *own.selections(0.1, 2)]
    alike = calibrate(plan_of(Unit.RECORD, Adjacency.ZERO_OUT, {"one client": releases}), BUDGET)
    assert run.needed(BUDGET) == noise_of(alike, TRAINING) == noise_of(alike, FIRST_ROUND)
    assert run.calibrated(BUDGET).units == alike.units


def test_a_budget_that_no_noise_meets_needs_none():
    assert RecordRun(500, 50, 8, selections=9, selection_epsilon=8.0).needed(BUDGET) is None


def test_one_round_alone_is_all_the_noise_there_is():
    run = RecordRun(500, 50, 1)
    plan = run.calibrated(BUDGET)
    assert noise_of(plan, TRAINING) is None
    assert run.training_noise(plan) == noise_of(plan, FIRST_ROUND) > 0
    without = RecordRun(500, 50, 1, first_round=None)
    assert without.training_noise(without.calibrated(BUDGET)) > 0


def test_noise_is_the_largest_of_all_units():
    quiet, loud = (
        [RecordReleases(500).steps(TRAINING, 3, 50, noise), *RecordReleases(500).selections(1.0, 1)]
        for noise in (1.0, 3.0)
    )
    plan = plan_of(Unit.RECORD, Adjacency.ZERO_OUT, {"a": quiet, "b": loud})
    assert noise_of(plan, TRAINING) == 3.0
    assert noise_of(plan, SELECTION) is None


@pytest.mark.parametrize("rule", ["route", "rebalance", "paper", "fedavg"])
def test_clients_pay_in_one_entry_and_noise_is_counted_as_the_rule_counts_it(rule):
    run = ClientRun(100, 0.1, 5, rule)
    plan = run.plan(2.0)
    (unit,) = plan.units
    assert unit.subject == POPULATION
    assert unit.release(SUMS).times == 5
    noises = run.noises(plan)
    assert noises["noise_multiplier"] == 2.0
    assert noises["noise_on_sum"] == (4.0 if rule in ("rebalance", "paper") else 2.0)
    assert ("histogram_noise_multiplier" in noises) == (rule == "route")
    assert ("identifier_noise_multiplier" in noises) == (rule in ("rebalance", "paper"))
    assert run.mode is (Mode.PAPER if rule == "paper" else Mode.SOUND)


def test_parts_add_up_to_the_whole_divergence():
    plan = RecordRun(500, 50, 8, selections=2, selection_epsilon=0.1).calibrated(BUDGET)
    parts = parts_of(plan, guarantee(plan, delta=BUDGET.delta))
    assert [part["release"] for part in parts] == ["first-round", "training", "selection"]
    assert sum(part["share"] for part in parts) == pytest.approx(1.0)
