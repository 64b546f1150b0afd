"""By what a record is known again."""

from pathlib import Path

import numpy as np
import pytest

from coterie.data import ClustersFederation, DataSettings, NaturalFederation, build_federation, load_dataset
from coterie.data.folder import read_folder
from coterie.data.identity import identified, of_arrays, of_records, of_table
from coterie.data.records import Dataset, Records, Task
from coterie.data.tables import ClientTable
from coterie.errors import DataError

YAML = """
task: classification
label: {column: ill, classes: ["no", "yes"]}
features: [{column: age, range: [0, 100]}]
"""


def table(**columns: list[str] | np.ndarray) -> ClientTable:
    return ClientTable(Path("t.csv"), columns, "line", range(len(next(iter(columns.values())))))


def test_a_row_is_the_same_in_another_order_of_columns_and_another_format() -> None:
    text = table(age=["61", "4.50", "-0"], name=["Ada", "?", "007"])
    binary = table(name=["Ada", "", "007"], age=np.array([61.0, 4.5, 0.0]))
    np.testing.assert_array_equal(of_table(text), of_table(binary))


def test_every_cell_and_every_name_counts() -> None:
    base = of_table(table(a=["1", "2"], b=["x", "y"]))
    changed = {
        "a value": table(a=["1", "3"], b=["x", "y"]),
        "the text of a number": table(a=["1", "02"], b=["x", "y"]),
        "a missing value": table(a=["1", ""], b=["x", "y"]),
        "the name of a column": table(a=["1", "2"], c=["x", "y"]),
    }
    for what, other in changed.items():
        assert not np.array_equal(base[1], of_table(other)[1]), what
    assert not np.array_equal(of_table(table(a=["1"], b=["2"])), of_table(table(a=["2"], b=["1"])))


def test_an_identifier_counts_alone_and_must_be_there() -> None:
    before, after = table(who=["17", "18"], age=["3", "4"]), table(who=["18", "17"], age=["9", "3"])
    np.testing.assert_array_equal(of_table(before, "who"), of_table(after, "who")[::-1])
    with pytest.raises(DataError, match=r"line 1, column who: no value, though it identifies"):
        of_table(table(who=["1", "?"]), "who")


def test_arrays_are_known_by_their_values_in_whatever_type() -> None:
    pixels = np.arange(12).reshape(3, 2, 2)
    labels = np.array([0, 1, 0])
    np.testing.assert_array_equal(of_arrays(pixels.astype(np.uint8), labels), of_arrays(pixels * 1.0, labels))
    assert not np.array_equal(of_arrays(pixels, labels)[1], of_arrays(pixels, 1 - labels)[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "federation.yaml").write_text(YAML)
    for name in "ab":
        rows = (f"{name}{row},{row},{'yes' if row % 2 else 'no'}" for row in range(40))
        (tmp_path / f"{name}.csv").write_text("\n".join(["who,age,ill", *rows]))
    return tmp_path


def test_records_carry_what_they_are_known_by_to_every_client_and_part(folder: Path) -> None:
    dataset = read_folder(folder)
    assert dataset.train.identity is not None
    federation = build_federation(dataset, NaturalFederation(), 0)
    parts = [part.identity for client in federation.clients for part in (client.train, client.test)]
    found = {bytes(row) for part in parts if part is not None for row in part}
    assert found == {bytes(row) for row in dataset.train.identity}
    # Scaling is no part of a record: another range, the same digests.
    (folder / "federation.yaml").write_text(YAML.replace("[0, 100]", "[0, 120]"))
    np.testing.assert_array_equal(read_folder(folder).train.identity, dataset.train.identity)


def test_a_declared_identifier_is_used_and_checked(folder: Path) -> None:
    (folder / "federation.yaml").write_text(f"{YAML}identifier: who\n")
    by_name = read_folder(folder).train.identity
    (folder / "a.csv").write_text((folder / "a.csv").read_text().replace("a3,3,", "a3,99,"))
    np.testing.assert_array_equal(read_folder(folder).train.identity, by_name)
    (folder / "federation.yaml").write_text(f"{YAML}identifier: ill\n")
    with pytest.raises(DataError, match="ill is the label, which identifies nobody"):
        read_folder(folder)
    (folder / "federation.yaml").write_text(f"{YAML}identifier: nobody\n")
    with pytest.raises(DataError, match="no column 'nobody'"):
        read_folder(folder)


def test_shifts_and_own_functions_do_not_make_other_records() -> None:
    images = Records(np.random.default_rng(0).random((60, 1, 4, 4), dtype=np.float32), np.arange(60) % 3)
    dataset = identified(Dataset("own", images, None, Task("classification", (1, 4, 4), 3), "drawn"))
    federation = build_federation(dataset, ClustersFederation(sizes=(2, 2), records_per_client=20), 0)
    everyone = [{bytes(row) for row in of_records(client.train)} for client in federation.clients]
    assert everyone[0] | everyone[1] == everyone[2] | everyone[3]


def test_published_records_are_not_identified() -> None:
    assert load_dataset(DataSettings(), 0).train.identity is None
