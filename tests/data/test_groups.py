"""Workers in groups: Dirichlet shares, and a structure that numbers the workers in their order."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_dirichlet import numbered

from coterie.data import DirichletFederation, GroupsFederation, build_federation
from coterie.errors import InputError
from coterie.groups import ring


def test_a_ring_of_workers_with_dirichlet_shares() -> None:
    settings = GroupsFederation(structure="ring", workers=8, groups=4, alpha=0.5)
    federation = build_federation(numbered(800, test=200), settings, 3)
    assert federation.structure is not None
    assert federation.structure.groups == ring(8, 4).groups
    names = tuple(client.name for client in federation.clients)
    assert names == federation.structure.names == tuple(f"worker-{number}" for number in range(8))
    plain = build_federation(numbered(800, test=200), DirichletFederation(clients=8, alpha=0.5), 3)
    for worker, client in zip(federation.clients, plain.clients, strict=True):
        assert np.array_equal(worker.train.features, client.train.features)
        assert np.array_equal(worker.test.features, client.test.features)


def test_groups_by_label_hold_the_workers_that_hold_the_label_and_say_so() -> None:
    settings = GroupsFederation(structure="label", workers=10, groups=2, alpha=0.05)
    federation = build_federation(numbered(1000, test=400), settings, 0)
    assert federation.structure is not None
    for group, members in enumerate(federation.structure.groups):
        for number, client in enumerate(federation.clients):
            held = {int(label) % 2 for label in client.train.targets}
            assert (number in members) == (group in held)
    assert any("formed from labels" in caveat for caveat in federation.structure.caveats)


def test_a_file_says_who_works_with_whom_and_how_they_are_called(tmp_path: Path) -> None:
    path = tmp_path / "hospitals.json"
    path.write_text(json.dumps({"groups": [["north", "east"], ["east", "south", "west"]]}))
    federation = build_federation(
        numbered(400, test=100), GroupsFederation(structure=str(path), alpha=1.0), 0
    )
    assert [client.name for client in federation.clients] == ["north", "east", "south", "west"]
    assert federation.structure is not None
    assert federation.structure.groups == ((0, 1), (1, 2, 3))


def test_other_groups_are_another_federation() -> None:
    prints = {
        build_federation(
            numbered(400, test=100), GroupsFederation(structure="ring", workers=8, groups=groups), 0
        ).fingerprint()
        for groups in (2, 4)
    }
    assert len(prints) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"structure": "ring", "groups": 4}, "federation.workers: nothing was given"),
        ({"structure": "ring", "workers": 8}, "federation.groups: nothing was given"),
        ({"structure": "rong", "workers": 8}, "federation.structure: 'rong' is not allowed"),
        ({"structure": "global", "workers": 8, "groups": 2}, "federation.groups: 2 is not allowed"),
        ({"structure": "ring", "workers": 3, "groups": 4}, "workers: 3 is not allowed"),
        ({"structure": "nowhere.json"}, "nowhere.json: cannot be read"),
    ],
)
def test_impossible_groups_are_refused_in_one_line(settings: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_federation(numbered(400, test=100), GroupsFederation.model_validate(settings), 0)
