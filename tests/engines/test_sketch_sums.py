"""What all clients release of their sketches: bounded whatever they hold, charged as planned."""

import json
from dataclasses import replace
from pathlib import Path

import dp_accounting as dp
import numpy as np
import pytest
import torch
from cohort_setup import ADD_REMOVE, TRAINING, Engine, models_of, names_of, same_streams
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.algorithms.protocol import Choice, Cohort, CohortJob, Sketch, Sum
from coterie.algorithms.sketches import SketchStatistic, moment_numbers, read_moments
from coterie.engines.cohorts import cohort_hash
from coterie.engines.computing import at_once
from coterie.errors import PlanError
from coterie.privacy import (
    POPULATION,
    Adjacency,
    Budget,
    Mechanism,
    NoiseRule,
    PlannedRelease,
    PrivacyPlan,
    SketchSums,
    ThreatModel,
    Unit,
    UnitPlan,
    calibrate,
    epsilon_of,
)
from coterie.privacy.plans import SUMS, CohortReleases, client_plan
from coterie.privacy.sketch_sums import EVERYONE
from coterie.training.local_sgd import balanced_gradient, mean_gradient

DIMENSIONS, TWELVE = 5, names_of(12)
START = models_of(1)[0]
RNG = np.random.default_rng(8)
KNOWN = Sketch(
    START,
    DIMENSIONS,
    mean=0.3 * RNG.normal(size=DIMENSIONS),
    basis=np.linalg.qr(RNG.normal(size=(DIMENSIONS, 3)))[0],
    frequencies=4 * RNG.normal(size=(20, 3)),
    centres=0.5 * RNG.normal(size=(4, 3)),
)
SKETCHES = {statistic: replace(KNOWN, statistic=statistic) for statistic in SketchStatistic}


def mechanism_of(sketch: Sketch, noise: float = 2.0, ratio: float = 1.5) -> SketchSums:
    told = {"numbers": sketch.numbers, "clients": 12, "ratio": ratio, "about": "something of it"}
    return SketchSums(1.0, noise, EVERYONE, ADD_REMOVE, **told)


def plan_of(mechanism: Mechanism) -> PrivacyPlan:
    unit = UnitPlan(POPULATION, (PlannedRelease("sums", mechanism, 1),))
    return PrivacyPlan(Unit.CLIENT, ADD_REMOVE, ThreatModel("whoever", "everything"), (unit,))


def released(folder: Path, sketch: Sketch, members: tuple[str, ...], noise: float = 2.0) -> np.ndarray:
    folder.mkdir()
    with Engine(folder, plan_of(mechanism_of(sketch, noise)), members) as engine:
        engine.cohorts.facts = same_streams(engine)
        job = CohortJob(members, START[None], TRAINING, sketch=sketch)
        return engine.cohorts.add_up(Sum(engine.cohorts.open(Cohort("sums", job), 1))).rows.value[0]


@pytest.mark.parametrize("statistic", SketchStatistic)
def test_one_client_less_moves_a_sum_by_its_own_contribution_and_no_more_than_one(
    statistic: SketchStatistic, tmp_path: Path
) -> None:
    """Neighbours with the same coins and noise; the whole vector is under one clip."""
    sketch = SKETCHES[statistic]
    moved = released(tmp_path / "with", sketch, TWELVE) - released(tmp_path / "without", sketch, TWELVE[1:])
    with Engine(tmp_path, plan_of(mechanism_of(sketch)), TWELVE) as engine:
        own = sketch.contribution(engine.clients.sketch(TWELVE[0], START, DIMENSIONS))
    np.testing.assert_allclose(moved, own, atol=1e-4)
    assert 0.9 < np.linalg.norm(moved) <= 1.0


@pytest.mark.parametrize("statistic", SketchStatistic)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_sketch_of_length_one_adds_more_than_one(statistic: SketchStatistic, data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.floats(-1, 1), min_size=DIMENSIONS, max_size=DIMENSIONS))
    point = np.array(drawn) / max(1.0, float(np.linalg.norm(drawn)))
    added = SKETCHES[statistic].contribution(point)
    assert len(added) == SKETCHES[statistic].numbers
    assert np.linalg.norm(added) <= 1 + 1e-12


