"""Each mechanism says what it samples, adds, divides by and costs, and these agree."""

import dataclasses

import dp_accounting as dp
import pytest

from coterie.privacy import (
    AccuracySelection,
    Adjacency,
    CohortSums,
    FixedSample,
    FullBatchSketch,
    FullBatchSteps,
    NoiseRule,
    NoisyScores,
    PlanError,
    PoissonSample,
    PoissonSteps,
    PrivacyInputError,
    PrivateSelection,
    ShuffledSteps,
)
from coterie.privacy.events import SelectionDpEvent, ShuffledEpochDpEvent

ZERO_OUT, REPLACE_ONE, ADD_REMOVE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE, Adjacency.ADD_REMOVE


def test_poisson_steps():
    mechanism = PoissonSteps(2.0, 1.5, 100, 30, 2, ZERO_OUT)
    assert mechanism.rate == 0.3
    assert mechanism.steps == 8
    assert mechanism.denominator == 30
    assert mechanism.noise_std == 3.0
    assert mechanism.adjacency.reach * mechanism.clip == 2.0
    step = dp.PoissonSampledDpEvent(0.3, dp.GaussianDpEvent(1.5))
    assert mechanism.event == dp.SelfComposedDpEvent(step, 8)


def test_shuffled_steps_cost_an_epoch_each():
    mechanism = ShuffledSteps(2.0, 1.5, 100, 30, 2, ZERO_OUT)
    assert mechanism.steps == 8
    assert mechanism.denominator == 30
    assert mechanism.event == dp.SelfComposedDpEvent(ShuffledEpochDpEvent(1.5), 2)


def test_full_batches_divide_by_all_records():
    steps = FullBatchSteps(2.0, 1.5, 100, 3, ZERO_OUT)
    assert (steps.steps, steps.denominator, steps.noise_std) == (3, 100, 3.0)
    assert steps.event == dp.SelfComposedDpEvent(dp.GaussianDpEvent(1.5), 3)
    sketch = FullBatchSketch(2.0, 1.5, 100, 50, ZERO_OUT)
    assert (sketch.denominator, sketch.noise_std) == (100, 3.0)
    assert sketch.event == dp.GaussianDpEvent(1.5)


def test_noise_multiplier_means_the_same_under_replacement_and_sensitivity_doubles():
    mechanism = PoissonSteps(2.0, 1.5, 100, 30, 2, REPLACE_ONE)
    assert mechanism.noise_std == 3.0
    assert mechanism.adjacency.reach * mechanism.clip == 4.0


@pytest.mark.parametrize(("adjacency", "scale"), [(ZERO_OUT, 10.0), (ADD_REMOVE, 10.0), (REPLACE_ONE, 20.0)])
def test_selection_on_counts_needs_twice_the_noise_only_under_replacement(adjacency, scale):
    mechanism = PrivateSelection(0.1, adjacency)
    assert mechanism.gumbel_scale == scale
    assert mechanism.event == SelectionDpEvent(scale)
    assert mechanism.event.bounded_range(adjacency is REPLACE_ONE) == pytest.approx(0.1)


@pytest.mark.parametrize("adjacency", [ZERO_OUT, REPLACE_ONE])
def test_selection_by_accuracy_saves_nothing(adjacency):
    event = AccuracySelection(0.1, adjacency).event
    assert event.gumbel_scale == 20.0
    assert event.bounded_range(adjacency is REPLACE_ONE) == pytest.approx(0.1)


