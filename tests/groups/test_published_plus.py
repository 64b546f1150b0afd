"""DP-OGL+ as published: members exchange models without clip or noise, so one worker moves what all send."""

import math

import numpy as np
import pytest
from group_simulation import clipped

from coterie.groups import GroupAlgorithm, GroupSchedule, Structure, leakage
from coterie.privacy import Mode

WORKERS, PERIOD, CLIP = 26, 2, 0.05
LIMIT = math.sqrt(PERIOD) * CLIP
"""How far the publication lets one worker move the clipped sum of a block."""


def quadratic(optimum, step):
    """One gradient step on the convex loss (x - optimum)^2 / 2; a step above 2 overshoots and diverges."""
    return lambda start: start - step * (start - optimum)


def block_sum(workers, synchronised):
    """The sum of clipped updates of one block, before noise, from the block's start model 0."""
    if synchronised:
        # As published: after every epoch all continue from the group's mean, neither clipped nor noisy.
        model, totals = 0.0, np.zeros(len(workers))
        for _ in range(PERIOD):
            moves = np.array([worker(model) - model for worker in workers])
            totals += moves
            model += moves.mean()
    else:
        totals = np.zeros(len(workers))
        for index, worker in enumerate(workers):
            local = 0.0
            for _ in range(PERIOD):
                local = worker(local)
            totals[index] = local
    return sum(clipped(np.array([total]), LIMIT)[0] for total in totals)


def moved(synchronised):
    """How far the sum moves when one worker falls silent, in units of what the publication allows."""
    others = [quadratic(1.0, 0.5)] * (WORKERS - 1)
    loud = quadratic(1e6, 60.0)
    silent = lambda start: start  # noqa: E731
    present = block_sum([loud, *others], synchronised)
    absent = block_sum([silent, *others], synchronised)
    return abs(present - absent) / LIMIT


def test_published_version_exceeds_its_sensitivity_by_far():
    """With convex losses alone the sum moves 51 times as far: once for the worker, twice for all others."""
    assert moved(synchronised=True) > 26
    assert moved(synchronised=True) == pytest.approx(2 * WORKERS - 1, rel=1e-6)


def test_sound_version_stays_within_its_sensitivity():
    assert moved(synchronised=False) <= 1 + 1e-9
    rng = np.random.default_rng(0)
    for _ in range(200):
        workers = [quadratic(rng.normal() * 10 ** rng.uniform(0, 6), rng.uniform(0, 4)) for _ in range(5)]
        absent = [lambda start: start, *workers[1:]]
        assert abs(block_sum(workers, False) - block_sum(absent, False)) <= LIMIT * (1 + 1e-9)


def test_what_is_proven_of_the_published_version_charges_every_member():
    structure = Structure("two groups", (tuple(range(26)), (25, 26)), 27)
    schedule = GroupSchedule.of(
        2,
        period=2,
        rate=0.7,
        noise=2.0,
        algorithm=GroupAlgorithm.DP_OGL_PLUS,
        mode=Mode.PAPER,
    )
    multipliers = [noise.multiplier for noise in schedule.accounted(structure.groups).noises]
    assert multipliers == [2.0 / 51, 2.0 / 3]
    found = leakage(structure, schedule, epoch=40, delta=1e-5)
    assert found.epsilon[0, 26] > 500 * found.published_epsilon[0, 26]
    assert np.isnan(found.epsilon[0, 1])


def test_without_epochs_inside_a_block_the_published_version_is_sound():
    structure = Structure("two groups", ((0, 1), (1, 2)), 3)
    values = [
        leakage(
            structure,
            GroupSchedule.of(
                2, period=1, rate=0.7, noise=2.0, algorithm=GroupAlgorithm.DP_OGL_PLUS, mode=mode
            ),
            epoch=20,
            delta=1e-5,
        ).epsilon[0, 2]
        for mode in Mode
    ]
    assert values[0] == values[1]
