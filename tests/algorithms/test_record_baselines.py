"""mr-mtl, dp-ifca, km-cdpfl and rc-dpfl against scripted answers."""

from collections.abc import Callable

import numpy as np
import pytest

from coterie.algorithms import AnyAlgorithm, find_algorithm
from coterie.algorithms.protocol import PublicFacts, Request, Select, State, Train, TrainJob, Vector
from coterie.algorithms.settings import PrivacySettings, Schedule
from coterie.engines.driver import drive
from coterie.errors import InputError
from coterie.privacy import (
    Budget,
    FullBatchSteps,
    LowestLoss,
    Mode,
    PoissonSteps,
    PrivacyPlan,
    PrivateSelection,
    Unit,
    calibrate,
    guarantee,
)
from coterie.testing import ScriptedEngine, facts_of

PRIVACY = PrivacySettings(delta=1e-3)
PAPER = PrivacySettings(delta=1e-3, mode=Mode.PAPER)
CLUSTER_OF = {f"client-{index}": index // 3 for index in range(9)}


def build(
    name: str, rounds: int, *, lr: float = 0.5, privacy: PrivacySettings = PRIVACY, **settings: object
) -> AnyAlgorithm:
    algorithm = find_algorithm(Unit.RECORD, name)
    return algorithm(
        algorithm.settings_type(name=name, **settings),  # type: ignore[arg-type]
        Schedule(rounds=rounds, lr=lr),
        privacy,
    )


def run(algorithm: AnyAlgorithm, engine: ScriptedEngine, facts: PublicFacts, rounds: int) -> State:
    state: State = algorithm.start(facts, np.random.default_rng(0))
    for _ in range(rounds):
        state = drive(algorithm.round(state), engine, state.round + 1)
    return state


def jobs_of(request: Request) -> dict[str, TrainJob]:
    assert isinstance(request, Train)
    return {job.client: job for job in request.jobs}


def random_start(facts: PublicFacts) -> PublicFacts:
    def initialise(seed: int) -> Vector:
        return np.random.default_rng(seed).normal(size=facts.parameters).astype(np.float32)

    return PublicFacts(facts.clients, facts.records, facts.parameters, initialise)


def towards_own_cluster(job: TrainJob, release: str) -> Vector:
    vector = np.zeros(4, dtype=np.float32)
    vector[CLUSTER_OF[job.client]] = 1.0
    return vector


def best_model(client: str, models: np.ndarray) -> int:
    return int(models[:, CLUSTER_OF[client]].argmax())


def partition(cluster_of: dict[str, int]) -> set[frozenset[str]]:
    return {
        frozenset(c for c, own in cluster_of.items() if own == cluster)
        for cluster in set(cluster_of.values())
    }


# --- mr-mtl -----------------------------------------------------------------------------------------


def test_mr_mtl_sends_everyone_the_mean_of_all_models() -> None:
    algorithm = build("mr-mtl", 2, pull=0.5)
    engine = ScriptedEngine(lambda job, _: np.full(4, float(job.client[-1]), dtype=np.float32))
    run(algorithm, engine, facts_of(3), 2)
    first, second = (jobs_of(request) for _, request in engine.asked)
    for index in range(3):
        np.testing.assert_array_equal(first[f"client-{index}"].anchor, 0.0)
        # After updates 0, 1 and 2 the mean is 1, and each client goes on from its own model.
        np.testing.assert_array_equal(second[f"client-{index}"].anchor, 1.0)
        np.testing.assert_array_equal(second[f"client-{index}"].start, float(index))
        assert second[f"client-{index}"].anchor_weight == 0.5


def test_mr_mtl_without_pull_asks_exactly_what_local_asks() -> None:
    asked = []
    for name, settings in (("mr-mtl", {"pull": 0.0}), ("local", {})):
        algorithm = build(name, 3, **settings)
        engine = ScriptedEngine(lambda job, _: np.full(4, float(job.client[-1]), dtype=np.float32))
        state = run(algorithm, engine, random_start(facts_of(3)), 3)
        models = algorithm.models(state).models
        asked.append(([jobs_of(request) for _, request in engine.asked], models))
    (ours, our_models), (plain, plain_models) = asked
    np.testing.assert_array_equal(our_models, plain_models)
    for one, other in zip(ours, plain, strict=True):
        for client in one:
            np.testing.assert_array_equal(one[client].start, other[client].start)
            assert (one[client].anchor, one[client].anchor_weight) == (None, 0.0)


def test_a_pull_beyond_the_mean_is_refused() -> None:
    with pytest.raises(InputError, match=r"algorithm.pull: 3 with schedule.lr 0.5 .* allowed: 0 to 2"):
        build("mr-mtl", 3, lr=0.5, pull=3.0)


@pytest.mark.parametrize(("anchor", "weight"), [(None, 1.0), (np.zeros(4), 0.0), (np.zeros(4), -1.0)])
def test_an_anchor_and_its_weight_come_together(anchor: Vector | None, weight: float) -> None:
    with pytest.raises(ValueError, match="anchor_weight"):
        TrainJob("client-0", np.zeros(4, dtype=np.float32), anchor, weight)


# --- dp-ifca ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rounds", "selections"), [(200, 21), (30, 4), (9, 1)])
def test_ifca_selects_in_the_first_tenth_plus_one_rounds_and_plans_that(rounds: int, selections: int) -> None:
    algorithm = build("dp-ifca", rounds, clusters=3)
    engine = ScriptedEngine(towards_own_cluster, best_model)
    run(algorithm, engine, random_start(facts_of(9)), rounds)
    assert engine.rounds_of(Select, "selection") == list(range(1, selections + 1))
    assert engine.rounds_of(Train, "training") == list(range(1, rounds + 1))
    plan = algorithm.plan(facts_of(9)).units[0]
    assert [(release.name, release.times) for release in plan.releases] == [
        ("training", rounds),
        ("selection", selections),
    ]
    assert isinstance(plan.release("training").mechanism, PoissonSteps)
    mechanism = plan.release("selection").mechanism
    assert isinstance(mechanism, PrivateSelection)
    assert mechanism.epsilon == pytest.approx(0.03 * PRIVACY.epsilon)


def test_ifca_trains_what_was_chosen_and_keeps_the_last_choice() -> None:
    algorithm = build("dp-ifca", 10, clusters=3)
    chosen = {"client-0": iter([2, 1])}
    engine = ScriptedEngine(
        towards_own_cluster, lambda client, models: next(chosen[client]) if client in chosen else 0
    )
    facts = random_start(facts_of(9))
    before = algorithm.start(facts, np.random.default_rng(0))
    state = run(algorithm, engine, facts, 10)
    np.testing.assert_array_equal(jobs_of(engine.asked[1][1])["client-0"].start, before.models[2])
    assert algorithm.models(state).cluster_of == {**dict.fromkeys(CLUSTER_OF, 0), "client-0": 1}


def test_ifca_finds_clusters_that_its_start_can_tell_apart() -> None:
    algorithm = build("dp-ifca", 20, clusters=3)
    engine = ScriptedEngine(towards_own_cluster, best_model)
    facts = facts_of(9)
    apart = PublicFacts(
        facts.clients,
        facts.records,
        facts.parameters,
        lambda seed: np.eye(4, dtype=np.float32)[seed % 4],
    )
    for seed in range(20):  # a start in which each of the three clusters has a model of its own
        state = algorithm.start(apart, np.random.default_rng(seed))
        if len({best_model(client, state.models) for client in CLUSTER_OF}) == 3:
            break
    for _ in range(20):
        state = drive(algorithm.round(state), engine, state.round + 1)
    found = algorithm.models(state)
    assert partition(dict(found.cluster_of)) == partition(CLUSTER_OF)
    for client, own in CLUSTER_OF.items():
        assert found.model_of(client)[own] > 10


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_near_starts_share_one_initialisation_and_keep_its_scale(share: float) -> None:
    facts = random_start(facts_of(9, parameters=20_000))
    models = build("dp-ifca", 10, start="near", perturbation=share).start(facts, np.random.default_rng(0))
    correlations = np.corrcoef(models.models)[np.triu_indices(4, 1)]
    # Standard error of a correlation over 20,000 parameters: below 0.0071.
    np.testing.assert_allclose(correlations, 1 - share**2, atol=0.04)
    np.testing.assert_allclose(models.models.std(axis=1), 1.0, atol=0.04)


def test_random_starts_are_independent_initialisations() -> None:
    facts = random_start(facts_of(9, parameters=20_000))
    models = build("dp-ifca", 10, start="random").start(facts, np.random.default_rng(0)).models
    np.testing.assert_allclose(np.corrcoef(models), np.eye(4), atol=0.04)


# --- km-cdpfl ---------------------------------------------------------------------------------------


def test_km_cdpfl_groups_every_round_s_updates_and_averages_inside_the_groups() -> None:
    algorithm = build("km-cdpfl", 4, clusters=3)
    engine = ScriptedEngine(towards_own_cluster)
    state = run(algorithm, engine, facts_of(9), 4)
    found = algorithm.models(state)
    assert partition(dict(found.cluster_of)) == partition(CLUSTER_OF)
    for client, own in CLUSTER_OF.items():
        np.testing.assert_allclose(found.model_of(client), 4.0 * np.eye(4)[own])


def test_km_cdpfl_s_next_model_is_the_mean_of_what_its_members_reached() -> None:
    algorithm = build("km-cdpfl", 2, clusters=2)
    # Round 1 groups {0, 1} and {2}; round 2 moves client 1 over to client 2.
    updates: dict[int, dict[str, float]] = {
        1: {"client-0": 0.0, "client-1": 0.2, "client-2": 10.0},
        2: {"client-0": 5.0, "client-1": -5.0, "client-2": -5.0},
    }
    engine = ScriptedEngine(lambda job, _: np.full(4, updates[len(engine.asked)][job.client], np.float32))
    found = algorithm.models(run(algorithm, engine, facts_of(3), 2))
    np.testing.assert_allclose(found.model_of("client-0"), 0.1 + 5.0, rtol=1e-6)
    together = ((0.1 - 5.0) + (10.0 - 5.0)) / 2
    np.testing.assert_allclose(found.model_of("client-1"), together, rtol=1e-6)
    np.testing.assert_allclose(found.model_of("client-2"), together, rtol=1e-6)


def test_km_cdpfl_keeps_the_names_of_clusters_from_round_to_round() -> None:
    algorithm = build("km-cdpfl", 6, clusters=3)
    engine = ScriptedEngine(towards_own_cluster)
    state = run(algorithm, engine, facts_of(9), 1)
    named = state.cluster_of
    for _ in range(5):
        state = drive(algorithm.round(state), engine, state.round + 1)
        assert state.cluster_of == named


@pytest.mark.parametrize("missing", [{"client-1"}, {f"client-{index}" for index in range(1, 9)}, CLUSTER_OF])
def test_km_cdpfl_leaves_who_did_not_answer_where_it_was(missing: set[str]) -> None:
    algorithm = build("km-cdpfl", 3, clusters=3)
    state = run(algorithm, ScriptedEngine(towards_own_cluster), facts_of(9), 1)
    silent = ScriptedEngine(towards_own_cluster, missing=frozenset(missing))
    after = drive(algorithm.round(state), silent, 2)
    for client in missing:
        assert after.cluster_of[client] == state.cluster_of[client]


def test_km_cdpfl_plans_training_alone() -> None:
    (release,) = build("km-cdpfl", 30).plan(facts_of(9)).units[0].releases
    assert (release.name, release.times) == ("training", 30)


# --- rc-dpfl ----------------------------------------------------------------------------------------


def clustered(job: TrainJob, release: str) -> Vector:
    noise = np.random.default_rng(int(job.client[-1])).normal(size=4).astype(np.float32) * 0.1
    vector: Vector = 10.0 * towards_own_cluster(job, release) + noise
    return vector if release == "first round" else 0.01 * vector


def test_rc_dpfl_chooses_at_the_end_of_every_round_after_the_switch_and_plans_that() -> None:
    algorithm = build("rc-dpfl", 10, privacy=PAPER, clusters=3, switch_round=4)
    engine = ScriptedEngine(clustered, best_model)
    state = run(algorithm, engine, facts_of(9), 10)
    assert engine.rounds_of(Train, "first round") == [1]
    assert engine.rounds_of(Train, "training") == list(range(2, 11))
    assert engine.rounds_of(Select, "choice") == list(range(5, 11))
    plan = algorithm.plan(facts_of(9)).units[0]
    assert [(release.name, release.times) for release in plan.releases] == [
        ("first round", 1),
        ("training", 9),
        ("choice", 6),
    ]
    assert isinstance(plan.release("first round").mechanism, FullBatchSteps)
    assert isinstance(plan.release("choice").mechanism, LowestLoss)
    assert partition(dict(algorithm.models(state).cluster_of)) == partition(CLUSTER_OF)


def test_rc_dpfl_chooses_between_the_models_of_the_round_just_trained() -> None:
    algorithm = build("rc-dpfl", 4, privacy=PAPER, clusters=3, switch_round=2)
    engine = ScriptedEngine(clustered, best_model)
    state = run(algorithm, engine, facts_of(9), 4)
    (*_, (_, request)) = engine.asked
    assert isinstance(request, Select)
    np.testing.assert_array_equal(request.models, algorithm.models(state).models)


def test_rc_dpfl_s_guarantee_says_that_its_choice_is_not_private() -> None:
    plan = build("rc-dpfl", 10, privacy=PAPER, clusters=3).plan(facts_of(9))
    calibrated = calibrate(plan, Budget(8.0, 1e-3), mode=Mode.PAPER)
    promise = guarantee(calibrated, delta=1e-3, mode=Mode.PAPER)
    assert promise.epsilon == float("inf")
    assert "published eps=8.00" in promise.line
    assert "sound: no privacy (eps=inf)" in promise.line
    assert "lowest loss, which is not private" in promise.text
    assert PrivacyPlan.from_json(calibrated.to_json()) == calibrated


def test_rc_dpfl_is_refused_in_sound_mode_in_one_line() -> None:
    with pytest.raises(InputError, match=r"^algorithm.name: 'rc-dpfl' .* not private; .* r-dpcfl[^\n]*$"):
        build("rc-dpfl", 10, privacy=PRIVACY)


@pytest.mark.parametrize(("rounds", "switch"), [(10, 10), (10, 0), (2, "auto")])
def test_rc_dpfl_needs_rounds_after_the_switch(rounds: int, switch: object) -> None:
    with pytest.raises(InputError, match=r"algorithm.switch_round"):
        build("rc-dpfl", rounds, privacy=PAPER, switch_round=switch)


# --- all of them ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "privacy"), [("dp-ifca", PRIVACY), ("km-cdpfl", PRIVACY), ("rc-dpfl", PAPER)]
)
def test_more_clusters_than_clients_are_refused(name: str, privacy: PrivacySettings) -> None:
    with pytest.raises(InputError, match=r"algorithm.clusters: 10 is more than the 9 clients"):
        build(name, 10, privacy=privacy, clusters=10).plan(facts_of(9))


CHOICES: list[tuple[str, PrivacySettings, Callable[[TrainJob, str], Vector]]] = [
    ("mr-mtl", PRIVACY, towards_own_cluster),
    ("dp-ifca", PRIVACY, towards_own_cluster),
    ("km-cdpfl", PRIVACY, clustered),
    ("rc-dpfl", PAPER, clustered),
]


@pytest.mark.parametrize(("name", "privacy", "update"), CHOICES)
def test_a_round_repeats_exactly_from_the_same_state(
    name: str, privacy: PrivacySettings, update: Callable[[TrainJob, str], Vector]
) -> None:
    algorithm = build(name, 10, privacy=privacy)
    state = run(algorithm, ScriptedEngine(update, best_model), random_start(facts_of(9)), 3)
    first, second = (drive(algorithm.round(state), ScriptedEngine(update, best_model), 4) for _ in range(2))
    np.testing.assert_array_equal(first.models, second.models)
    assert algorithm.models(first).cluster_of == algorithm.models(second).cluster_of
