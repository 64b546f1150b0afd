"""What private scores cost: parallel to training for records, composed with it for clients."""

from __future__ import annotations

import math

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from coterie.errors import PlanError
from coterie.privacy import (
    EVALUATION,
    POPULATION,
    Adjacency,
    Budget,
    BudgetError,
    CohortSums,
    FullBatchSteps,
    HeldOut,
    NoiseRule,
    NoisyScores,
    PlannedRelease,
    PoissonSample,
    PrivacyInputError,
    PrivacyPlan,
    ThreatModel,
    Unit,
    UnitPlan,
    calibrate,
    epsilon_of,
    guarantee,
    held_out,
)
from coterie.privacy.evaluation import with_client_scores, with_held_out_records

ZERO_OUT = Adjacency.ZERO_OUT


def records_plan(epochs: int = 3) -> PrivacyPlan:
    steps = FullBatchSteps(1.0, NoiseRule.SHARED, records=50, epochs=1, adjacency=ZERO_OUT)
    units = tuple(UnitPlan(name, (PlannedRelease("training", steps, epochs),)) for name in ("a", "b"))
    return PrivacyPlan(Unit.RECORD, ZERO_OUT, ThreatModel("the server", "everything"), units)


def clients_plan() -> PrivacyPlan:
    sums = CohortSums(1.0, NoiseRule.SHARED, PoissonSample(0.2), Adjacency.ADD_REMOVE)
    unit = UnitPlan(POPULATION, (PlannedRelease("sums", sums, 20),))
    return PrivacyPlan(Unit.CLIENT, Adjacency.ADD_REMOVE, ThreatModel("all", "models", "the server"), (unit,))


def exact_delta(epsilon: float, sensitivity_over_std: float) -> float:
    """Of one Gaussian release (Balle and Wang 2018), written down a second time."""
    s = sensitivity_over_std
    return float(norm.cdf(s / 2 - epsilon / s) - math.exp(epsilon) * norm.cdf(-s / 2 - epsilon / s))


def test_scores_of_one_half_take_half_the_noise_and_no_less_than_one_gaussian_needs() -> None:
    budgets = {"a": Budget(8.0, 1e-4), "b": Budget(8.0, 1e-4)}
    plan, budgets = with_held_out_records(records_plan(), budgets, {"a": HeldOut(60, 1.0, 1)})
    [release] = calibrate(plan, budgets, accountant="pld").for_subject(held_out("a")).releases
    assert isinstance(release.mechanism, NoisyScores)
    needed = 0.5 / brentq(lambda s: exact_delta(1.0, s) - 1e-4, 1e-3, 10)
    assert needed <= release.mechanism.noise_std <= 1.001 * needed


def test_a_record_pays_for_training_or_for_scores_and_never_for_both() -> None:
    budgets = {"a": Budget(2.0, 1e-4), "b": Budget(2.0, 1e-4)}
    alone = calibrate(records_plan(), budgets)
    plan, everyone = with_held_out_records(records_plan(), budgets, {"a": HeldOut(60, 0.5, 3)})
    plan = calibrate(plan, everyone)
    assert plan.for_subject("a") == alone.for_subject("a"), "scores take nothing from training"
    scored = plan.for_subject(held_out("a"))
    assert 0.4995 <= epsilon_of(scored.event, 1e-4, "rdp", ZERO_OUT) <= 0.5
    assert guarantee(plan, budget=everyone).epsilon == guarantee(alone, budget=budgets).epsilon
    dearer, more = with_held_out_records(records_plan(), budgets, {"a": HeldOut(60, 3.0, 3)})
    told = guarantee(calibrate(dearer, more), budget=more).epsilon
    assert 2.99 <= told <= 3.0, "the dearer of both parts is what is promised"


def test_three_reports_cost_what_three_gaussians_do() -> None:
    budgets = {"a": Budget(2.0, 1e-4), "b": Budget(2.0, 1e-4)}
    plan, everyone = with_held_out_records(records_plan(), budgets, {"b": HeldOut(60, 1.0, 3)})
    [release] = calibrate(plan, everyone, accountant="pld").for_subject(held_out("b")).releases
    together = math.sqrt(3) / release.mechanism.multiplier  # type: ignore[attr-defined]
    assert exact_delta(1.0, together) <= 1e-4
    assert exact_delta(0.999, together) > 1e-4


def test_a_clients_score_is_paid_from_its_one_budget() -> None:
    budgets = {POPULATION: Budget(4.0, 1e-3)}
    without = calibrate(clients_plan(), budgets)
    plan = calibrate(with_client_scores(clients_plan(), budgets, HeldOut(100, 1.0, 2), "rdp"), budgets)
    [unit] = plan.units
    assert [release.name for release in unit.releases] == ["sums", EVALUATION]
    assert epsilon_of(unit.event, 1e-3, "rdp", Adjacency.ADD_REMOVE) <= 4.0
    sums = unit.release("sums").mechanism.multiplier  # type: ignore[attr-defined]
    assert sums > without.units[0].release("sums").mechanism.multiplier  # type: ignore[attr-defined]
    alone = UnitPlan(POPULATION, (unit.release(EVALUATION),))
    assert 0.999 <= epsilon_of(alone.event, 1e-3, "rdp", Adjacency.ADD_REMOVE) <= 1.0


def test_scores_that_leave_nothing_for_training_are_refused() -> None:
    budgets = {POPULATION: Budget(1.0, 1e-3)}
    plan = with_client_scores(clients_plan(), budgets, HeldOut(100, 2.0, 2), "rdp")
    with pytest.raises(BudgetError, match="evaluation alone"):
        calibrate(plan, budgets)


def test_scores_of_a_unit_that_has_none_are_refused() -> None:
    with pytest.raises(PlanError, match="owns the records"):
        with_held_out_records(clients_plan(), {}, {"a": HeldOut(3, 1.0, 1)})
    with pytest.raises(PlanError, match="not a client"):
        with_client_scores(records_plan(), {}, HeldOut(3, 1.0, 1), "rdp")
    with pytest.raises(PrivacyInputError, match="clip"):
        NoisyScores(1.0, 2.0, 10, ZERO_OUT)


def test_nothing_but_scores_is_released_of_held_out_records() -> None:
    """A client cannot hide its training behind a name that is charged apart."""
    steps = FullBatchSteps(1.0, 2.0, records=50, epochs=1, adjacency=ZERO_OUT)
    unit = UnitPlan(held_out("a"), (PlannedRelease("training", steps, 1),))
    with pytest.raises(PlanError, match="only scores are released"):
        PrivacyPlan(Unit.RECORD, ZERO_OUT, ThreatModel("the server", "everything"), (unit,))


def test_replacing_a_record_moves_a_score_by_one() -> None:
    """Twice the size of what one adds, as accountants charge it."""
    event = NoisyScores(0.5, 4.0, 10, ZERO_OUT).event
    moved = epsilon_of(event, 1e-5, "pld", Adjacency.REPLACE_ONE)
    assert exact_delta(moved, 1.0 / (0.5 * 4.0)) <= 1e-5
    assert exact_delta(0.999 * moved, 1.0 / (0.5 * 4.0)) > 1e-5
