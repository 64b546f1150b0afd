"""Algorithms whose unit is a client, against scripted answers: what they plan, ask, divide by and keep."""

import math
from collections.abc import Callable
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie import testing
from coterie.algorithms import algorithm_names, find_algorithm
from coterie.algorithms.client import revival
from coterie.algorithms.client.rebalancing import routing_matrix
from coterie.algorithms.protocol import (
    Algorithm,
    Assignment,
    Choice,
    Cohort,
    OwnChoice,
    PublicFacts,
    Sum,
)
from coterie.algorithms.settings import PrivacySettings, Schedule
from coterie.algorithms.smoothing import smoothed
from coterie.engines.driver import drive
from coterie.errors import InputError
from coterie.privacy import (
    POPULATION,
    Adjacency,
    Budget,
    Mode,
    Unit,
    calibrate,
    guarantee,
)
from coterie.privacy.errors import PrivacyInputError

CLIENTS, RATE, SIZE = 40, 0.5, 6
EXPECTED = CLIENTS * RATE
SCHEDULE = Schedule(rounds=10, epochs=2, batch=5, lr=0.1)
HALVED = np.array([11.0, 4.0, 0.0, 5.0])
"""Sizes of clusters of which one is dead and one serves two."""


def facts_of(clients: int = CLIENTS) -> PublicFacts:
    return testing.facts_of(
        clients,
        SIZE,
        20,
        layout={"body.weight": 3, "head.weight": 2, "head.bias": 1},
        initialise=lambda seed: np.random.default_rng(seed).normal(size=SIZE).astype(np.float32),
    )


def build(name: str, mode: str = "sound", **options: object) -> Algorithm:  # type: ignore[type-arg]
    algorithm = find_algorithm(Unit.CLIENT, name)
    chosen = algorithm.settings_type.model_validate({"name": name, "rate": RATE, **options})
    privacy = PrivacySettings.model_validate({"unit": "client", "epsilon": 4, "clip": 0.5, "mode": mode})
    return algorithm(chosen, SCHEDULE, privacy)


class ScriptedCohorts(testing.ScriptedEngine):
    """Answers with given sums, histogram and sizes of a round."""

    def __init__(
        self,
        rows: Callable[[int], np.ndarray],
        histogram: Callable[[int], np.ndarray] = lambda round: np.zeros(0),
        sizes: tuple[int, ...] | None = None,
        noise: float = testing.SCRIPTED_NOISE,
    ) -> None:
        super().__init__(
            sums=lambda job, round: rows(round),
            histogram=lambda job, round: histogram(round),
            sizes=sizes,
            noise=noise,
        )

    @property
    def first(self) -> Cohort:
        [(_, opening), *_] = self.asked
        assert isinstance(opening, Cohort)
        return opening

    def kinds(self) -> list[str]:
        return [type(request).__name__ for _, request in self.asked]

    def sums_asked(self) -> list[Sum]:
        return [request for _, request in self.asked if isinstance(request, Sum)]


def ones(rows: int) -> Callable[[int], np.ndarray]:
    return lambda round: np.ones((rows, SIZE))


def start(algorithm: Algorithm):  # type: ignore[type-arg,no-untyped-def]
    return algorithm.start(facts_of(), np.random.default_rng(0))


def one_round(algorithm: Algorithm, engine: ScriptedCohorts, state=None):  # type: ignore[type-arg,no-untyped-def]
    state = state or start(algorithm)
    return drive(algorithm.round(state), engine, state.round + 1)


def test_all_of_them_are_registered_for_clients() -> None:
    wanted = {"dp-fedavg", "dp-fedprox", "dp-fedper", "dp-ifca", "dp-fesem", "dp-fedcam", "gmfsc"}
    assert wanted <= set(algorithm_names(Unit.CLIENT))


# --- plans ----------------------------------------------------------------------------------------------


