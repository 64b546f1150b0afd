"""Cohorts: charged before a coin is flipped, executed as planned, moved by one member no more than planned.

Every statistical test here fails by chance at most once in a million runs; the seeds are fixed.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from cohort_setup import (
    ADD_REMOVE,
    CLIP,
    ROUTED,
    SIZE,
    SUM,
    TRAINING,
    Engine,
    Twin,
    job_of,
    models_of,
    names_of,
    population_plan,
    rebalanced,
    same_streams,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from coterie.algorithms.client.rebalancing import routing_matrix
from coterie.algorithms.protocol import (
    Choice,
    Cohort,
    CohortJob,
    Count,
    Histogram,
    Opened,
    Parts,
    Sum,
    Sums,
)
from coterie.engines import clients, cohorts, members
from coterie.engines.clients import COINS, TrainingFacts
from coterie.engines.cohorts import cohort_hash, routed
from coterie.engines.computing import Computing, at_once
from coterie.engines.members import Lesson, nearest
from coterie.errors import BudgetError, PlanError
from coterie.privacy import (
    Charge,
    CohortSums,
    FixedSample,
    PlannedRelease,
    PoissonSample,
    PrivacyPlan,
    RandomStream,
    SecretKey,
    ThreatModel,
    Unit,
    UnitPlan,
    epsilon_of,
)
from coterie.training.clipping import clip_rows
from coterie.training.local_sgd import LocalSGD
from slow_mechanisms import clipped, route

ERROR_RATE = 1e-6
TWELVE = names_of(12)


def released(engine: Engine, job: CohortJob, round: int, matrix: np.ndarray | None = None) -> Sums:
    opened = engine.cohorts.open(Cohort("sums", job), round)
    if matrix is not None:
        engine.cohorts.count(Count(opened))
    return engine.cohorts.add_up(Sum(opened, matrix))


# --- charges ------------------------------------------------------------------------------------------


def test_the_charge_is_on_disk_before_a_coin_is_flipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tmp_path, population_plan(SUM), TWELVE) as engine:
        seen: list[int] = []
        flip = TrainingFacts.uniforms

        def watched(self: TrainingFacts, *arguments: Any) -> NDArray[np.float64]:
            seen.append(engine.lines())
            return flip(self, *arguments)

        monkeypatch.setattr(TrainingFacts, "uniforms", watched)
        engine.cohorts.open(Cohort("sums", job_of(TWELVE)), 1)
        assert seen == [2]  # the header, and one line for the whole population


def test_the_population_pays_one_entry_a_round_and_not_one_more_than_planned(tmp_path: Path) -> None:
    with Engine(tmp_path, population_plan(SUM, times=2), TWELVE) as engine:
        for round in (1, 2):
            released(engine, job_of(TWELVE, seed=round), round)
        assert engine.lines() == 3
        with pytest.raises(BudgetError):
            engine.cohorts.open(Cohort("sums", job_of(TWELVE)), 3)


def test_members_with_plans_of_their_own_pay_for_each_group_they_are_in(tmp_path: Path) -> None:
    groups = {"group 0": TWELVE[:8], "group 1": TWELVE[6:]}
    units = tuple(
        UnitPlan(
            name, tuple(PlannedRelease(group, SUM, 3) for group, members in groups.items() if name in members)
        )
        for name in TWELVE
    )
    plan = PrivacyPlan(Unit.WORKER, ADD_REMOVE, ThreatModel("workers", "models"), units)
    with Engine(tmp_path, plan, TWELVE) as engine:
        for group, members in groups.items():
            start_of = {member: index % 2 for index, member in enumerate(members)}
            job = CohortJob(members, models_of(2), TRAINING, start_of=start_of)
            opened = engine.cohorts.open(Cohort(group, job), 1)
            assert engine.cohorts.add_up(Sum(opened)).rows.value.shape == (1, models_of(1).shape[1])
        assert engine.ledger.executed(TWELVE[0]) == {"group 0": 1}
        assert engine.ledger.executed(TWELVE[7]) == {"group 0": 1, "group 1": 1}
        assert engine.ledger.spent(TWELVE[7]) > engine.ledger.spent(TWELVE[0]) > 0
        with pytest.raises(PlanError, match="not declared"):
            engine.cohorts.open(Cohort("group 1", CohortJob(TWELVE, models_of(1), TRAINING)), 2)


def test_members_of_one_cohort_agree_on_what_is_released(tmp_path: Path) -> None:
    quieter = replace(SUM, noise_multiplier=1.0)
    units = tuple(
        UnitPlan(name, (PlannedRelease("sums", quieter if name == TWELVE[0] else SUM, 1),)) for name in TWELVE
    )
    plan = PrivacyPlan(Unit.WORKER, ADD_REMOVE, ThreatModel("workers", "models"), units)
    with Engine(tmp_path, plan, TWELVE) as engine, pytest.raises(PlanError, match="planned differently"):
        engine.cohorts.open(Cohort("sums", job_of(TWELVE)), 1)


# --- refusals -----------------------------------------------------------------------------------------


def test_a_cohort_gives_what_was_planned_once_and_in_order(tmp_path: Path) -> None:
    with Engine(tmp_path, population_plan(ROUTED), TWELVE) as engine:
        answer = engine.cohorts
        opened = answer.open(Cohort("sums", job_of(TWELVE)), 1)
        with pytest.raises(PlanError, match="before the sums"):
            answer.add_up(Sum(opened, np.eye(3)))
        answer.count(Count(opened))
        with pytest.raises(PlanError, match="already"):
            answer.count(Count(opened))
        with pytest.raises(PlanError, match="identifiers"):
            answer.add_up(Sum(opened, minimum=2))
        answer.add_up(Sum(opened, np.eye(3)))
        with pytest.raises(PlanError, match="not open"):
            answer.add_up(Sum(opened, np.eye(3)))
        with pytest.raises(PlanError, match="opened already"):
            answer.open(Cohort("sums", job_of(TWELVE)), 1)
        left_open = answer.open(Cohort("sums", job_of(TWELVE, seed=5)), 1)
        answer.open(Cohort("sums", job_of(TWELVE)), 2)
        with pytest.raises(PlanError, match="not open"):
            answer.count(Count(left_open))


def test_nothing_is_routed_or_counted_that_no_histogram_was_planned_for(tmp_path: Path) -> None:
    with Engine(tmp_path, population_plan(SUM), TWELVE) as engine:
        opened = engine.cohorts.open(Cohort("sums", job_of(TWELVE)), 1)
        with pytest.raises(PlanError, match="plans no histogram"):
            engine.cohorts.count(Count(opened))
        with pytest.raises(PlanError, match="plans no histogram"):
            engine.cohorts.add_up(Sum(opened, np.eye(3)))
        with pytest.raises(PlanError, match="nobody is called"):
            engine.cohorts.open(Cohort("sums", job_of((*TWELVE, "stranger"))), 1)


@pytest.mark.parametrize(
    "matrix",
    [
        np.eye(2),
        np.diag([1.0, 1.0, 0.5]),
        np.array([[1.5, -0.5, 0.0], [0, 1, 0], [0, 0, 1]]),
        np.array([[np.nan, 0.5, 0.5], [0, 1, 0], [0, 0, 1]]),
        2 * np.eye(3),
    ],
)
def test_a_route_whose_rows_are_no_probabilities_is_refused(tmp_path: Path, matrix: np.ndarray) -> None:
    with Engine(tmp_path, population_plan(ROUTED), TWELVE) as engine:
        opened = engine.cohorts.open(Cohort("sums", job_of(TWELVE)), 1)
        engine.cohorts.count(Count(opened))
        with pytest.raises(PlanError, match="route"):
            engine.cohorts.add_up(Sum(opened, matrix))


# --- execution against the slow twin ------------------------------------------------------------------


MATRIX = np.array([[0.6, 0.1, 0.3], [0.4, 0.3, 0.3], [0.25, 0.25, 0.5]])
"""Everyone's coin decides, whatever they chose."""


