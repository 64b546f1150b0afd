"""The example on a line: the printed numbers, the trap, and how the three ways of grouping end."""

import numpy as np
import pytest

from coterie.reproduce.two_clusters import (
    CURVATURE,
    OPTIMA,
    STRATEGIES,
    TRAPPED_START,
    Floats,
    choose_by_loss,
    play,
    same_groups,
    split_by_update,
    success,
)

BY_LOSS, BY_UPDATE, BOTH = STRATEGIES
LATE = (-4.5, 5.5)
"""Models of the two clusters after some rounds, as printed."""


def gradient(theta: float) -> Floats:
    """Of each client, as a round computes it."""
    return CURVATURE * (theta - OPTIMA)


def loss(theta: float) -> Floats:
    return CURVATURE / 2 * (theta - OPTIMA) ** 2


def test_losses_and_gradients_are_the_printed_ones() -> None:
    assert gradient(LATE[0])[:2].tolist() == [12.0, 4.0]
    assert gradient(LATE[1])[2:].tolist() == [4.0, -4.0]
    assert loss(LATE[0])[1] == 1.0
    assert loss(LATE[1])[1] == 21.0**2


def test_gradients_are_those_of_the_losses() -> None:
    for theta in (-7.0, 0.3, 11.0):
        slope = (loss(theta + 1e-6) - loss(theta - 1e-6)) / 2e-6
        assert gradient(theta) == pytest.approx(slope, rel=1e-6)


def test_the_trap_closes_beyond_twelve_and_not_at_the_printed_eleven() -> None:
    assert choose_by_loss((11.0, 0.0)) == (1, 1, 1, 0)
    assert choose_by_loss(TRAPPED_START) == (1, 1, 1, 1)
    assert gradient(0.0).sum() == 0.0, "everyone is stuck there: the mean update is nothing"


def test_late_updates_put_client_2_with_the_others_though_its_losses_are_plain() -> None:
    updates = np.array([*gradient(LATE[0])[:2], *gradient(LATE[1])[2:]])
    late = split_by_update(updates)
    assert not same_groups(late)
    assert same_groups(choose_by_loss(LATE))


@pytest.mark.parametrize(
    ("values", "expected"),
    [([48.0, 40.0, -40.0, -48.0], (1, 1, 0, 0)), ([1.0, 9.0, 2.0, 8.0], (0, 1, 0, 1))],
)
def test_the_best_cut_is_found(values: list[float], expected: tuple[int, ...]) -> None:
    assert split_by_update(np.array(values)) == expected


def test_from_a_bad_start_only_updates_first_and_losses_later_group_rightly() -> None:
    courses = {name: play(name, TRAPPED_START, 4.0, np.random.default_rng(0)) for name in STRATEGIES}
    assert not courses[BY_LOSS].found
    assert courses[BOTH].found
    assert sorted(courses[BOTH].models[-1]) == pytest.approx([-5.5, 5.5], abs=0.6)
    wrong = [not same_groups(groups) for groups in courses[BY_UPDATE].groups]
    assert any(wrong[5:]), "with models near their optima, updates mislead"


def test_over_random_starts_the_order_is_the_papers() -> None:
    shares = {name: success(name, 20.0, draws=40, seed=1) for name in STRATEGIES}
    assert shares[BOTH] > shares[BY_LOSS] > shares[BY_UPDATE]
    assert shares[BOTH] >= 0.95
