"""The published table's settings: epsilon at given noise against an independent computation."""

import math

import pytest
from privacy_oracles import quad_epsilon, record_plan

from coterie.privacy import Adjacency, PrivacyInputError, delta_of, epsilon_of

ZERO_OUT = Adjacency.ZERO_OUT

# (records, batch, epsilon, selections, first round, noise by RDP): noise printed by benchmarks/plan_grid.py.
GRID = [
    (8000, 32, 2, 0, True, 2.5846),
    (8000, 32, 2, 21, True, 2.6737),
    (8000, 32, 3, 21, True, 1.9145),
    (8000, 32, 5, 0, True, 1.2519),
    (8000, 32, 5, 21, True, 1.3008),
    (8000, 32, 10, 21, True, 0.8541),
    (8000, 32, 15, 0, True, 0.6900),
    (8000, 32, 15, 21, True, 0.7147),
    (8000, 32, 2, 0, False, 1.8364),
    (8000, 32, 5, 0, False, 1.0120),
    (8000, 32, 15, 0, False, 0.6512),
    (6600, 32, 5, 0, True, 1.3103),
    (6600, 32, 5, 0, False, 1.0785),
    (8000, 16, 2, 0, True, 2.2730),
    (8000, 16, 2, 0, False, 1.3807),
    (10000, 64, 3, 21, True, 2.1569),
    (6600, 64, 10, 21, True, 1.0575),
    (10000, 16, 5, 21, True, 1.1000),
]


@pytest.mark.parametrize(("records", "batch", "epsilon", "selections", "first", "noise"), GRID)
def test_epsilon_at_given_noise_is_never_below_the_independent_value(
    records, batch, epsilon, selections, first, noise
):
    options = {"records": records, "batch": batch, "selections": selections}
    plan = record_plan(
        noise=noise, first=noise if first else None, selection_epsilon=0.03 * epsilon, **options
    )
    found = epsilon_of(plan.units[0].event, 1e-4, "rdp", ZERO_OUT)
    rounds = 199 if first else 200
    releases = [(rounds * math.ceil(records / batch), batch / records, noise)]
    releases += [(1, 1.0, noise)] if first else []
    exact = quad_epsilon(releases, selections, 0.03 * epsilon, 1e-4)
    assert exact * (1 - 1e-6) <= found <= exact * (1 + 5e-4)
    # The noise was printed with four decimals for this budget.
    assert found == pytest.approx(epsilon, rel=5e-4)


def test_pld_value_of_the_example_sentence():
    event = record_plan(noise=1.3008, first=1.3008).units[0].event
    assert epsilon_of(event, 1e-4, "pld", ZERO_OUT) == pytest.approx(4.638, rel=1e-3)
    assert epsilon_of(event, 1e-4, "rdp", ZERO_OUT) == pytest.approx(5.0, rel=1e-3)


def test_training_alone_costs_by_pld_what_was_found_before():
    event = record_plan(noise=1.2519, first=1.2519, selections=0).units[0].event
    assert epsilon_of(event, 1e-4, "pld", ZERO_OUT) == pytest.approx(4.56, rel=2e-3)


def test_both_accountants_answer_both_questions_on_the_same_tree():
    event = record_plan(noise=2.0, first=8.0, rounds=20).units[0].event
    for accountant in ("rdp", "pld"):
        for adjacency in Adjacency:
            spent = epsilon_of(event, 1e-5, accountant, adjacency)
            assert delta_of(event, spent, accountant, adjacency) == pytest.approx(1e-5, rel=1e-3)


def test_unknown_accountant_is_refused():
    with pytest.raises(PrivacyInputError, match="moments"):
        epsilon_of(record_plan(noise=1.0, first=1.0).units[0].event, 1e-5, "moments", ZERO_OUT)