def test_histogram_and_sums_are_those_of_the_members_computed_one_by_one(tmp_path: Path) -> None:
    with Engine(tmp_path, population_plan(ROUTED), TWELVE) as engine:
        job, round = job_of(TWELVE), 4
        opened = engine.cohorts.open(Cohort("sums", job), round)
        histogram = engine.cohorts.count(Count(opened)).counts
        sums = engine.cohorts.add_up(Sum(opened, MATRIX)).rows

        twin = Twin(engine, job, round)
        sampled = twin.sampled(ROUTED.rate)
        assert 2 < len(sampled) < 12
        noise = engine.facts.stream("histogram", twin.charge("cohort")).normal(
            3, std=ROUTED.histogram_multiplier
        )
        counts = np.bincount([twin.choice(member) for member in sampled], minlength=3)
        np.testing.assert_allclose(histogram.value, counts + noise, atol=1e-12)
        assert histogram.noise_std == ROUTED.histogram_multiplier == 3.0

        expected, moved = np.zeros(sums.value.shape), 0
        for member in sampled:
            hashed = cohorts._digest(twin.hash, MATRIX.tobytes())
            coin = engine.facts.stream("route", replace(twin.charge(member), input_hash=hashed))
            choice = twin.choice(member)
            goes_to = int(route([choice], MATRIX, coin)[0])
            expected[goes_to] += clipped(twin.update(member), CLIP)
            moved += goes_to != choice
        assert 0 < moved < len(sampled)
        hashed = cohorts._digest(twin.hash, b"0", MATRIX.tobytes())
        noise = engine.facts.stream("noise", replace(twin.charge("cohort"), input_hash=hashed))
        expected += noise.normal(sums.value.shape, std=CLIP * 1.5)
        # The clip's margin (2^-16) and float32 losses are all that lies between.
        np.testing.assert_allclose(sums.value, expected, atol=3e-5 * CLIP * len(sampled))
        assert sums.noise_std == CLIP * 1.5


