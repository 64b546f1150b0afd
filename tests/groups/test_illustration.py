"""The published degradation: its own example, and why it may not be called a bound."""

import numpy as np
import pytest
from illustration import ConvexTraining, degradation_factors, illustrated_share

from coterie.errors import InputError
from coterie.groups import GroupSchedule, Structure, ring, string

CALM = ConvexTraining(clip=1.0, smoothness=1.0, learning_rate=0.2, iterations=1)


def schedule_of(groups, period=2, noise=1.0):
    return GroupSchedule.of(groups, period=period, rate=1.0, noise=noise)


def test_published_example_passes_one_noisy_sum():
    structure = string(3, 2)
    schedule = schedule_of(2)
    factors = degradation_factors(structure, schedule, CALM, 3, order=2.0)
    share = illustrated_share(structure, schedule, CALM, 0, 2, 4, order=2.0)
    assert share == pytest.approx(factors[2, 1])
    assert 0 < share < 1


def test_members_and_the_targets_own_groups_degrade_nothing():
    structure = string(3, 2)
    assert illustrated_share(structure, schedule_of(2), CALM, 0, 1, 4, order=2.0) == 1
    assert illustrated_share(structure, schedule_of(2), CALM, 1, 0, 4, order=2.0) == 1


def test_farther_observers_are_shown_less():
    structure = string(9, 4)
    shares = [illustrated_share(structure, schedule_of(4), CALM, 0, i, 20, order=2.0) for i in (3, 5, 7)]
    assert shares == sorted(shares, reverse=True)


def exact_over_order(members, epochs, learning_rate):
    """Exact R / order for groups {0, 1} and {1, ..., members}, merging every second epoch, noise and clip 1.

    Worker 0 sends its clip, worker 1 follows the gradient of x^2 / 2, the others' losses are flat. What
    worker 1 sends stays ten standard deviations within the clip, so models are Gaussian.
    """
    sizes = (2, members)
    unit = np.eye(2 * epochs + 1)
    models = [np.zeros(len(unit)), np.zeros(len(unit))]
    seen = []
    for epoch in range(epochs):
        merged = (models[0] + models[1]) / 2
        following = []
        for group in (0, 1):
            start = merged if epoch % 2 == 0 else models[group]
            total = unit[2 * epoch + group] - learning_rate * start
            if group == 0:
                total = total + unit[-1]
            following.append(models[group] + total / sizes[group])
        models = following
        seen.append(models[1])
    table = np.array(seen)
    noise, shift = table[:, :-1], table[:, -1]
    spread = learning_rate * np.linalg.norm(merged[:-1])
    assert 10 * spread + learning_rate * abs(merged[-1]) < 1
    return 0.5 * float(shift @ np.linalg.solve(noise @ noise.T, shift))


def test_exact_divergence_of_quadratic_losses_exceeds_the_published_value():
    members = 300
    structure = Structure("string", ((0, 1), tuple(range(1, members + 1))), members + 1)
    share = illustrated_share(structure, schedule_of(2), CALM, 0, 2, 4, order=1.01)
    published = 2 * 0.5 * share  # two releases, each 1/2 per order
    assert exact_over_order(members, 3, CALM.learning_rate) > 2 * published
    # While the counts, which are proven, hold.
    assert exact_over_order(members, 3, CALM.learning_rate) < 2 * 0.5


def test_other_structures_and_rates_are_refused():
    with pytest.raises(InputError, match="a string"):
        degradation_factors(ring(8, 4), schedule_of(4), CALM, 3, 2.0)
    with pytest.raises(InputError, match="rate 1"):
        degradation_factors(string(3, 2), GroupSchedule.of(2, period=2, rate=0.7, noise=1.0), CALM, 3, 2.0)
