"""Nothing that was not built as markup may act as markup."""

from coterie.report.markup import Markup, number, render, tag


def test_text_is_escaped_and_markup_is_not_escaped_twice() -> None:
    assert tag("p", "<b>", tag("b", "&")) == "<p>&lt;b&gt;<b>&amp;</b></p>"


def test_attributes_cannot_be_left_by_a_quote() -> None:
    assert tag("a", "x", title='" onclick="y') == '<a title="&quot; onclick=&quot;y">x</a>'


def test_absent_children_and_attributes_leave_no_trace() -> None:
    assert tag("p", None, ["a", [Markup("<i></i>"), None]], id=None) == "<p>a<i></i></p>"


def test_attribute_names_are_spelled_as_html_spells_them() -> None:
    assert tag("path", class_="line", stroke_dasharray="2 3") == '<path class="line" stroke-dasharray="2 3"/>'


def test_coordinates_are_short_and_never_minus_zero() -> None:
    assert [number(value) for value in (1.0, 0.125, -0.001, 1234.5)] == ["1", "0.12", "0", "1234.5"]


def test_a_plain_string_is_one_child_not_many() -> None:
    assert render("a<b") == "a&lt;b"
