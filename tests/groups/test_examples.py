"""The publication's three workers: one group of all, or {0, 1} and {1, 2}, merging every second epoch."""

import numpy as np
import pytest

from coterie.groups import GroupAlgorithm, GroupSchedule, Structure, Threat, global_structure, leakage
from coterie.privacy import Mode

STRING = Structure("three workers", ((0, 1), (1, 2)), 3)
OGL, PLUS = GroupAlgorithm.DP_OGL, GroupAlgorithm.DP_OGL_PLUS
NONE = -1


def found(structure, algorithm=OGL, mode=Mode.SOUND, threat=None):
    schedule = GroupSchedule.of(
        len(structure.groups), period=2, rate=1.0, noise=2.0, algorithm=algorithm, mode=mode
    )
    return leakage(structure, schedule, epoch=4, delta=1e-5, threat=threat)


def test_one_group_has_made_three_releases():
    assert found(global_structure(3)).counts.tolist() == [[NONE, 3, 3], [3, NONE, 3], [3, 3, NONE]]


def test_two_groups():
    assert found(STRING).counts.tolist() == [[NONE, 3, 2], [5, NONE, 5], [2, 3, NONE]]


def test_plus_as_published_shows_outsiders_one_release_and_its_theorem_none():
    result = found(STRING, PLUS, Mode.PAPER)
    assert result.counts.tolist() == [[NONE, NONE, 1], [NONE] * 3, [1, NONE, NONE]]
    assert result.published_counts.tolist() == [[NONE, NONE, 0], [NONE] * 3, [0, NONE, NONE]]


def test_sound_plus_shows_outsiders_nothing():
    result = found(STRING, PLUS)
    assert result.counts.tolist() == [[NONE, NONE, 0], [NONE] * 3, [0, NONE, NONE]]
    assert result.epsilon[0, 2] == 0
    assert np.isnan(result.per_worker[1])


def test_sound_plus_protects_members_too():
    result = found(STRING, PLUS, threat=Threat.ANYONE)
    assert result.counts.tolist() == [[NONE, 1, 0], [1, NONE, 1], [0, 1, NONE]]


def test_published_theorem_contradicts_the_published_example():
    result = found(STRING, mode=Mode.PAPER)
    assert result.published_counts.tolist() == [[NONE, 3, 0], [3, NONE, 3], [0, 3, NONE]]
    assert result.counts.tolist() == [[NONE, 3, 2], [5, NONE, 5], [2, 3, NONE]]
    assert np.nanmax(result.published_epsilon - result.epsilon_counts) <= 0


def test_what_the_middle_worker_leaks_through_the_other_group_comes_back_through_itself_only():
    """Behind a cut at the other group, three releases bound what five were charged for."""
    result = found(STRING)
    alone = found(global_structure(3)).epsilon_counts[0, 1]
    assert result.epsilon_counts[1, 0] > alone
    assert result.epsilon[1, 0] == pytest.approx(alone)
