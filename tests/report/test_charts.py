"""Charts from plain numbers: every point is there, says what it is, and stands where it belongs."""

import pytest

from coterie.report.charts import Scale, Series, bar_figure, line_figure
from coterie.report.drawing import colour
from coterie.report.figures import sorted_scores
from painting import painted


def test_a_logarithmic_axis_puts_powers_of_ten_at_equal_distances() -> None:
    scale = Scale("", lambda value: f"{value:g}", logarithmic=True)
    assert scale.ticks([0.02, 300.0]) == pytest.approx([0.01, 0.1, 1, 10, 100, 1000])
    axes = painted(line_figure("n", "h", [Series("a", [(0.02, 1.0), (300.0, 2.0)])], scale, scale, "c")).axes
    assert axes.get_xscale() == "log"
    assert axes.get_xlim() == (0.01, 1000)
    assert [label.get_text() for label in axes.get_xticklabels()][:2] == ["0.01", "0.1"]


def test_every_point_is_marked_and_says_what_it_is() -> None:
    shown = Scale("x", lambda value: f"{value:g}")
    figure = line_figure(
        "n", "h", [Series("a", [(1.0, 2.0), (3.0, 4.0)])], shown, shown, "c", milestone=(2.0, "here")
    )
    assert "a: 1, 2" in figure.svg
    assert "a: 3, 4" in figure.svg
    assert "here" in figure.svg


def test_what_is_printed_has_the_colour_of_ours_and_is_dashed_and_hollow() -> None:
    points = [(1.0, 2.0), (3.0, 4.0)]
    ours, theirs = Series("a", points, colour=1, printed=False), Series("b", points, colour=1, printed=True)
    lines = painted(line_figure("n", "h", [ours, theirs], Scale(), Scale(), "c", note="per cent"))
    assert lines["a"].get_color() == lines["b"].get_color() == lines["a"].get_markerfacecolor()
    assert lines["b"].get_markerfacecolor() == colour("card")
    assert (lines["a"].get_linestyle(), lines["b"].get_linestyle()) == ("-", "--")
    assert [text.get_text() for text in lines.axes.texts] == ["per cent"]


def test_bars_stand_on_the_axis() -> None:
    figure = bar_figure("n", "h", ["3", "10"], [("a", [0, 2]), ("b", [None, 1])], "c", "epsilon")
    assert "a, 3: 0" in figure.svg
    assert "a, 10: 2" in figure.svg
    assert "b, 10: 1" in figure.svg
    assert "b, 3" not in figure.svg, "what was not run is no zero"


def test_scores_are_sorted_as_numbers_and_finite() -> None:
    assert sorted_scores({"10": 1.0, "9": 2.0, "2": float("inf")}) == [(9, 2.0), (10, 1.0)]