def test_clients_come_and_go_unless_the_file_says_otherwise() -> None:
    assert PrivacySettings.model_validate({"unit": "client"}).adjacency is Adjacency.ADD_REMOVE
    kept = PrivacySettings.model_validate({"unit": "client", "adjacency": "zero-out"})
    assert kept.adjacency is Adjacency.ZERO_OUT
    assert PrivacySettings().adjacency is Adjacency.ZERO_OUT


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("dp-fedavg", {}, "sampled-sum"),
        ("dp-fedper", {}, "sampled-sum"),
        ("dp-ifca", {}, "sampled-sum"),
        ("dp-ifca", {"rebalance": {"rule": "none", "minimum": 5}}, "sampled-sum"),
        ("dp-ifca", {"rebalance": {"minimum": 5}}, "routed-sums"),
        ("dp-fesem", {"rebalance": {"minimum": "auto"}}, "routed-sums"),
        ("dp-fedcam", {"rebalance": {"rule": "rebalance", "minimum": 5}}, "rebalanced-sums"),
        ("gmfsc", {}, "routed-sums"),
    ],
)
def test_one_plan_stands_for_the_population(name: str, options: dict[str, object], kind: str) -> None:
    plan = build(name, **options).plan(facts_of())
    (unit,) = plan.units
    (release,) = unit.releases
    assert (unit.subject, release.mechanism.name, release.times) == (POPULATION, kind, SCHEDULE.rounds)
    assert release.mechanism.rate == RATE  # type: ignore[attr-defined]
    assert any("hyper-parameters" in caveat for caveat in plan.caveats)


def test_a_minimum_of_zero_is_the_base_algorithm_bit_for_bit() -> None:
    """No histogram is planned, asked for or charged, and the same models come out."""
    base, zero = build("dp-ifca", rebalance={"rule": "none"}), build("dp-ifca", rebalance={"minimum": 0})
    assert base.plan(facts_of()) == zero.plan(facts_of())
    engines = [ScriptedCohorts(ones(4)) for _ in range(2)]
    states = [one_round(algorithm, engine) for algorithm, engine in zip((base, zero), engines, strict=True)]
    np.testing.assert_array_equal(states[0].models, states[1].models)
    assert engines[0].kinds() == engines[1].kinds() == ["Cohort", "Sum"]
    assert engines[1].sums_asked()[0].route is None


def test_a_clip_that_follows_a_count_is_planned_only_where_it_is_asked_for() -> None:
    for options, kind, tracked in (
        ({}, "sampled-sum", "tracked-sum"),
        ({"rebalance": {"minimum": 4}}, "routed-sums", "tracked-routed-sums"),
    ):
        fixed, following = (
            build("dp-ifca", **options, **more).plan(facts_of()) for more in ({}, {"adaptive_clip": {}})
        )
        assert fixed.units[0].releases[0].mechanism.name == kind
        assert following.units[0].releases[0].mechanism.name == tracked
        noise = [
            calibrate(plan, {POPULATION: Budget(4.0, 1e-3)}).units[0].releases[0].mechanism.multiplier
            for plan in (fixed, following)
        ]
        assert noise[0] < noise[1] < 1.03 * noise[0]
        assert start(build("dp-ifca", **options)).clip is None
    with pytest.raises(InputError, match="adaptive_clip"):
        build("dp-ifca", rebalance={"rule": "rebalance", "minimum": 4}, adaptive_clip={}).plan(facts_of())


def test_a_minimum_that_no_round_can_reach_is_refused() -> None:
    with pytest.raises(InputError, match=r"algorithm.rebalance.minimum: 6; .* allows 0 to 5"):
        build("dp-ifca", rebalance={"minimum": 6}).plan(facts_of())


def test_clients_have_no_budgets_of_their_own() -> None:
    algorithm = build("dp-fedavg")
    algorithm.privacy = PrivacySettings.model_validate(
        {"unit": "client", "budgets": {"client-0": {"epsilon": 1}}}
    )
    with pytest.raises(InputError, match=r"privacy\.budgets: client-0"):
        algorithm.plan(facts_of())


