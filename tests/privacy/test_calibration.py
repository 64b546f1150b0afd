"""Noise from budgets: known values, the safe side, per-client budgets, impossible budgets."""

import dataclasses
import math

import pytest
from privacy_oracles import noise_of, record_plan

from coterie.privacy import (
    Adjacency,
    Budget,
    BudgetError,
    FullBatchSketch,
    FullBatchSteps,
    NoiseRule,
    PlannedRelease,
    PrivacyPlan,
    PrivateSelection,
    ShuffledSteps,
    UnitPlan,
    calibrate,
    epsilon_of,
    guarantee,
)
from coterie.privacy.calibration import LARGEST_FIRST_ROUND_SHARE

ZERO_OUT = Adjacency.ZERO_OUT


def test_calibrated_plan_stays_within_its_budget_and_no_smaller_noise_does():
    budget = Budget(5.0, 1e-4)
    plan = calibrate(record_plan(), budget)
    assert guarantee(plan, delta=1e-4).epsilon <= 5.0
    unit = record_plan(noise=noise_of(plan) * (1 - 1e-5), first=noise_of(plan) * (1 - 1e-5)).units[0]
    assert epsilon_of(unit.event, 1e-4, "rdp", plan.adjacency) > 5.0


def test_first_round_noise_of_its_own_frees_budget_for_training():
    plan = calibrate(record_plan(first=8.0, selection_epsilon=0.09), Budget(3.0, 1e-4))
    assert noise_of(plan) == pytest.approx(1.4301, rel=1e-3)
    assert noise_of(plan, "first-round") == 8.0


def test_auto_first_round_raises_training_noise_by_two_percent():
    budget = Budget(3.0, 1e-4)
    plan = record_plan(first=NoiseRule.AUTO, selection_epsilon=0.09)
    bare = dataclasses.replace(plan, units=(plan.units[0].without("first-round"),))
    calibrated = calibrate(plan, budget)
    assert noise_of(calibrated) == pytest.approx(1.02 * noise_of(calibrate(bare, budget)), rel=1e-6)
    assert noise_of(calibrated, "first-round") == pytest.approx(6.2, rel=0.01)
    assert guarantee(calibrated, delta=1e-4).epsilon == pytest.approx(3.0, rel=1e-5)


def sketch_plan(records: int, first: float | NoiseRule = NoiseRule.AUTO) -> PrivacyPlan:
    """As `record_plan`, but round 1 releases a sketch of 200 coordinates."""
    plan = record_plan(first=first, selection_epsilon=0.09, records=records)
    unit = plan.units[0]
    sketch = FullBatchSketch(1.0, first, records, 200, plan.adjacency)
    releases = (PlannedRelease("first-round", sketch, 1), *unit.releases[1:])
    return dataclasses.replace(plan, units=(dataclasses.replace(unit, releases=releases),))


def test_auto_spends_more_on_a_sketch_of_few_records_if_that_is_enough():
    budget = Budget(3.0, 1e-4)
    for records, first, share in (
        (8000, 6.20, 0.02),
        (800, 5.66, None),
        (400, 2.83, None),
        (200, 6.96, 0.02),
    ):
        plan = sketch_plan(records)
        bare = dataclasses.replace(plan, units=(plan.units[0].without("first-round"),))
        calibrated = calibrate(plan, budget)
        more = noise_of(calibrated) / noise_of(calibrate(bare, budget)) - 1
        assert noise_of(calibrated, "first-round") == pytest.approx(first, rel=2e-3)
        assert more == pytest.approx(share, rel=1e-4) if share else 0.02 < more <= LARGEST_FIRST_ROUND_SHARE
        # Whatever it buys, the budget is kept, and used up.
        assert budget.epsilon * (1 - 1e-5) <= guarantee(calibrated, delta=1e-4).epsilon <= budget.epsilon


def test_equal_clients_get_equal_noise_and_other_budgets_other_noise():
    subjects = tuple(f"client {i}" for i in range(5))
    plan = record_plan(subjects=subjects)
    budgets = {subject: Budget(5.0, 1e-4) for subject in subjects} | {"client 4": Budget(2.0, 1e-5)}
    noises = [unit.release("training").mechanism.multiplier for unit in calibrate(plan, budgets).units]
    assert len(set(noises[:4])) == 1
    assert noises[4] > noises[0]


def test_infinite_epsilon_means_no_noise_and_says_so():
    plan = calibrate(record_plan(selections=0), Budget(math.inf, 1e-4))
    assert noise_of(plan) == 0.0
    promise = guarantee(plan, delta=1e-4)
    assert math.isinf(promise.epsilon)
    assert promise.line.startswith("no privacy")


def test_budget_below_the_selections_names_their_cost():
    with pytest.raises(BudgetError, match="selection alone") as caught:
        calibrate(record_plan(selection_epsilon=3.0), Budget(3.0, 1e-4))
    assert caught.value.exit_code == 3


def test_budget_below_the_selections_is_refused_as_such_where_the_search_would_leave_the_grid():
    """Three hundred full batches at the noise where a search begins have losses beyond the grid."""
    steps = PlannedRelease("training", FullBatchSteps(1.0, NoiseRule.SHARED, 100, 1, ZERO_OUT), 300)
    selections = PlannedRelease("selection", PrivateSelection(3.0, ZERO_OUT), 10)
    unit = UnitPlan("client", (steps, selections))
    with pytest.raises(BudgetError, match="selection alone"):
        calibrate(dataclasses.replace(record_plan(), units=(unit,)), Budget(1.0, 1e-4), accountant="pld")


def test_shuffled_batches_are_not_amplified():
    plan = calibrate(record_plan(steps=ShuffledSteps, selections=0), Budget(5.0, 1e-4))
    assert noise_of(plan) == pytest.approx(12.14, rel=1e-3)
