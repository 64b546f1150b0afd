"""A user's own data: what a declaration may say, and every way in which files can disagree with it."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coterie.data import Dataset, DataSettings, NaturalFederation, Task, build_federation, load_dataset
from coterie.data.folder import read_folder
from coterie.errors import DataError, InputError

TABLE = """
task: classification
label: {column: ill, classes: ["no", "yes"]}
features:
  - {column: age, range: [20, 80]}
  - {column: ward, categories: [a, b, c]}
  - {column: dose, range: [0, 10], missing: indicator, missing_values: [-1]}
"""
ARRAYS = """
task: classification
label: {classes: 3}
features: {shape: [2, 2], range: [0, 255]}
"""
HEADER = "ill,age,ward,dose\n"
ROWS = HEADER + "no,50,a,5\nyes,80,c,?\nyes,90,b,-1\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "clinics").mkdir()
    return tmp_path / "clinics"


def declare(folder: Path, text: str) -> None:
    (folder / "federation.yaml").write_text(text)


def load(folder: Path) -> Dataset:
    return load_dataset(DataSettings(name="folder", path=folder), seed=0)


def refused(folder: Path, line: str) -> None:
    with pytest.raises(InputError, match=line) as error:
        load(folder)
    assert "\n" not in str(error.value)
    assert folder.name in str(error.value)


def savez(path: Path, x: object, y: object) -> None:
    np.savez(path, x=np.asarray(x), y=np.asarray(y))


def test_columns_become_features_as_declared(folder: Path) -> None:
    declare(folder, TABLE)
    (folder / "north.csv").write_text(ROWS)
    data = load(folder)
    assert data.train.features.dtype == np.float32
    np.testing.assert_allclose(
        data.train.features,
        [
            [0.0, 1, 0, 0, 0.0, 0],
            [1.0, 0, 0, 1, 0.0, 1],
            [1.0, 0, 1, 0, 0.0, 1],  # 90 is clipped to 80, -1 means missing
        ],
    )
    assert data.train.targets.tolist() == [0, 1, 1]
    assert data.task == Task("classification", (6,), 2)
    assert data.name == "clinics"


def test_a_file_is_a_client_and_its_features_do_not_depend_on_the_others(folder: Path) -> None:
    declare(folder, TABLE)
    (folder / "north.csv").write_text(HEADER + "no,50,a,5\n" * 20)
    alone = load(folder)
    (folder / "south.csv").write_text(HEADER + "yes,20,b,9\n" * 15)
    (folder / "README.md").write_text("notes may lie beside the data")
    (folder / ".hidden").write_text("so may hidden files")
    together = load(folder)
    assert together.owners is not None
    assert together.owners.names == ("north", "south")
    assert np.array_equal(together.train.features[:20], alone.train.features)
    federation = build_federation(together, NaturalFederation(), seed=0)
    assert [(c.name, len(c.train), len(c.test)) for c in federation.clients] == [
        ("north", 16, 4),
        ("south", 12, 3),
    ]


def test_parquet_and_csv_give_the_same_records(folder: Path) -> None:
    declare(folder, TABLE)
    (folder / "north.csv").write_text(ROWS)
    table = pa.table(
        {
            "dose": pa.array([5, None, -1], pa.int32()),
            "ward": ["a", "c", "b"],
            "age": [50.0, 80.0, 90.0],
            "ill": ["no", "yes", "yes"],
            "ignored": [[1], [2], [3]],
        }
    )
    pq.write_table(table, folder / "south.parquet")
    data = load(folder)
    assert np.array_equal(data.train.features[:3], data.train.features[3:])
    assert np.array_equal(data.train.targets[:3], data.train.targets[3:])


def test_numeric_categories_match_as_numbers(folder: Path) -> None:
    declare(
        folder,
        "task: classification\nlabel: {column: y, classes: 3}\nfeatures: [{column: k, categories: [1, 2]}]\n",
    )
    (folder / "a.csv").write_text("k,y\n1.0,0\n2,2\n")
    pq.write_table(pa.table({"k": [2, 1], "y": [1.0, 2.0]}), folder / "b.parquet")
    data = load(folder)
    assert data.train.features.tolist() == [[1, 0], [0, 1], [0, 1], [1, 0]]
    assert data.train.targets.tolist() == [0, 2, 1, 2]


def test_truth_values_of_parquet_match_quoted_names(folder: Path) -> None:
    declare(folder, TABLE.replace('["no", "yes"]', '["false", "true"]'))
    table = pa.table({"ill": [True, False], "age": [30, 40], "ward": ["a", "b"], "dose": [1.0, 2.0]})
    pq.write_table(table, folder / "a.parquet")
    assert load(folder).train.targets.tolist() == [1, 0]


def test_arrays_are_divided_by_the_end_of_their_range(folder: Path) -> None:
    declare(folder, ARRAYS)
    savez(folder / "a.npz", [[[0, 51], [255, 999]]], [2])
    data = load(folder)
    np.testing.assert_allclose(data.train.features, [[[0.0, 0.2], [1.0, 1.0]]])
    assert data.train.features.dtype == np.float32
    assert data.train.targets.tolist() == [2]
    assert data.task == Task("classification", (2, 2), 3)


def test_regression_targets_are_mapped_to_the_unit_interval(folder: Path) -> None:
    declare(
        folder,
        "task: regression\nlabel: {column: score, range: [0, 50]}\nfeatures: [{column: x, range: [-1, 1]}]\n",
    )
    (folder / "a.csv").write_text("x,score\n0.5,25\n-3,60\n")
    data = load(folder)
    assert data.train.features.tolist() == [[0.5], [-1.0]]
    assert data.train.targets.tolist() == [0.5, 1.0]
    assert data.train.targets.dtype == np.float32
    assert data.task == Task("regression", (1,), 0, error_cap=0.1)


@pytest.mark.parametrize(
    "scaling",
    [
        "scale: client-mean",
        "standardize: per-client",
        "normalise: true",
        "min-max: true",
        "features: {shape: [2], range: [0, 1], scaling: min-max}",
        "features: {shape: [2], range: min-max}",
        "features: {shape: [2], range: auto}",
        "features: [{column: a, range: auto}]",
        "features: [{column: a, range: [0, 1], standardise: true}]",
        "label: {column: y, range: auto}",
    ],
)
def test_scaling_by_a_clients_own_statistics_is_refused_with_the_reason(folder: Path, scaling: str) -> None:
    declaration = {
        "task": "classification",
        "label": "{classes: 2}",
        "features": "{shape: [2], range: [0, 1]}",
    }
    key, _, value = scaling.partition(": ")
    declaration[key] = value
    declare(folder, "".join(f"{key}: {value}\n" for key, value in declaration.items()))
    refused(folder, r"federation\.yaml: .*breaks the per-record sensitivity; declare range")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "should be a section of keys and values"),
        ("- a\n", "should be a section of keys and values"),
        ("task: [", "not YAML, line 1"),
        (TABLE.replace("classification", "clustering"), "task: .*'classification' or 'regression'"),
        (TABLE + "colour: red\n", "colour: unknown key; known here: task, label"),
        (TABLE.replace('"no", "yes"', "true, false"), "put true and false in quotes"),
        (
            TABLE.replace("[20, 80]", "[80, 20]"),
            r"features\[0\]\.range: \[80, 20\] is not allowed, should be two finite numbers",
        ),
        (TABLE.replace("[20, 80]", "[0, .inf]"), "two finite numbers"),
        (TABLE.replace(", range: [20, 80]", ""), "column age: declare either range or categories"),
        (TABLE.replace("missing: indicator, ", ""), "missing_values needs missing: indicator"),
        (TABLE.replace("[a, b, c]", "[a, b, a]"), r"\['a', 'b', 'a'\] .*, should have every name once"),
        (TABLE.replace('"no", "yes"', '"no"'), r"label.classes: \['no'\] .*, should have 2 or more entries$"),
        (TABLE.replace('"no", "yes"', "a, [b]"), r"label.classes\[1\]: \['b'\] .* a text or an integer or"),
        (
            TABLE.replace("range: [20", "rang: [20"),
            r"features\[0\].rang: unknown key; did you mean 'range'\?",
        ),
        (
            TABLE.replace("[a, b, c]", "[a, b], missing: indicator, missing_values: [0]"),
            "missing_values are numbers, its categories are names",
        ),
        (TABLE.replace("column: age", "column: ill"), "ill is the label, a model must not see it"),
        (TABLE.replace("column: age", "column: dose"), "dose is declared twice"),
        (TABLE.replace("column: ill, ", ""), "a table needs label.column"),
        (TABLE.replace('classes: ["no", "yes"]', "range: [0, 1]"), "classification needs classes"),
        (TABLE.replace("classification", "regression"), "regression needs a range"),
        (ARRAYS.replace("classes: 3", "classes: 1"), "classes: 1; allowed: 2 or more"),
        (ARRAYS.replace("classes: 3", "classes: 0"), "label.classes"),
        (ARRAYS.replace("classes: 3", "classes: 3, column: y"), "beside arrays it has no column"),
        (ARRAYS.replace("[2, 2]", "[]"), r"features\.shape"),
    ],
)
def test_declarations_with_mistakes_are_refused_by_key(folder: Path, text: str, line: str) -> None:
    declare(folder, text)
    (folder / "a.csv").write_text(ROWS)
    refused(folder, rf"federation\.yaml.*{line}")


REGRESSION = """
task: regression
label: {column: y, range: [0, 50]}
features: [{column: x, range: [0, 1]}]
"""
ENDS = "[-1e308, 1e308]", "[0, 1e31]", "[-1e31, 0]", "[1e308, -1e308]", "[.nan, 1]", "[0, .nan]", "[-.inf, 0]"
ENDS += "[0, 5e-324]", "[0, 1e-31]", "[0, 0]", "[-0.0, 0.0]", "[1, 1]"


@pytest.mark.parametrize("ends", ENDS)
def test_a_range_that_no_arithmetic_holds_is_refused_wherever_it_is_declared(folder: Path, ends: str) -> None:
    (folder / "a.csv").write_text("y,x\n1,1\n")
    for text, key in (
        (TABLE.replace("[20, 80]", ends), r"features\[0\]\.range"),
        (ARRAYS.replace("[0, 255]", ends), r"features\.range"),
        (REGRESSION.replace("[0, 50]", ends), r"label\.range"),
    ):
        declare(folder, text)
        refused(
            folder, rf"federation\.yaml.*{key}: .* is not allowed, should be two finite numbers, the lower"
        )


@pytest.mark.parametrize("ends", ["[-1e30, 1e30]", "[0, 1e-30]", "[1, 1.0000000000000002]", "[-1e30, -1e29]"])
def test_the_widest_and_the_narrowest_range_scale_to_finite_numbers(folder: Path, ends: str) -> None:
    declare(folder, REGRESSION.replace("[0, 1]", ends).replace("[0, 50]", ends))
    low, high = (float(end) for end in ends.strip("[]").split(", "))
    (folder / "a.csv").write_text(f"y,x\n{low!r},{low!r}\n{high!r},{high!r}\n0,0\n1e300,1e300\n")
    data = load(folder)
    for values in (data.train.features, data.train.targets):
        assert np.isfinite(values).all()
        assert np.abs(values).max() <= 1


@pytest.mark.parametrize("count", ["-1", "0", "1", "1.5", "nan", ".nan", ".inf", "1" + "0" * 18, "true"])
def test_a_number_of_classes_that_no_model_has_is_refused(folder: Path, count: str) -> None:
    declare(folder, ARRAYS.replace("classes: 3", f"classes: {count}"))
    savez(folder / "a.npz", np.zeros((3, 2, 2)), [0, 1, 0])
    refused(folder, r"federation\.yaml: label\.classes: ")


@pytest.mark.parametrize(
    "cap", ["0", "-1", "5e-324", "1e-10", "1000001", "1e308", ".inf", ".nan", "true", "x"]
)
def test_a_cap_on_errors_that_no_score_can_have_is_refused(folder: Path, cap: str) -> None:
    (folder / "a.csv").write_text("y,x\n1,1\n")
    declare(folder, REGRESSION + f"error_cap: {cap}\n")
    refused(folder, r"federation\.yaml: error_cap: ")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", "no records"),
        (HEADER, "no records"),
        ("age,ward,dose\n50,a,5\n", "no column 'ill'; it has age, ward, dose"),
        ("ill,ward,dose\nno,a,5\n", "no column 'age'"),
        (HEADER + "no,50,a,5\nno,old,a,5\n", "line 3, column age: 'old' is no number"),
        (HEADER + "no,inf,a,5\n", "line 2, column age: inf; allowed: finite numbers"),
        (HEADER + "no,nan,a,5\n", "line 2, column age: no value; declare missing: indicator"),
        (HEADER + "no,,a,5\n", "line 2, column age: no value"),
        (HEADER + "\n\nno,50,d,5\n", "line 4, column ward: 'd'; allowed: a, b, c"),
        (HEADER + "maybe,50,a,5\n", "line 2, column ill: 'maybe'; allowed: no, yes"),
        (HEADER + ",50,a,5\n", "line 2, column ill: no label"),
        (HEADER + "no,50,a,5\nno,50\n", "line 3: 2 values for 4 columns"),
        (HEADER + 'no,50,"a,5\n', "cannot be read"),
        ("ill,age,age,dose\nno,1,2,3\n", "column 'age' occurs twice"),
    ],
)
def test_tables_with_mistakes_are_refused_by_line(folder: Path, content: str, line: str) -> None:
    declare(folder, TABLE)
    (folder / "good.csv").write_text(ROWS)
    (folder / "north.csv").write_text(content)
    refused(folder, rf"north\.csv: {line}")


def test_text_in_another_encoding_is_refused(folder: Path) -> None:
    declare(folder, TABLE)
    (folder / "north.csv").write_bytes("ill,age,ward,dose\nno,50,é,5\n".encode("latin-1"))
    refused(folder, r"north\.csv: cannot be read")


@pytest.mark.parametrize(("label", "shown"), [("3", r"3\.0"), ("-1", r"-1\.0"), ("0.5", r"0\.5")])
def test_labels_out_of_range_are_refused_in_tables(folder: Path, label: str, shown: str) -> None:
    declare(
        folder,
        "task: classification\nlabel: {column: y, classes: 3}\nfeatures: [{column: x, range: [0, 1]}]\n",
    )
    (folder / "a.csv").write_text(f"x,y\n0,2\n0,{label}\n")
    refused(folder, rf"a\.csv: line 3, column y: label {shown}; allowed: 0 to 2")


GOOD = np.zeros((4, 2, 2))


@pytest.mark.parametrize(
    ("x", "y", "line"),
    [
        (np.zeros((0, 2, 2)), [], "no records"),
        (np.float64(3.0), [], "no records"),
        (np.zeros((4, 2, 3)), [0] * 4, r"records of shape \(2, 3\); federation.yaml declares \(2, 2\)"),
        (GOOD, [0] * 3, r"4 records with targets of shape \(3,\)"),
        (GOOD, [[0]] * 4, r"4 records with targets of shape \(4, 1\)"),
        (np.where(np.arange(16).reshape(4, 2, 2) == 9, np.nan, 0.0), [0] * 4, "row 2 of x .* not finite"),
        (np.where(np.arange(16).reshape(4, 2, 2) == 9, np.inf, 0.0), [0] * 4, "row 2 of x .* not finite"),
        (GOOD, [0, 1, 3, 0], "row 2 of y: label 3; allowed: 0 to 2"),
        (GOOD, [0, -1, 0, 0], "row 1 of y: label -1"),
        (GOOD, [0, 0.5, 0, 0], r"row 1 of y: label 0\.5"),
        (GOOD, [0, 0, 0, np.nan], "row 3 of y: label nan"),
        (GOOD, ["a", "b", "c", "d"], "array y is of type <U1; allowed: numbers"),
    ],
)
def test_arrays_with_mistakes_are_refused_by_row(folder: Path, x: object, y: object, line: str) -> None:
    declare(folder, ARRAYS)
    savez(folder / "good.npz", GOOD, [0] * 4)
    savez(folder / "north.npz", x, y)
    refused(folder, rf"north\.npz: {line}")


def test_archives_never_run_pickled_code(folder: Path) -> None:
    declare(folder, ARRAYS)
    np.savez(folder / "north.npz", x=np.array([{}, {}], dtype=object), y=np.zeros(2))
    refused(folder, r"north\.npz: array x holds pickled objects; allowed: numbers")


def test_what_a_library_says_of_a_damaged_file_is_not_repeated(folder: Path) -> None:
    """It may quote records, and is no sentence of ours."""
    declare(folder, TABLE)
    (folder / "north.csv").write_text(HEADER + 'no,50,"secret,5\n')
    refused(folder, r"north\.csv: cannot be read, it may be truncated or corrupt \(\w+\)$")


def test_archives_without_the_arrays_are_refused(folder: Path) -> None:
    declare(folder, ARRAYS)
    np.savez(folder / "north.npz", x=GOOD, labels=np.zeros(4))
    refused(folder, r"north\.npz: no array 'y'; it has x, labels")
    np.save(folder / "north", GOOD)
    (folder / "north.npy").rename(folder / "north.npz")
    refused(folder, r"north\.npz: ")


def test_a_member_that_is_no_array_is_refused(folder: Path) -> None:
    declare(folder, ARRAYS)
    with zipfile.ZipFile(folder / "north.npz", "w") as archive:
        archive.writestr("x.npy", b"not an array")
        archive.writestr("y.npy", b"")
    refused(folder, r"north\.npz: array x is of type bytes; allowed: numbers")


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scrambled(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes(255 - byte for byte in content[100:160]) + content[160:])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [halved, scrambled, emptied])
def test_damaged_archives_are_refused(folder: Path, damage: Callable[[Path], None]) -> None:
    declare(folder, ARRAYS)
    noise = np.random.default_rng(0).integers(0, 255, size=(50, 2, 2))
    np.savez_compressed(folder / "north.npz", x=noise, y=np.zeros(50))
    damage(folder / "north.npz")
    refused(folder, r"north\.npz: cannot be read")


@pytest.mark.parametrize("damage", [halved, emptied])
def test_damaged_parquet_is_refused(folder: Path, damage: Callable[[Path], None]) -> None:
    declare(folder, TABLE)
    pq.write_table(pa.table({"age": [1.0] * 100}), folder / "north.parquet")
    damage(folder / "north.parquet")
    refused(folder, r"north\.parquet: cannot be read")


@pytest.mark.parametrize("where", ["a name", "a value"])
def test_parquet_with_text_that_is_no_text_is_refused(folder: Path, where: str) -> None:
    declare(folder, TABLE)
    told = {"a name": {"age": [1.0], "marked": ["x"]}, "a value": {"age": [1.0], "b": ["marked"]}}[where]
    pq.write_table(pa.table(told), folder / "north.parquet", compression="none", use_dictionary=False)
    file = folder / "north.parquet"
    file.write_bytes(file.read_bytes().replace(b"marked", b"mark\xef\xbf"))
    refused(folder, r"north\.parquet: cannot be read")


def test_parquet_without_rows_is_refused(folder: Path) -> None:
    declare(folder, TABLE)
    pq.write_table(pa.table({"age": pa.array([], pa.float64())}), folder / "north.parquet")
    refused(folder, r"north\.parquet: no records")


def test_two_files_of_one_client_are_refused(folder: Path) -> None:
    declare(folder, TABLE)
    (folder / "north.csv").write_text(ROWS)
    (folder / "north.east.csv").write_text(ROWS)
    pq.write_table(pa.table({"age": [1.0]}), folder / "north.parquet")
    refused(folder, r"north\.parquet: client north is also in north\.csv")


@pytest.mark.parametrize("name", ["north.xlsx", "north.npz", "north.csv.gz"])
def test_files_that_would_be_overlooked_are_refused(folder: Path, name: str) -> None:
    declare(folder, TABLE)
    (folder / "south.csv").write_text(ROWS)
    (folder / name).write_text("")
    refused(folder, rf"{name}: federation\.yaml asks for \.csv or \.parquet files")


def test_folders_without_declaration_or_clients_are_refused(folder: Path) -> None:
    refused(folder, r"clinics: no federation\.yaml, which declares task, label and features")
    declare(folder, TABLE)
    refused(folder, r"clinics: no clients; put one \.csv or \.parquet file per client there")


def test_a_path_that_is_no_folder_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path: .*absent; allowed: a folder"):
        load(folder / "absent")


def test_one_bad_client_is_found_when_the_federation_is_built(folder: Path) -> None:
    declare(folder, TABLE)
    (folder / "north.csv").write_text(HEADER + "no,50,a,5\n" * 30)
    (folder / "south.csv").write_text(HEADER + "no,50,a,5\n" * 3)
    with pytest.raises(DataError, match="client south: 2 training and 1 test records"):
        build_federation(load(folder), NaturalFederation(), seed=0)


def test_identifiers_longer_than_floats_can_tell_apart_stay_apart(tmp_path: Path) -> None:
    """Beside the declared columns an identifier is ignored; as a category its last digit counts."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    long = [2**53, 2**53 + 1, 2**63 - 1, -(2**53) - 1]
    pq.write_table(
        pa.table({"id": pa.array(long), "v": [0.0, 1.0, 0.5, 0.25], "y": [0, 1, 0, 1]}),
        tmp_path / "a.parquet",
    )
    declared = "task: classification\nlabel: {column: y, classes: 2}\nfeatures:\n"
    (tmp_path / "federation.yaml").write_text(declared + "  - {column: v, range: [0, 1]}\n")
    assert read_folder(tmp_path).train.features[:, 0].tolist() == [-1.0, 1.0, 0.0, -0.5]
    categories = f"  - {{column: id, categories: {long}}}\n"
    (tmp_path / "federation.yaml").write_text(declared + categories)
    assert read_folder(tmp_path).train.features.tolist() == np.eye(4).tolist()


