"""Figures hold their data, tell series apart, follow the page's colours and let nothing act as markup."""

import re
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import matplotlib.ticker  # noqa: F401  (its import is no part of what has a deadline)
import pytest
from html_outline import outline
from hypothesis import given
from hypothesis import strategies as st

from coterie.report.charts import round_ticks, share_ticks, ticks_around
from coterie.report.drawing import (
    COLOURS,
    GLYPHS,
    LONGEST,
    MARKERS,
    ROW,
    STYLE_SHEET,
    Figure,
    chip,
    colour,
    look,
    tips,
    write_figures,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOSTILE = ["<script>alert(1)</script>", '" onclick="y', "$x^2$ & co", "_hidden", '#0069a8 --> clip-path="x"']
numbers = st.floats(-1e6, 1e6, allow_nan=False)


def figure(names: list[str], name: str = "one", heading: str = "A heading + more") -> Figure:
    def paint(axes: "Axes") -> None:
        for index, each in enumerate(names):
            (line,) = axes.plot([1, 2, 3], [index, index + 1, index], **look(index, each))
            tips(line, [f"{each} at {x}" for x in (1, 2, 3)])

    return Figure(name, heading, "What to see", paint)


@given(numbers, st.floats(1e-3, 1e6))
def test_ticks_hold_the_range_and_are_few(low: float, extent: float) -> None:
    ticks = ticks_around(low, low + extent)
    slack = 1e-6 * max(1.0, abs(low) + extent)
    assert 2 <= len(ticks) <= 9
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + extent - slack


@given(st.floats(0, 1), st.floats(0, 1))
def test_an_accuracy_axis_holds_its_data_and_never_leaves_zero_to_one(one: float, other: float) -> None:
    low, high = sorted((one, other))
    ticks = share_ticks([low, high])
    assert 0 <= ticks[0] <= low + 1e-9
    assert high - 1e-9 <= ticks[-1] <= 1
    assert ticks[0] < ticks[-1]


@given(st.integers(1, 5000))
def test_the_first_and_the_last_round_are_named_once(rounds: int) -> None:
    ticks = round_ticks(rounds)
    assert ticks[0] == 1
    assert ticks[-1] == rounds
    assert len(set(ticks)) == len(ticks) <= 9


def test_series_that_share_a_colour_differ_in_their_marker() -> None:
    looks = {(look(index)["color"], look(index)["marker"]) for index in range(4 * COLOURS)}
    assert len(looks) == 4 * COLOURS
    assert len(GLYPHS) == len(MARKERS)


def test_a_chip_has_the_mark_of_its_series_and_escapes_its_name() -> None:
    mark = f'<span style="color: var(--c1)" aria-hidden="true">{GLYPHS[2]}</span>'
    assert chip("<b>", 9) == f'<span class="chip">{mark} &lt;b&gt;</span>'


def test_names_stay_text_in_legends_and_titles() -> None:
    svg = figure(HOSTILE, heading=HOSTILE[0]).svg
    parsed = outline(str(svg))
    assert not {"script"} & set(parsed.tags)
    assert not {"onclick", "clip-path"} & {name for name, _ in parsed.attributes}
    for name in HOSTILE:
        assert parsed.text.count(name) >= 4, "in the legend, and on each of three points"


def test_colours_are_the_style_sheets_variables() -> None:
    svg = figure(["a", "b"]).svg
    for name in ("ink", "soft", "grid", "c0", "c1"):
        assert f"var(--{name})" in svg
    assert colour(0) not in svg
    dark = STYLE_SHEET.split("prefers-color-scheme: dark")[1]
    for name in ("ink", "soft", "rule", "grid", "card", "accent", *(f"c{index}" for index in range(COLOURS))):
        assert f"--{name}: #" in dark


def test_the_drawing_says_what_it_shows() -> None:
    root = ElementTree.fromstring(figure(["a"]).svg)
    assert root.attrib["role"] == "img"
    told = {child.attrib["id"]: child.text for child in root if child.tag in ("title", "desc")}
    assert list(told) == root.attrib["aria-labelledby"].split()
    assert list(told.values()) == ["A heading + more", "What to see"]


def test_two_figures_of_one_page_share_no_id() -> None:
    outline(str(figure(["a", "b"]).svg) + figure(["a", "b"], name="two").svg)


@pytest.mark.parametrize(("kind", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
def test_a_file_has_the_heading_as_its_name_and_the_same_bytes_again(
    tmp_path: Path, kind: str, start: bytes
) -> None:
    (first,) = write_figures([figure(["a"])], tmp_path / "new" / "one", kind)
    (second,) = write_figures([figure(["a"])], tmp_path / "two", kind)
    assert first.name == f"a-heading-plus-more.{kind}"
    assert first.read_bytes().startswith(start)
    assert first.read_bytes() == second.read_bytes()


def test_an_svg_file_brings_its_heading_its_legend_and_its_colours(tmp_path: Path) -> None:
    root = ElementTree.parse(figure(["a", "b"]).write(tmp_path)).getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"A heading + more", "a", "b"} <= set(texts)
    style = root.find("{http://www.w3.org/2000/svg}style")
    assert style is not None
    assert "--c0:" in (style.text or "")
    assert "prefers-color-scheme: dark" in (style.text or "")


def test_an_svg_file_has_its_colours_also_where_no_variables_are_known(tmp_path: Path) -> None:
    named = 0
    for element in ElementTree.parse(figure(["a", "b"]).write(tmp_path)).getroot().iter():
        for attribute, name in re.findall(r"\b(fill|stroke): var\(--(\w+)\)", element.get("style", "")):
            assert element.get(attribute) == colour(int(name[1:]) if name[1:].isdigit() else name)
            named += 1
    assert named > 10


def test_nothing_to_draw_makes_no_folder(tmp_path: Path) -> None:
    assert write_figures([], tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def test_a_long_name_is_broken_into_lines_that_fit_and_the_drawing_grows(tmp_path: Path) -> None:
    long = " ".join(["eleven-more"] * 9)
    files = [figure(["a", "b"]).write(tmp_path), figure(["a", long], heading=long).write(tmp_path)]
    short, tall = (ElementTree.parse(file).getroot() for file in files)
    texts = [element.text or "" for element in tall.iter("{http://www.w3.org/2000/svg}text")]
    assert " ".join(texts).count("eleven-more") == 2 * 9
    assert max(map(len, texts)) <= LONGEST
    assert float(tall.attrib["height"]) >= float(short.attrib["height"]) + 4 * ROW