def test_who_is_told_a_cluster_adds_to_its_sum_alone(tmp_path: Path) -> None:
    """Neighbours with the same coins: one member less moves the sum of its own cluster, within the clip."""
    told = {name: int(name[-2:]) % 3 for name in TWELVE}
    everyone = replace(SUM, sampling=PoissonSample(1.0))
    sums = []
    for number, population in enumerate((TWELVE, TWELVE[1:])):
        (folder := tmp_path / str(number)).mkdir()
        job = CohortJob(tuple(population), models_of(3), TRAINING, Choice.TOLD, start_of=told)
        with Engine(folder, population_plan(everyone), population) as engine:
            engine.cohorts.facts = same_streams(engine)
            sums.append(engine.cohorts.add_up(Sum(engine.cohorts.open(Cohort("sums", job), 1))).rows.value)
    moved = np.linalg.norm(sums[0] - sums[1], axis=1)
    assert 0 < moved[told[TWELVE[0]]] <= CLIP
    assert (np.delete(moved, told[TWELVE[0]]) == 0).all()


def test_every_update_is_clipped_by_its_norm_in_double_and_never_longer_than_the_clip() -> None:
    rows = torch.tensor([[3.0, 4.0], [1e30, 1e30], [0.1, 0.0], [float("nan"), 1.0], [float("inf"), 0.0]])
    kept = clip_rows(rows, 1.0)
    norms = torch.linalg.vector_norm(kept, dim=1)
    assert bool((norms <= 1.0).all())
    torch.testing.assert_close(norms, torch.tensor([1.0, 1.0, 0.1, 0.0, 0.0]).double(), rtol=2e-5, atol=1e-8)


def test_the_noise_on_all_sums_is_gaussian_with_the_planned_deviation(tmp_path: Path) -> None:
    draws, std = [], CLIP * 1.5
    with Engine(tmp_path, population_plan(SUM, times=400), TWELVE) as engine:
        # At this clip what members add is nothing beside the noise, which is that of the plan.
        for round in range(1, 301):
            job = replace(job_of(TWELVE[:1], clusters=2), training=replace(TRAINING, lr=1e-12))
            draws.append(released(engine, job, round).rows.value)
    noise = np.stack(draws) / std
    assert stats.kstest(noise.ravel(), "norm").pvalue > ERROR_RATE
    # Sums of different clusters, and of different rounds, share no noise.
    first, second = noise[:, 0].ravel(), noise[:, 1].ravel()
    assert stats.pearsonr(first, second).pvalue > ERROR_RATE
    assert stats.pearsonr(first[: -noise.shape[2]], first[noise.shape[2] :]).pvalue > ERROR_RATE


def test_members_are_sampled_at_the_planned_rate_and_independently(tmp_path: Path) -> None:
    rounds = 1500
    with Engine(tmp_path, population_plan(SUM), TWELVE) as engine:
        taken = np.zeros((rounds, 12))
        for round in range(rounds):
            coins = engine.facts.uniforms("coins", TWELVE, round, "sums", "0")
            taken[round, PoissonSample(0.3).drawn(coins)] = 1
    for column in taken.T:
        assert stats.binomtest(int(column.sum()), rounds, 0.3).pvalue > ERROR_RATE
    for one, other in itertools.combinations(taken.T, 2):
        assert stats.pearsonr(one, other).pvalue > ERROR_RATE / 100
    spread = stats.chi2(rounds - 1).sf(taken.sum(axis=1).var(ddof=1) * (rounds - 1) / (12 * 0.21))
    assert ERROR_RATE < spread < 1 - ERROR_RATE


def test_the_published_rule_draws_a_cohort_of_its_fixed_size(tmp_path: Path) -> None:
    mechanism = rebalanced(12, 5)
    with Engine(tmp_path, population_plan(mechanism), TWELVE) as engine:
        taken = [
            mechanism.sampling.drawn(engine.facts.uniforms("coins", TWELVE, round, "sums", "0")).tolist()
            for round in range(400)
        ]
        assert {len(set(drawn)) for drawn in taken} == {5}
        counts = [sum(place in drawn for drawn in taken) for place in range(12)]
        assert all(stats.binomtest(count, 400, 5 / 12).pvalue > ERROR_RATE for count in counts)
        opened = engine.cohorts.open(Cohort("sums", job_of(TWELVE, clusters=2)), 1)
        answer = engine.cohorts.add_up(Sum(opened, minimum=2))
        assert answer.sizes is not None
        assert sum(answer.sizes) == 5
        assert min(answer.sizes) >= 2
        with pytest.raises(PlanError, match="planned for 12 clients"):
            engine.cohorts.open(Cohort("sums", job_of(TWELVE[:9])), 1)