def table(ages: list[int]) -> pa.Table:
    rows = len(ages)
    return pa.table({"ill": ["no"] * rows, "age": ages, "ward": ["a"] * rows, "dose": [1.0] * rows})


def write_parts(path: Path, *parts: pa.Table) -> None:
    """As Spark writes a table: a folder of parts, with marks and checksums beside them."""
    path.mkdir()
    (path / "_SUCCESS").touch()
    for number, part in enumerate(parts):
        pq.write_table(part, path / f"part-{number:05d}-9c1e.snappy.parquet")
        (path / f".part-{number:05d}-9c1e.snappy.parquet.crc").write_bytes(b"crc")


def test_a_folder_of_parquet_parts_is_one_client(folder: Path) -> None:
    declare(folder, TABLE)
    pq.write_table(table([20, 30]), folder / "north.parquet")
    write_parts(folder / "south.parquet", table([40, 50]), table([60]).slice(1), table([80]))
    data = load(folder)
    assert data.owners is not None
    assert data.owners.names == ("north", "south")
    assert data.owners.train.tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_allclose(data.train.features[2:, 0], [-1 / 3, 0, 1], rtol=1e-6)


def test_parts_that_do_not_fit_together_are_refused(folder: Path) -> None:
    declare(folder, TABLE)
    write_parts(folder / "south.parquet", table([40]), table([50]).drop_columns(["dose"]))
    refused(folder, r"south\.parquet: cannot be read")
    write_parts(folder / "east.parquet")
    (folder / "south.parquet").rename(folder.parent / "elsewhere")
    refused(folder, r"east\.parquet: no records")
    pq.write_table(table([40]), folder / "east.parquet" / "part-0.parquet")
    (folder / "east.parquet" / "year=2020").mkdir()
    refused(folder, r"year=2020: .*allowed: parquet files")


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "part-0.csv").write_text(ROWS)


