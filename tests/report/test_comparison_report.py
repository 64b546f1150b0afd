"""The page of a comparison: every row with its promise, every run one step away, nothing broken hidden."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from pathlib import Path

import pytest
from html_outline import outline

from coterie.errors import InputError
from coterie.experiment.result import RunResult
from coterie.experiment.sweep import Part, Sweep
from coterie.report.comparison import write_comparison_report

ALGORITHMS = ["r-dpcfl", "local"]


def report(folder: Path) -> str:
    return write_comparison_report(folder).read_text(encoding="utf-8")


def test_the_report_is_well_formed_and_fetches_nothing(comparison_folder: Callable[..., Path]) -> None:
    html = report(comparison_folder({"algorithm.name": ALGORITHMS}))
    parsed = outline(html)
    assert not {"script", "link", "img", "iframe"} & set(parsed.tags)
    assert not re.search(r"https?:|src=|url\(|@import", html)


def test_every_row_has_its_guarantee(comparison_folder: Callable[..., Path]) -> None:
    folder = comparison_folder({"algorithm.name": ALGORITHMS})
    promise = RunResult.load(folder / "cells" / "name=local").guarantee
    assert report(folder).count(escape(promise)) == len(ALGORITHMS)


def test_links_lead_to_each_runs_own_report(comparison_folder: Callable[..., Path]) -> None:
    folder = comparison_folder({"algorithm.name": ALGORITHMS, "seeds.simulation": [0, 1]})
    parsed = outline(report(folder))
    links = [value or "" for name, value in parsed.attributes if name == "href" and value[0] != "#"]
    assert len(links) == 4
    for link in links:
        assert (folder / link.replace("%3D", "=").replace("%2B", "+")).exists()


def test_a_failed_cell_is_reported_with_its_last_words(comparison_folder: Callable[..., Path]) -> None:
    folder = comparison_folder(
        {"algorithm.name": ALGORITHMS, "seeds.simulation": [0, 1]},
        failed={"name=local+simulation=1": "no noise <meets> the budget"},
    )
    parsed = outline(report(folder))
    assert "3 of 4 runs finished" in parsed.text
    assert "no noise <meets> the budget (0 of 6 rounds done)" in parsed.text
    assert "meets" not in parsed.tags


def test_a_comparison_of_failures_alone_has_a_report(comparison_folder: Callable[..., Path]) -> None:
    folder = comparison_folder({"algorithm.name": ["local"]}, failed={"name=local": "broken"})
    text = outline(report(folder)).text
    assert "0 of 1 run finished" in text
    assert "broken" in text


def test_an_interrupted_comparison_reports_what_is_there(comparison_folder: Callable[..., Path]) -> None:
    folder = comparison_folder({"algorithm.name": ALGORITHMS})
    (folder / "table.csv").unlink()
    (folder / "cells" / f"name={ALGORITHMS[0]}" / "result.json").unlink()
    text = outline(report(folder)).text
    assert "1 run did not finish" in text
    assert "not finished" in text


def test_spread_over_seeds_is_shown(comparison_folder: Callable[..., Path]) -> None:
    text = outline(
        report(comparison_folder({"algorithm.name": ALGORITHMS, "seeds.simulation": [0, 1, 2]}))
    ).text
    assert "±" in text
    assert "one seed" in text


def test_accuracy_is_drawn_against_epsilon_where_it_varies(comparison_folder: Callable[..., Path]) -> None:
    folder = comparison_folder({"algorithm.name": ALGORITHMS, "privacy.epsilon": [2, 8.0]})
    text = outline(report(folder)).text
    assert "Accuracy against epsilon" in text
    assert "Accuracy against round: epsilon 2" in text


def test_epsilon_alone_makes_one_curve(comparison_folder: Callable[..., Path]) -> None:
    text = outline(report(comparison_folder({"privacy.epsilon": [1, 2, 4]}))).text
    assert "Accuracy against epsilon" in text


def test_the_same_epsilon_everywhere_makes_no_curve(comparison_folder: Callable[..., Path]) -> None:
    assert "against epsilon" not in outline(report(comparison_folder({"algorithm.name": ALGORITHMS}))).text


def test_seeds_alone_are_one_setting(comparison_folder: Callable[..., Path]) -> None:
    text = outline(report(comparison_folder({"seeds.simulation": [0, 1]}))).text
    assert "all runs" in text


def test_values_that_are_lists_find_their_row(comparison_folder: Callable[..., Path]) -> None:
    folder = comparison_folder({"federation.sizes": [[3, 3], [2, 4]], "privacy.delta": [None, 0.001]})
    assert outline(report(folder)).text.count("for one record of any of 6 clients") == 4


def test_the_same_folder_gives_the_same_bytes(comparison_folder: Callable[..., Path]) -> None:
    folder = comparison_folder({"algorithm.name": ALGORITHMS, "seeds.simulation": [0, 1]})
    assert report(folder) == report(folder)


def test_a_folder_without_a_comparison_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"sweep\.yaml is missing"):
        write_comparison_report(tmp_path)


def test_a_label_stays_a_label_in_every_table(comparison_folder: Callable[..., Path]) -> None:
    hostile = "=cmd | <img src=x>\n| c"
    sweep = Sweep.of_parts({}, [Part({"algorithm.name": ["global"]}, label=hostile)])
    folder = comparison_folder({}, sweep=sweep)
    lines = (folder / "table.md").read_text().splitlines()
    assert not any("<img" in line or line.startswith("| c") for line in lines)
    assert (folder / "table.csv").read_text().splitlines()[1].startswith("\"'=cmd | <img src=x>")
