"""How clusters of known sizes step: small ones quietly, filled up or with all where that is asked for."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.algorithms import find_algorithm
from coterie.algorithms.client.client_level import ClientLevelState
from coterie.algorithms.client.dp_sketch_cluster import SketchCluster, SketchClusterState
from coterie.algorithms.client.rebalancing import routing_matrix
from coterie.algorithms.protocol import Sum
from coterie.algorithms.settings import PrivacySettings, Schedule
from coterie.engines.driver import drive
from coterie.errors import InputError
from coterie.privacy import Unit
from coterie.testing import ScriptedEngine, facts_of

CLIENTS, RATE, SIZE, CLIP = 36, 0.5, 40, 0.5
ROWS = np.array([[1.0], [10.0]]) * np.ones(SIZE)
PRIVACY = PrivacySettings.model_validate({"unit": "client", "epsilon": 4, "clip": CLIP})


def engine_of(noise: float) -> ScriptedEngine:
    return ScriptedEngine(sums=lambda job, round: ROWS, noise=noise)


def sketching(**options: Any) -> tuple[SketchCluster, SketchClusterState]:
    """Clusters of 30 and 6 clients, of whom a round expects 15 and 3."""
    given = {"name": "dp-sketch-cluster", "rate": RATE, **options}
    algorithm = SketchCluster(SketchCluster.settings_type.model_validate(given), Schedule(rounds=9), PRIVACY)
    state = algorithm.start(facts_of(CLIENTS, SIZE), np.random.default_rng(0))
    models, sizes = np.zeros((2, SIZE), dtype=np.float32), np.array([30.0, 6.0])
    return algorithm, replace(state, round=1, models=models, centres=np.eye(2, 10), sizes=sizes)


def moved(noise: float = 0.01, **options: Any) -> np.ndarray:
    algorithm, state = sketching(**options)
    after = drive(algorithm.round(state), engine_of(noise), 2)
    assert np.ptp(after.models, axis=1).max() == 0
    return np.asarray(after.models[:, 0])


@pytest.mark.parametrize("server_step", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("noise", [0.1, 0.5, 2.0])
def test_no_step_carries_more_noise_than_asked_for_and_a_large_cluster_s_is_whole(
    server_step: float, noise: float
) -> None:
    """With noise n on a sum and a step s over the divisor d the noise of a step is s n / d."""
    steps = moved(noise, server_step=server_step) / ROWS[:, 0]
    whole = server_step / np.array([15.0, 3.0])
    np.testing.assert_allclose(steps, np.minimum(whole, 0.08 * CLIP / noise), rtol=1e-6)
    np.testing.assert_allclose(
        moved(noise, server_step=server_step, step_noise=None) / ROWS[:, 0], whole, rtol=1e-6
    )


def test_the_oracle_steps_as_quietly() -> None:
    kind, facts = find_algorithm(Unit.CLIENT, "oracle"), facts_of(CLIENTS, SIZE)
    truth = {client: int(place >= 30) for place, client in enumerate(facts.clients)}
    options = kind.settings_type.model_validate({"name": "oracle", "rate": RATE})
    algorithm = kind(options, Schedule(rounds=9), PRIVACY, truth=truth)
    begun = algorithm.start(facts, np.random.default_rng(0))
    assert isinstance(begun, ClientLevelState)
    after = drive(algorithm.round(begun), engine_of(0.5), 1)
    np.testing.assert_allclose(
        (after.models - begun.models)[:, 0] / ROWS[:, 0], [1 / 15, 0.08], rtol=1e-3, atol=1e-5
    )


def test_route_fills_small_clusters_up_by_released_sizes_alone() -> None:
    algorithm, state = sketching(rebalance={"rule": "route", "minimum": 5})
    engine = engine_of(0.01)
    after = drive(algorithm.round(state), engine, 2)
    (asked,) = [request for _, request in engine.asked if isinstance(request, Sum)]
    assert asked.route is not None
    np.testing.assert_allclose(asked.route, routing_matrix(np.array([15.0, 3.0]), 5.0))
    np.testing.assert_allclose(after.models[:, 0], [1 / 13, 10 / 5], rtol=1e-6)


def test_gmfsc_lets_small_clusters_step_with_the_sum_of_all_which_is_louder() -> None:
    options = {"rule": "gmfsc", "minimum": 5}
    np.testing.assert_allclose(moved(rebalance=options), [1 / 15, 11 / 18], rtol=1e-6)
    loud = moved(2.0, rebalance=options)
    np.testing.assert_allclose(loud, [0.02, 11 * 0.02 / np.sqrt(2)], rtol=1e-6)
    np.testing.assert_allclose(moved(rebalance={"rule": "gmfsc", "minimum": 3}), [1 / 15, 10 / 3], rtol=1e-6)


def test_more_than_a_round_samples_is_no_minimum() -> None:
    algorithm, _ = sketching(rebalance={"rule": "route", "minimum": 19})
    with pytest.raises(InputError, match=r"rebalance.minimum: 19; .* allows 0 to 18"):
        algorithm.plan(facts_of(CLIENTS, SIZE))