def test_identifiers_are_everyones_choice_with_the_planned_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing shows them but the sizes that follow from them."""
    mechanism, found = rebalanced(12, 11), set()
    monkeypatch.setattr(clients.Clients, "learn", lambda self, client, start, *_: np.zeros_like(start))
    with Engine(tmp_path, population_plan(mechanism), TWELVE) as engine:
        for round in range(1, 21):
            opened = engine.cohorts.open(Cohort("sums", job_of(TWELVE, seed=round)), round)
            cohort, assigned = engine.cohorts._open[opened.number], []
            for member, choice in zip(cohort.sampled, cohort.choices, strict=True):
                noise = engine.facts.stream("identifier", Charge(member, round, "sums", cohort.input_hash))
                own = np.eye(3)[choice] + noise.normal(3, std=mechanism.identifier_multiplier)
                assigned.append(int(np.argmax(own)))
            sizes = engine.cohorts.add_up(Sum(opened)).sizes
            assert sizes == tuple(np.bincount(assigned, minlength=3).tolist())
            found.add(sizes)
    assert len(found) > 5


# --- one member more or less ----------------------------------------------------------------------------


def test_a_member_moves_one_count_by_one_and_one_sum_by_at_most_the_clip(tmp_path: Path) -> None:
    """Neighbours with the same coins and the same released histogram: all other rows keep every bit."""
    moved = 0
    for round in range(1, 7):
        answers = []
        for name, population in (("with", TWELVE), ("without", TWELVE[1:])):
            folder = tmp_path / f"{name}-{round}"
            folder.mkdir()
            with Engine(folder, population_plan(ROUTED), population) as engine:
                engine.cohorts.facts = same_streams(engine)
                opened = engine.cohorts.open(Cohort("sums", job_of(population)), round)
                counts = engine.cohorts.count(Count(opened)).counts.value
                sums = engine.cohorts.add_up(Sum(opened, MATRIX)).rows.value
                answers.append((counts, sums))
        (counts, sums), (less_counts, less_sums) = answers
        step = np.abs(counts - less_counts)
        rows = np.flatnonzero((sums != less_sums).any(axis=1))
        assert np.isclose(step.sum(), 0, atol=1e-9) or np.isclose(sorted(step), [0, 0, 1], atol=1e-9).all()
        assert len(rows) == round_to_int(step.sum())
        assert np.linalg.norm(sums - less_sums) <= CLIP
        moved += len(rows)
    assert moved  # the member was sampled at least once


def round_to_int(value: float) -> int:
    return int(np.rint(value))


vectors = st.lists(
    st.sampled_from([0.0, 1.0, -1.0, 0.3, 1e-30, 1e20, -1e20, np.nan, np.inf]), min_size=2, max_size=2
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), vectors, st.floats(0.001, 0.999)), min_size=1, max_size=7),
    st.lists(st.floats(-5, 12), min_size=3, max_size=3),
    st.integers(0, 6),
    st.floats(0.01, 5),
)
def test_joint_sensitivity_by_adversarial_search(
    members: list[tuple[int, list[float], float]], histogram: list[float], out: int, least: float
) -> None:
    """Whatever members choose and learn: given histogram and coins, all sums together move by at most C."""
    matrix = routing_matrix(np.array(histogram), least)

    def total(part: list[tuple[int, list[float], float]]) -> np.ndarray:
        sums = np.zeros((3, 2))
        if part:
            choices, updates, coins = zip(*part, strict=True)
            goes_to = routed(np.array(choices), matrix, np.array(coins))
            rows = clip_rows(torch.tensor(updates, dtype=torch.float64), CLIP).numpy()
            for row, destination in zip(rows, goes_to, strict=True):
                sums[destination] += row
        return sums

    out %= len(members)
    assert np.linalg.norm(total(members) - total(members[:out] + members[out + 1 :])) <= CLIP


def test_a_members_update_has_the_same_bits_whoever_else_was_sampled(tmp_path: Path) -> None:
    with Engine(tmp_path, population_plan(SUM), TWELVE) as engine:
        starts, rule = torch.from_numpy(models_of(12)), LocalSGD(**vars(TRAINING))

        def learnt(members: Sequence[str], starts: torch.Tensor) -> torch.Tensor:
            lesson = Lesson(tuple(members), lambda: starts, rule, lambda member: 0, wave=len(members))
            return at_once(engine.members._train([lesson]))[0]

        many = learnt(TWELVE, starts)
        for index in (0, 5, 11):
            mine = slice(index, index + 1)
            alone = learnt(TWELVE[mine], starts[mine])
            torch.testing.assert_close(alone[0], many[index], rtol=0, atol=0)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("choice", [Choice.LOWEST_LOSS, Choice.NEAREST])
def test_a_members_choice_is_the_same_whoever_else_was_sampled(
    choice: Choice, stacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own records and the models of the round: nothing of others that was not released."""
    monkeypatch.setattr("coterie.engines.members.stacks", lambda learner: stacked)
    with Engine(tmp_path, population_plan(replace(SUM, sampling=PoissonSample(1.0))), TWELVE) as engine:
        # Centres nearer to each other than one training goes: whatever leaks from others would decide.
        job = replace(job_of(TWELVE, choice=choice), models=0.1 * models_of(3, seed=1))
        opened = engine.cohorts.open(Cohort("sums", job), 1)
        cohort = engine.cohorts._open[opened.number]
        assert len(set(cohort.choices.tolist())) > 1
        for member, row in zip(cohort.sampled, cohort.choices, strict=True):
            choosing = engine.members.choose(replace(cohort, sampled=(member,)))
            assert at_once(choosing).tolist() == [row]


