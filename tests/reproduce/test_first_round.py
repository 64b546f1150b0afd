"""The accountant's figures: batches of round 1 and of later rounds against the noise of a run."""

import math

import pytest

from coterie.reproduce.declared import EVERYTHING, ScaleName, find, sweep_of
from coterie.reproduce.illustrations import NoiseExample, noise_multiplier, update_variance


def test_the_multiplier_without_a_full_batch_is_that_of_plain_dpsgd() -> None:
    """21 digits aside, 1.374 is what 50,000 steps at rate 32/8000 need for epsilon 3."""
    assert noise_multiplier(NoiseExample(records=8000, epsilon=3.0), 32, 32) == pytest.approx(
        1.3743, abs=1e-4
    )


def test_the_noise_grows_with_either_batch_and_more_with_the_later_ones() -> None:
    client = NoiseExample()
    base = noise_multiplier(client, 64, 64)
    assert base < noise_multiplier(client, client.records, 64) < noise_multiplier(client, 64, 256)


def test_the_variance_is_that_of_the_sum_of_noisy_steps() -> None:
    client = NoiseExample(records=1000, parameters=7, clip=2.0, lr=0.1, rounds=5)
    z = noise_multiplier(client, 100, 30)
    # 10 steps of round 1, 34 of a later one; each adds lr * c * z / b in every coordinate.
    assert update_variance(client, 100, 30, in_round_1=True) == pytest.approx(
        10 * 7 * (0.1 * 2.0 * z / 100) ** 2
    )
    assert update_variance(client, 100, 30, in_round_1=False) == pytest.approx(
        34 * 7 * (0.1 * 2.0 * z / 30) ** 2
    )


def test_a_full_first_batch_lowers_the_noise_of_round_1_by_orders_of_magnitude() -> None:
    client = NoiseExample()
    small = update_variance(client, 32, 32, in_round_1=True)
    full = update_variance(client, client.records, 32, in_round_1=True)
    assert math.log10(small / full) > 6


@pytest.mark.parametrize("scale", ScaleName)
def test_the_declared_noise_of_round_1_is_what_200_rounds_would_need(scale: ScaleName) -> None:
    sweep = sweep_of(find("rdpcfl-first-round"), scale, EVERYTHING)
    assert sweep is not None
    cells = sweep.cells()
    assert len(cells) == 6
    for cell in cells:
        federation = cell.experiment.federation.model_dump()
        options = cell.experiment.algorithm.model_dump()
        records = federation["records_per_client"]
        first = records if options["first_round_batch"] == "all" else options["first_round_batch"]
        client = NoiseExample(records=records, epsilon=cell.experiment.privacy.epsilon)
        needed = noise_multiplier(client, first, cell.experiment.schedule.batch)
        assert options["first_round_noise"] == pytest.approx(needed, abs=1e-4)