@pytest.mark.parametrize("name", ["south.csv", "south.parquet", "federation.yaml"])
@pytest.mark.parametrize("make", [os.mkfifo, dangling, to_zeros])
def test_what_is_no_file_is_refused_and_never_opened(
    folder: Path, name: str, make: Callable[[Path], None]
) -> None:
    declare(folder, TABLE)
    (folder / "north.csv").write_text(ROWS)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    refused(folder, name if make is not dangling or name != "federation.yaml" else "no federation.yaml")


def test_a_pipe_among_the_parts_of_a_table_is_refused(folder: Path) -> None:
    declare(folder, TABLE)
    write_parts(folder / "south.parquet", table([40]))
    os.mkfifo(folder / "south.parquet" / "part-00001.parquet")
    refused(folder, r"part-00001\.parquet: ")


@pytest.mark.parametrize("name", ["south.csv", "south", "south.npz", "south.d"])
def test_a_folder_that_may_be_a_client_is_refused(folder: Path, name: str) -> None:
    declare(folder, TABLE)
    (folder / "north.csv").write_text(ROWS)
    with_a_file(folder / name)
    refused(folder, rf"{name}: a folder; .*NAME\.parquet")


def test_folders_without_records_lie_there_unread(folder: Path) -> None:
    declare(folder, TABLE)
    (folder / "north.csv").write_text(ROWS)
    for name in ("notes", ".coterie"):
        (folder / name).mkdir()
        (folder / name / "what.md").write_text("ours")
    assert len(load(folder).train) == 3


