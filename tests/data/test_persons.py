"""A person's records stay together, so many of them count, and nobody's depend on what anyone's say."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.data import Dataset, Federation, NaturalFederation, Owners, PersonRecords, Persons, Records, Task
from coterie.data.clusters import ClustersFederation
from coterie.data.federation import build_federation
from coterie.data.folder import read_folder
from coterie.data.own import check_dataset
from coterie.errors import DataError, InputError
from coterie.privacy import PersonBounds

TASK = Task("regression", (2,), 0, error_cap=0.1)
NATURAL = NaturalFederation(minimum_records=1, test_share=0.25)


def dataset(persons: NDArray[np.int64], owner: NDArray[np.int64], values: float = 0.0) -> Dataset:
    """Records whose features are their number and their person's, plus something that nothing depends on."""
    number = np.arange(len(persons))
    features = np.column_stack([number, persons]).astype(np.float32) + np.float32(values)
    records = Records(features, number.astype(np.float32))
    names = tuple(f"client-{place}" for place in range(owner.max() + 1))
    return Dataset("made", records, None, TASK, "", Owners(names, owner), persons=Persons(persons))


def dealt(most: int = 3, clients: int = 1, seed: int = 0, **changes: object) -> Federation:
    rng = np.random.default_rng(5)
    owner = np.repeat([0, 1], 150)
    persons = np.concatenate([rng.integers(40, size=150), 100 + rng.integers(40, size=150)])
    return build_federation(dataset(persons, owner, **changes), NATURAL, seed, PersonBounds(most, clients))  # type: ignore[arg-type]


def rows_of(records: Records) -> PersonRecords:
    assert isinstance(records, PersonRecords)
    return records


def test_every_row_is_one_person_and_no_person_is_in_two_parts() -> None:
    for client in dealt().clients:
        seen: list[set[float]] = []
        for part in (client.train, client.validation, client.test):
            rows = rows_of(part)
            for features, present in zip(rows.features, rows.present, strict=True):
                assert len(set(features[present, 1])) == 1
                assert 1 <= present.sum() <= 3
                assert not features[~present].any()
            seen.append(set(rows.features[:, 0, 1]))
        assert (
            len(seen[0] | seen[1] | seen[2])
            == sum(map(len, seen))
            == sum(map(len, (client.train, client.validation, client.test)))
        )
        assert len(client.test) == round(0.25 * (len(client.train) + len(client.test)))


def test_of_a_person_with_more_records_that_many_are_drawn_each_as_likely() -> None:
    counts = np.zeros(8)
    trials = 600
    for seed in range(trials):
        made = dataset(np.zeros(8, dtype=np.int64), np.zeros(8, dtype=np.int64))
        whole = NaturalFederation(minimum_records=1, test_share=0)
        [client] = build_federation(made, whole, seed, PersonBounds(3)).clients
        kept = rows_of(client.train).flat.targets.astype(int)
        assert list(kept) == sorted(set(kept))
        assert len(kept) == 3
        counts[kept] += 1
    # Each is kept with probability 3/8: six standard deviations, once in 10^8 for the eight of them.
    spread = np.sqrt(trials * 3 / 8 * 5 / 8)
    assert np.abs(counts - trials * 3 / 8).max() < 6 * spread


def test_values_decide_nothing() -> None:
    for one, other in zip(dealt().clients, dealt(values=1000.0).clients, strict=True):
        for part in ("train", "test"):
            mine, theirs = (rows_of(getattr(client, part)) for client in (one, other))
            np.testing.assert_array_equal(mine.targets, theirs.targets)
            np.testing.assert_array_equal(mine.present, theirs.present)


def test_a_person_with_other_records_changes_nobody_elses() -> None:
    """More of them, fewer, elsewhere in the file: who is where, and what else counts, stays as it was."""
    persons = np.repeat(np.arange(12), 5)
    more = np.concatenate([persons, np.full(9, 4)])
    one = np.concatenate([persons[:21], persons[25:]])
    whole = dataset(more, np.zeros(len(more), dtype=np.int64))
    features = {len(more): whole.train.features, len(one): np.delete(whole.train.features, range(21, 25), 0)}

    def federation(persons: NDArray[np.int64]) -> Federation:
        made = dataset(persons, np.zeros(len(persons), dtype=np.int64))
        records = replace(
            made.train, features=features.get(len(persons), whole.train.features[: len(persons)])
        )
        return build_federation(replace(made, train=records), NATURAL, 0, PersonBounds(2))

    before = federation(persons)
    for other in (more, one):
        after = federation(other)
        for part in ("train", "test"):
            mine, theirs = (rows_of(getattr(each.clients[0], part)) for each in (before, after))
            assert mine.present.shape == theirs.present.shape
            others = mine.features[:, 0, 1] != 4
            np.testing.assert_array_equal(mine.features[others], theirs.features[others])
            np.testing.assert_array_equal(mine.present[others], theirs.present[others])


def test_where_one_record_of_a_person_counts_persons_are_records() -> None:
    owner = np.repeat([0, 1], [30, 20])
    made = dataset(np.arange(50)[::-1].copy(), owner)
    by_record = build_federation(made, NATURAL, 3)
    by_person = build_federation(made, NATURAL, 3, PersonBounds(1))
    assert by_person.fingerprint() == by_record.fingerprint()
    assert type(by_person.clients[0].train) is Records


def test_persons_at_more_clients_than_declared_are_refused_without_a_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    owner = np.repeat([0, 1, 2], 10)
    persons = np.tile(np.arange(10), 3)
    made = dataset(persons, owner)
    for allowed in (1, 2):
        with pytest.raises(
            DataError, match=rf"clients_per_person: {allowed}; there are persons with"
        ) as said:
            build_federation(made, NATURAL, 0, PersonBounds(4, allowed))
        assert "3" not in str(said.value)
    build_federation(made, NATURAL, 0, PersonBounds(4, 3))


