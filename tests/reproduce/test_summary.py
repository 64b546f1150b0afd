"""Printed tables beside stored results: how a cell is judged, what is counted, what documents show of it."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from coterie.errors import InputError
from coterie.reproduce.curves import read_curves
from coterie.reproduce.declared import find, names
from coterie.reproduce.overview import summary_rows
from coterie.reproduce.pages import drawings, paper_page, with_places
from coterie.reproduce.printed import Printed, read_publication
from coterie.reproduce.runs import QUANTITIES
from coterie.reproduce.stored import KINDS, RESULTS, StoredNumber, StoredRow, StoredTable, read_results, store
from coterie.reproduce.summary import PaperTable, Standing, judge, printed_cells, read_papers, summarise
from painting import painted

ROOT = Path(__file__).resolve().parents[2]
PREPRINT = read_publication("rc-dpfl-preprint")
SUMMARY = summarise()
TABLE = PaperTable(table=3, data="mnist", shift="rotation", holds="a test")
FIGURES = {quantity.key: quantity for quantity in QUANTITIES}


def number(ours: float, seeds: tuple[int, ...] = (0, 1, 2), rounds: int = 200) -> StoredNumber:
    return StoredNumber(ours, None, seeds, rounds, 11.0)


def row(figure: str, own: StoredNumber) -> StoredRow:
    own = own if FIGURES[figure].base else replace(own, base_rate=None)  # a disparity is no score
    return StoredRow("r-dpcfl", "", {"privacy.epsilon": "3"}, {figure: own}, "–", "–", 4, 4, "1.5")


@pytest.mark.parametrize(
    ("figure", "ours", "printed", "standing"),
    [
        ("mean", number(89.004), 89.0, Standing.GOOD),
        ("mean", number(88.996), 89.0, Standing.GOOD),  # the same at the decimals that are printed
        ("mean", number(88.994), 89.0, Standing.WORSE),
        ("disparity", number(3.0), 2.99, Standing.WORSE),
        ("disparity", number(2.98), 2.99, Standing.GOOD),
        ("mean", number(99.0, rounds=199), 89.0, Standing.SHORTER),
        ("f_loss", number(0.1), 0.35, Standing.OTHERWISE),
        ("mean", number(50.0), 11.0, Standing.MEANINGLESS),
        ("mean", None, 89.0, Standing.NOT_RUN),
    ],
)
def test_a_cell_has_one_standing(
    figure: str, ours: StoredNumber | None, printed: float, standing: Standing
) -> None:
    own = row(figure, ours) if ours else None
    cell = judge(TABLE, "r-dpcfl", 3.0, FIGURES[figure], Printed(printed, None, 3), own, PREPRINT)
    assert cell.standing is standing
    assert cell.enough_seeds == (ours is not None)


@pytest.mark.parametrize(("mean", "standing"), [(89.0, Standing.GOOD), (88.9, Standing.SHORTER)])
def test_shorter_runs_are_judged_where_they_are_no_worse_on_average(mean: float, standing: Standing) -> None:
    """A model that learnt little treats everybody alike: its small disparity means nothing."""
    fair, own = number(1.0, rounds=100), row("mean", number(mean, rounds=100))
    own = replace(own, numbers={**own.numbers, "disparity": replace(fair, base_rate=None)})
    cell = judge(TABLE, "r-dpcfl", 3.0, FIGURES["disparity"], Printed(2.99, None, 4), own, PREPRINT, 89.0)
    assert cell.standing is standing


def test_a_cell_with_fewer_seeds_says_so() -> None:
    own = row("mean", number(95.0, seeds=(0, 1)))
    cell = judge(TABLE, "r-dpcfl", 3.0, FIGURES["mean"], Printed(89.0, None, 3), own, PREPRINT)
    assert cell.standing is Standing.GOOD
    assert not cell.enough_seeds


def test_every_printed_number_is_counted_once_and_the_counts_add_up() -> None:
    for paper in SUMMARY.papers:
        if paper.paper.source is None:
            assert not paper.tables
            continue
        publication = read_publication(paper.paper.source)
        readable = [printed for printed in publication.numbers.values() if printed.mean is not None]
        counts = paper.counts()
        assert counts["printed"] == len(readable)
        assert counts["unreadable"] == len(publication.numbers) - len(readable)
        assert counts["printed"] == counts["run"] + counts["not_run"]
        assert counts["run"] == counts["at_least_as_good"] + counts["worse"] + counts["no_verdict"]
    assert SUMMARY.counts()["printed"] == 694 + 198


def test_counts_follow_from_the_stored_numbers_by_another_way() -> None:
    """Table 3 counted from the file and the publication directly."""
    stored = StoredTable.read(RESULTS / "rdpcfl-mnist-paper.csv", "rdpcfl-mnist", "paper")
    good = run = 0
    for (data, shift, algorithm, figure, epsilon), printed in PREPRINT.numbers.items():
        if (data, shift, printed.table) == ("mnist", "rotation", 3):
            ours = "r-dpcfl" if algorithm == "rc-dpfl" else algorithm
            found = [each for each in stored.rows if each.row == ours and each.epsilon == epsilon]
            run += bool(found)
            good += bool(
                found and printed.mean and np.round(found[0].numbers[figure].ours, 2) >= printed.mean
            )
    (table,) = [each for each in SUMMARY.papers[0].tables if each.table.table == 3]
    assert (table.were_run, table.good) == (run, good)


def test_every_shortfall_has_a_reason_and_every_table_that_was_not_run() -> None:
    for paper in SUMMARY.papers:
        for table in paper.tables:
            for cell in table.cells:
                assert cell.shortfall is None or table.reason(cell), (table.table.label, cell)
            assert table.were_run or table.table.not_run, (paper.paper.key, table.table.label)


def test_a_page_names_every_worse_cell_with_its_reason() -> None:
    for paper in SUMMARY.papers:
        page = paper_page(paper, SUMMARY)
        for table in paper.tables:
            for cell in table.cells:
                if cell.standing is Standing.WORSE:
                    epsilon = "infinite" if np.isinf(cell.epsilon) else f"{cell.epsilon:g}"
                    named = rf"Worse: .*{cell.row}, {cell.quantity.heading} \([^)]*\b{epsilon}\b.*Why: "
                    assert re.search(named + re.escape(table.reason(cell)), page), (table.table.label, cell)


def test_a_table_names_what_of_it_was_not_run() -> None:
    lacking = {each.table.table: each.lacking for each in SUMMARY.papers[0].tables}
    assert lacking[3] == "epsilon 4"
    assert lacking[7] == "epsilon 2, 4, 5, 10; km-cdpfl"
    for paper in SUMMARY.papers:
        page = paper_page(paper, SUMMARY)
        for table in paper.tables:
            assert bool(table.lacking) == any(cell.ours is None for cell in table.cells)
            assert not table.were_run or not table.lacking or f" Not run: {table.lacking}." in page


def test_every_figure_is_on_the_page_or_has_a_command_or_is_named_as_missing() -> None:
    _, rows = summary_rows(SUMMARY)
    for paper in SUMMARY.papers:
        page = paper_page(paper, SUMMARY)
        lines = [row for row in rows if row[0] == paper.paper.name and row[1].startswith("Figure")]
        for each in paper.figures:
            own = each.figure
            number = re.compile(rf"\b{re.escape(own.figure)}(, |$)")
            if each.curves:
                (row,) = (row for row in lines if row[1].endswith(f": {own.shows}"))
                assert row[3] == str(each.run)
            else:
                (row,) = (row for row in lines if row[2] == "drawings" and number.search(row[1]))
                assert row[3] == ("on the page" if own.files else "by their commands" if own.by else "–")
            assert own.missing in row[-1]
            assert all(f"]({file})" in page for file in own.files)


def test_the_sums_of_a_paper_stand_before_its_tables() -> None:
    _, rows = summary_rows(SUMMARY)
    names = [row[0] for row in rows]
    for paper in SUMMARY.papers:
        if paper.tables:
            sums = rows[names.index(paper.paper.name)]
            tables = [row for row in rows if row[0] == paper.paper.name][1 : len(paper.tables) + 1]
            assert sums[1] == "**all tables**"
            assert int(sums[2]) == sum(int(row[2]) for row in tables)
            assert int(sums[5]) == sum(int(row[5]) for row in tables if row[5] != "–")


def test_shakespeare_as_printed_is_at_the_base_rate_but_for_one_cell() -> None:
    (table,) = [each for paper in SUMMARY.papers for each in paper.tables if each.table.data == "shakespeare"]
    above = [cell for cell in table.cells if cell.standing is not Standing.MEANINGLESS]
    assert [(cell.row, cell.epsilon, cell.printed.mean) for cell in above] == [("dp-fedavg", 16.0, 17.53)]


def test_what_papers_name_exists() -> None:
    for paper in read_papers():
        for figure in paper.figures:
            assert figure.by or figure.missing, figure.figure
            for name in figure.by:
                assert find(name).figures, name
            for file in figure.files:
                assert (ROOT / "docs" / "reproduce" / file).resolve().exists(), file
        for table in paper.tables:
            if table.by:
                source = find(table.by).publication
                assert source is not None
                assert (source.source, source.data, source.shift) == (paper.source, table.data, table.shift)
                assert list(printed_cells(table, read_publication(source.source), find(table.by)))
        assert [each.figure for each in paper.figures] == list(
            dict.fromkeys(e.figure for e in paper.figures)
        ) or (paper.key == "dp-ogl")


def test_every_stored_file_is_one_of_a_reproduction() -> None:
    known = {f"{name}-{kind}.csv" for name in names() for kind in (*KINDS, "rounds")}
    assert {path.name for path in RESULTS.glob("*")} <= known
    for (name, kind), table in read_results().items():
        scale = find(name).scales["paper" if kind == "features" else kind]
        scale = scale.on_features() if kind == "features" else scale
        declared = {each.row for each in scale.algorithms}
        assert {each.row for each in table.rows} <= declared, (name, kind)
        for each in table.rows:
            assert each.executed is None or each.executed <= (each.planned or 0)
            assert set(each.numbers) <= set(FIGURES)


def test_a_stored_curve_ends_in_the_stored_number() -> None:
    ends = 0
    for name, curves in read_curves().items():
        rows = {each.key: each for each in SUMMARY.results[name, "paper"].rows}
        for curve in curves:
            own = rows[curve.key].numbers["mean"]
            assert curve.seeds == " ".join(map(str, own.seeds))
            last, score = curve.points["accuracy"][-1]
            assert (last, 100 * score) == (own.rounds, pytest.approx(own.ours))
            ends += 1
    assert ends


# --- storing ----------------------------------------------------------------------------------------


def test_seeds_are_pooled_as_if_they_had_run_together(tmp_path: Path) -> None:
    values = {0: 80.0, 1: 83.0, 2: 85.5, 3: 79.0}

    def of(seeds: tuple[int, ...]) -> StoredTable:
        own = [values[seed] for seed in seeds]
        spread = float(np.std(own, ddof=1)) if len(own) > 1 else None
        single = StoredNumber(float(np.mean(own)), spread, seeds, 200, 10.0)
        found = f"{len(own)} of {len(own)}"
        each = StoredRow(
            "x", "", {"privacy.epsilon": "3"}, {"mean": single}, found, "–", 4 * len(own), 4 * len(own), "1"
        )
        return StoredTable("rdpcfl-mnist", "paper", (each,))

    for part in (of((0, 1)), of((2,)), of((3,))):
        path = store(part, tmp_path)
    (pooled,) = StoredTable.read(path, "rdpcfl-mnist", "paper").rows
    (together,) = of((0, 1, 2, 3)).rows
    assert pooled.numbers["mean"].seeds == (0, 1, 2, 3)
    assert pooled.numbers["mean"].ours == pytest.approx(together.numbers["mean"].ours)
    assert pooled.numbers["mean"].spread == pytest.approx(together.numbers["mean"].spread)
    assert (pooled.clusters_found, pooled.executed, pooled.planned) == ("4 of 4", 16, 16)
    values[4] = 1.0
    with pytest.raises(
        InputError, match=r"x, 3, mean: seeds 0 1 2 3 of 200 rounds are stored; seeds 3 4 of 200"
    ):
        store(of((3, 4)), tmp_path)
    store(of((0, 1, 2, 3, 4)), tmp_path)
    assert StoredTable.read(path, "rdpcfl-mnist", "paper").rows == of((0, 1, 2, 3, 4)).rows


def test_a_file_that_is_no_table_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rdpcfl-mnist-paper.csv"
    path.write_text("algorithm,figure\nx,mean\n")
    with pytest.raises(InputError, match="not a table of results"):
        StoredTable.read(path, "rdpcfl-mnist", "paper")


# --- documents --------------------------------------------------------------------------------------

RENDER = "coterie reproduce --all --render --out docs/reproduce --docs docs/reproduce.md --docs README.md"


def documents(read: Callable[[Path], str]) -> list[str]:
    """Names of the documents that do not show what the stored results say."""
    wrong = []
    for name, folder in (("docs/reproduce.md", "reproduce/"), ("README.md", "docs/reproduce/")):
        text = read(ROOT / name)
        if with_places(SUMMARY, text, folder, name) != text:
            wrong.append(name)
    for paper in SUMMARY.papers:
        name = f"docs/reproduce/{paper.paper.key}.md"
        if paper_page(paper, SUMMARY, "../reproduce.md") != read(ROOT / name):
            wrong.append(name)
    return wrong


def test_documents_show_what_is_stored() -> None:
    wrong = documents(lambda path: path.read_text(encoding="utf-8"))
    assert not wrong, f"{', '.join(wrong)}: other numbers than the stored ones; write them again by: {RENDER}"


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("README.md", "892 numbers", "893 numbers"),
        ("docs/reproduce.md", "| 75 | 60 | 59 (24) |", "| 75 | 60 | 60 (24) |"),
        ("docs/reproduce/r-dpcfl.md", "**94.6** / 89.0", "**94.7** / 89.0"),
        ("docs/reproduce/dp-ogl.md", "| 83.7 |", "| 83.8 |"),
    ],
)
def test_one_changed_digit_is_found(name: str, before: str, after: str) -> None:
    def read(path: Path) -> str:
        text = path.read_text(encoding="utf-8")
        if path == ROOT / name:
            assert before in text
            text = text.replace(before, after, 1)
        return text

    assert documents(read) == [name]


def test_a_changed_result_changes_the_documents() -> None:
    key = ("rdpcfl-mnist", "paper")
    first, *rest = SUMMARY.results[key].rows
    worse = replace(first, numbers={**first.numbers, "mean": replace(first.numbers["mean"], ours=12.0)})
    changed = summarise({**SUMMARY.results, key: replace(SUMMARY.results[key], rows=(worse, *rest))})
    assert changed.counts()["at_least_as_good"] == SUMMARY.counts()["at_least_as_good"] - 1
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert with_places(changed, text, "docs/reproduce/", "README.md") != text


def test_drawings_have_ours_and_the_printed_lines() -> None:
    found = [figure for paper in SUMMARY.papers for figure in drawings(paper, SUMMARY)]
    assert len(found) == sum(len(paper.paper.drawings) for paper in SUMMARY.papers)
    assert "r-dpcfl, printed" in found[0].svg
    assert len({figure.slug for figure in found}) == len(found)


def test_a_drawing_tells_ours_from_printed_and_names_unit_seeds_and_base_rate() -> None:
    mnist = next(iter(drawings(SUMMARY.papers[0], SUMMARY)))
    lines = painted(mnist)
    ours, printed = lines["r-dpcfl"], lines["r-dpcfl, printed"]
    assert ours.get_color() == printed.get_color()
    assert (ours.get_linestyle(), printed.get_linestyle()) == ("-", "--")
    assert printed.get_markerfacecolor() != ours.get_markerfacecolor()
    assert lines.axes.get_xscale() == "log"
    (note,) = [text.get_text() for text in lines.axes.texts]
    assert note == "per cent, mean of 1 to 3 seeds, base rate 11.3 to 11.4"
    assert note in mnist.caption


def test_every_drawing_says_at_its_marks_what_is_stored(tmp_path: Path) -> None:
    for paper in SUMMARY.papers:
        for figure in drawings(paper, SUMMARY):
            path = figure.write(tmp_path)
            kept, drawn = (
                list(ElementTree.parse(file).getroot().itertext())
                for file in (ROOT / "docs" / "reproduce" / path.name, path)
            )
            assert kept == drawn, f"{path.name}; write it again by: {RENDER}"