def test_noise_is_the_planned_one_in_every_number(tmp_path: Path) -> None:
    """Without clients' contributions: the engine's noise, against a standard deviation of 3 = 1.5 x 2."""
    sketch = replace(KNOWN, statistic=SketchStatistic.FEATURES, frequencies=np.ones((600, 3)))
    quiet = released(tmp_path / "quiet", sketch, TWELVE, noise=0.0)
    noise = released(tmp_path / "noisy", sketch, TWELVE) - quiet
    # 1,200 numbers: the deviation is known to 2 %, so that 90 % of the noise would be seen (5 deviations).
    assert np.std(noise) == pytest.approx(3.0, rel=0.09)
    assert abs(noise.mean()) < 5 * 3.0 / np.sqrt(len(noise))


def test_a_mechanism_is_written_and_read_and_costs_a_gaussian(tmp_path: Path) -> None:
    mechanism = mechanism_of(SKETCHES[SketchStatistic.MOMENTS])
    assert Mechanism.read(json.loads(json.dumps(mechanism.to_json()))) == mechanism
    assert mechanism.multiplier == mechanism.noise_std == 3.0
    independent = dp.rdp.RdpAccountant().compose(dp.GaussianDpEvent(3.0)).get_epsilon(1e-4)
    assert epsilon_of(mechanism.event, 1e-4, "rdp", ADD_REMOVE) == pytest.approx(independent, rel=1e-3)
    with pytest.raises(Exception, match="rate"):
        Mechanism.read({**mechanism.to_json(), "rate": 0.5})


@pytest.mark.parametrize("epsilon", [2.0, 4.0])
def test_sketches_and_training_are_charged_together_as_an_independent_composition_does(
    epsilon: float,
) -> None:
    told = {"numbers": 9, "clients": 840, "about": "something"}
    first = [
        PlannedRelease(name, SketchSums(1.0, NoiseRule.AUTO, EVERYONE, ADD_REMOVE, ratio=ratio, **told), 1)
        for name, ratio in (("moments", 1.0), ("features", 0.8), ("sizes", 2.1))
    ]
    draft = client_plan(CohortReleases(0.1, 0.1).sums(), 149, first=first)
    plan = calibrate(draft, Budget(epsilon, 1e-3), accountant="rdp")
    (unit,) = plan.units
    base, *_ = (release.mechanism.noise_multiplier for release in unit.releases)
    sums = unit.release(SUMS).mechanism.multiplier
    accountant = dp.rdp.RdpAccountant()
    for ratio in (1.0, 0.8, 2.1):
        accountant.compose(dp.GaussianDpEvent(ratio * base))
    accountant.compose(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(sums)), 149)
    spent = epsilon_of(unit.event, 1e-3, "rdp", ADD_REMOVE)
    assert spent <= epsilon
    # dp-accounting overestimates fractional orders, by up to 6 %; less than ours it never says.
    assert spent <= accountant.get_epsilon(1e-3) * (1 + 1e-6)
    assert spent == pytest.approx(accountant.get_epsilon(1e-3), rel=0.06)
    alone = calibrate(client_plan(CohortReleases(0.1, 0.1).sums(), 149), Budget(epsilon, 1e-3))
    without = alone.units[0].release(SUMS).mechanism.multiplier
    assert 1.0 < sums / without < 1.16
    # With 90 % of any noise the budget is overspent.
    for name in ("moments", SUMS):
        louder = tuple(
            replace(each, mechanism=each.mechanism.with_noise(0.9 * each.mechanism.noise_multiplier))
            if each.name == name
            else each
            for each in unit.releases
        )
        assert epsilon_of(replace(unit, releases=louder).event, 1e-3, "rdp", ADD_REMOVE) > epsilon


def test_moments_are_read_back() -> None:
    points = RNG.normal(size=(7, DIMENSIONS))
    summed = sum(SKETCHES[SketchStatistic.MOMENTS].contribution(point) for point in points)
    sums, squares = read_moments(np.asarray(summed), DIMENSIONS)
    np.testing.assert_allclose(sums, points.sum(axis=0))
    np.testing.assert_allclose(squares, points.T @ points)
    assert moment_numbers(DIMENSIONS) == len(np.asarray(summed))


def test_only_what_was_planned_is_summed(tmp_path: Path) -> None:
    features = SKETCHES[SketchStatistic.FEATURES]
    with Engine(tmp_path, plan_of(mechanism_of(features)), TWELVE) as engine:
        for other in (
            CohortJob(TWELVE, START[None], TRAINING, sketch=SKETCHES[SketchStatistic.MOMENTS]),
            CohortJob(TWELVE, START[None], TRAINING),
            CohortJob(TWELVE, models_of(4), TRAINING, Choice.SKETCH, sketch=KNOWN),
        ):
            with pytest.raises(PlanError, match="planned for another contribution"):
                engine.cohorts.open(Cohort("sums", other), 1)
        assert engine.lines() == 1  # nothing was charged


