"""The preprint's tables are complete, in range, and say what they were copied from."""

import pytest

from coterie.algorithms import algorithm_names
from coterie.errors import InputError
from coterie.privacy import Unit
from coterie.reproduce.published import Cell, rc_dpfl_preprint

PREPRINT = rc_dpfl_preprint()
UNREADABLE = {
    (7, "dp-ifca", "mean", 3.0),
    (7, "dp-ifca", "majority", 3.0),
    (7, "dp-ifca", "minority", 3.0),
    (7, "km-cdpfl", "minority", 10.0),
    (7, "km-cdpfl", "minority", 5.0),
    (7, "km-cdpfl", "minority", 4.0),
}


def test_every_table_has_every_algorithm_and_figure() -> None:
    assert [table.number for table in PREPRINT.tables] == list(range(3, 11))
    for table in PREPRINT.tables:
        accuracies = {"mean", "majority", "minority"}
        expected = accuracies if table.number % 2 else set(PREPRINT.figures) - accuracies
        assert list(table.cells) == ["global", "dp-ifca", "km-cdpfl", "rc-dpfl", "oracle"]
        for figures in table.cells.values():
            assert set(figures) == expected


def test_only_what_could_not_be_read_is_missing() -> None:
    missing = {
        (table.number, algorithm, figure, epsilon)
        for table in PREPRINT.tables
        for algorithm, figures in table.cells.items()
        for figure, row in figures.items()
        for epsilon, cell in zip(PREPRINT.epsilons, row, strict=True)
        if cell is None
    }
    assert missing == UNREADABLE


def test_numbers_are_in_range_and_in_the_units_they_claim() -> None:
    for table in PREPRINT.tables:
        for figures in table.cells.values():
            for figure, row in figures.items():
                for cell in filter(None, row):
                    assert 0 < cell.mean < (4 if figure == "f_loss" else 100)
                    assert cell.std is None or 0 < cell.std < 21


@pytest.mark.parametrize(
    ("asked", "printed"),
    [
        (("mnist", "rotation", "rc-dpfl", "mean", 3), Cell(89.0, 0.44)),
        (("mnist", "rotation", "oracle", "minority", 3), Cell(89.1, 0.089)),
        (("mnist", "rotation", "global", "disparity", 10), Cell(18.56, 0.57)),
        (("fashion-mnist", "rotation", "rc-dpfl", "mean", 3), Cell(74.04, 1.54)),
        (("fashion-mnist", "rotation", "km-cdpfl", "min", 2), Cell(14.03, 7.47)),
        (("cifar10", "rotation", "rc-dpfl", "majority", 4), Cell(35.05, 0.05)),
        (("cifar10", "rotation", "oracle", "mean", 2), Cell(29.34, 0.61)),
        (("cifar10", "label", "dp-ifca", "minority", 10), Cell(36.17, 0.37)),
        (("cifar10", "label", "km-cdpfl", "f_loss", 5), Cell(0.46, 0.01)),
    ],
)
def test_cells_are_found_by_what_they_measure(asked: tuple[str, str, str, str, float], printed: Cell) -> None:
    assert PREPRINT.cell(*asked) == printed


def test_a_cell_that_is_not_printed_is_an_error_that_says_so() -> None:
    with pytest.raises(
        InputError, match=r"prints no mean of oracle on mnist with rotation shift at epsilon 7"
    ):
        PREPRINT.cell("mnist", "rotation", "oracle", "mean", 7)
    assert PREPRINT.cell("cifar10", "rotation", "km-cdpfl", "minority", 10) is None


def test_every_published_algorithm_can_be_run() -> None:
    assert set(PREPRINT.algorithms) <= set(algorithm_names(Unit.RECORD))


def test_the_source_is_named() -> None:
    assert "Malekmohammadi" in PREPRINT.source
    assert "Tables 3 to 10" in PREPRINT.source
