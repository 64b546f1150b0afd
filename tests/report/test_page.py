"""Nothing that a template is given may act as markup, and the glossary explains what the page says."""

from pathlib import Path

from html_outline import outline

from coterie.report.page import page
from coterie.table import Table

PARTS = '{% extends "page.html.j2" %}{% import "parts.html.j2" as ui %}{% block body %}'


def written(tmp_path: Path, body: str, **content: object) -> str:
    (tmp_path / "odd.html.j2").write_text(f"{PARTS}{body}{{% endblock %}}")
    return page("odd", "<i>title</i>", "</code>", tmp_path, **content)


def test_whatever_a_page_is_given_stays_text(tmp_path: Path) -> None:
    table = Table.of([{"<b>": '"><b>'}], 'caption" onclick="y', total=["<b>"])
    html = written(tmp_path, "{{ ui.table(table) }}{{ ui.facts([(odd, odd)]) }}", table=table, odd="<b>")
    parsed = outline(html)
    assert not {"b", "i"} & set(parsed.tags)
    assert "onclick" not in {name for name, _ in parsed.attributes}
    for text in ("<i>title</i>", "</code>", '"><b>'):
        assert text in parsed.text


def test_the_first_column_names_its_row_and_figures_line_up(tmp_path: Path) -> None:
    table = Table.of([{"who": "a", "what": "b", "how many": "1"}], words=["what"])
    html = written(tmp_path, "{{ ui.table(table) }}", table=table)
    assert '<th scope="row">a</th><td>b</td><td class="num">1</td>' in html


def test_the_glossary_explains_the_words_that_are_used_and_no_others(tmp_path: Path) -> None:
    text = outline(written(tmp_path, "<p>The ledger, at epsilon 3.</p>")).text
    told = text.split("What the words on this page mean")[1]
    assert "Epsilon" in told
    assert "Ledger" in told
    assert "Disparity" not in told
