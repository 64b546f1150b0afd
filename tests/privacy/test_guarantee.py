"""A guarantee: complete in each of its forms, rounded up, the worst unit's, and the same after a file."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from privacy_oracles import SERVER, record_plan

from coterie.privacy import (
    Adjacency,
    Budget,
    CohortSums,
    Custody,
    Guarantee,
    Mode,
    NoisyScores,
    PlanError,
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
from coterie.privacy.units import round_up, short_number
from coterie.privacy.wording import SIMULATION

ZERO_OUT = Adjacency.ZERO_OUT
PLAN = record_plan(noise=1.3008, first=1.3008)


def test_line_says_what_holds_for_whom_and_against_whom():
    promise = guarantee(PLAN, delta=1e-4, caveats=["hyper-parameters tuned without privacy"])
    assert promise.line == (
        "(eps=5.01, delta=1e-4)-DP for one record of client 3, zero-out (replace-one 10.86); "
        "against server; 1 caveat"
    )


def test_paragraph_names_everything_that_a_reader_must_know():
    text = str(guarantee(PLAN, delta=1e-4, caveats=["hyper-parameters tuned without privacy"]))
    for part in (
        "Protected is one record of client 3",
        "not a person",
        "e^5.01",
        "probability of 1e-4",
        "epsilon is 10.86",
        "against server, seeing all updates and selections",
        "at even odds",
        "accuses 1 %",
        "Computed by RDP",
        "Hyper-parameters tuned without privacy.",
        "Other runs and releases on the same data are not counted here",
    ):
        assert part in text
    assert "\n" not in text
    assert "events, z=" not in text


def test_table_has_a_row_for_each_kind_of_release():
    promise = guarantee(PLAN, delta=1e-4)
    assert [(row.name, row.times, row.noise) for row in promise.releases] == [
        ("first-round", 1, "1.301 x clip 1"),
        ("training", 199, "1.301 x clip 1"),
        ("selection", 21, "Gumbel, scale 6.67"),
    ]
    assert promise.releases[1].what == "250 steps on Poisson batches, 32 of 8,000 records in expectation"
    assert all(0 < row.epsilon < promise.epsilon for row in promise.releases)
    assert sum(row.epsilon for row in promise.releases) > promise.epsilon


def test_who_held_the_records_is_true_of_the_run():
    told = {held: guarantee(PLAN, delta=1e-4, held_by=held) for held in Custody}
    one = told[Custody.ONE_PROCESS]
    assert "one process held all records" in one.line
    assert "One process held all records and the noise key" in one.text
    assert "no other party is trusted" in told[Custody.EACH_SITE].text
    assert "the server held the noise key" in told[Custody.TRUSTED_SERVER].text
    assert "This is a plan" in told[Custody.PLAN].text
    for held, promise in told.items():
        assert ("one process" in promise.line) == (held is Custody.ONE_PROCESS)
        assert "trusting nobody" not in promise.line + promise.text


def test_what_weakens_a_promise_stands_in_its_line_and_is_not_counted():
    caveats = [f"{SIMULATION}: noise comes from a seed", "scores are exact", "delta is large"]
    promise = guarantee(PLAN, delta=1e-4, caveats=caveats)
    assert promise.line.endswith("; simulation; 2 caveats")
    assert promise.text.startswith("Simulation: noise comes from a seed.")


def test_the_accountant_is_named_with_the_other_value():
    small = record_plan(noise=1.5, first=8.0, rounds=10, selections=2)
    promise = guarantee(small, delta=1e-4, accountant="pld")
    assert promise.accountant.startswith("PLD vdi=1e-4 (RDP: ")
    assert promise.accountant in promise.text


def test_replace_one_stands_alone_when_it_is_the_adjacency():
    plan = record_plan(noise=3.0, first=3.0, adjacency=Adjacency.REPLACE_ONE)
    promise = guarantee(plan, delta=1e-4)
    assert ", replace-one; against" in promise.line
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
    assert (promise.subject, promise.most_exposed) == ("any of 2 clients", "b")
    assert promise.meaning == guarantee(loud, delta=1e-4).meaning


def test_every_client_has_a_row_with_its_own_epsilon_delta_and_records():
    few, many = record_plan(noise=3.0, first=3.0, records=400), record_plan(noise=3.0, first=3.0)
    units = (UnitPlan("a", few.units[0].releases), UnitPlan("b", many.units[0].releases))
    plan = PrivacyPlan(Unit.RECORD, Adjacency.ZERO_OUT, SERVER, units)
    promise = guarantee(plan, budget={"a": Budget(99.0, 1e-3), "b": Budget(99.0, 1e-4)})
    assert promise.per_client_json() == {
        "a": {"epsilon": guarantee(few, delta=1e-3).epsilon, "delta": 1e-3, "records": 400},
        "b": {"epsilon": guarantee(many, delta=1e-4).epsilon, "delta": 1e-4, "records": 8000},
    }
    assert "delta 1e-4 to 1e-3" in promise.text


@pytest.mark.parametrize("noise", [0.5, 40.0])
def test_held_out_records_are_no_client_and_cost_a_client_the_larger_of_both(noise):
    trained = record_plan(noise=2.0, first=2.0).units[0].releases
    scored = (PlannedRelease("evaluation", NoisyScores(0.5, noise, 50, ZERO_OUT), 2),)
    units = (UnitPlan("a", trained), UnitPlan("b", trained), UnitPlan(held_out("a"), scored))
    promise = guarantee(PrivacyPlan(Unit.RECORD, ZERO_OUT, SERVER, units), delta=1e-4)
    training, scores = (
        epsilon_of(UnitPlan("x", own).event, 1e-4, "rdp", ZERO_OUT) for own in (trained, scored)
    )
    assert (scores > training) == (noise < 1)
    assert "one record of any of 2 clients" in promise.line
    assert {cost.name: (cost.epsilon, cost.records) for cost in promise.per_client} == {
        "a": (max(training, scores), 8050),
        "b": (training, 8000),
    }
    assert promise.epsilon == max(training, scores)
    assert promise.most_exposed == "a"
    assert [row.held_out for row in promise.releases] == [False] * 3 + [True]


def test_many_equal_units_share_one_line():
    plan = record_plan(noise=2.0, first=2.0, subjects=tuple(f"client {i}" for i in range(1000)))
    promise = guarantee(plan, delta=1e-4)
    assert "for one record of any of 1000 clients, zero-out" in promise.line
    assert promise.most_exposed is None
    assert len(promise.per_client) == 1000


def test_no_noise_says_that_there_is_no_privacy():
    promise = guarantee(record_plan(noise=0.0, first=0.0, selections=0), delta=1e-4)
    assert promise.line == "no privacy (eps=inf) for one record of client 3"
    assert promise.text.startswith("There is no privacy")
    assert math.isinf(promise.epsilon_replace_one)
    assert (promise.meaning.guess, promise.meaning.found) == (1.0, 1.0)


@pytest.mark.parametrize("noise", [1.3008, 0.0])
def test_guarantee_survives_a_file_and_can_be_recomputed_from_it(noise):
    promise = guarantee(record_plan(noise=noise, first=8.0), delta=1e-4, caveats=["simulation"])
    data = json.loads(json.dumps(promise.to_json(), allow_nan=False))
    again = Guarantee.from_json(data)
    assert again == promise
    assert (data["line"], data["text"]) == (again.line, str(again))
    assert epsilon_of(again.event, again.delta, "rdp", again.adjacency) == promise.epsilon


def test_damaged_guarantee_is_refused():
    data = guarantee(PLAN, delta=1e-4).to_json()
    deep: dict[str, object] = {"event": "nothing"}
    for _ in range(900):
        deep = {"event": "repeated", "times": 1, "of": deep}
    for change in (
        {"unit": "galaxy"},
        {"event": []},
        {"epsilon": "many"},
        {"delta": 10**400},
        {"event": deep},
        {"epsilon": -1.0},
        {"delta": -1e-9},
        {"per_client": {"a": {"epsilon": -1, "delta": 1e-4, "records": None}}},
    ):
        with pytest.raises(PlanError):
            Guarantee.from_json(data | change)


def test_paper_mode_prints_both_numbers_and_a_caveat():
    promise = guarantee(PLAN, delta=1e-4, mode=Mode.PAPER)
    assert promise.published_epsilon is not None
    assert promise.line.startswith(
        "paper: published eps=6.90 (replace-one claimed), sound: (eps=5.01, delta=1e-4)"
    )
    assert "It claims epsilon 6.90" in promise.text
    assert "As published" in promise.text


def test_client_level_line():
    models = ThreatModel("other clients", "all models", trusted="the server", collusion=3)
    release = PlannedRelease(
        "sums", CohortSums(1.0, 1.2088, PoissonSample(0.1), Adjacency.ADD_REMOVE, histogram_ratio=10.0), 100
    )
    plan = PrivacyPlan(Unit.CLIENT, Adjacency.ADD_REMOVE, models, (UnitPlan("the population", (release,)),))
    promise = guarantee(plan, delta=1e-3)
    assert "for one client of the population, add-remove (replace-one 6.75)" in promise.line
    assert "against other clients (3 colluding), trusting the server" in promise.line
    assert "seeing all models" in promise.text
    assert [cost.name for cost in promise.per_client] == ["the population"]


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
    assert guarantee(plan, delta=1e-4).line.startswith("(eps=5.00, delta=1e-4)-DP")


@given(st.floats(1e-9, 0.99))
def test_printed_delta_is_never_below_the_value(value):
    assert float(short_number(value)) >= value * (1 - 1e-9)
