"""Record-level algorithms against scripted answers: who is asked what, when, and what comes of it."""

from dataclasses import replace

import numpy as np
import pytest

from coterie.algorithms import AnyAlgorithm, find_algorithm
from coterie.algorithms.protocol import Select, State, Train, TrainJob, Vector
from coterie.algorithms.record.r_dpcfl import RDPCFL, RDPCFLSettings
from coterie.algorithms.settings import AlgorithmSettings, PrivacySettings, Schedule
from coterie.clustering.mixture import CLEAR_OVERLAP
from coterie.engines.driver import drive
from coterie.errors import InputError
from coterie.privacy import NoiseRule, PoissonSteps, PrivateSelection, Unit
from coterie.testing import SCRIPTED_NOISE, ScriptedEngine, facts_of, play

PRIVACY = PrivacySettings(delta=1e-3)


def run(algorithm: AnyAlgorithm, engine: ScriptedEngine, clients: int, rounds: int) -> State:
    state: State = play(algorithm, facts_of(clients), engine, rounds)[-1]
    return state


def build(name: str, rounds: int, **more: object) -> AnyAlgorithm:
    return find_algorithm(Unit.RECORD, name)(
        AlgorithmSettings(name=name), Schedule(rounds=rounds), PRIVACY, **more
    )


def constant(values: dict[str, float]) -> ScriptedEngine:
    return ScriptedEngine(lambda job, release: np.full(4, values[job.client], dtype=np.float32))


def test_global_averages_everyone() -> None:
    algorithm = build("global", 3)
    state = run(algorithm, constant({"client-0": 1.0, "client-1": 3.0}), 2, 3)
    assignment = algorithm.models(state)
    np.testing.assert_allclose(assignment.model_of("client-0"), 6.0)
    np.testing.assert_allclose(assignment.model_of("client-1"), 6.0)


def test_local_keeps_everyone_apart() -> None:
    algorithm = build("local", 3)
    assignment = algorithm.models(run(algorithm, constant({"client-0": 1.0, "client-1": 3.0}), 2, 3))
    np.testing.assert_allclose(assignment.model_of("client-0"), 3.0)
    np.testing.assert_allclose(assignment.model_of("client-1"), 9.0)


def test_oracle_averages_inside_the_true_clusters_and_says_so() -> None:
    truth = {"client-0": 0, "client-1": 1, "client-2": 0}
    algorithm = build("oracle", 2, truth=truth)
    engine = constant({"client-0": 1.0, "client-1": 5.0, "client-2": 3.0})
    assignment = algorithm.models(run(algorithm, engine, 3, 2))
    np.testing.assert_allclose(assignment.model_of("client-0"), 4.0)
    np.testing.assert_allclose(assignment.model_of("client-1"), 10.0)
    assert any("true clusters" in caveat for caveat in algorithm.plan(facts_of(3)).caveats)


@pytest.mark.parametrize("name", ["global", "local"])
def test_baselines_plan_training_in_every_round_and_nothing_else(name: str) -> None:
    (release,) = build(name, 30).plan(facts_of(2)).units[0].releases
    assert isinstance(release.mechanism, PoissonSteps)
    assert release.times == 30
    assert release.mechanism.noise_multiplier is NoiseRule.SHARED


def test_a_client_that_did_not_answer_changes_nothing() -> None:
    algorithm = build("global", 1)
    engine = constant({"client-0": 1.0, "client-1": 3.0})
    engine.missing = frozenset({"client-1"})
    np.testing.assert_allclose(algorithm.models(run(algorithm, engine, 2, 1)).model_of("client-1"), 1.0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["global", "r-dpcfl", "km-cdpfl", "oracle"])