def test_only_the_published_rule_has_a_publication_to_account_by() -> None:
    budget = Budget(20.0, 1e-3)
    published = build("dp-ifca", "paper", rebalance={"rule": "rebalance", "minimum": 5})
    plan = calibrate(published.plan(facts_of()), budget, mode=Mode.PAPER)
    promise = guarantee(plan, delta=1e-3, mode=Mode.PAPER)
    assert "published eps=" in promise.line
    assert "As published" in promise.text
    with pytest.raises(PrivacyInputError, match="mode: paper"):
        calibrate(build("dp-ifca", "paper").plan(facts_of()), budget, mode=Mode.PAPER)


# --- rounds ---------------------------------------------------------------------------------------------


def test_one_model_moves_by_the_sum_over_the_expected_number() -> None:
    algorithm, engine = build("dp-fedavg", server_step=0.5, momentum=0.9), ScriptedCohorts(ones(1))
    before = start(algorithm)
    after = one_round(algorithm, engine, before)
    np.testing.assert_allclose(after.models, before.models + 0.5 / EXPECTED, rtol=1e-6)
    request = engine.first
    assert (request.job.training.momentum, request.job.training.proximal) == (0.9, 0.0)
    assert isinstance(algorithm.models(after), Assignment)


def test_fedprox_pulls_towards_the_start() -> None:
    engine = ScriptedCohorts(ones(1))
    one_round(build("dp-fedprox", proximal=0.3), engine)
    assert engine.first.job.training.proximal == 0.3


def test_fedper_keeps_the_last_layer_with_the_client() -> None:
    algorithm, engine = build("dp-fedper"), ScriptedCohorts(ones(1))
    state = one_round(algorithm, engine)
    parts = engine.first.job.parts
    assert parts is not None
    np.testing.assert_array_equal(parts.personal, [False, False, False, True, True, True])
    assert isinstance(algorithm.models(state), OwnChoice)
    whole = replace(facts_of(), layout={"head.weight": 5, "head.bias": 1})
    with pytest.raises(InputError, match="one layer"):  # before a folder is written
        algorithm.plan(whole)


@pytest.mark.parametrize(("name", "choice"), [("dp-ifca", Choice.LOWEST_LOSS), ("dp-fesem", Choice.NEAREST)])
def test_without_rebalancing_every_sum_is_divided_by_a_fair_share(name: str, choice: Choice) -> None:
    algorithm, engine = build(name), ScriptedCohorts(ones(4))
    before = start(algorithm)
    after = one_round(algorithm, engine, before)
    np.testing.assert_allclose(after.models, before.models + 4 / EXPECTED, rtol=1e-6)
    assert engine.first.job.choice is choice
    served = algorithm.models(after)
    assert isinstance(served, OwnChoice)
    assert served.choice is choice


def test_route_and_divisors_are_functions_of_the_released_histogram_alone() -> None:
    histogram = np.array([9.0, 7.5, -1.0, 4.5])
    engine = ScriptedCohorts(ones(4), lambda round: histogram)
    algorithm = build("dp-ifca", rebalance={"minimum": 4}, revive=False)
    before = start(algorithm)
    after = one_round(algorithm, engine, before)
    assert engine.kinds() == ["Cohort", "Count", "Sum"]
    matrix = routing_matrix(histogram, 4.0)
    np.testing.assert_array_equal(engine.sums_asked()[0].route, matrix)
    divisors = np.maximum(4.0, matrix.T @ np.maximum(histogram, 0))
    np.testing.assert_allclose(after.models, before.models + 1 / divisors[:, None], rtol=1e-6)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-20, 60), min_size=2, max_size=6), st.floats(0.5, 20))
