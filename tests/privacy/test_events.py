"""The normal form of event trees: one amplification per sample, nothing unknown, nothing lost on disk."""

import json
import math

import dp_accounting as dp
import pytest

from coterie.privacy import PlanError
from coterie.privacy.events import (
    BridgedSumDpEvent,
    SelectionDpEvent,
    ShuffledEpochDpEvent,
    atoms,
    event_from_json,
    event_to_json,
    joint_multiplier,
)

GAUSSIAN = dp.GaussianDpEvent(2.0)


def test_composition_under_one_sample_is_amplified_once():
    pair = dp.ComposedDpEvent([dp.GaussianDpEvent(10.0), dp.SelfComposedDpEvent(dp.GaussianDpEvent(2.0), 2)])
    found = atoms(dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, pair), 7))
    [(atom, times)] = found.items()
    assert times == 7
    assert atom.sampling_probability == 0.1
    assert atom.event.noise_multiplier == pytest.approx((1 / 100 + 2 / 4) ** -0.5, rel=1e-15)


def test_equal_releases_are_counted_together_in_any_order():
    one = dp.ComposedDpEvent([GAUSSIAN, dp.SelfComposedDpEvent(GAUSSIAN, 3), dp.NoOpDpEvent()])
    assert atoms(one) == atoms(dp.ComposedDpEvent([dp.SelfComposedDpEvent(GAUSSIAN, 3), GAUSSIAN]))
    assert atoms(one)[GAUSSIAN] == 4


def test_shuffled_epoch_costs_one_plain_gaussian():
    assert atoms(ShuffledEpochDpEvent(2.0)) == atoms(GAUSSIAN)


def test_sampling_everyone_amplifies_nothing_and_nobody_costs_nothing():
    assert atoms(dp.PoissonSampledDpEvent(1.0, GAUSSIAN)) == atoms(GAUSSIAN)
    assert not atoms(dp.PoissonSampledDpEvent(0.0, GAUSSIAN))
    assert not atoms(dp.PoissonSampledDpEvent(0.5, dp.NoOpDpEvent()))


@pytest.mark.parametrize(
    "event",
    [
        dp.GaussianDpEvent(0.0),
        SelectionDpEvent(0.0),
        dp.NonPrivateDpEvent(),
        dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(0.0)),
        dp.PoissonSampledDpEvent(0.1, dp.ComposedDpEvent([GAUSSIAN, dp.NonPrivateDpEvent()])),
        dp.SampledWithoutReplacementDpEvent(10, 2, dp.NonPrivateDpEvent()),
        BridgedSumDpEvent(0.5, 0.0, 2, 1),
    ],
)
def test_a_release_without_noise_is_not_private(event):
    assert atoms(event) == {dp.NonPrivateDpEvent(): 1}


@pytest.mark.parametrize(
    "event",
    [
        dp.LaplaceDpEvent(1.0),
        dp.ZCDpEvent(0.1),
        dp.UnsupportedDpEvent(),
        dp.PoissonSampledDpEvent(0.1, SelectionDpEvent(1.0)),
        dp.PoissonSampledDpEvent(0.1, dp.PoissonSampledDpEvent(0.1, GAUSSIAN)),
        dp.PoissonSampledDpEvent(1.5, GAUSSIAN),
        dp.SampledWithoutReplacementDpEvent(10, 11, GAUSSIAN),
        BridgedSumDpEvent(1.5, 1.0, 2, 1),
        BridgedSumDpEvent(0.5, 1.0, 1, 2),
        dp.PoissonSampledDpEvent(0.5, BridgedSumDpEvent(0.5, 1.0, 2, 1)),
        dp.SelfComposedDpEvent(GAUSSIAN, -1),
        dp.PoissonSampledDpEvent(0.5, dp.SelfComposedDpEvent(GAUSSIAN, -1)),
    ],
)
def test_unknown_or_meaningless_events_are_refused(event):
    with pytest.raises(PlanError):
        atoms(event)


def test_joint_multiplier_of_nothing_is_infinite():
    assert math.isinf(joint_multiplier(dp.ComposedDpEvent([])))


@pytest.mark.parametrize(
    "event",
    [
        dp.ComposedDpEvent(
            [
                GAUSSIAN,
                dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.004, dp.GaussianDpEvent(1.3008)), 49750),
                dp.SelfComposedDpEvent(SelectionDpEvent(1 / 0.15), 21),
            ]
        ),
        dp.SampledWithoutReplacementDpEvent(1000, 100, dp.ComposedDpEvent([GAUSSIAN, GAUSSIAN])),
        dp.ComposedDpEvent([ShuffledEpochDpEvent(3.0), dp.NonPrivateDpEvent(), dp.NoOpDpEvent()]),
        SelectionDpEvent(0.5, monotone=False),
        dp.SelfComposedDpEvent(BridgedSumDpEvent(0.7, 2.0, 3, 2), 17),
    ],
)
def test_tree_survives_a_file(event):
    assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


def test_unknown_event_in_a_file_is_refused():
    with pytest.raises(PlanError, match="teleport"):
        event_from_json({"event": "teleport"})
    for name in (None, [], {}, 3):
        with pytest.raises(PlanError, match="is not known"):
            event_from_json({"event": name})