def test_a_release_that_is_not_finite_counts_as_no_answer(
    name: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    def spoilt(job: TrainJob, release: str) -> Vector:
        vector = clustered(job, release)
        if job.client == "client-4":
            vector[2] = value
        return vector

    kind = find_algorithm(Unit.RECORD, name)
    truth = {"truth": CLUSTER_OF} if name == "oracle" else {}
    algorithm = kind(kind.settings_type(), Schedule(rounds=4), PRIVACY, **truth)
    with caplog.at_level("WARNING"):
        reached = run(algorithm, ScriptedEngine(spoilt), 9, 4)
    assert np.isfinite(algorithm.models(reached).models).all()
    assert "left out, their releases are not finite: client-4" in caplog.text


# --- r-dpcfl ----------------------------------------------------------------------------------------

CLUSTER_OF = {f"client-{index}": index // 3 for index in range(9)}


def clustered(job: TrainJob, release: str) -> Vector:
    """Round-1 releases that point in the direction of the client's cluster; later updates of that size."""
    vector = np.zeros(4, dtype=np.float32)
    vector[CLUSTER_OF[job.client]] = 10.0
    vector += np.random.default_rng(int(job.client[-1])).normal(size=4).astype(np.float32) * 0.1
    return vector if release == "first round" else 0.01 * vector


def best_model(client: str, models: np.ndarray) -> int:
    return int(models[:, CLUSTER_OF[client]].argmax())


def rdpcfl(rounds: int, **settings: object) -> RDPCFL:
    return RDPCFL(RDPCFLSettings(name="r-dpcfl", **settings), Schedule(rounds=rounds), PRIVACY)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rounds", "selections"), [(200, 21), (30, 4), (9, 1), (3, 1)])
def test_planned_releases_are_one_first_round_the_rest_training_and_a_tenth_plus_one_selections(
    rounds: int, selections: int
) -> None:
    plan = rdpcfl(rounds).plan(facts_of(9)).units[0]
    assert [(r.name, r.times) for r in plan.releases] == [
        ("first round", 1),
        ("training", rounds - 1),
        ("selection", selections),
    ]
    selection = plan.release("selection").mechanism
    assert isinstance(selection, PrivateSelection)
    assert selection.epsilon == pytest.approx(0.03 * PRIVACY.epsilon)


@pytest.mark.parametrize("rounds", [3, 10, 40])
def test_what_is_asked_never_exceeds_the_plan(rounds: int) -> None:
    engine = ScriptedEngine(clustered, best_model)
    algorithm = rdpcfl(rounds)
    run(algorithm, engine, 9, rounds)
    plan = algorithm.plan(facts_of(9)).units[0]
    assert engine.rounds_of(Train, "first round") == [1]
    assert engine.rounds_of(Train, "training") == list(range(2, rounds + 1))
    assert len(engine.rounds_of(Select, "selection")) <= plan.release("selection").times


def test_two_rounds_leave_no_trained_models_to_choose_from() -> None:
    assert [r.name for r in rdpcfl(2).plan(facts_of(9)).units[0].releases] == ["first round", "training"]


@pytest.mark.parametrize("rounds", [2, 3, 4, 6])
def test_short_runs_do_not_choose_between_equal_models(rounds: int) -> None:
    algorithm = rdpcfl(rounds)

    def choose(client: str, models: np.ndarray) -> int:
        assert len(np.unique(models, axis=0)) == len(models)
        return best_model(client, models)

    state = run(algorithm, ScriptedEngine(clustered, choose), 9, rounds)
    cluster_of = algorithm.models(state).cluster_of
    assert len({(cluster_of[c], CLUSTER_OF[c]) for c in CLUSTER_OF}) == 3


def test_clusters_are_found_and_trained_apart() -> None:
    algorithm = rdpcfl(40)
    engine = ScriptedEngine(clustered, best_model)
    state = run(algorithm, engine, 9, 40)
    cluster_of = algorithm.models(state).cluster_of
    assert {frozenset(c for c in CLUSTER_OF if cluster_of[c] == k) for k in range(3)} == {
        frozenset(c for c in CLUSTER_OF if CLUSTER_OF[c] == k) for k in range(3)
    }
    # Clear clusters: E_c = floor(E / 2), then floor(E / 10) + 1 rounds of selection.
    assert engine.rounds_of(Select, "selection") == list(range(20, 25))
    for client, cluster in CLUSTER_OF.items():
        assert int(algorithm.models(state).model_of(client).argmax()) == cluster


def test_the_first_round_trains_nothing() -> None:
    algorithm = rdpcfl(10)
    state = run(algorithm, ScriptedEngine(clustered, best_model), 9, 1)
    np.testing.assert_array_equal(algorithm.models(state).models, 0.0)
    assert len(algorithm.models(state).models) == 3


def test_the_most_frequent_choice_wins_and_is_kept() -> None:
    algorithm = rdpcfl(40, clusters=3)
    votes = {"client-0": iter([1, 2, 1, 0, 2]), "client-1": iter([1, 1, 0, 1, 2])}

    def choose(client: str, models: np.ndarray) -> int:
        return next(votes[client]) if client in votes else best_model(client, models)

    state = run(algorithm, ScriptedEngine(clustered, choose), 9, 40)
    # 1 and 2 were chosen twice each; 2 was chosen last.
    assert algorithm.models(state).cluster_of["client-0"] == 2
    # 1 was chosen three times, 2 last.
    assert algorithm.models(state).cluster_of["client-1"] == 1


def test_soft_rounds_join_clusters_at_the_mixture_s_odds() -> None:
    algorithm = rdpcfl(400, clusters=2)
    state = run(algorithm, ScriptedEngine(clustered, best_model), 9, 1)
    state = replace(state, responsibilities=np.tile([0.25, 0.75], (9, 1)), switch_round=350)
    engine = ScriptedEngine(
        lambda job, release: np.zeros(4, dtype=np.float32),
    )
    marked = replace(state, models=np.stack([np.zeros(4), np.ones(4)]).astype(np.float32))
    joined = []
    while marked.round < 300:
        marked = drive(algorithm.round(marked), engine, marked.round + 1)
        request = engine.asked[-1][1]
        assert isinstance(request, Train)
        joined += [job.start[0] for job in request.jobs]
    # 2,691 coins at 0.75: outside 0.75 +- 0.041 with probability below 1e-6.
    assert np.mean(joined) == pytest.approx(0.75, abs=0.041)


def test_noise_alone_is_reported_as_no_clusters() -> None:
    rng = np.random.default_rng(0)
    noise = ScriptedEngine(
        lambda job, release: rng.normal(0, SCRIPTED_NOISE, size=4).astype(np.float32), best_model
    )
    algorithm = rdpcfl(10, clusters=3)
    findings = algorithm.findings(run(algorithm, noise, 9, 1))
    assert findings is not None
    assert findings.overlap > CLEAR_OVERLAP
    (warning,) = findings.warnings
    assert warning.startswith("round 1 shows no clusters: a single one explains it no worse than 3")


@pytest.mark.parametrize(
    ("clustered_at_all", "overlap", "said"),
    [(True, 0.0, None), (True, 0.19, None), (True, 0.21, "overlap by 21%"), (False, 0.0, "no clusters")],
)
def test_clusters_that_are_not_clear_are_reported(
    clustered_at_all: bool, overlap: float, said: str | None
) -> None:
    algorithm = rdpcfl(10)
    state = run(algorithm, ScriptedEngine(clustered, best_model), 9, 1)
    before, after = (
        algorithm.findings(each)
        for each in (state, replace(state, clustered=clustered_at_all, overlap=overlap))
    )
    assert before is not None
    assert before.warnings == ()
    assert after is not None
    assert [said in warning for warning in after.warnings if said] == ([True] if said else [])
    assert bool(after.warnings) == bool(said)


@pytest.mark.parametrize(("apart", "sure"), [(0.40, False), (0.8, False), (10.0, True)])
def test_the_surer_the_mixture_the_longer_it_is_followed(apart: float, sure: bool) -> None:
    """E_c = floor((1 - MPO) E / 2)."""

    def two_clusters(job: TrainJob, release: str) -> Vector:
        rng = np.random.default_rng(int(job.client[-1]))
        vector = rng.normal(0, SCRIPTED_NOISE, size=4).astype(np.float32)
        vector[0] += apart * (int(job.client[-1]) % 2)
        return vector

    algorithm = rdpcfl(1000, clusters=2)
    findings = algorithm.findings(run(algorithm, ScriptedEngine(two_clusters), 10, 1))
    assert findings is not None
    assert findings.switch_round == pytest.approx(500 * (1 - findings.overlap), abs=1)
    assert (findings.switch_round == 500) == sure
    assert findings.switch_round > 10, "the overlap says nothing here"


def test_a_round_repeats_exactly_from_the_same_state() -> None:
    algorithm = rdpcfl(20)
    state = run(algorithm, ScriptedEngine(clustered, best_model), 9, 5)
    first, second = (
        drive(algorithm.round(state), ScriptedEngine(clustered, best_model), 6) for _ in range(2)
    )
    np.testing.assert_array_equal(first.models, second.models)
    assert first.cluster_of == second.cluster_of


@pytest.mark.parametrize(
    ("settings", "clients", "key"),
    [({"clusters": 10}, 9, "algorithm.clusters"), ({"candidates": (5,)}, 4, "algorithm.candidates")],
)
def test_more_clusters_than_clients_are_refused(settings: dict[str, int], clients: int, key: str) -> None:
    with pytest.raises(InputError, match=key):
        rdpcfl(10, **settings).plan(facts_of(clients))


def test_a_batch_larger_than_a_client_s_records_is_refused() -> None:
    algorithm = find_algorithm(Unit.RECORD, "global")(
        AlgorithmSettings(name="global"), Schedule(batch=101), PRIVACY
    )
    with pytest.raises(InputError, match=r"schedule.batch: 101 .* 100 records"):
        algorithm.plan(facts_of(2))


def clustering_by(**settings: object) -> RDPCFL:
    return RDPCFL(RDPCFLSettings.model_validate(settings), Schedule(rounds=5, batch=20), PRIVACY)


def test_round_1_may_be_trained_in_small_batches_at_its_own_cost() -> None:
    algorithm = clustering_by(first_round_release="update", first_round_batch=25, first_round_noise=3.0)
    first = algorithm.plan(facts_of(3)).units[0].release("first round")
    records = facts_of(3).records["client-0"]
    assert isinstance(first.mechanism, PoissonSteps)
    assert (first.mechanism.batch, first.mechanism.records, first.times) == (25, records, 1)
    assert first.mechanism.multiplier == 3.0
    assert first.mechanism.denominator == 25


def test_batches_of_round_1_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="should be all or an integer from 1"):
        RDPCFLSettings.model_validate({"first_round_batch": 0, "first_round_release": "update"})


def test_a_first_batch_larger_than_a_client_s_records_is_refused() -> None:
    algorithm = clustering_by(first_round_release="update", first_round_batch=10**6)
    with pytest.raises(InputError, match=r"algorithm.first_round_batch: 1000000 is more than the"):
        algorithm.plan(facts_of(3))


def test_one_round_is_too_few_for_clustering() -> None:
    with pytest.raises(InputError, match=r"schedule.rounds: 1"):
        rdpcfl(1)


def test_an_unknown_algorithm_is_answered_with_those_that_exist() -> None:
    with pytest.raises(
        InputError,
        match=r"'r-dpfl' is not known for unit 'record' \(did you mean rc-dpfl\?\); allowed: dp-ifca, global",
    ):
        find_algorithm(Unit.RECORD, "r-dpfl")


def test_a_client_with_a_budget_of_its_own_selects_with_its_share_of_that() -> None:
    privacy = PrivacySettings(epsilon=8, delta=1e-3, budgets={"client-1": {"epsilon": 2}})  # type: ignore[dict-item]
    algorithm = RDPCFL(RDPCFLSettings(name="r-dpcfl"), Schedule(rounds=20), privacy)
    plan = algorithm.plan(facts_of(9))
    epsilons = [unit.release("selection").mechanism.epsilon for unit in plan.units]  # type: ignore[attr-defined]
    assert epsilons == [pytest.approx(0.03 * (2 if k == 1 else 8)) for k in range(9)]


def test_a_budget_for_nobody_is_refused() -> None:
    privacy = PrivacySettings(delta=1e-3, budgets={"client-77": {"epsilon": 2}})  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"privacy.budgets: no client is called 'client-77'"):
        RDPCFL(RDPCFLSettings(name="r-dpcfl"), Schedule(rounds=20), privacy).plan(facts_of(9))


def test_two_clients_are_told_what_can_be_done_with_them() -> None:
    with pytest.raises(InputError, match=r"auto cannot tell clusters among 2 clients, .* here: 2, or"):
        rdpcfl(4).plan(facts_of(2))
    rdpcfl(4, clusters=2).plan(facts_of(2))


def test_a_sketch_is_no_longer_than_the_model() -> None:
    rdpcfl(4, sketch_dimensions=4).plan(facts_of(5))
    with pytest.raises(InputError, match=r"sketch_dimensions: 5 is more than the model's 4 parameters"):
        rdpcfl(4, sketch_dimensions=5).plan(facts_of(5))