def test_every_cluster_expects_the_minimum_whenever_there_are_enough(
    sizes: list[float], least: float
) -> None:
    histogram = np.array(sizes)
    matrix = routing_matrix(histogram, least)
    assert (matrix >= 0).all()
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0)
    if np.maximum(histogram, 0).sum() >= len(sizes) * least:
        assert (matrix.T @ np.maximum(histogram, 0)).min() >= least * (1 - 1e-9)


@pytest.mark.parametrize("name", ["dp-ifca", "dp-fesem", "dp-fedcam"])
@pytest.mark.parametrize(
    ("rule", "kind", "asked"),
    [
        ("none", "sampled-sum", ["Cohort", "Sum"]),
        ("route", "routed-sums", ["Cohort", "Count", "Sum"]),
        ("rebalance", "rebalanced-sums", ["Cohort", "Sum"]),
    ],
)
def test_the_plug_in_goes_on_each_of_them_with_every_rule(
    name: str, rule: str, kind: str, asked: list[str]
) -> None:
    algorithm = build(name, rebalance={"rule": rule, "minimum": 4})
    (release,) = algorithm.plan(facts_of()).units[0].releases
    assert release.mechanism.name == kind
    histogram = np.array([9.0, 7.0, 1.0, 3.0])
    engine = ScriptedCohorts(ones(4), lambda round: histogram, sizes=(8, 4, 4, 4))
    before = start(algorithm)
    after = one_round(algorithm, engine, before)
    assert engine.kinds() == asked
    assert engine.sums_asked()[0].minimum == (4 if rule == "rebalance" else 0)
    divisors = {
        "none": np.full(4, EXPECTED / 4),
        "route": routing_matrix(histogram, 4.0).T @ histogram,
        "rebalance": np.array([8.0, 4.0, 4.0, 4.0]),
    }[rule]
    own = ~after.shared
    np.testing.assert_allclose(
        (after.models - before.models)[:, own], (1 / divisors)[:, None] + np.zeros(own.sum()), rtol=1e-4
    )


def test_auto_begins_at_half_a_fair_share_and_falls_to_none() -> None:
    algorithm = build("dp-ifca", rebalance={"minimum": "auto"})
    before = start(algorithm)
    least = [algorithm.minimum(replace(before, round=done)) for done in (0, 5, 10)]  # type: ignore[attr-defined]
    assert least == [EXPECTED / 4 / 2, EXPECTED / 4 / 4, 0]


def test_the_published_rule_divides_by_the_sizes_that_its_identifiers_make_public() -> None:
    engine = ScriptedCohorts(ones(2), sizes=(13, 7))
    algorithm = build("dp-ifca", clusters=2, rebalance={"rule": "rebalance", "minimum": 5})
    before = start(algorithm)
    after = one_round(algorithm, engine, before)
    assert engine.sums_asked()[0].minimum == 5
    np.testing.assert_allclose(
        after.models - before.models, np.array([[1 / 13], [1 / 7]]) + np.zeros(SIZE), 1e-5
    )


def test_fedcam_shares_the_first_model_and_divides_its_sum_by_everyone() -> None:
    engine = ScriptedCohorts(ones(4))
    algorithm = build("dp-fedcam")
    before = start(algorithm)
    assert (before.models[:, :3] == before.models[0, :3]).all()
    after = one_round(algorithm, engine, before)
    np.testing.assert_allclose(after.models[:, :3], before.models[:, :3] + 1 / EXPECTED, rtol=1e-6)
    np.testing.assert_allclose(after.models[:, 3:], before.models[:, 3:] + 4 / EXPECTED, rtol=1e-6)


def test_gmfsc_gives_small_clusters_the_update_of_all() -> None:
    rows = np.arange(4.0)[:, None] + np.zeros(SIZE)
    engine = ScriptedCohorts(lambda round: rows, lambda round: np.array([9.0, 6.0, 1.0, 4.0]))
    algorithm = build("gmfsc", minimum=4, revive=False)
    before = start(algorithm)
    after = one_round(algorithm, engine, before)
    moved = (after.models - before.models)[:, 0]
    np.testing.assert_allclose(moved, [0, 1 / 6, 6 / EXPECTED, 3 / 4], atol=1e-6)


