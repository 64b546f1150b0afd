"""Plans and guarantees for persons: written with their bounds, and composed over the clients they are at."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from coterie.privacy import (
    Adjacency,
    Budget,
    Guarantee,
    HeldOut,
    PersonBounds,
    PlanError,
    PrivacyPlan,
    Unit,
    calibrate,
    epsilon_of,
    guarantee,
)
from coterie.privacy.errors import RangeError
from coterie.privacy.evaluation import with_held_out_records
from coterie.privacy.events import composed
from coterie.privacy.plans import RecordReleases, plan_of

SIZES = {"north": 400, "south": 150, "east": 900, "west": 60}


def plan_for(bounds: PersonBounds | None, unit: Unit = Unit.PERSON) -> PrivacyPlan:
    """Four clients of different sizes, of whom two also choose models: no curve is above all others."""
    releases = {}
    for place, (name, size) in enumerate(SIZES.items()):
        own = RecordReleases(size)
        releases[name] = [own.steps("training", 5, 20, 1.0 + 0.4 * place)]
        releases[name] += own.selections(0.8, 3) if place % 2 else []
    return plan_of(unit, Adjacency.ZERO_OUT, releases, persons=bounds)


@pytest.mark.parametrize("clients", [2, 3, 4, 9])
def test_across_clients_epsilon_is_no_less_than_that_of_any_of_them_composed(clients: int) -> None:
    plan = plan_for(PersonBounds(4, clients))
    promise = guarantee(plan, delta=1e-4)
    assert promise.epsilon_across_clients is not None
    worst = max(
        epsilon_of(composed([unit.event for unit in chosen]), 1e-4, "rdp", plan.adjacency)
        for chosen in itertools.combinations(plan.units, min(clients, len(plan.units)))
    )
    assert worst <= promise.epsilon_across_clients * (1 + 1e-12)
    assert promise.epsilon_across_clients <= 1.1 * worst  # and not much more
    if clients >= len(plan.units):
        assert promise.epsilon_across_clients == pytest.approx(worst)


def test_a_person_may_be_trained_on_at_one_client_and_held_out_at_another() -> None:
    plan, budgets = plan_for(PersonBounds(2, 2)), {name: Budget(50.0, 1e-4) for name in SIZES}
    both, budgets = with_held_out_records(plan, budgets, {"west": HeldOut(15, 30.0, 1)})
    both = calibrate(both, budgets)
    dear = guarantee(both, budget=budgets)
    held = [unit for unit in both.units if unit.is_held_out]
    pairs = [
        epsilon_of(composed([one.event, held[0].event]), 1e-4, "rdp", plan.adjacency)
        for one in both.units
        if one.owner != "west"
    ]
    assert dear.epsilon_across_clients is not None
    assert dear.epsilon_across_clients >= max(pairs)
    assert dear.epsilon_across_clients > guarantee(plan, delta=1e-4).epsilon_across_clients  # type: ignore[operator]


def test_without_noise_nothing_is_promised_across_clients_either() -> None:
    releases = {name: [RecordReleases(size).steps("training", 1, 20, 0.0)] for name, size in SIZES.items()}
    plan = plan_of(Unit.PERSON, Adjacency.ZERO_OUT, releases, persons=PersonBounds(4, 2))
    assert guarantee(plan, delta=1e-4).epsilon_across_clients == np.inf


def test_at_one_client_nothing_is_composed_and_the_text_says_so() -> None:
    promise = guarantee(plan_for(PersonBounds(4)), delta=1e-4)
    assert promise.epsilon_across_clients is None
    assert "for one person's records at any of 4 clients, zero-out (replace-one" in promise.line
    assert (
        "of which at most 4 count; a person is at one client, and whoever is at several pays" in promise.text
    )
    assert "whether a given person took part at a given client is right at most" in promise.text
    several = guarantee(plan_for(PersonBounds(1, 3)), delta=1e-4)
    assert "for a person at up to 3 clients; against" in several.line
    assert "of which at most 1 counts; for a person with records at up to 3 clients" in several.text


def test_it_costs_what_as_many_records_would() -> None:
    by_person, by_record = (
        guarantee(plan_for(bounds, unit), delta=1e-4)
        for bounds, unit in ((PersonBounds(7), Unit.PERSON), (None, Unit.RECORD))
    )
    assert by_person.epsilon == by_record.epsilon
    assert by_person.epsilon_replace_one == by_record.epsilon_replace_one
    assert by_person.releases[0].what == "8 steps on Poisson batches, 20 of 150 persons in expectation"


@pytest.mark.parametrize("bounds", [PersonBounds(4), PersonBounds(1, 5)])
def test_plans_and_guarantees_are_read_as_they_were_written(bounds: PersonBounds) -> None:
    plan = plan_for(bounds)
    stored = json.loads(json.dumps(plan.to_json()))
    assert stored["persons"] == {"records": bounds.records, "clients": bounds.clients}
    assert PrivacyPlan.from_json(stored) == plan
    promise = guarantee(plan, delta=1e-4)
    assert Guarantee.from_json(json.loads(json.dumps(promise.to_json()))) == promise
    for mistake in ({"records": 0, "clients": 1}, {"records": 2}, {"records": "4", "clients": 1}, None):
        with pytest.raises((PlanError, RangeError)):
            PrivacyPlan.from_json({**stored, "persons": mistake})


def test_plans_for_records_are_written_as_before() -> None:
    plan = plan_for(None, Unit.RECORD)
    assert "persons" not in plan.to_json()
    written = guarantee(plan, delta=1e-4).to_json()
    assert written.keys().isdisjoint({"persons", "epsilon_across_clients"})
    assert PrivacyPlan.from_json(plan.to_json()) == plan


def test_bounds_and_unit_come_together() -> None:
    with pytest.raises(PlanError, match="unit person with no bounds of a person"):
        plan_for(None)
    with pytest.raises(PlanError, match="unit record with PersonBounds"):
        plan_for(PersonBounds(2), Unit.RECORD)
    for records, clients in ((0, 1), (10**5, 1), (1, 0)):
        with pytest.raises(RangeError):
            PersonBounds(records, clients)


def test_noise_is_bound_to_the_bounds_unless_persons_are_records() -> None:
    record, one, two = (plan_for(None, Unit.RECORD), plan_for(PersonBounds(1)), plan_for(PersonBounds(2)))
    assert record.computed() == record.digest() == one.computed()
    assert len({record.digest(), one.digest(), two.digest(), two.computed()}) == 3
    assert replace(two, persons=PersonBounds(3)).computed() != two.computed()