def test_the_hash_binds_all_that_sketches_depend_on() -> None:
    def hashed(sketch: Sketch) -> str:
        return cohort_hash("context", CohortJob(TWELVE, START[None], TRAINING, sketch=sketch))

    one = SKETCHES[SketchStatistic.FEATURES]
    others = [
        replace(one, statistic=SketchStatistic.SIZES),
        *(
            replace(one, **{part: 2 * getattr(one, part)})
            for part in ("start", "mean", "basis", "frequencies", "centres")
        ),
    ]
    assert len({hashed(each) for each in (one, *others)}) == 7


def test_a_client_chooses_the_component_that_is_nearest_to_its_own_sketch(tmp_path: Path) -> None:
    with Engine(tmp_path, plan_of(mechanism_of(SKETCHES[SketchStatistic.SIZES])), TWELVE) as engine:
        job = CohortJob(TWELVE, models_of(4), TRAINING, Choice.SKETCH, sketch=KNOWN)
        chosen = at_once(engine.members._choose(TWELVE, job))
        for member, choice in zip(TWELVE, chosen, strict=True):
            point = engine.clients.sketch(member, START, DIMENSIONS)
            assert np.linalg.norm(point) == pytest.approx(1.0)
            apart = [np.linalg.norm((point - KNOWN.mean) @ KNOWN.basis - centre) for centre in KNOWN.centres]
            assert choice == np.argmin(apart)


@pytest.mark.parametrize("leaves", [0, 5, 11])
def test_one_client_less_moves_one_routed_sum_by_at_most_the_clip(leaves: int, tmp_path: Path) -> None:
    """Routed by sizes that were released before: the same matrix in both worlds, and coins of one's own."""
    route = np.array([[0.4, 0.2, 0.2, 0.2], [0.0, 1.0, 0.0, 0.0], [0.1, 0.1, 0.7, 0.1], [0.0, 0.5, 0.0, 0.5]])
    mechanism, rows = CohortReleases(1.0, 0.3).sums().with_noise(2.0), []
    for world in (TWELVE, TWELVE[:leaves] + TWELVE[leaves + 1 :]):
        folder = tmp_path / str(len(world))
        folder.mkdir()
        with Engine(folder, plan_of(mechanism), world) as engine:
            engine.cohorts.facts = same_streams(engine)
            job = CohortJob(world, models_of(4), TRAINING, Choice.SKETCH, sketch=KNOWN)
            opened = engine.cohorts.open(Cohort("sums", job), 1)
            rows.append(engine.cohorts.add_up(Sum(opened, route)).rows.value)
    lengths = np.linalg.norm(rows[0] - rows[1], axis=1)
    assert (lengths > 1e-9).sum() == 1
    assert 0.1 < lengths.max() <= 0.3


def test_every_class_counts_alike_in_a_balanced_gradient(tmp_path: Path) -> None:
    with Engine(tmp_path, plan_of(mechanism_of(SKETCHES[SketchStatistic.SIZES])), TWELVE) as engine:
        records, start = engine.records[TWELVE[3]], torch.from_numpy(START)
        parts = [
            mean_gradient(engine.learner, start, records.take(records.targets == each))
            for each in torch.unique(records.targets)
        ]
        expected = sum(parts) / len(parts)
        torch.testing.assert_close(balanced_gradient(engine.learner, start, records), expected)


def test_a_sketch_is_for_those_who_choose_by_it_or_add_something_of_it() -> None:
    with pytest.raises(ValueError, match="sketch"):
        CohortJob(TWELVE, models_of(4), TRAINING, Choice.SKETCH)
    with pytest.raises(ValueError, match="sketch"):
        CohortJob(TWELVE, models_of(4), TRAINING, Choice.LOWEST_LOSS, sketch=KNOWN)


def test_replacing_a_client_is_charged_twice_as_far() -> None:
    event = mechanism_of(SKETCHES[SketchStatistic.MOMENTS]).event
    twice = epsilon_of(dp.GaussianDpEvent(1.5), 1e-4, "rdp", ADD_REMOVE)
    assert epsilon_of(event, 1e-4, "rdp", Adjacency.REPLACE_ONE) == pytest.approx(twice, rel=1e-6)
