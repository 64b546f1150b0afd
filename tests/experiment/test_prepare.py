"""What is settled before anything is written or released: plan, noise and promise of every client."""

import pytest

from coterie.experiment.files import read_experiment
from coterie.experiment.runner import prepare
from coterie.privacy import PoissonSteps, epsilon_of

SMALL = [
    "federation.sizes=[2,3]",
    "federation.records_per_client=60",
    "schedule.rounds=5",
    "schedule.batch=20",
]


def noise_of(client: str, overrides: list[str]) -> float:
    mechanism = (
        prepare(read_experiment(None, overrides)).plan.for_subject(client).release("training").mechanism
    )
    assert isinstance(mechanism, PoissonSteps)
    return mechanism.multiplier


def test_every_client_gets_the_noise_of_its_own_budget() -> None:
    overrides = [*SMALL, "privacy.epsilon=8", "privacy.budgets={client-1: {epsilon: 2, delta: 1.0e-5}}"]
    prepared = prepare(read_experiment(None, overrides))
    for unit in prepared.plan.units:
        budget = prepared.budgets[unit.subject]
        spent = epsilon_of(unit.event, budget.delta, "rdp", prepared.plan.adjacency)
        assert 0.99 * budget.epsilon < spent <= budget.epsilon
    assert noise_of("client-1", overrides) > 2 * noise_of("client-0", overrides)
    assert prepared.guarantee.epsilon == pytest.approx(8, rel=1e-3)


def test_a_name_that_is_no_client_is_refused() -> None:
    from coterie.errors import InputError

    with pytest.raises(InputError, match=r"privacy.budgets: no client is called 'mars'"):
        prepare(read_experiment(None, [*SMALL, "privacy.budgets={mars: {epsilon: 2}}"]))


def test_delta_left_open_is_a_tenth_of_one_over_the_records_rounded_down() -> None:
    prepared = prepare(read_experiment(None, SMALL))
    assert {budget.delta for budget in prepared.budgets.values()} == {1e-3}
