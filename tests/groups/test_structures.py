"""Structures: shapes as told, distances, and mistakes refused in one line."""

import json

import numpy as np
import pytest

from coterie.errors import InputError
from coterie.groups import (
    Structure,
    clustered,
    drawn_labels,
    global_structure,
    label,
    read_labels,
    read_structure,
    ring,
    string,
)
from coterie.privacy.errors import RangeError


def test_ring_groups_share_one_worker_with_each_neighbour():
    structure = ring(100, 4)
    assert [len(members) for members in structure.groups] == [26] * 4
    assert structure.groups[0] == tuple(range(26))
    assert structure.groups[3] == (0, *range(75, 100))
    assert structure.shared.tolist() == [[26, 1, 0, 1], [1, 26, 1, 0], [0, 1, 26, 1], [1, 0, 1, 26]]
    assert structure.distances.tolist() == [[0, 1, 2, 1], [1, 0, 1, 2], [2, 1, 0, 1], [1, 2, 1, 0]]


def test_ring_of_ten_has_distance_five():
    assert ring(100, 10).distances.max() == 5
    assert {len(members) for members in ring(100, 10).groups} == {11}


def test_string_is_a_ring_cut_open():
    structure = string(3, 2)
    assert structure.groups == ((0, 1), (1, 2))
    assert string(100, 4).groups[:3] == ring(100, 4).groups[:3]
    assert string(100, 4).groups[3] == tuple(range(75, 100))
    assert string(5, 4).groups == ((0, 1), (1, 2), (2, 3), (3, 4))
    assert string(9, 4).distances[0].tolist() == [0, 1, 2, 3]


def test_clusters_are_disjoint_and_cover_everyone():
    structure = clustered(10, 3)
    assert [len(members) for members in structure.groups] == [3, 3, 4]
    assert np.isinf(structure.distances[0, 1])
    assert structure.membership.sum() == 10


def test_global_is_one_group():
    assert global_structure(4).groups == ((0, 1, 2, 3),)


def test_label_groups_hold_their_labels_and_say_so():
    structure = label([{0, 5}, {1}, {6, 2}, {3, 4}], 5)
    assert structure.groups == ((0,), (1, 2), (2,), (3,), (3,))
    assert "labels" in structure.caveats[0]
    drawn = drawn_labels(100, seed=0)
    assert drawn == drawn_labels(100, seed=0)
    assert all(drawn)


def test_classes_are_the_different_memberships():
    structure = ring(100, 4)
    assert len(structure.classes) == 8
    assert structure.class_sizes.sum() == 100
    assert np.array_equal(structure.classes[structure.class_of], structure.membership)


@pytest.mark.parametrize(
    ("groups", "workers", "words"),
    [
        ([], 3, "groups: none"),
        ([[]], 1, r"groups\[0\]: empty"),
        ([[0, 1], []], 2, r"groups\[1\]: empty"),
        ([[0, 3]], 3, "worker 3 is unknown"),
        ([[0, -1]], 3, "worker -1 is unknown"),
        ([[0, 0]], 1, "listed twice"),
        ([[0, 1]], 4, "2 of 4 workers are in no group"),
        ([[0]], 0, "workers: 0"),
    ],
)
def test_broken_structures_are_refused(groups, workers, words):
    with pytest.raises(InputError, match=words):
        Structure("broken", tuple(tuple(members) for members in groups), workers)


@pytest.mark.parametrize(
    ("build", "workers", "groups"), [(ring, 3, 4), (string, 4, 4), (clustered, 2, 3), (ring, 5, 0)]
)
def test_too_few_workers_or_groups_are_refused(build, workers, groups):
    with pytest.raises((InputError, RangeError)):
        build(workers, groups)


