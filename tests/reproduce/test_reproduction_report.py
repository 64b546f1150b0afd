"""The page of a reproduction, and its figures with and without runs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from coterie.errors import InputError
from coterie.reproduce import table
from coterie.reproduce.declared import ScaleName, find, names, parse
from coterie.reproduce.figures import FIGURES, figures_of
from coterie.reproduce.page import write_reproduction_report
from coterie.reproduce.running import reproduce
from coterie.reproduce.table import Reproduction
from tiny_reproduction import tiny_text

TINY = tiny_text(
    rounds=3,
    epsilons="[5, 10]",
    algorithms="[{name: r-dpcfl, seeds: [1], set: {algorithm.candidates: [2, 3]}}]",
    figures="[budgets, rounds, separation, success, releases, batches]",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reproduction]:
    reproduction = parse("tiny", TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "find", lambda name: reproduction if name == "tiny" else find(name))
        yield reproduce(reproduction, tmp_path_factory.mktemp("page") / "out")


@pytest.fixture(scope="module")
def page(finished: Reproduction) -> str:
    return write_reproduction_report(finished).read_text()


def test_the_page_has_our_numbers_theirs_and_the_verdict(finished: Reproduction, page: str) -> None:
    for line in finished.lines:
        for entry in line.entries[:5]:
            assert entry.text() in page
            assert entry.printed_text() in page
            assert entry.verdict in page
    assert "92.3 ± 0.4" in page
    assert "average (table 3)" in page
    assert "printed: RC-DPFL" in page
    assert "Digits instead of MNIST." in page


def test_the_page_shows_ledgers_guarantees_and_no_second_host(finished: Reproduction, page: str) -> None:
    assert page.count("exactly as planned") == 2
    for line in finished.lines:
        assert line.guarantee in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page


def test_every_figure_comes_from_the_runs(finished: Reproduction) -> None:
    headings = [figure.heading for figure in figures_of(finished)]
    assert headings == [
        "Accuracy against epsilon: r-dpcfl",
        "Accuracy of the minority against epsilon: r-dpcfl",
        "Runs that found all clusters",
        "Runs that found the minority as a cluster of its own",
        "Accuracy against round: r-dpcfl",
        "Separation score by number of clusters: r-dpcfl, epsilon 5",
        "Separation score by number of clusters: r-dpcfl, epsilon 10",
        "All clusters found, against the separation score",
        "Round 1: epsilon 5",
        "Round 1: epsilon 10",
    ]


def test_drawings_on_one_page_have_names_of_their_own(page: str) -> None:
    ids = [part.partition('"')[0] for part in page.split(' id="')[1:]]
    assert len(ids) == len(set(ids))


def test_names_of_figures_are_known_in_every_reproduction() -> None:
    for name in names():
        assert set(find(name).figures) <= set(FIGURES), name


def test_an_unknown_figure_is_one_line(finished: Reproduction) -> None:
    odd = parse("odd", TINY.replace("figures: [budgets,", "figures: [budget,"))
    result = Reproduction(finished.folder, odd, ScaleName.QUICK, ())
    with pytest.raises(InputError, match="odd: no figure is called 'budget'; allowed: budgets, "):
        list(figures_of(result))


def test_a_reproduction_without_runs_is_a_page_of_figures(tmp_path: Path) -> None:
    reproduction = find("rdpcfl-noise")
    result = reproduce(reproduction, tmp_path / "out")
    text = write_reproduction_report(result).read_text()
    assert "Noise multiplier against the batches of a run" in text
    assert not (tmp_path / "out" / "runs").exists()


def test_figures_that_need_runs_draw_nothing_without_them(finished: Reproduction) -> None:
    without = replace(finished, compared=None)
    for name in ("budgets", "rounds", "separation", "success", "releases", "batches"):
        assert list(FIGURES[name](without)) == []


def test_figures_are_also_files_with_heading_and_legend(finished: Reproduction, page: str) -> None:
    files = sorted((finished.folder / "figures").iterdir())
    assert len(files) == len(list(figures_of(finished)))
    for file in files:
        drawing = ElementTree.parse(file).getroot()
        assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    rounds = (finished.folder / "figures" / "accuracy-against-round-r-dpcfl.svg").read_text()
    texts = [
        element.text for element in ElementTree.fromstring(rounds).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert "Accuracy against round: r-dpcfl" in texts
    assert "epsilon 5" in texts
    assert "epsilon 10" in texts
    assert "--c0:" in rounds, "the colours come along"