# --- what would break routing -----------------------------------------------------------------------------


def test_destinations_follow_the_exact_distribution_over_all_outcomes(tmp_path: Path) -> None:
    """Exhaustive enumeration: independent draws, each by its row; quotas would favour some joint outcomes."""
    draws = 4000
    with Engine(
        tmp_path, population_plan(replace(ROUTED, sampling=PoissonSample(1.0))), names_of(3)
    ) as engine:
        opened = engine.cohorts.open(Cohort("sums", job_of(names_of(3))), 1)
        engine.cohorts.count(Count(opened))
        cohort = engine.cohorts._open[opened.number]
        cohort.choices = np.array([0, 0, 2])
        found: dict[tuple[int, ...], int] = {}
        for draw in range(draws):
            cohort.input_hash = str(draw)
            goes_to, _ = engine.cohorts._destinations(cohort, Sum(opened, MATRIX))
            found[tuple(goes_to)] = found.get(tuple(goes_to), 0) + 1
    outcomes = list(itertools.product(range(3), repeat=3))
    exact = np.array(
        [np.prod([MATRIX[a, r] for a, r in zip((0, 0, 2), each, strict=True)]) for each in outcomes]
    )
    counts = np.array([found.get(each, 0) for each in outcomes])
    assert exact.min() > 0
    assert stats.chisquare(counts, exact * draws).pvalue > ERROR_RATE


