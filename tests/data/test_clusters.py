"""Clusters of clients with a shift between them."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.data import (
    ClustersFederation,
    Dataset,
    DataSettings,
    Federation,
    Records,
    Task,
    build_federation,
    load_dataset,
)
from coterie.errors import InputError

DIGITS = load_dataset(DataSettings(name="digits"), seed=0)
DEFAULT = ClustersFederation(records_per_client=239)


def numbered(records: int, test: int | None = None) -> Dataset:
    """Images whose corner pixel is the number of the record: a record can be followed wherever it goes."""

    def images(start: int, count: int) -> Records:
        features = np.zeros((count, 1, 4, 4), dtype=np.float32)
        features[:, 0, 0, 0] = np.arange(start, start + count)
        return Records(features, (np.arange(count) % 5).astype(np.int64))

    return Dataset(
        name="numbered",
        train=images(1, records),
        test=None if test is None else images(10_001, test),
        task=Task("classification", (1, 4, 4), 5),
        note="",
    )


def numbers(records: Records) -> set[int]:
    found = records.features.max(axis=(1, 2, 3)).astype(int).tolist()
    assert len(set(found)) == len(found)
    return set(found)


def members(federation: Federation, cluster: int) -> list[int]:
    assert federation.truth is not None
    return [index for index, k in enumerate(federation.truth) if k == cluster]


def test_default_is_21_clients_of_239_digits_each() -> None:
    federation = build_federation(DIGITS, DEFAULT, seed=0)
    assert [len(client.train) for client in federation.clients] == [239] * 21
    assert [len(client.test) for client in federation.clients] == [60] * 21
    assert federation.truth == (0,) * 3 + (1,) * 6 + (2,) * 6 + (3,) * 6
    assert federation.task == Task("classification", (1, 8, 8), 10)
    assert min(c.train.features.min() for c in federation.clients) >= 0.0
    assert max(c.train.features.max() for c in federation.clients) == 1.0


def test_without_a_count_digits_are_dealt_the_same_way() -> None:
    explicit, implied = (build_federation(DIGITS, one, seed=0) for one in (DEFAULT, ClustersFederation()))
    assert explicit.fingerprint() == implied.fingerprint()


def test_without_a_count_every_client_gets_what_the_largest_cluster_allows() -> None:
    federation = build_federation(numbered(100, test=20), ClustersFederation(sizes=(2, 4)), seed=0)
    assert {len(client.train) for client in federation.clients} == {25}
    assert {len(client.test) for client in federation.clients} == {5}


def test_clients_of_a_cluster_share_no_record_and_no_one_trains_on_test_records() -> None:
    settings = ClustersFederation(sizes=(2, 3, 3), records_per_client=20, validation_per_client=5)
    federation = build_federation(numbered(120), settings, seed=3)
    trained: set[int] = set()
    tested: set[int] = set()
    for cluster in range(3):
        seen: set[int] = set()
        for index in members(federation, cluster):
            client = federation.clients[index]
            assert len(client.validation) == 5
            mine = numbers(client.train) | numbers(client.validation)
            assert not mine & seen
            assert not numbers(client.test) & seen
            seen |= mine | numbers(client.test)
            trained |= mine
            tested |= numbers(client.test)
    assert not trained & tested


def test_test_records_come_from_the_test_set_where_there_is_one() -> None:
    federation = build_federation(numbered(60, test=30), ClustersFederation(sizes=(3, 3)), seed=0)
    for client in federation.clients:
        assert max(numbers(client.train)) <= 60
        assert min(numbers(client.test)) > 10_000


def test_clusters_reuse_the_same_records_under_different_shifts() -> None:
    federation = build_federation(numbered(60, test=30), ClustersFederation(sizes=(3, 3)), seed=0)
    first, second = (
        set().union(*(numbers(federation.clients[i].train) for i in members(federation, k))) for k in (0, 1)
    )
    assert first == second == set(range(1, 61))
    assert numbers(federation.clients[0].train) != numbers(federation.clients[3].train)


@pytest.mark.parametrize(("cluster", "corner"), [(0, (0, 0)), (1, (3, 0)), (2, (3, 3)), (3, (0, 3))])
def test_rotation_turns_cluster_k_by_k_quarters(cluster: int, corner: tuple[int, int]) -> None:
    federation = build_federation(numbered(40, test=8), ClustersFederation(sizes=(1, 1, 1, 1)), seed=0)
    client = federation.clients[cluster]
    for records in (client.train, client.test):
        assert np.all(records.features[:, 0, corner[0], corner[1]] > 0)
        assert records.features.flags.c_contiguous
    upright = build_federation(numbered(40, test=8), ClustersFederation(sizes=(4,), shift="none"), seed=0)
    assert np.all(upright.clients[3].train.features[:, 0, 0, 0] > 0)


def test_label_shift_moves_classes_and_leaves_images_alone() -> None:
    settings = ClustersFederation(sizes=(1, 1, 1), shift="label")
    federation = build_federation(numbered(50, test=10), settings, seed=0)
    for cluster, client in enumerate(federation.clients):
        original = (client.train.features[:, 0, 0, 0].astype(int) - 1) % 5
        assert np.array_equal(client.train.targets, (original + cluster) % 5)


def test_without_a_shift_the_truth_is_one_cluster() -> None:
    federation = build_federation(DIGITS, ClustersFederation(sizes=(2, 2), shift="none"), seed=0)
    assert federation.truth == (0, 0, 0, 0)


def test_same_seed_same_federation_other_seed_another() -> None:
    first = build_federation(DIGITS, DEFAULT, seed=5)
    again = build_federation(DIGITS, DEFAULT, seed=5)
    other = build_federation(DIGITS, DEFAULT, seed=6)
    assert first.fingerprint() == again.fingerprint()
    assert first.fingerprint() != other.fingerprint()


def test_one_more_cluster_leaves_the_others_as_they_were() -> None:
    few = build_federation(numbered(60, test=20), ClustersFederation(sizes=(2, 2)), seed=1)
    more = build_federation(numbered(60, test=20), ClustersFederation(sizes=(2, 2, 2)), seed=1)
    for before, after in zip(few.clients, more.clients[:4], strict=True):
        assert np.array_equal(before.train.features, after.train.features)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"records_per_client": 299}, "federation.records_per_client: 299; digits has 298"),
        ({"records_per_client": 239, "test_per_client": 61}, "federation.test_per_client: 61"),
        ({"validation_per_client": 400}, "beside 400 for validation"),
        ({"sizes": (2000,)}, "federation.records_per_client"),
        ({"sizes": (1,) * 5}, "federation.sizes: 5 clusters"),
        ({"sizes": (1,) * 11, "shift": "label"}, "federation.sizes: 11 clusters"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_with_the_key(
    settings: dict[str, object], line: str
) -> None:
    with pytest.raises(InputError, match=line) as refused:
        build_federation(DIGITS, ClustersFederation.model_validate(settings), seed=0)
    assert "\n" not in str(refused.value)


def test_shifts_refuse_data_they_do_not_apply_to() -> None:
    flat = Records(np.zeros((20, 3), dtype=np.float32), np.zeros(20, dtype=np.float32))
    table = Dataset("table", flat, None, Task("regression", (3,), 0), "")
    for shift in ("rotation", "label"):
        with pytest.raises(InputError, match=f"federation.shift: {shift}"):
            build_federation(table, ClustersFederation(sizes=(2,), shift=shift), seed=0)


@pytest.mark.parametrize("wrong", [{"sizes": []}, {"sizes": [0]}, {"shift": "colour"}, {"records": 3}])
def test_settings_without_meaning_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ClustersFederation.model_validate(wrong)
