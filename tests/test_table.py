"""A table, as Markdown and without the columns that say nothing."""

from coterie.table import NONE, Table


def test_markdown_has_headings_a_rule_and_a_line_for_each_row() -> None:
    table = Table.of([{"name": "a", "value": "1"}, {"name": "b", "value": "2"}])
    assert table.markdown() == "| name | value |\n| --- | --- |\n| a | 1 |\n| b | 2 |"


def test_columns_without_any_content_are_left_out() -> None:
    table = Table(["a", "b", "c"], [["1", NONE, NONE], ["2", NONE, "3"]]).without_empty()
    assert (table.headings, table.rows) == (["a", "c"], [["1", NONE], ["2", "3"]])


def test_no_rows_make_no_table() -> None:
    assert Table.of([]).rows == []
