"""Virtual sites on Ray reach the state of the in-process engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from memory_federation import experiment

from coterie.algorithms import find_algorithm
from coterie.experiment import checkpoint, runner
from coterie.experiment.folder import RunFolder
from coterie.experiment.serving import Callbacks
from coterie.experiment.simulation import simulate

pytestmark = [
    pytest.mark.deployment,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="the extra 'simulation' (Ray) is not installed"
    ),
]


def test_virtual_sites_reach_the_same_state(tmp_path: Path) -> None:
    chosen = experiment(
        algorithm={"name": "r-dpcfl", "clusters": 2},
        schedule={"rounds": 3, "batch": 20},
        evaluation={"kind": "private"},
    )
    served = simulate(chosen, tmp_path / "served", Callbacks())
    alone = runner.run(chosen, tmp_path / "alone")
    kind = find_algorithm(chosen.privacy.unit, chosen.algorithm.name).state_type
    states = [checkpoint.load(RunFolder(tmp_path / out).checkpoint, kind) for out in ("served", "alone")]
    assert states[0] is not None
    assert states[1] is not None
    np.testing.assert_array_equal(states[0].state.models, states[1].state.models)  # type: ignore[attr-defined]
    assert dict(served.clusters) == dict(alone.clusters)
    assert served.epsilon == alone.epsilon
    books = sorted(path.name for path in (tmp_path / "served.sites").iterdir())
    assert books == sorted(served.clusters)
