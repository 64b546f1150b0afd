"""The preprint's tables are complete, in range, and say what they were copied from."""

import pytest

from coterie.algorithms import algorithm_names
from coterie.privacy import Unit
from coterie.reproduce.printed import read_publication

PREPRINT = read_publication("rc-dpfl-preprint")
UNREADABLE = {
    (7, "dp-ifca", "mean", 3.0),
    (7, "dp-ifca", "majority", 3.0),
    (7, "dp-ifca", "minority", 3.0),
    (7, "km-cdpfl", "minority", 10.0),
    (7, "km-cdpfl", "minority", 5.0),
    (7, "km-cdpfl", "minority", 4.0),
}


SETTINGS = ("mnist", "rotation"), ("fashion-mnist", "rotation"), ("cifar10", "rotation"), ("cifar10", "label")
ACCURACIES = ("mean", "majority", "minority")
FAIRNESS = ("min", "disparity", "f_acc", "f_loss")


def test_every_table_has_every_algorithm_figure_and_epsilon() -> None:
    expected = {
        (data, shift, algorithm, figure, epsilon): table
        for place, (data, shift) in enumerate(SETTINGS)
        for table, figures in ((3 + 2 * place, ACCURACIES), (4 + 2 * place, FAIRNESS))
        for algorithm in ("global", "dp-ifca", "km-cdpfl", "rc-dpfl", "oracle")
        for figure in figures
        for epsilon in (10.0, 5.0, 4.0, 3.0, 2.0)
    }
    assert {key: printed.table for key, printed in PREPRINT.numbers.items()} == expected


def test_only_what_could_not_be_read_is_missing() -> None:
    missing = {(printed.table, *key[2:]) for key, printed in PREPRINT.numbers.items() if printed.mean is None}
    assert missing == UNREADABLE


def test_numbers_are_in_range_and_in_the_units_they_claim() -> None:
    for key, printed in PREPRINT.numbers.items():
        if printed.mean is not None:
            assert 0 < printed.mean < (4 if key[3] == "f_loss" else 100)
            assert printed.std is None or 0 < printed.std < 21


@pytest.mark.parametrize(
    ("asked", "printed"),
    [
        (("mnist", "rotation", "rc-dpfl", "mean", 3), (89.0, 0.44)),
        (("mnist", "rotation", "oracle", "minority", 3), (89.1, 0.089)),
        (("mnist", "rotation", "global", "disparity", 10), (18.56, 0.57)),
        (("fashion-mnist", "rotation", "rc-dpfl", "mean", 3), (74.04, 1.54)),
        (("fashion-mnist", "rotation", "km-cdpfl", "min", 2), (14.03, 7.47)),
        (("cifar10", "rotation", "rc-dpfl", "majority", 4), (35.05, 0.05)),
        (("cifar10", "rotation", "oracle", "mean", 2), (29.34, 0.61)),
        (("cifar10", "label", "dp-ifca", "minority", 10), (36.17, 0.37)),
        (("cifar10", "label", "km-cdpfl", "f_loss", 5), (0.46, 0.01)),
    ],
)
def test_cells_are_found_by_what_they_measure(
    asked: tuple[str, str, str, str, float], printed: tuple[float, float]
) -> None:
    found = PREPRINT.printed(*asked)
    assert found is not None
    assert (found.mean, found.std) == printed


def test_what_is_not_printed_is_none() -> None:
    assert PREPRINT.printed("mnist", "rotation", "oracle", "mean", 7) is None


def test_every_published_algorithm_can_be_run() -> None:
    assert set(PREPRINT.algorithms) <= set(algorithm_names(Unit.RECORD))


def test_the_source_is_named() -> None:
    assert "Malekmohammadi" in PREPRINT.source
    assert "Tables 3 to 10" in PREPRINT.source
