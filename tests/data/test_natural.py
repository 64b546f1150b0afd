"""Clients that the data come with."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.data import (
    Dataset,
    DataSettings,
    NaturalFederation,
    Owners,
    Records,
    Task,
    build_federation,
    load_dataset,
)
from coterie.errors import DataError, InputError
from coterie.experiment.schema import Experiment

SIZES = {"small": 4, "large": 100, "middle": 40, "another": 30}


def owned(test: bool = False) -> Dataset:
    """Owners' records mixed together; the first feature is the owner, the second the record's number."""
    owner = np.random.default_rng(0).permutation(np.repeat(np.arange(4), list(SIZES.values())))
    features = np.stack([owner, np.arange(len(owner))], axis=1).astype(np.float32)
    records = Records(features, np.zeros(len(owner), dtype=np.int64))
    return Dataset(
        name="owned",
        train=records,
        test=records.take(slice(0, 80)) if test else None,
        task=Task("classification", (2,), 2),
        note="",
        owners=Owners(tuple(SIZES), owner, owner[:80] if test else None),
    )


def test_every_client_has_its_own_records_and_only_those() -> None:
    settings = NaturalFederation(minimum_records=2, validation_share=0.25, test_share=0.2)
    federation = build_federation(owned(), settings, seed=0)
    assert [client.name for client in federation.clients] == list(SIZES)
    assert federation.truth is None
    for index, client in enumerate(federation.clients):
        parts = [part.features for part in (client.train, client.validation, client.test)]
        together = np.concatenate(parts)
        assert set(together[:, 0]) == {index}
        assert len(np.unique(together[:, 1])) == len(together) == SIZES[client.name]
    large = federation.clients[1]
    assert (len(large.train), len(large.validation), len(large.test)) == (60, 20, 20)


def test_test_records_of_the_dataset_stay_test_records() -> None:
    federation = build_federation(owned(test=True), NaturalFederation(clients="enough"), seed=0)
    for client in federation.clients:
        assert set(client.test.features[:, 1]) <= set(range(80))
        assert len(client.train) == SIZES[client.name]


def test_a_client_with_too_few_records_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"client small: 3 training and 1 test records.*minimum_records.*10"):
        build_federation(owned(), NaturalFederation(), seed=0)


def test_enough_leaves_small_clients_out_and_a_number_draws_among_the_others() -> None:
    assert [
        client.name for client in build_federation(owned(), NaturalFederation(clients="enough"), 0).clients
    ] == ["large", "middle", "another"]
    drawn = {
        tuple(client.name for client in build_federation(owned(), NaturalFederation(clients=2), seed).clients)
        for seed in range(12)
    }
    assert drawn == {("large", "middle"), ("large", "another"), ("middle", "another")}


def test_whoever_is_left_out_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    build_federation(owned(), NaturalFederation(clients="enough"), 0)
    said = capsys.readouterr().err
    assert said.startswith("federation.clients: enough: 1 of 4 clients are left out, with fewer than 10 ")
    assert said.endswith(": small\n")


def test_a_clients_split_does_not_depend_on_who_else_is_drawn() -> None:
    everyone = build_federation(owned(), NaturalFederation(clients="enough"), seed=3)
    few = build_federation(owned(), NaturalFederation(clients=1), seed=3)
    same = next(client for client in everyone.clients if client.name == few.clients[0].name)
    assert np.array_equal(same.train.features, few.clients[0].train.features)


def test_same_seed_same_federation_other_seed_another() -> None:
    prints = [
        build_federation(owned(), NaturalFederation(clients="enough"), seed).fingerprint()
        for seed in (1, 1, 2)
    ]
    assert prints[0] == prints[1] != prints[2]


def test_more_clients_than_there_are_is_refused() -> None:
    with pytest.raises(InputError, match=r"federation.clients: 4; 3 clients of owned have .*= 10 training"):
        build_federation(owned(), NaturalFederation(clients=4), seed=0)
    with pytest.raises(DataError, match=r"federation\.minimum_records: 1000; no client"):
        build_federation(owned(), NaturalFederation(clients="enough", minimum_records=1000), seed=0)


def test_data_without_natural_clients_are_refused() -> None:
    with pytest.raises(InputError, match="digits has no natural clients, allowed: clusters, dirichlet"):
        build_federation(load_dataset(DataSettings(name="digits"), 0), NaturalFederation(), seed=0)


def test_nothing_is_held_out_where_nothing_is_judged() -> None:
    none = NaturalFederation(test_share=0.0, minimum_records=1)
    federation = build_federation(owned(), none, seed=0)
    assert {client.name: len(client.train) for client in federation.clients} == SIZES
    assert {len(client.test) for client in federation.clients} == {0}
    mine = {"data": {"name": "folder", "path": "mine"}, "federation": {"kind": "natural", "test_share": 0}}
    for kind in ("auto", "exact", "private"):
        with pytest.raises(
            InputError, match=r"federation\.test_share: 0 with evaluation\.kind (exact|private)"
        ):
            Experiment.model_validate({**mine, "evaluation": {"kind": kind}})
    Experiment.model_validate({**mine, "evaluation": {"kind": "none"}})
