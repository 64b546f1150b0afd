"""Charts whose axes hold their data and whose series can be told apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.report import chart
from coterie.report.figures import value_axis
from coterie.report.record import ACCURACY

numbers = st.floats(-1e6, 1e6, allow_nan=False)


@given(numbers, st.floats(1e-3, 1e6))
def test_ticks_stay_inside_the_range_and_are_few(low: float, extent: float) -> None:
    ticks = chart.nice_ticks(low, low + extent)
    slack = 1e-6 * max(1.0, abs(low) + extent)
    assert len(ticks) <= 7
    assert all(low - slack <= tick <= low + extent + slack for tick in ticks)


@given(st.floats(0, 1), st.floats(0, 1))
def test_an_accuracy_axis_holds_its_data_and_never_leaves_zero_to_one(one: float, other: float) -> None:
    low, high = sorted((one, other))
    axis = value_axis(ACCURACY, low, high)
    assert 0 <= axis.low <= low + 1e-9
    assert high - 1e-9 <= axis.high <= 1
    assert axis.low < axis.high
    assert all(axis.low - 1e-9 <= tick <= axis.high + 1e-9 for tick in axis.ticks)


@given(st.integers(1, 5000))
def test_the_first_and_the_last_round_are_named_once(rounds: int) -> None:
    axis = chart.round_axis(rounds)
    assert axis.ticks[0] == 1
    assert axis.ticks[-1] == rounds
    assert len(set(axis.ticks)) == len(axis.ticks) <= 8


def test_series_that_share_a_colour_differ_in_their_marker() -> None:
    looks = {(chart.series(index), chart.shape_of(index)) for index in range(4 * chart.COLOURS)}
    assert len(looks) == 4 * chart.COLOURS


@pytest.mark.parametrize("shape", range(chart.SHAPES))
def test_every_marker_is_a_closed_path_around_its_point(shape: int) -> None:
    drawn = chart.marker((50.0, 50.0), shape, "mark", size=4)
    assert drawn.startswith('<path class="mark" d="M')
    assert 'Z"' in drawn
