"""The sentence: complete, rounded up, the worst unit's, and the same after a file."""

import json
import math

import pytest
from privacy_oracles import SERVER, record_plan

from coterie.privacy import (
    Adjacency,
    Budget,
    Guarantee,
    Mode,
    PlanError,
    PlannedRelease,
    PrivacyInputError,
    PrivacyPlan,
    RoutedSums,
    ThreatModel,
    Unit,
    UnitPlan,
    calibrate,
    epsilon_of,
    guarantee,
)
from coterie.privacy.guarantee import round_up

PLAN = record_plan(noise=1.3008, first=1.3008)


def test_sentence_names_everything_that_a_reader_must_know():
    sentence = str(guarantee(PLAN, delta=1e-4, caveats=["hyper-parameters tuned without privacy"]))
    expected = [
        "(eps=5.01, delta=1e-4)-DP",
        "unit=record of client 3",
        "adjacency=zero-out (replace-one: 10.86)",
        "vs server seeing all updates and selections",
        "trusting nobody",
        "RDP, 1+49750+21 events, z=1.3008",
        "sound",
        "hyper-parameters tuned without privacy",
    ]
    assert sentence.split(" | ") == expected
    assert "\n" not in sentence


def test_sentence_names_its_accountant_and_the_other_value():
    small = record_plan(noise=1.5, first=8.0, rounds=10, selections=2)
    promise = guarantee(small, delta=1e-4, accountant="pld")
    assert promise.accountant.startswith("PLD vdi=1e-4 (RDP: ")
    assert "z=8.0000/1.5000" in str(promise)


def test_replace_one_stands_alone_when_it_is_the_adjacency():
    plan = record_plan(noise=3.0, first=3.0, adjacency=Adjacency.REPLACE_ONE)
    promise = guarantee(plan, delta=1e-4)
    assert "adjacency=replace-one |" in str(promise)
    assert promise.epsilon == promise.epsilon_replace_one


def test_replace_one_value_doubles_the_range_of_a_selection_too():
    # Noise 1/epsilon on counts was enough for zero-out only: replaced, the same noise has range 2 epsilon.
    event = PLAN.units[0].event
    doubled = record_plan(noise=1.3008, first=1.3008, selection_epsilon=0.3, adjacency=Adjacency.REPLACE_ONE)
    expected = epsilon_of(doubled.units[0].event, 1e-4, "rdp", Adjacency.REPLACE_ONE)
    assert epsilon_of(event, 1e-4, "rdp", Adjacency.REPLACE_ONE) == pytest.approx(expected, rel=1e-12)


def test_several_units_get_the_worst_of_all():
    quiet, loud = record_plan(noise=3.0, first=3.0), record_plan(noise=1.0, first=1.0)
    units = (UnitPlan("a", quiet.units[0].releases), UnitPlan("b", loud.units[0].releases))
    plan = PrivacyPlan(Unit.RECORD, Adjacency.ZERO_OUT, SERVER, units)
    budgets = {"a": Budget(9.0, 1e-3), "b": Budget(9.0, 1e-4)}
    promise = guarantee(plan, budget=budgets)
    assert promise.epsilon == guarantee(loud, delta=1e-4).epsilon
    assert promise.delta == 1e-3
    assert promise.subject == "any of 2 clients (most: b)"


def test_many_equal_units_share_one_sentence():
    plan = record_plan(noise=2.0, first=2.0, subjects=tuple(f"client {i}" for i in range(1000)))
    assert "unit=record of any of 1000 clients |" in str(guarantee(plan, delta=1e-4))


def test_no_noise_says_that_there_is_no_privacy():
    promise = guarantee(record_plan(noise=0.0, first=0.0, selections=0), delta=1e-4)
    assert str(promise).startswith("no privacy (eps=inf) | ")
    assert "replace-one: inf" in str(promise)


@pytest.mark.parametrize("noise", [1.3008, 0.0])
def test_guarantee_survives_a_file_and_can_be_recomputed_from_it(noise):
    promise = guarantee(record_plan(noise=noise, first=8.0), delta=1e-4, caveats=["simulation"])
    data = json.loads(json.dumps(promise.to_json(), allow_nan=False))
    again = Guarantee.from_json(data)
    assert again == promise
    assert data["sentence"] == str(again)
    assert epsilon_of(again.event, again.delta, "rdp", again.adjacency) == promise.epsilon


def test_damaged_guarantee_is_refused():
    data = guarantee(PLAN, delta=1e-4).to_json()
    for change in ({"unit": "galaxy"}, {"event": []}, {"epsilon": "many"}):
        with pytest.raises(PlanError):
            Guarantee.from_json(data | change)


def test_paper_mode_prints_both_numbers_and_a_caveat():
    promise = guarantee(PLAN, delta=1e-4, mode=Mode.PAPER)
    assert promise.published_epsilon is not None
    assert str(promise).startswith("published eps=")
    assert "(replace-one claimed) -> sound: (eps=5.01, delta=1e-4)-DP" in str(promise)
    assert "as published" in str(promise)


def test_client_level_sentence():
    models = ThreatModel("other clients", "all models", trusted="the server", collusion=3)
    release = PlannedRelease("sums", RoutedSums(1.0, 1.2088, 10.0, 0.1, Adjacency.ADD_REMOVE), 100)
    plan = PrivacyPlan(Unit.CLIENT, Adjacency.ADD_REMOVE, models, (UnitPlan("the population", (release,)),))
    sentence = str(guarantee(plan, delta=1e-3))
    assert "unit=client of the population | adjacency=add-remove (replace-one: 6.75)" in sentence
    assert "vs other clients (3 colluding) seeing all models | trusting the server" in sentence


def test_delta_or_budget_must_be_given():
    with pytest.raises(PrivacyInputError, match="either delta or budget"):
        guarantee(PLAN)
    with pytest.raises(PrivacyInputError, match="client 3"):
        guarantee(PLAN, budget={})
    with pytest.raises(PlanError, match="no units"):
        guarantee(PrivacyPlan(Unit.RECORD, Adjacency.ZERO_OUT, SERVER, ()), delta=1e-4)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5.0, "5.00"),
        (4.999999999, "5.00"),
        (5.0001, "5.01"),
        (12.345, "12.35"),
        (0.0123451, "0.0124"),
        (0.4, "0.400"),
        (0.0, "0"),
        (math.inf, "inf"),
    ],
)
def test_printed_epsilon_is_never_below_the_value(value, text):
    assert round_up(value) == text
    assert float(text) >= value


def test_calibrated_plan_prints_its_budget():
    plan = calibrate(record_plan(rounds=20), Budget(5.0, 1e-4))
    assert str(guarantee(plan, delta=1e-4)).startswith("(eps=5.00, delta=1e-4)-DP")
