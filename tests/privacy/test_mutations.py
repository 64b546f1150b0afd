"""Mistakes that have been made elsewhere, made on purpose: each must be caught."""

import dataclasses

import numpy as np
import pytest
from privacy_oracles import noise_of, record_plan
from scipy import stats

from coterie.privacy import (
    Adjacency,
    Budget,
    BudgetError,
    Charge,
    Ledger,
    Mode,
    PoissonSteps,
    SecretKey,
    ShuffledSteps,
    calibrate,
    epsilon_of,
    guarantee,
)
from slow_mechanisms import noisy_mean

BUDGET = Budget(5.0, 1e-4)
HONEST = calibrate(record_plan(), BUDGET)
NOISE = noise_of(HONEST)


def cost(plan, adjacency=Adjacency.ZERO_OUT):
    return epsilon_of(plan.units[0].event, BUDGET.delta, "rdp", adjacency)


def refused(plan):
    """Whether the check that every run starts with turns the plan down."""
    try:
        calibrate(plan, BUDGET)
    except BudgetError:
        return True
    return False


def test_the_honest_plan_passes():
    assert not refused(HONEST)


def test_nine_tenths_of_the_noise_are_caught_by_accounting():
    assert refused(record_plan(noise=0.9 * NOISE, first=0.9 * NOISE))


def test_nine_tenths_of_the_noise_are_caught_by_looking_at_it():
    stream = SecretKey.from_seed(1).stream("noise", subject="a", round=1, release="t", input_hash="0")
    declared = PoissonSteps(1.0, NOISE, 8000, 32, 1, Adjacency.ZERO_OUT)
    mutant = dataclasses.replace(declared, noise_multiplier=0.9 * NOISE)
    for mechanism, passes in ((declared, True), (mutant, False)):
        sample = noisy_mean(mechanism, [], 60_000, 32, stream)
        pvalue = float(stats.kstest(sample, "norm", args=(0.0, NOISE / 32)).pvalue)
        assert (pvalue > 1e-6) == passes


def test_a_forgotten_first_round_is_caught():
    forgotten = noise_of(calibrate(record_plan(first=None), BUDGET))
    assert refused(record_plan(noise=forgotten, first=forgotten))


def test_one_selection_more_than_planned_is_caught(tmp_path):
    assert refused(record_plan(noise=NOISE, first=NOISE, selections=22))
    with Ledger.open(tmp_path / "ledger.jsonl", HONEST, budget=BUDGET, accountant="rdp") as ledger:
        for number in range(21):
            ledger.charge([Charge("client 3", number, "selection", "0")])
        with pytest.raises(BudgetError):
            ledger.charge([Charge("client 3", 21, "selection", "0")])


def test_dividing_by_the_realised_batch_is_caught():
    mechanism = PoissonSteps(1.0, NOISE, 8000, 32, 1, Adjacency.ZERO_OUT)
    rng = np.random.default_rng(3)
    batch = list(rng.normal(size=(40, 6)) + 1.0)

    def moved(denominator):
        one, two = (
            noisy_mean(
                mechanism,
                records,
                6,
                denominator(records),
                SecretKey.from_seed(2).stream("noise", subject="a", round=1, release="t", input_hash="0"),
            )
            for records in (batch, batch[1:])
        )
        return float(np.linalg.norm(one - two))

    # Between neighbours with equal noise, the mean may move by the declared sensitivity over the constant.
    allowed = mechanism.adjacency.reach * mechanism.clip / mechanism.denominator
    assert moved(lambda records: mechanism.denominator) <= allowed
    # With the realised size the noise moves too, and with loud noise by more than any record could.
    mechanism = dataclasses.replace(mechanism, noise_multiplier=100 * NOISE)
    assert moved(lambda records: mechanism.denominator) <= allowed
    assert moved(len) > allowed


def test_a_shuffled_loader_accounted_as_poisson_is_caught():
    assert refused(record_plan(noise=NOISE, first=NOISE, steps=ShuffledSteps))
    assert cost(record_plan(noise=NOISE, first=NOISE, steps=ShuffledSteps)) > 20 * BUDGET.epsilon


def test_replacement_accounted_with_the_sensitivity_of_zeroing_is_caught():
    assert refused(record_plan(noise=NOISE, first=NOISE, adjacency=Adjacency.REPLACE_ONE))
    assert cost(HONEST, Adjacency.REPLACE_ONE) > 2 * BUDGET.epsilon


def test_a_published_plan_is_not_sold_as_sound():
    published = guarantee(HONEST, delta=1e-4, mode=Mode.PAPER)
    assert published.mode is Mode.PAPER
    assert published.line.startswith("paper: published eps=")
    assert "which is not proven" in published.text