# --- starts and second lives ------------------------------------------------------------------------------


def test_the_oracle_divides_each_sum_by_what_its_told_cluster_expects() -> None:
    kind, facts = find_algorithm(Unit.CLIENT, "oracle"), facts_of()
    truth = {client: int(place >= 30) for place, client in enumerate(facts.clients)}
    options = kind.settings_type.model_validate({"name": "oracle", "rate": RATE})
    privacy = PrivacySettings.model_validate({"unit": "client", "epsilon": 4, "clip": 0.5})
    algorithm = kind(options, SCHEDULE, privacy, truth=truth)
    engine = ScriptedCohorts(ones(2))
    begun = algorithm.start(facts, np.random.default_rng(0))
    moved = drive(algorithm.round(begun), engine, 1)
    np.testing.assert_allclose((moved.models - begun.models)[:, 0], [1 / 15, 1 / 5], rtol=1e-5)
    assert engine.first.job.choice is Choice.TOLD
    assert engine.first.job.start_of == truth
    assert algorithm.models(moved).cluster_of == truth
    assert any("true clusters were handed" in caveat for caveat in algorithm.plan(facts).caveats)


def test_models_begin_near_each_other_by_default() -> None:
    near, apart = start(build("dp-ifca")).models, start(build("dp-ifca", start="random")).models
    spread = [np.linalg.norm(models - models.mean(axis=0)) for models in (near, apart)]
    assert 0 < spread[0] < spread[1]