def test_what_does_not_say_whose_its_records_are_is_refused() -> None:
    made = dataset(np.arange(20), np.zeros(20, dtype=np.int64))
    with pytest.raises(InputError, match=r"privacy.unit: person; made does not say whose each record is"):
        build_federation(replace(made, persons=None), NATURAL, 0, PersonBounds(2))
    with pytest.raises(InputError, match=r"federation.kind: clusters deals single records"):
        build_federation(made, ClustersFederation(), 0, PersonBounds(2))


def test_test_records_that_the_data_come_with_must_be_of_other_persons() -> None:
    made = dataset(np.arange(20), np.zeros(20, dtype=np.int64))
    assert made.owners is not None
    owners = replace(made.owners, test=made.owners.train)
    both = replace(made, test=made.train, owners=owners, persons=Persons(np.arange(20), np.arange(20)))
    natural = NaturalFederation(minimum_records=1)
    with pytest.raises(DataError, match="both among the training and among the test records"):
        build_federation(both, natural, 0, PersonBounds(2))
    others = replace(both, persons=Persons(np.arange(20), 20 + np.arange(20) // 2))
    [client] = build_federation(others, natural, 0, PersonBounds(2)).clients
    assert (len(client.train), len(client.test)) == (20, 10)


def test_the_number_of_dropped_records_is_told_to_nobody_but_who_sits_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("coterie.data.persons.tell_here", told.append)
    dealt(most=2)
    [line] = told
    assert line.startswith("note, for the holder of the records alone: ")
    assert "persons have more than 2 records at a client" in line
    assert capsys.readouterr().err == ""


def test_a_dataset_of_own_code_says_it_by_an_integer_for_every_record() -> None:
    made = dataset(np.arange(20), np.zeros(20, dtype=np.int64))
    check_dataset(made)
    for wrong in (np.arange(19), np.arange(20.0), np.arange(40).reshape(20, 2)):
        with pytest.raises(DataError, match=r"persons.train: allowed: an integer for each of 20 records"):
            check_dataset(replace(made, persons=Persons(wrong)))


# --- a folder ---------------------------------------------------------------------------------------------

DECLARED = (
    "task: classification\nlabel: {column: ill, classes: 2}\nfeatures: [{column: age, range: [0, 90]}]\n"
)


def folder(path: Path, declared: str, **files: str) -> Path:
    path.mkdir()
    (path / "federation.yaml").write_text(declared)
    for name, text in files.items():
        (path / f"{name}.csv").write_text(text)
    return path


def test_a_folder_names_the_column_of_persons_who_are_the_same_at_all_clients(tmp_path: Path) -> None:
    files = {"north": "who,ill,age\nann,1,30\nbob,0,40\nann,0,31\n", "south": "who,ill,age\nbob,1,50\n"}
    found = read_folder(folder(tmp_path / "wards", f"{DECLARED}person: who\n", **files))
    assert found.persons is not None
    assert found.persons.train.tolist() == [0, 1, 0, 1]
    assert found.task.shape == (1,)
    assert read_folder(folder(tmp_path / "plain", DECLARED, **files)).persons is None


REFUSED: dict[str, tuple[str, str]] = {
    "no identifier": ("who,ill,age\nann,1,30\n,0,40\n", r"line 3, column who: no person"),
    "said to be missing": ("who,ill,age\nann,1,30\nNA,0,40\n", r"line 3, column who: no person"),
    "no such column": ("ill,age\n1,30\n", r"no column 'who'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_records_of_nobody_are_refused(case: str, tmp_path: Path) -> None:
    text, said = REFUSED[case]
    with pytest.raises(DataError, match=said):
        read_folder(folder(tmp_path / "wards", f"{DECLARED}person: who\n", north=text))


@pytest.mark.parametrize(("column", "said"), [("age", "is a feature, too"), ("ill", "is the label, too")])
def test_the_column_of_persons_is_nothing_else(column: str, said: str, tmp_path: Path) -> None:
    wards = folder(tmp_path / "wards", f"{DECLARED}person: {column}\n", north="ill,age\n1,30\n")
    with pytest.raises(DataError, match=f"person: {column} {said}"):
        read_folder(wards)


def test_arrays_say_it_by_one_more_array(tmp_path: Path) -> None:
    wards = tmp_path / "wards"
    wards.mkdir()
    declared = (
        "task: classification\nlabel: {classes: 2}\nfeatures: {shape: [3], range: [0, 1]}\nperson: who\n"
    )
    (wards / "federation.yaml").write_text(declared)
    arrays = {"x": np.zeros((4, 3)), "y": np.array([0, 1, 0, 1])}

    def save(**more: object) -> Path:
        np.savez(wards / "north.npz", **arrays, **more)  # type: ignore[arg-type]
        return wards

    found = read_folder(save(who=np.array(["b", "a", "b", "c"])))
    assert found.persons is not None
    assert found.persons.train.tolist() == [1, 0, 1, 2]
    wrong: list[tuple[Callable[[], Path], str]] = [
        (save, "no array 'who'"),
        (lambda: save(who=np.array([1, 2])), "persons: allowed: an integer or a text for each of 4"),
        (lambda: save(who=np.array([1.5, 2, 3, 4])), "persons: allowed"),
        (lambda: save(who=np.array(["a", "", "b", "c"])), "row 1: no person"),
    ]
    for made, said in wrong:
        with pytest.raises(DataError, match=said):
            read_folder(made())
