"""A table, as Markdown and without the columns that say nothing."""

import csv
import io

from coterie.table import NONE, Table, csv_text


def test_markdown_has_headings_a_rule_and_a_line_for_each_row() -> None:
    table = Table.of([{"name": "a", "value": "1"}, {"name": "b", "value": "2"}])
    assert table.markdown() == "| name | value |\n| --- | --- |\n| a | 1 |\n| b | 2 |"


def test_columns_without_any_content_are_left_out() -> None:
    table = Table(["a", "b", "c"], [["1", NONE, NONE], ["2", NONE, "3"]]).without_empty()
    assert (table.headings, table.rows) == (["a", "c"], [["1", NONE], ["2", "3"]])


def test_no_rows_make_no_table() -> None:
    assert Table.of([]).rows == []


def test_no_cell_ends_its_cell_its_line_or_its_page() -> None:
    hostile = "a | b\n\n<script>alert(1)</script>\r| c |"
    lines = Table(["name", hostile], [[hostile, "1"], ["x", hostile]]).markdown().split("\n")
    assert len(lines) == 4
    assert not any("<" in line or "\r" in line for line in lines)
    assert [line.replace("\\|", "").count("|") for line in lines] == [3] * 4
    assert r"a \| b &lt;script>alert(1)&lt;/script> \| c \|" in lines[2]


def test_no_text_is_a_formula_and_every_number_stays_one() -> None:
    cells = ["=cmd|' /C calc'!A0", " =1+1", "+1 2", "-x", "@SUM(A1)", "-1.5", -2, "+3e4", None, "a,b\nc", "–"]
    (row,) = csv.reader(io.StringIO(csv_text([cells])))
    assert row[:5] == [f"'{cell}" for cell in cells[:5]]
    assert row[5:] == ["-1.5", "-2", "+3e4", "", "a,b\nc", "–"]


def test_a_table_without_rows_has_nothing_to_add_up() -> None:
    empty = Table.of([], "Every kind of release", words=["What"], total=["together", "", "3"])
    assert "<tfoot>" not in empty.html()
