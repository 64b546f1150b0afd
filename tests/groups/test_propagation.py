"""Counts of releases: three ways that must agree, and the published formula where it does not."""

import itertools

import numpy as np
import pytest
from group_oracles import contained, random_structure, tainted_counts

from coterie.groups import (
    GroupAlgorithm,
    GroupSchedule,
    clustered,
    drawn_labels,
    label,
    leakage,
    ring,
    string,
)
from coterie.groups.propagation import contained_at, published_contained_at
from coterie.privacy import Mode

PLUS = GroupAlgorithm.DP_OGL_PLUS


def schedule_for(structure, period, algorithm=GroupAlgorithm.DP_OGL, mode=Mode.SOUND):
    groups = len(structure.groups)
    return GroupSchedule.of(groups, period=period, rate=0.5, noise=1.0, algorithm=algorithm, mode=mode)


def out_of_group(structure):
    table = structure.membership.astype(int)
    return table @ table.T == 0


def structures():
    rng = np.random.default_rng(3)
    named = [ring(12, 4), ring(10, 5), string(9, 4), clustered(6, 3), label(drawn_labels(8, 1), 5)]
    return named + [random_structure(rng) for _ in range(12)]


@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [(GroupAlgorithm.DP_OGL, Mode.SOUND), (PLUS, Mode.SOUND), (PLUS, Mode.PAPER)],
)
def test_counts_equal_the_sets_of_releases_that_views_contain(algorithm, mode):
    checked = 0
    for structure, period in itertools.product(structures(), (1, 2, 3, 5)):
        schedule = schedule_for(structure, period, algorithm, mode)
        for epoch, expected in tainted_counts(structure, schedule, 13).items():
            found = leakage(structure, schedule, epoch=epoch, delta=1e-5)
            assert np.array_equal(found.counts[found.defined], expected[found.defined])
            checked += int(found.defined.sum())
    assert checked > 10_000


@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [(GroupAlgorithm.DP_OGL, Mode.SOUND), (PLUS, Mode.SOUND), (PLUS, Mode.PAPER)],
)
def test_propagation_equals_the_closed_form_on_random_structures(algorithm, mode):
    rng = np.random.default_rng(7)
    checked = 0
    for _ in range(250):
        structure = random_structure(rng, most_workers=14, most_groups=8)
        period, epoch = int(rng.integers(1, 8)), int(rng.integers(1, 60))
        schedule = schedule_for(structure, period, algorithm, mode)
        found = contained(structure.overlap, schedule, epoch)
        formula = contained_at(structure.distances, schedule, epoch)
        # As published, members see their own group without noise: there the number has no meaning.
        where = structure.distances > 0 if schedule.publishes_drafts else np.ones_like(found, dtype=bool)
        assert np.array_equal(found[where], formula[where])
        checked += int(where.sum())
    assert checked > 2000


def test_published_floor_is_too_small_exactly_where_a_block_is_unfinished():
    wrong = agreed = 0
    for structure, period, epoch in itertools.product(structures(), (1, 2, 3, 5), range(1, 14)):
        schedule = schedule_for(structure, period)
        true = contained_at(structure.distances, schedule, epoch)
        published = published_contained_at(structure.distances, schedule, epoch)
        assert np.all(published <= true)
        if (epoch - 1) % period == 0:
            assert np.array_equal(published, true)
            agreed += 1
        else:
            visible = (structure.distances > 0) & (true > 0)
            assert np.array_equal(published != true, visible)
            wrong += int(visible.sum())
    assert wrong > 100
    assert agreed > 100


def test_published_plus_formula_ignores_the_models_inside_a_block():
    structure = string(3, 2)
    published = schedule_for(structure, 2, PLUS, Mode.PAPER)
    hop = np.array([1.0])
    assert published_contained_at(hop, published, 4) == [0]
    assert contained_at(hop, published, 4) == [1]
    assert published_contained_at(hop, published, 5) == contained_at(hop, published, 5) == [1]


def test_effect_of_the_correction_at_200_epochs():
    for period, distance, releases, claimed in ((10, 1, 190, 180), (25, 1, 175, 150), (25, 2, 150, 125)):
        schedule = GroupSchedule.of(1, period=period, rate=0.7, noise=2.0)
        hops = np.array([float(distance)])
        assert contained_at(hops, schedule, 200) == [releases]
        assert published_contained_at(hops, schedule, 200) == [claimed]


def test_counts_grow_with_epochs_and_shrink_with_distance():
    structure = string(11, 5)
    schedule = schedule_for(structure, 3)
    before = np.zeros((5, 5))
    for epoch in range(1, 40):
        known = contained_at(structure.distances, schedule, epoch)
        assert np.all(known >= before)
        for row, hops in zip(known, structure.distances, strict=True):
            assert np.all(np.diff(row[np.argsort(hops)]) <= 0)
        before = known
