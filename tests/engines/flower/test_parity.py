"""The same experiment in one process and over a grid: the same models, bit for bit, and the same ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_federation import MemoryFederation, experiment

from coterie.algorithms import find_algorithm
from coterie.experiment import checkpoint, local
from coterie.experiment.folder import RunFolder
from coterie.experiment.schema import Experiment

ALGORITHMS: list[dict[str, Any]] = [
    {"name": "global"},
    {"name": "local"},
    {"name": "oracle"},
    {"name": "mr-mtl"},
    {"name": "dp-ifca", "clusters": 2, "start": "random"},
    {"name": "r-dpcfl", "clusters": 2},
]


@pytest.fixture
def federation(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MemoryFederation]:
    made = MemoryFederation(experiment(algorithm=request.param), tmp_path / "sites")
    yield made
    made.close()


def state_arrays(chosen: Experiment, out: Path) -> dict[str, Any]:
    algorithm = find_algorithm(chosen.privacy.unit, chosen.algorithm.name)
    saved = checkpoint.load(RunFolder(out).checkpoint, algorithm.state_type)
    assert saved is not None
    return vars(saved.state)


@pytest.mark.parametrize("federation", ALGORITHMS, ids=lambda entry: entry["name"], indirect=True)
def test_every_algorithm_reaches_the_same_state_bit_for_bit(
    federation: MemoryFederation, tmp_path: Path
) -> None:
    chosen = federation.experiment
    alone = local.run(chosen, tmp_path / "alone")
    served = federation.serve(tmp_path / "served")
    expected, found = state_arrays(chosen, tmp_path / "alone"), state_arrays(chosen, tmp_path / "served")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        else:
            assert found[name] == value, name
    # The server charged for exactly what a simulation charges for, to the byte.
    ledgers = [RunFolder(tmp_path / out).ledger.read_bytes() for out in ("alone", "served")]
    assert ledgers[0] == ledgers[1]
    assert served.epsilon == alone.epsilon
    assert dict(served.clusters) == dict(alone.clusters)
    for name, site in federation.sites.items():
        assert site.finished
        assert not site.files.secret.exists()
        told = json.loads(site.files.finished.read_text())
        assert told["epsilon"] == pytest.approx(served.asked[name])