def test_a_dead_cluster_takes_half_of_a_large_one_in_opposite_directions() -> None:
    engine = ScriptedCohorts(lambda round: np.zeros((4, SIZE)), lambda round: HALVED)
    algorithm = build("dp-ifca", rebalance={"minimum": 2})
    state = first = start(algorithm)
    for _ in range(3):
        state = one_round(algorithm, engine, state)
    assert state.last_split == 3
    np.testing.assert_allclose((state.models[0] + state.models[2]) / 2, first.models[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        np.abs(state.models[0] - first.models[0]), 0.5 * np.abs(first.scale), rtol=1e-4
    )
    np.testing.assert_array_equal(state.models[[1, 3]], first.models[[1, 3]])
    assert state.sizes[0] == state.sizes[2] == 5.5
    again = one_round(algorithm, engine, state)  # the next split waits, whatever the histogram says
    np.testing.assert_array_equal(again.models, state.models)


def test_nothing_is_split_that_noise_may_have_made() -> None:
    engine = ScriptedCohorts(lambda round: np.zeros((4, SIZE)), lambda round: HALVED, noise=5.0)
    algorithm = build("dp-ifca", rebalance={"minimum": 2})
    state = first = start(algorithm)
    for _ in range(5):
        state = one_round(algorithm, engine, state)
    np.testing.assert_array_equal(state.models, first.models)
    np.testing.assert_allclose(state.sizes, HALVED)  # the mean of all rounds, not of the last two


def test_routes_and_divisors_go_by_a_mean_of_released_histograms_where_memory_says_so() -> None:
    histograms = [np.array([20.0, 0, 0, 0]), np.array([8.0, 4, 4, 4]), np.array([5.0, 5, 5, 5])]
    engine = ScriptedCohorts(ones(4), lambda round: histograms[round - 1])
    algorithm = build("dp-ifca", rebalance={"minimum": 4, "memory": 0.6}, revive=False)
    state, sizes = start(algorithm), np.zeros(4)
    for round, weight in ((1, 1.0), (2, 0.5), (3, 0.4)):
        before, state = state, one_round(algorithm, engine, state)
        sizes = (1 - weight) * sizes + weight * histograms[round - 1]
        route = routing_matrix(sizes, 4)
        np.testing.assert_allclose(engine.sums_asked()[-1].route, route)
        expected = 1 / np.maximum(sizes @ route, 4)
        np.testing.assert_allclose((state.models - before.models)[:, 0], expected, rtol=1e-4)
        np.testing.assert_allclose(state.believed, sizes)


def test_a_mean_over_rounds_begins_anew_with_the_models_that_a_split_replaced() -> None:
    engine = ScriptedCohorts(lambda round: np.full((4, SIZE), 1.0 * round), lambda round: HALVED)
    plain = build("dp-ifca", rebalance={"minimum": 2})
    plain.schedule = SCHEDULE.model_copy(update={"averaging": 1.0})
    algorithm = smoothed(plain)
    states = [start(algorithm)]
    for _ in range(5):
        states.append(one_round(algorithm, engine, states[-1]))
    assert [state.last_split for state in states] == [0, 0, 0, 3, 3, 3]
    served = [algorithm.models(state).models for state in states]
    np.testing.assert_allclose(served[2], (states[1].models + 2 * states[2].models) / 3, rtol=1e-5)
    np.testing.assert_array_equal(served[3], states[3].models)
    np.testing.assert_allclose(served[4], (states[3].models + 2 * states[4].models) / 3, rtol=1e-5)


def test_noisier_histograms_are_averaged_for_longer_until_their_mean_is_as_clear() -> None:
    clear = revival.CLEAR * 5.0
    quiet = revival.Rhythm.of(1.0, 5.0)
    assert (quiet.weight, quiet.first, quiet.pause) == (0.5, 3, 3) == astuple(revival.Rhythm.of(0.0, 5.0))
    rng = np.random.default_rng(0)
    for noise in (2.0, 4.0):
        rhythm = revival.Rhythm.of(noise, 5.0)
        assert rhythm.first == math.ceil((noise / clear) ** 2)
        mean, seen = np.zeros(20_000), []
        for round in range(1, 5 * rhythm.first):
            mean = rhythm.smoothed(mean, noise * rng.standard_normal(mean.size), round)
            seen.append(mean.std())
        assert max(seen[rhythm.first - 1 :]) < 1.1 * clear < seen[rhythm.first // 2]
        assert rhythm.pause * rhythm.weight >= 1
    never = revival.Rhythm.of(math.inf, 5.0)
    assert not never.may_split(10**9, 10**12, 0)


def test_two_clusters_that_share_a_model_are_told_apart_in_spite_of_much_noise() -> None:
    """The noise in one histogram is as large as a fair share; a mean over rounds shows the dead cluster."""
    rng = np.random.default_rng(3)
    engine = ScriptedCohorts(
        lambda round: np.zeros((4, SIZE)),
        lambda round: np.array([10.0, 5.0, 0.0, 5.0]) + 5.0 * rng.standard_normal(4),
        noise=5.0,
    )
    algorithm = build("dp-ifca", rebalance={"minimum": 2})
    algorithm.schedule = SCHEDULE.model_copy(update={"rounds": 100})
    state = first = start(algorithm)
    while not state.last_split and state.round < 70:
        state = one_round(algorithm, engine, state)
    assert state.last_split >= 25
    moved = np.flatnonzero((state.models != first.models).any(axis=1))
    assert moved.tolist() == [0, 2]


def test_fair_clusters_are_left_alone_and_two_dead_ones_are_revived_at_once() -> None:
    assert revival.splits(np.array([6.0, 4.0, 5.0, 3.0]), 5.0) == []
    assert revival.splits(np.array([9.0, 0.5, 9.5, 1.0]), 5.0) == [(1, 2), (3, 0)]
    rhythm = revival.Rhythm.of(0.0, 5.0)
    assert not rhythm.may_split(2, 50, 0)
    assert not rhythm.may_split(36, 50, 0)
    assert not rhythm.may_split(10, 50, 8)
    assert rhythm.may_split(10, 50, 7)