def test_client_level_sums():
    routed = CohortSums(0.5, 1.2, PoissonSample(0.1), ADD_REMOVE, histogram_ratio=4.0)
    assert routed.noise_std == pytest.approx(0.6)
    assert routed.adjacency.reach * routed.clip == 0.5
    assert routed.histogram_multiplier == pytest.approx(4.8)
    assert routed.event.event == dp.ComposedDpEvent([dp.GaussianDpEvent(4.8), dp.GaussianDpEvent(1.2)])
    rebalanced = CohortSums(0.5, 4.0, FixedSample(1000, 100), ADD_REMOVE, identifier_ratio=1.5)
    assert rebalanced.rate == 0.1
    assert rebalanced.identifier_multiplier == 3.0
    assert rebalanced.event.sample_size == 100
    assert CohortSums(0.5, 1.2, PoissonSample(0.1), ADD_REMOVE).event == dp.PoissonSampledDpEvent(
        0.1, dp.GaussianDpEvent(1.2)
    )


def test_noise_can_be_set_where_there_is_some():
    open_plan = PoissonSteps(2.0, NoiseRule.SHARED, 100, 30, 2, ZERO_OUT)
    assert open_plan.rule is NoiseRule.SHARED
    assert open_plan.with_noise(1.5) == PoissonSteps(2.0, 1.5, 100, 30, 2, ZERO_OUT)
    assert open_plan.with_noise(1.5).rule is None
    for use in (lambda: open_plan.noise_std, lambda: open_plan.event):
        with pytest.raises(PlanError, match="calibrated"):
            use()
    with pytest.raises(PlanError, match="no noise multiplier"):
        PrivateSelection(0.1, ZERO_OUT).with_noise(1.0)


@pytest.mark.parametrize("unsaid", [None, NoiseRule.SHARED, True, "1"])
def test_what_is_no_number_stands_nowhere_but_for_noise_to_be_found_or_a_part_that_is_left_out(unsaid):
    steps = PoissonSteps(2.0, 1.5, 100, 30, 2, ZERO_OUT)
    sums = CohortSums(1.0, 4.0, PoissonSample(0.1), ADD_REMOVE, histogram_ratio=1.0)
    selection, scores = PrivateSelection(0.1, ZERO_OUT), NoisyScores(0.5, 1.0, 10, ZERO_OUT)
    for mechanism, key, allowed in (
        (steps, "clip", ()),
        (steps, "records", ()),
        (steps, "epochs", ()),
        (steps, "noise_multiplier", (NoiseRule.SHARED,)),
        (sums, "clip", ()),
        (sums, "histogram_ratio", (None,)),
        (selection, "epsilon", ()),
        (scores, "units", ()),
        (scores, "noise_multiplier", (NoiseRule.SHARED,)),
    ):
        if unsaid in allowed:
            assert getattr(dataclasses.replace(mechanism, **{key: unsaid}), key) is unsaid
            continue
        with pytest.raises(PrivacyInputError, match=key):
            dataclasses.replace(mechanism, **{key: unsaid})


def test_no_noise_is_a_non_private_event():
    for mechanism in (
        PoissonSteps(1.0, 0.0, 100, 30, 1, ZERO_OUT),
        ShuffledSteps(1.0, 0.0, 100, 30, 1, ZERO_OUT),
        FullBatchSteps(1.0, 0.0, 100, 1, ZERO_OUT),
        FullBatchSketch(1.0, 0.0, 100, 5, ZERO_OUT),
        CohortSums(1.0, 0.0, PoissonSample(0.1), ADD_REMOVE),
        PrivateSelection(float("inf"), ZERO_OUT),
    ):
        event = mechanism.event
        while isinstance(event, dp.SelfComposedDpEvent):
            event = event.event
        assert event == dp.NonPrivateDpEvent()


def test_a_population_that_loses_a_client_can_still_fill_the_cohort_of_a_fixed_size() -> None:
    with pytest.raises(PrivacyInputError, match="cohort: 10 is not allowed, an integer from 1 to 9"):
        CohortSums(1.0, 4.0, FixedSample(10, 10), Adjacency.ADD_REMOVE, identifier_ratio=1.0)
    whole = CohortSums(1.0, 4.0, FixedSample(10, 10), Adjacency.ZERO_OUT, identifier_ratio=1.0)
    assert whole.rate == 1.0