def test_a_hidden_file_of_records_is_refused(folder: Path) -> None:
    declare(folder, TABLE)
    (folder / "north.csv").write_text(ROWS)
    (folder / ".north.csv.swp").write_bytes(b"\0")
    assert len(load(folder).train) == 3
    (folder / ".south.csv").write_text(ROWS)
    refused(folder, r"\.south\.csv: hidden; ")


def test_a_client_whose_name_is_no_text_is_refused(folder: Path) -> None:
    declare(folder, TABLE)
    (folder / os.fsdecode(b"n\xffrth.csv")).write_text(ROWS)
    refused(folder, r"rth\.csv: its name is not UTF-8")


@pytest.mark.parametrize("rows", [b"(9999999999, 2, 2)", b"(5, 2, 2)", b"(-1, 2, 2)", b"(3, 2, 2)"])
def test_arrays_that_claim_what_the_file_does_not_hold_are_refused_by_their_header(
    folder: Path, rows: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(folder, ARRAYS)
    savez(folder / "north.npz", GOOD, [0] * 4)
    content = io.BytesIO()
    np.save(content, GOOD)
    claimed = b"(4, 2, 2), }".ljust(len(rows) + 3)
    with zipfile.ZipFile(folder / "north.npz", "w") as archive:
        archive.writestr("x.npy", content.getvalue().replace(claimed, rows + b", }"))
        np.lib.format.write_array(archive.open("y.npy", "w"), np.zeros(4))
    monkeypatch.setattr("numpy.lib.format.read_array", lambda *_, **__: pytest.fail("memory was taken"))
    refused(folder, r"north\.npz: array x claims .* not what the file holds")