def test_no_quota_ties_members_together() -> None:
    """Exact quotas: taking a member away moves others, and sums move by more than the clip."""
    choices, matrix = np.array([0, 0, 0, 0]), np.array([[0.5, 0.5], [0.0, 1.0]])
    coins = np.array([0.1, 0.6, 0.2, 0.9])

    def quota(chosen: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """As many as expected go over, by the order of their coins."""
        over = np.argsort(drawn)[: round(0.5 * len(chosen))]
        return np.isin(np.arange(len(chosen)), over).astype(int)

    def sums(goes_to: np.ndarray, updates: np.ndarray) -> np.ndarray:
        return np.array([updates[goes_to == j].sum() for j in range(2)])

    updates = np.array([1.0, -1.0, 1.0, -1.0])
    ours = sums(routed(choices, matrix, coins), updates) - sums(
        routed(choices[1:], matrix, coins[1:]), updates[1:]
    )
    theirs = sums(quota(choices, coins), updates) - sums(quota(choices[1:], coins[1:]), updates[1:])
    assert np.linalg.norm(ours) <= 1.0 < np.linalg.norm(theirs)


def test_histogram_and_sums_are_amplified_as_one_sample() -> None:
    """Two samples of their own would claim less than the one coin of a member spends."""
    mechanism = CohortSums(CLIP, 1.2, PoissonSample(0.1), ADD_REMOVE, histogram_ratio=1.0)
    assert isinstance(mechanism.event, dp.PoissonSampledDpEvent)
    assert isinstance(mechanism.event.event, dp.ComposedDpEvent)
    parts = [dp.PoissonSampledDpEvent(0.1, part) for part in mechanism.event.event.events]
    apart = dp.SelfComposedDpEvent(dp.ComposedDpEvent(parts), 100)
    together = dp.SelfComposedDpEvent(mechanism.event, 100)
    claimed, spent = (epsilon_of(event, 1e-3, "rdp", ADD_REMOVE) for event in (apart, together))
    assert claimed < 0.95 * spent


def test_a_member_draws_the_same_again_and_nobody_elses_absence_changes_it(tmp_path: Path) -> None:
    """No re-drawing after a drop-out: the coin belongs to the member, the round and the route."""
    goes_to = []
    for attempt in range(2):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with Engine(folder, population_plan(replace(ROUTED, sampling=PoissonSample(1.0))), TWELVE) as engine:
            opened = engine.cohorts.open(Cohort("sums", job_of(TWELVE)), 1)
            engine.cohorts.count(Count(opened))
            cohort = engine.cohorts._open[opened.number]
            if attempt:
                cohort.sampled, cohort.choices = cohort.sampled[4:], cohort.choices[4:]
            goes_to.append(engine.cohorts._destinations(cohort, Sum(opened, MATRIX))[0])
            assert (goes_to[-1] != cohort.choices).any()
    np.testing.assert_array_equal(goes_to[0][4:], goes_to[1])


def test_an_empty_sample_and_an_empty_cluster_release_noise_like_any_other(tmp_path: Path) -> None:
    with Engine(tmp_path, population_plan(replace(ROUTED, sampling=PoissonSample(1e-9))), TWELVE) as engine:
        answer = released(engine, job_of(TWELVE), 1, np.eye(3))
        assert answer.rows.noise_std == CLIP * 1.5
        deviations = answer.rows.value.std(axis=1) / answer.rows.noise_std
        assert ((deviations > 0.4) & (deviations < 1.8)).all()


def test_answers_say_nothing_about_single_members(tmp_path: Path) -> None:
    """Neither who was sampled, nor what anyone chose, lost or scored, nor how many they were."""
    fields = {kind: [field.name for field in dataclasses.fields(kind)] for kind in (Opened, Histogram, Sums)}
    assert fields == {Opened: ["release", "number"], Histogram: ["counts"], Sums: ["rows", "sizes", "within"]}
    with Engine(tmp_path, population_plan(SUM), TWELVE) as engine:
        handles = [engine.cohorts.open(Cohort("sums", job_of(TWELVE, seed=seed)), 1) for seed in range(3)]
        assert handles == [Opened("sums", 1), Opened("sums", 2), Opened("sums", 3)]
        assert engine.cohorts.add_up(Sum(handles[0])).sizes is None
    (tmp_path / "routed").mkdir()
    with Engine(tmp_path / "routed", population_plan(ROUTED), TWELVE) as engine:
        assert released(engine, job_of(TWELVE), 1, MATRIX).sizes is None


class Silent(members.LocalMembers):
    """Members of whom some never answer."""

    missing: tuple[str, ...] = ()

    def choose(self, cohort: members.OpenCohort) -> Computing[np.ndarray]:
        rows = yield from super().choose(cohort)
        return np.where([name in self.missing for name in cohort.sampled], members.NO_ANSWER, rows)

    def learn(
        self, cohort: members.OpenCohort, waiting: Sequence[members.OpenCohort]
    ) -> Computing[torch.Tensor]:
        updates = yield from super().learn(cohort, waiting)
        updates[[name in self.missing for name in cohort.sampled]] = 0.0
        return updates


@pytest.mark.parametrize(
    "mechanism", [replace(ROUTED, sampling=PoissonSample(1.0)), rebalanced(12, 11)], ids=lambda m: m.name
)
def test_a_member_that_does_not_answer_adds_nothing_and_keeps_its_slot(
    tmp_path: Path, mechanism: CohortSums
) -> None:
    """With the same coins: one count less and one update less, or one slot of noise; nothing else moves."""
    job, found = job_of(TWELVE), {}
    for missing in ((), TWELVE[3:4]):
        folder = tmp_path / str(len(missing))
        folder.mkdir()
        with Engine(folder, population_plan(mechanism), TWELVE) as engine:
            engine.cohorts.members = silent = Silent(engine.clients)
            silent.missing = missing
            opened = engine.cohorts.open(Cohort("sums", job), 1)
            sampled = engine.cohorts._open[opened.number].sampled
            assert TWELVE[3] in sampled
            if mechanism.histogram_ratio:
                counts = engine.cohorts.count(Count(opened)).counts.value
                found[missing] = counts, engine.cohorts.add_up(Sum(opened, MATRIX))
            else:
                found[missing] = np.zeros(3), engine.cohorts.add_up(Sum(opened))
    (counts, sums), (fewer, without) = found.values()
    assert np.linalg.norm(sums.rows.value - without.rows.value) <= 2 * CLIP
    if mechanism.histogram_ratio:
        np.testing.assert_allclose(sorted(counts - fewer), [0, 0, 1], atol=1e-9)
        assert 0 < np.linalg.norm(sums.rows.value - without.rows.value) <= CLIP
    else:
        assert without.sizes is not None
        assert sum(without.sizes) == len(sampled) == 11


def test_a_choice_that_is_none_of_the_models_is_never_counted(tmp_path: Path) -> None:
    class Astray(members.LocalMembers):
        def choose(self, cohort: members.OpenCohort) -> Computing[np.ndarray]:
            return (yield from super().choose(cohort)) + 3

    with Engine(tmp_path, population_plan(ROUTED), TWELVE) as engine:
        engine.cohorts.members = Astray(engine.clients)
        opened = engine.cohorts.open(Cohort("sums", job_of(TWELVE)), 1)
        with pytest.raises(ValueError, match="broadcast"):
            engine.cohorts.count(Count(opened))


def test_nobody_is_in_a_cohort_twice() -> None:
    """Two updates of one member would move a sum by twice the clip."""
    with pytest.raises(ValueError, match="nobody twice"):
        replace(job_of(TWELVE), members=(*TWELVE, TWELVE[0]))
    coins = np.random.default_rng(1).random((200, 12))
    for sampling in (PoissonSample(0.7), FixedSample(12, 7)):
        for own in (*coins, np.full(12, 0.5)):
            places = sampling.drawn(own)
            assert len(set(places.tolist())) == len(places)


def test_every_member_is_sent_every_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that fetched only the model it chose would tell its choice."""
    with Engine(tmp_path, population_plan(replace(SUM, sampling=PoissonSample(1.0))), TWELVE) as engine:
        asked: list[int] = []
        original = clients.score_sums

        def count_models(*arguments):  # type: ignore[no-untyped-def]
            asked.append(1)
            return original(*arguments)

        monkeypatch.setattr(clients, "score_sums", count_models)
        engine.cohorts.open(Cohort("sums", job_of(TWELVE)), 1)
        assert len(asked) == 12 * 3


# --- shared and personal parts ------------------------------------------------------------------------------


def test_shared_and_routed_parts_move_together_under_one_clip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = models_of(1).shape[1]
    shared = np.arange(size) < 6
    parts = Parts(shared, np.zeros(size, dtype=bool))
    quiet = replace(SUM, sampling=PoissonSample(1.0), noise_multiplier=0.0)
    with Engine(tmp_path, population_plan(quiet), TWELVE) as engine:
        job = replace(job_of(TWELVE), parts=parts)
        tens = np.full(size, 10.0, dtype=np.float32)
        monkeypatch.setattr(clients.Clients, "learn", lambda *_: tens)
        rows = released(engine, job, 1).rows.value
    entry = CLIP / np.sqrt(size)  # one clip for the whole vector
    np.testing.assert_allclose(rows[:, shared], 12 * entry, rtol=1e-4)
    np.testing.assert_allclose(rows[:, ~shared].sum(axis=0), 12 * entry, rtol=1e-4)


def test_shared_noise_is_one_draw_for_all_rows_and_independent_of_the_routed(tmp_path: Path) -> None:
    size = models_of(1).shape[1]
    shared = np.arange(size) < 9
    with Engine(
        tmp_path, population_plan(replace(SUM, sampling=PoissonSample(1e-9)), times=200), TWELVE
    ) as engine:
        job = replace(job_of(TWELVE), parts=Parts(shared, np.zeros(size, dtype=bool)))
        rows = np.stack([released(engine, job, round).rows.value for round in range(1, 121)])
        hashed = cohorts._digest(cohort_hash("context", job), b"0", b"")
        stream = engine.facts.stream("shared noise", Charge("cohort", 1, "sums", hashed))
        np.testing.assert_array_equal(rows[0, 0, shared], stream.normal(size, std=CLIP * 1.5)[shared])
    assert (rows[:, 0, shared] == rows[:, 1, shared]).all()
    assert stats.kstest(rows[:, 0, shared].ravel() / (CLIP * 1.5), "norm").pvalue > ERROR_RATE
    assert stats.pearsonr(rows[:, 0, :9].ravel(), rows[:, 0, 9:18].ravel()).pvalue > ERROR_RATE


def test_personal_parts_are_kept_by_their_client_and_never_released(tmp_path: Path) -> None:
    size = models_of(1).shape[1]
    personal = np.arange(size) >= 12
    parts = Parts(np.zeros(size, dtype=bool), personal)
    quiet = replace(SUM, sampling=PoissonSample(0.5), noise_multiplier=1.0)
    with Engine(tmp_path, population_plan(quiet), TWELVE) as engine:
        job = replace(job_of(TWELVE, clusters=1, choice=Choice.GIVEN), parts=parts)
        first = released(engine, job, 1).rows.value
        assert (first[:, personal] == 0).all()
        kept = engine.members.personal
        sampled = Twin(engine, job, 1).sampled(0.5)
        assert sorted(kept) == sorted(sampled)
        twin = Twin(engine, job, 1)
        for member in sampled:
            expected = job.models[0][personal] + twin.update(member)[personal]
            np.testing.assert_allclose(kept[member], expected, atol=1e-6)
        # The next round starts from what each kept, whatever the model says there.
        engine.members.personal = {member: np.full(personal.sum(), 7.0, np.float32) for member in TWELVE}
        moved = replace(job, training=replace(TRAINING, lr=1e-12))
        released(engine, moved, 2)
        assert all(np.allclose(part, 7.0) for part in engine.members.personal.values())


def test_nearest_is_by_direction_from_the_mean_of_the_centres() -> None:
    directions = torch.tensor([[10.0, 0.0], [0.0, 0.1], [-10.0, -0.1]])
    updates = torch.tensor([[0.1, 0.01], [0.01, 0.1], [-1.0, 0.0], [float("nan"), 0.0]])
    np.testing.assert_array_equal(nearest(updates, directions), [0, 1, 2, 0])


def test_the_nearest_is_the_same_whoever_else_was_sampled() -> None:
    """Also where directions are equally near but for the last bits, which depend on the order of a sum."""
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(60, 57, generator=generator)
    turned = torch.randn(3, 57, generator=generator)
    directions = torch.cat([turned, turned * (1.0 + 2.0**-23), turned.flip(0)])
    together = nearest(updates, directions)
    alone = [int(nearest(update[None], directions)[0]) for update in updates]
    assert together.tolist() == alone
    assert nearest(updates[:0], directions).shape == (0,)


def test_the_hash_binds_everything_that_members_are_sent() -> None:
    job = job_of(TWELVE)
    size = job.models.shape[1]
    mask = np.arange(size) < 3
    others = [
        replace(job, members=TWELVE[1:]),
        replace(job, models=job.models + np.float32(1e-6)),
        replace(job, training=replace(TRAINING, epochs=3)),
        replace(job, choice=Choice.NEAREST),
        replace(job, choice=Choice.GIVEN),
        replace(job, choice=Choice.GIVEN, start_of=dict.fromkeys(TWELVE, 1)),
        replace(job, parts=Parts(mask, ~mask)),
        replace(job, parts=Parts(~mask, mask)),
        replace(job, clip=0.1),
        replace(job, clip=0.2),
    ]
    assert (
        len({cohort_hash("", each) for each in (job, *others)} | {cohort_hash("x", job)}) == len(others) + 2
    )


# --- which key --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mechanism", "draws"),
    [
        (SUM, {"noise", "shared noise"}),
        (ROUTED, {"histogram", "noise", "shared noise"}),
        (rebalanced(12, 5), {"identifier", "noise", "shared noise"}),
        (
            CohortSums(CLIP, 1.5, PoissonSample(0.5), ADD_REMOVE, histogram_ratio=2.0, tracking_ratio=2.0),
            {"histogram", "noise", "shared noise", "within"},
        ),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_no_two_parts_of_a_run_share_their_noise(
    mechanism: CohortSums, draws: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise that stands in two places could be taken away from one of them by looking at the other."""
    drawn: list[tuple[str, Charge]] = []
    original = TrainingFacts.stream

    def remembered(self: TrainingFacts, purpose: str, charge: Charge) -> RandomStream:
        drawn.append((purpose, charge))
        return original(self, purpose, charge)

    monkeypatch.setattr(TrainingFacts, "stream", remembered)
    shared = np.arange(SIZE) < 6
    job = replace(job_of(TWELVE), parts=Parts(shared, np.zeros_like(shared)))
    job = replace(job, clip=CLIP if mechanism.tracking_ratio else None)
    with Engine(tmp_path, population_plan(mechanism), TWELVE) as engine:
        for round in (1, 2):
            released(engine, job, round, MATRIX if mechanism.histogram_ratio else None)
    noise = [each for each in drawn if each[0] not in COINS]
    assert {purpose for purpose, _ in noise} == draws
    assert len(noise) == len(set(noise))
    assert all((purpose == "identifier") == (charge.subject != "cohort") for purpose, charge in noise)


@pytest.mark.parametrize("kind", ["sum", "routed", "rebalanced", "shared", "tracked"])
def test_all_that_is_added_as_noise_comes_from_the_noise_key(kind: str, tmp_path: Path) -> None:
    """In a simulation coins have a seed of their own: with other noise, the same clients do the same."""
    tracked = CohortSums(CLIP, 1.5, PoissonSample(0.5), ADD_REMOVE, tracking_ratio=2.0)
    mechanism = {"sum": SUM, "rebalanced": rebalanced(12, 5), "tracked": tracked}.get(kind, ROUTED)
    shared = np.arange(SIZE) < (6 if kind == "shared" else 0)
    job = replace(job_of(TWELVE), parts=Parts(shared, np.zeros_like(shared)))
    job = replace(job, clip=CLIP if kind == "tracked" else None)
    found = []
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        with Engine(tmp_path / str(seed), population_plan(mechanism), TWELVE) as engine:
            engine.cohorts.facts = replace(engine.facts, noise_key=SecretKey.from_seed(seed))
            opened = engine.cohorts.open(Cohort("sums", job), 1)
            inside = engine.cohorts._open[opened.number]
            values = []
            if mechanism.histogram_ratio:
                values.append(engine.cohorts.count(Count(opened)).counts.value)
            if kind == "rebalanced":
                noise = engine.cohorts._stream("identifier", inside, inside.input_hash, inside.sampled[0])
                values.append(noise.normal(3))
            sums = engine.cohorts.add_up(Sum(opened))
            values.append(sums.rows.value[:, ~shared])
            if sums.within is not None:
                values.append(np.array([sums.within.value]))
            if kind == "shared":
                values.append(engine.cohorts._stream("shared noise", inside, "other").normal(6))
            found.append((inside.sampled, inside.choices.tolist(), values))
    assert found[0][:2] == found[1][:2]
    for one, other in zip(found[0][2], found[1][2], strict=True):
        assert not np.any(one == other)
