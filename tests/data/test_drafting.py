"""From a table to a declaration: what is declared, left open or refused, and what becomes a file."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from coterie.data import DataSettings, load_dataset
from coterie.data.drafting import Drafting, FederationDraft
from coterie.data.folder import TAKEN_FROM_DATA
from coterie.data.frames import ColumnValues, ValueKind, deal, file_names, read_whole
from coterie.errors import DataError, InputError

ROWS: dict[str, list[Any]] = {
    "ward": ["a", "b", "a", "b"],
    "age": [30, 70, 41, 65],
    "seen": [date(2001, 1, 1), date(2001, 1, 3), date(2001, 1, 2), None],
    "smoker": [True, False, True, False],
    "drug": ["x", "y", "x", "z"],
    "code": [1, 2, 3, 2],
    "ill": ["no", "yes", "no", "yes"],
}
PUBLIC: dict[str, Any] = {
    "age": (20, 80),
    "seen": ("2001-01-01", "2001-01-03"),
    "drug": ["x", "y", "z"],
    "code": [1, 2, 3],
    "ill": ["no", "yes"],
}


def draft(bounds: Any, rows: Any = ROWS, **options: Any) -> FederationDraft:
    return Drafting(deal(read_whole(pa.table(rows)), "ward"), "ill", bounds, **options).draft()


def test_what_is_declared_becomes_features_and_nothing_is_said_to_come_from_the_data() -> None:
    made = draft(PUBLIC, missing=["seen"])
    assert made.fill_in == []
    assert made.declaration().declared == "in-advance"
    data = made.dataset(Path("wards"))
    assert data.caveats == ()
    np.testing.assert_allclose(
        data.train.features,
        [  # age, day, no day, false, true, x, y, z, 1, 2, 3
            [-2 / 3, -1, 0, 0, 1, 1, 0, 0, 1, 0, 0],
            [-0.3, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1],
            [2 / 3, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0],
            [0.5, 0, 1, 1, 0, 0, 0, 1, 0, 1, 0],
        ],
        atol=1e-6,
    )
    assert data.train.targets.tolist() == [0, 0, 1, 1]


def test_what_nobody_declares_is_left_open_and_no_run_reads_it(tmp_path: Path) -> None:
    made = draft({"age": (20, 80)})
    assert made.fill_in == [
        "ill (classes)",
        "seen (dates, missing)",
        "drug (categories)",
        "code (range)",
    ]
    (tmp_path / "federation.yaml").write_text(made.text)
    made.write_tables(tmp_path, ".csv")
    with pytest.raises(DataError, match=r"a draft, in which ill \(classes\), seen \(dates, missing\)"):
        load_dataset(DataSettings(name="folder", path=tmp_path), seed=0)


def test_what_comes_from_the_records_is_said_wherever_they_are_used(tmp_path: Path) -> None:
    made = draft("data")
    assert made.declaration().declared == "from-data"
    (tmp_path / "federation.yaml").write_text(made.text)
    made.write_tables(tmp_path, ".parquet")
    assert load_dataset(DataSettings(name="folder", path=tmp_path), seed=0).caveats == (TAKEN_FROM_DATA,)
    # One column is enough.
    assert draft({**PUBLIC, "age": "data"}, missing=["seen"]).declaration().declared == "from-data"


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_files_read_as_the_table_did(tmp_path: Path, suffix: str) -> None:
    made = draft(PUBLIC, missing=["seen"])
    (tmp_path / "federation.yaml").write_text(made.text)
    made.write_tables(tmp_path, suffix)
    stored, direct = load_dataset(DataSettings(name="folder", path=tmp_path), seed=0), made.dataset(tmp_path)
    assert stored.owners is not None
    assert stored.owners.names == ("a", "b")
    np.testing.assert_array_equal(stored.train.features, direct.train.features)
    np.testing.assert_array_equal(stored.train.targets, direct.train.targets)


def test_a_label_decides_the_task_and_a_range_of_it_a_regression() -> None:
    assert draft({**PUBLIC, "ill": "data"}, missing=["seen"]).declared["task"] == "classification"
    rows = {**ROWS, "ill": [1.5, 2.5, 0.5, 1.0]}
    made = draft({**PUBLIC, "ill": (0, 5)}, rows, missing=["seen"])
    assert made.dataset(Path("wards")).task.kind == "regression"
    with pytest.raises(InputError, match="task: classification, but ill"):
        draft({**PUBLIC, "ill": (0, 5)}, rows, task="classification")
    counted = draft({**PUBLIC, "ill": 2}, {**ROWS, "ill": [0, 1, 0, 1]}, missing=["seen"])
    assert counted.declaration().as_task().classes == 2


def test_free_text_is_refused_with_advice_unless_its_categories_are_listed() -> None:
    words = [f"word {number}" for number in range(120)]
    rows = {"ward": ["a"] * 120, "note": words, "ill": ["no", "yes"] * 60}
    for bounds in (None, "data"):
        with pytest.raises(DataError, match=r"column note: free text.*leave it out"):
            draft(bounds, rows)
    assert draft({"note": words, "ill": ["no", "yes"]}, rows).fill_in == []


def test_whoever_looks_like_an_identifier_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"ward": ["a"] * 40, "number": list(range(40)), "ill": ["no", "yes"] * 20}
    draft({"number": (0, 100), "ill": ["no", "yes"]}, rows)
    assert "every row has another number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bounds", "line"),
    [
        ({"age": "all"}, "bounds: age: 'all' is not allowed; allowed: .low, high."),
        ({"age": ("young", "old")}, "bounds: age"),
        ({"height": (0, 2)}, "no column 'height'; it has age"),
        ({"ill": ("2001-01-01", "2002-01-01")}, "bounds: ill is a date"),
    ],
)
def test_bounds_that_are_none_are_refused(bounds: Any, line: str) -> None:
    with pytest.raises(InputError, match=line):
        draft(bounds)


def test_values_that_contradict_the_declaration_are_found_before_anything_is_written() -> None:
    made = draft({**PUBLIC, "drug": ["x", "y"]}, missing=["seen"])
    with pytest.raises(DataError, match="table: row 4, column drug: 'z'; allowed: x, y"):
        made.dataset(Path("wards"))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "2.5", ""], ValueKind.NUMBERS),
        (["007", "12"], ValueKind.WORDS),
        (["2001-01-01", "2001-02-01 10:30"], ValueKind.DATES),
        (["20010101", "20010201"], ValueKind.NUMBERS),
        (["TRUE", "FALSE"], ValueKind.TRUTH),
        (["True", "false", ""], ValueKind.TRUTH),
        (["", "?"], ValueKind.NOTHING),
    ],
)
def test_a_column_is_what_all_its_values_look_like(values: list[str], kind: ValueKind) -> None:
    table = read_whole({"ward": ["a"] * len(values), "x": values})
    assert ColumnValues({"a": table}, "x").kind is kind


def test_clients_are_files_of_different_names() -> None:
    names = file_names(["North/1", "North%2F1", ".west", "Zürich", "a b"])
    assert names == {
        "North/1": "North%2F1",
        "North%2F1": "North%252F1",
        ".west": "%2Ewest",
        "Zürich": "Zürich",
        "a b": "a b",
    }
    for clash in (["north", "NORTH"], ["ﬁ", "fi"]):
        with pytest.raises(InputError, match="the same name on some systems"):
            file_names(clash)
    with pytest.raises(InputError, match="too long"):
        file_names(["x" * 300])


def test_a_row_without_a_client_is_refused() -> None:
    with pytest.raises(DataError, match="table: row 2, column ward: no client"):
        deal(read_whole({"ward": ["a", ""], "x": [1, 2]}), "ward")


@pytest.mark.parametrize("source", [{"x": [[1], [2, 3]]}, 5, {}])
def test_what_is_no_table_is_refused(source: Any) -> None:
    with pytest.raises(DataError, match="data: "):
        read_whole(source)


def test_data_frames_are_read_without_their_index() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"x": [1.5, None], "day": pandas.to_datetime(["2001-01-01", None])}, index=[7, 9]
    )
    table = read_whole(frame)
    assert list(table.columns) == ["x", "day"]
    np.testing.assert_array_equal(table.numbers("x"), [1.5, np.nan])
    assert table.words("day") == ["2001-01-01 00:00:00", ""]