def test_files_of_all_kinds_give_the_same_structure(tmp_path):
    contents = {
        "a.json": json.dumps({"groups": [[0, 1], [1, 2]]}),
        "b.yaml": "groups:\n- [0, 1]\n- [1, 2]\n",
        "c.yml": "groups: {'0': [0, 1], '1': [1, 2]}\nworkers: 3\n",
        "d.csv": "worker,group\n0,0\n1,0\n1,1\n2,1\n",
        "e.csv": "0,0\n1,0\n\n1,1\n2,1\n",
        "f.csv": "group,worker\n0,0\n0,1\n1,1\n1,2\n",
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
        structure = read_structure(tmp_path / name)
        assert structure.groups == ((0, 1), (1, 2)), name
        assert structure.workers == 3


def test_names_may_stand_for_numbers(tmp_path):
    (tmp_path / "named.yaml").write_text(
        "workers: [ann, ben, cy]\ngroups: {lab: [ann, ben], ward: [ben, cy]}\n"
    )
    structure = read_structure(tmp_path / "named.yaml")
    assert structure.groups == ((0, 1), (1, 2))
    assert structure.worker("cy") == structure.worker("2") == 2
    assert structure.group_name(1) == "ward"
    (tmp_path / "named.csv").write_text("ann,lab\nben,lab\nben,ward\ncy,ward\n")
    assert read_structure(tmp_path / "named.csv").names == ("ann", "ben", "cy")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "not JSON"),
        ("a.json", "[1, 2]", "groups is missing"),
        ("a.json", '{"groups": [1]}', "groups: 0: 1 is not allowed, a list is"),
        ("a.json", '{"groups": [[0, 1]], "workers": 3}', "in no group"),
        ("a.json", '{"groups": [[0, 5]], "workers": 2}', "unknown"),
        ("a.json", '{"groups": [[0], []]}', "empty"),
        ("a.json", '{"groups": []}', "none was given"),
        ("a.json", '{"groups": [[0]], "grops": 1}', "unknown fields: grops"),
        ("a.json", '{"groups": [[0]], "workers": 1.5}', "workers: 1.5"),
        ("a.json", '{"groups": [["x"]], "workers": ["y"]}', "'x' is unknown"),
        ("a.yaml", "groups: [", "not YAML"),
        ("a.csv", "0,1,2\n", "worker,group is"),
        ("a.csv", "", "none was given"),
        ("a.txt", "0,1", "this kind of file"),
        ("a.json", b"\xff\xfe\x00", "not a text file"),
        ("a.json", '{"groups": [[0, 1], [1, 2.0]]}', "worker 2.0 is not allowed"),
        ("a.json", '{"groups": [[0, null]]}', "worker None is not allowed"),
        ("a.json", '{"groups": [[0, true]]}', "worker True is not allowed"),
        ("a.json", '{"groups": [[0, " "]]}', "a whole number or a name"),
        ("a.yaml", "groups: [[0, 1], [1, 017]]", "line 1: 017 begins with a zero"),
        ("a.yaml", "groups: &a [*a]", "for itself"),
        ("a.yaml", "groups: [[!!int 3]]", "not YAML"),
        ("a.json", '{"groups": {"a": [0, 1], "a": [1, 0]}}', "key 'a' stands twice"),
        ("a.yaml", "groups: {a: [0, 1], a: [1, 0]}", "key 'a' stands twice"),
        ("a.json", '{"workers": 4, "groups": [["ann", "ben"]]}', "workers: 4 is not allowed"),
        ("a.json", '{"groups": [[0, 99999999999]]}', "99999999998 of 100000000000 workers are in no group"),
        ("a.json", '{"workers": 1000000000000, "groups": [[0]]}', "in no group"),
        ("a.json", '{"groups":' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_files_are_refused_with_their_name(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=words) as mistake:
        read_structure(path)
    assert str(path) in str(mistake.value)
    assert "\n" not in str(mistake.value)


def test_a_spreadsheets_mark_before_the_heading_is_no_worker(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfworker,group\r\n0,a\r\n1,a\r\n")
    found = read_structure(tmp_path / "a.csv")
    assert (found.groups, found.names) == (((0, 1),), ())


def test_file_must_have_the_workers_that_were_asked_for(tmp_path):
    (tmp_path / "a.json").write_text('{"groups": [[0, 1]]}')
    with pytest.raises(InputError, match="in no group"):
        read_structure(tmp_path / "a.json", workers=5)
    with pytest.raises(InputError, match="cannot be read"):
        read_structure(tmp_path / "missing.json")


def test_labels_come_from_a_file(tmp_path):
    (tmp_path / "labels.json").write_text("[[0, 1], [2]]")
    assert read_labels(tmp_path / "labels.json") == [{0, 1}, {2}]
    for text in ("[[]]", "3", '[["a"]]', "[1]"):
        (tmp_path / "labels.json").write_text(text)
        with pytest.raises(InputError, match="list of labels"):
            read_labels(tmp_path / "labels.json")
