"""Equal shares with unequal labels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data import (
    ClustersFederation,
    Dataset,
    DirichletFederation,
    Federation,
    Records,
    Task,
    build_federation,
)
from coterie.errors import InputError


def numbered(records: int, test: int | None = None, classes: int = 5) -> Dataset:
    """One feature, the number of the record; labels in turn."""

    def part(start: int, count: int) -> Records:
        features = np.arange(start, start + count, dtype=np.float32)[:, None]
        return Records(features, np.arange(count, dtype=np.int64) % classes)

    held_out = None if test is None else part(100_000, test)
    return Dataset("numbered", part(0, records), held_out, Task("classification", (1,), classes), "")


def mixtures(federation: Federation, part: str = "train") -> np.ndarray:
    classes = federation.task.classes
    counts = [np.bincount(getattr(c, part).targets, minlength=classes) for c in federation.clients]
    return np.array([row / row.sum() for row in counts])


@given(
    clients=st.integers(1, 30),
    alpha=st.sampled_from([0.01, 0.1, 1.0, 100.0]),
    records=st.integers(600, 700),
    validation=st.sampled_from([0.0, 0.25]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=40, deadline=None)
def test_every_record_has_at_most_one_owner_and_shares_are_equal(
    clients: int, alpha: float, records: int, validation: float, seed: int
) -> None:
    federation = build_federation(
        numbered(records, test=400),
        DirichletFederation(clients=clients, alpha=alpha, validation_share=validation),
        seed,
    )
    dealt = [np.concatenate([c.train.features, c.validation.features])[:, 0] for c in federation.clients]
    assert {len(one) for one in dealt} == {records // clients}
    assert len(np.unique(np.concatenate(dealt))) == clients * (records // clients)
    tested = np.concatenate([c.test.features[:, 0] for c in federation.clients])
    assert tested.min() >= 100_000
    assert len(np.unique(tested)) == len(tested)
    for client in federation.clients:
        assert len(client.validation) == round(validation * (records // clients))


def test_small_alpha_means_few_classes_and_large_alpha_all() -> None:
    data = numbered(20_000, test=4_000, classes=10)
    few = mixtures(build_federation(data, DirichletFederation(clients=20, alpha=0.05), 0))
    all_ = mixtures(build_federation(data, DirichletFederation(clients=20, alpha=1000.0), 0))
    assert np.median(few.max(axis=1)) > 0.5
    assert np.abs(all_ - 0.1).max() < 0.05


def test_test_records_have_the_labels_a_client_trains_on() -> None:
    federation = build_federation(
        numbered(20_000, test=10_000, classes=10), DirichletFederation(clients=10, alpha=0.1), 0
    )
    assert np.abs(mixtures(federation, "train") - mixtures(federation, "test")).max() < 0.01
    assert all(abs(len(client.test) - 1000) <= 10 for client in federation.clients)


def test_a_dataset_without_test_records_holds_some_out() -> None:
    federation = build_federation(
        numbered(1000), DirichletFederation(clients=4, alpha=1.0, test_share=0.3), 0
    )
    trained = np.concatenate([c.train.features[:, 0] for c in federation.clients])
    tested = np.concatenate([c.test.features[:, 0] for c in federation.clients])
    assert len(trained) == 700
    assert len(tested) == 300
    assert not set(trained) & set(tested)


def test_same_seed_same_federation_other_seed_another() -> None:
    prints = [
        build_federation(numbered(500), DirichletFederation(clients=5, alpha=0.5), seed).fingerprint()
        for seed in (1, 1, 2)
    ]
    assert prints[0] == prints[1] != prints[2]


def test_more_records_than_there_are_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"federation.records_per_client: 101; numbered has 100 .* 4 clients"
    ):
        build_federation(
            numbered(400, test=40), DirichletFederation(clients=4, alpha=1.0, records_per_client=101), 0
        )
    with pytest.raises(InputError, match="0 training records for each of 500 clients"):
        build_federation(numbered(400, test=40), DirichletFederation(clients=500, alpha=1.0), 0)


def test_regression_is_refused() -> None:
    flat = Records(np.zeros((20, 3), dtype=np.float32), np.zeros(20, dtype=np.float32))
    table = Dataset("table", flat, None, Task("regression", (3,), 0), "")
    with pytest.raises(InputError, match="dirichlet; it needs classes"):
        build_federation(table, DirichletFederation(clients=2, alpha=1.0), 0)


def test_clients_of_a_cluster_may_have_mixtures_of_labels_and_share_no_record() -> None:
    settings = ClustersFederation(sizes=(20, 10), shift="label", records_per_client=200, alpha=0.1)
    federation = build_federation(numbered(20_000, test=4_000, classes=10), settings, 0)
    train, test = mixtures(federation, "train"), mixtures(federation, "test")
    assert np.median(train.max(axis=1)) > 0.4
    # Held-out records of a class are dealt in proportion, in whole records.
    assert np.abs(train - test).max() < 0.02
    assert {len(client.train) for client in federation.clients} == {200}
    assert min(len(client.test) for client in federation.clients) > 100
    for members in (federation.clients[:20], federation.clients[20:]):
        owned = np.concatenate([client.train.features[:, 0] for client in members])
        assert len(np.unique(owned)) == len(owned) == 200 * len(members)
    even = ClustersFederation(sizes=(20, 10), shift="label", records_per_client=200, alpha=1e4)
    assert np.abs(mixtures(build_federation(numbered(20_000, 4_000, 10), even, 0)) - 0.1).max() < 0.1
    table = replace(numbered(400), task=Task("regression", (1,), 0))
    with pytest.raises(InputError, match=r"federation.alpha: 1; it needs classes"):
        build_federation(table, ClustersFederation(sizes=(2,), shift="none", alpha=1.0), 0)
