"""A clip that follows a quantile: what one member can move, how much noise hides it, and what it costs.

Every statistical test here fails by chance at most once in a million runs; the seeds are fixed.
"""

import math
import re
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
    TRAINING,
    Engine,
    Twin,
    job_of,
    models_of,
    names_of,
    population_plan,
    same_streams,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from coterie.algorithms.client.client_level import AdaptiveClip
from coterie.algorithms.protocol import Cohort, CohortJob, Count, Sum, Sums
from coterie.engines import cohorts
from coterie.engines.cohorts import halves
from coterie.errors import PlanError
from coterie.experiment.local import run
from coterie.experiment.schema import Experiment
from coterie.privacy import (
    CohortSums,
    PoissonSample,
    PrivacyInputError,
    epsilon_of,
    ranges,
)
from coterie.privacy.errors import NoiseError, RangeError
from coterie.privacy.mechanisms import Mechanism

TRACKED = CohortSums(9.0, 1.5, PoissonSample(0.5), ADD_REMOVE, tracking_ratio=2.0)
"""Planned with another clip than any round has."""
ROUTED = CohortSums(9.0, 1.5, PoissonSample(0.5), ADD_REMOVE, histogram_ratio=2.0, tracking_ratio=2.0)
TWELVE = names_of(12)
MATRIX = np.array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])


def tracked_job(members: tuple[str, ...] = TWELVE, clip: float = CLIP, seed: int = 0) -> CohortJob:
    return replace(job_of(members, seed=seed), clip=clip)


def answer(engine: Engine, job: CohortJob, round: int) -> Sums:
    opened = engine.cohorts.open(Cohort("sums", job), round)
    if engine.cohorts._open[opened.number].mechanism.histogram_ratio:
        engine.cohorts.count(Count(opened))
        return engine.cohorts.add_up(Sum(opened, MATRIX))
    return engine.cohorts.add_up(Sum(opened))


# --- what is released -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", [TRACKED, ROUTED], ids=lambda each: each.name)
def test_sums_have_the_clip_of_the_round_and_noise_in_proportion(
    mechanism: CohortSums, tmp_path: Path
) -> None:
    with Engine(tmp_path, population_plan(mechanism), TWELVE) as engine:
        for round, clip in ((1, 0.01), (2, 3.0)):
            found = answer(engine, tracked_job(clip=clip), round)
            assert found.rows.noise_std == pytest.approx(1.5 * clip)
            assert found.within is not None
            assert found.within.noise_std == pytest.approx(2.0 * 1.5 / 2)
            spread = found.rows.value.std() / found.rows.noise_std
            assert 0.5 < spread < 2.0


def test_the_count_is_that_of_the_members_computed_one_by_one_and_the_planned_noise(tmp_path: Path) -> None:
    seen = set()
    with Engine(tmp_path, population_plan(TRACKED), TWELVE) as engine:
        for round, clip in enumerate((0.2, 0.3, 0.4, 0.5), start=1):
            job = tracked_job(clip=clip)
            twin = Twin(engine, job, round)
            norms = [float(np.linalg.norm(twin.update(member))) for member in twin.sampled(0.5)]
            found = answer(engine, job, round).within
            assert found is not None
            count = sum(0.5 if norm <= clip else -0.5 for norm in norms)
            hashed = cohorts._digest(twin.hash, b"0", b"")
            noise = engine.facts.stream("within", replace(twin.charge("cohort"), input_hash=hashed))
            assert found.value == count + float(noise.normal(1, std=2.0 * 1.5 / 2)[0])
            seen.add(count)
    assert len(seen) > 1


def test_the_noise_on_the_count_is_gaussian_with_the_planned_deviation(tmp_path: Path) -> None:
    nobody = replace(TRACKED, sampling=PoissonSample(1e-9))
    values = []
    with Engine(tmp_path, population_plan(nobody, times=400), TWELVE[:2]) as engine:
        for round in range(1, 401):
            found = answer(engine, tracked_job(TWELVE[:2], seed=round), round).within
            assert found is not None
            values.append(found.value)
    assert stats.kstest(values, "norm", args=(0.0, 2.0 * 1.5 / 2)).pvalue > 1e-6


def test_less_noise_on_the_count_than_planned_is_never_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation of the test above: half the noise, refused where it would be drawn and seen without."""
    monkeypatch.setattr(CohortSums, "count_std", property(lambda self: self.tracking_multiplier / 4))
    with pytest.raises(NoiseError, match=r"1\.5 is planned"):
        test_the_noise_on_the_count_is_gaussian_with_the_planned_deviation(tmp_path)
    monkeypatch.setattr(ranges, "check_noise", lambda *numbers: None)
    (tmp_path / "unchecked").mkdir()
    with pytest.raises(AssertionError):
        test_the_noise_on_the_count_is_gaussian_with_the_planned_deviation(tmp_path / "unchecked")


# --- one member more or less ----------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", [TRACKED, ROUTED], ids=lambda each: each.name)
def test_a_member_moves_the_count_by_a_half_and_all_sums_by_at_most_the_clip(
    mechanism: CohortSums, tmp_path: Path
) -> None:
    """Neighbours with the same coins."""
    moved = 0
    for round in range(1, 6):
        found = []
        for name, population in (("with", TWELVE), ("without", TWELVE[1:])):
            folder = tmp_path / f"{name}-{round}"
            folder.mkdir()
            with Engine(folder, population_plan(mechanism), population) as engine:
                engine.cohorts.facts = same_streams(engine)
                found.append(answer(engine, tracked_job(population, clip=0.3), round))
        more, less = found
        assert more.within is not None
        assert less.within is not None
        step = abs(more.within.value - less.within.value)
        distance = float(np.linalg.norm(more.rows.value - less.rows.value))
        assert step == pytest.approx(0.5) if distance else step == 0.0
        assert distance <= 0.3
        moved += bool(distance)
    assert moved


numbers = st.sampled_from([0.0, 0.3, -0.3, 1.0, 1e-300, 1e200, math.nan, math.inf, -math.inf])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(numbers, min_size=2, max_size=2), min_size=1, max_size=6),
    st.lists(numbers, min_size=2, max_size=2),
    st.floats(1e-12, 1e12),
    st.booleans(),
)
def test_whatever_a_member_sends_it_moves_the_count_by_a_half_its_replacement_by_one(
    updates: list[list[float]], other: list[float], clip: float, answers: bool
) -> None:
    def total(rows: list[list[float]]) -> float:
        answered = np.array([answers, *[True] * (len(rows) - 1)])[: len(rows)]
        return halves(torch.tensor(rows, dtype=torch.float64).reshape(-1, 2), answered, clip)

    assert abs(total(updates) - total(updates[:-1])) <= 0.5
    assert abs(total(updates) - total([*updates[:-1], other])) <= 1.0


def test_nobody_changes_sides_with_anothers_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that rounds sums of rows by how many rows there are, as a GPU may."""
    norm = torch.linalg.vector_norm

    def rounded(values: torch.Tensor, **options: Any) -> torch.Tensor:
        rows = len(values) if options else 1
        return norm(values, **options) * (1.0 + 2.0**-50 * (rows - 1))

    monkeypatch.setattr(torch.linalg, "vector_norm", rounded)
    rows = torch.tensor([[1.0], [0.1], [0.1]], dtype=torch.float64)
    for members in (0, 1, 2, 3):
        assert halves(rows[:members], np.ones(members, dtype=np.bool_), 1.0) == 0.5 * members


def test_a_member_that_does_not_answer_is_on_neither_side() -> None:
    rows = torch.tensor([[0.1], [0.1], [9.0]], dtype=torch.float64)
    assert halves(rows, np.array([True, True, True]), 1.0) == 0.5
    assert halves(rows, np.array([False, True, True]), 1.0) == 0.0


# --- what it costs ----------------------------------------------------------------------------------------


def test_count_histogram_and_sums_are_amplified_as_one_sample_and_none_is_free() -> None:
    for tracked, plain in (
        (TRACKED, CohortSums(9.0, 1.5, PoissonSample(0.5), ADD_REMOVE)),
        (ROUTED, CohortSums(9.0, 1.5, PoissonSample(0.5), ADD_REMOVE, histogram_ratio=2.0)),
    ):
        event = tracked.event
        assert isinstance(event, dp.PoissonSampledDpEvent)
        assert event.sampling_probability == 0.5
        multipliers = [part.noise_multiplier for part in event.event.events]
        assert multipliers == ([3.0, 1.5] if tracked is TRACKED else [3.0, 3.0, 1.5])
        spent = [
            epsilon_of(dp.SelfComposedDpEvent(e, 50), 1e-3, "rdp", ADD_REMOVE) for e in (event, plain.event)
        ]
        assert spent[0] > 1.05 * spent[1]


def test_the_clip_of_a_round_changes_nothing_that_is_charged() -> None:
    assert TRACKED.at(0.01).event == TRACKED.event
    assert TRACKED.at(0.01).noise_std == pytest.approx(0.015)
    assert TRACKED.at(0.01).count_std == TRACKED.count_std
    with pytest.raises(PrivacyInputError, match="clip"):
        TRACKED.at(math.nan)
    with pytest.raises(PrivacyInputError, match="tracking_ratio"):
        replace(TRACKED, tracking_ratio=0.0)
    assert Mechanism.from_json(ROUTED.to_json()) == ROUTED


def test_only_a_release_that_plans_it_has_a_clip_of_its_own(tmp_path: Path) -> None:
    with (
        Engine(tmp_path, population_plan(TRACKED), TWELVE) as engine,
        pytest.raises(PlanError, match="follows"),
    ):
        engine.cohorts.open(Cohort("sums", job_of(TWELVE)), 1)
    (tmp_path / "fixed").mkdir()
    plan = population_plan(CohortSums(CLIP, 1.5, PoissonSample(0.5), ADD_REMOVE))
    with Engine(tmp_path / "fixed", plan, TWELVE) as engine:
        with pytest.raises(PlanError, match="fixed clip"):
            engine.cohorts.open(Cohort("sums", tracked_job()), 1)
        assert engine.lines() == 1  # the header: nothing was charged, nothing released


@pytest.mark.parametrize("clip", [0.0, 5e-324, 1e-7, 1e7, math.inf])
def test_a_clip_beyond_the_range_is_refused_and_none_is_never_the_planned_one(
    clip: float, tmp_path: Path
) -> None:
    with Engine(tmp_path, population_plan(TRACKED), TWELVE) as engine:
        with pytest.raises(RangeError, match=f"clip: {re.escape(str(clip))} is not allowed"):
            engine.cohorts.open(Cohort("sums", tracked_job(clip=clip)), 1)
        assert engine.lines() == 1


def test_updates_of_zeros_drive_the_clip_to_the_floor_where_noise_is_as_planned(tmp_path: Path) -> None:
    """Nobody learns anything: the clip falls as fast as it may, and stays where arithmetic still holds."""
    still = replace(job_of(TWELVE), training=replace(TRAINING, lr=0.0))
    rule, clip, rounds, rest = AdaptiveClip(rate=10.0, quantile=0.0), 1.0, 60, []
    with Engine(tmp_path, population_plan(TRACKED, times=rounds), TWELVE) as engine:
        for round in range(1, rounds + 1):
            found = answer(engine, replace(still, clip=clip, models=models_of(3, seed=round)), round)
            assert found.rows.noise_std == 1.5 * clip
            assert found.within is not None
            if clip == ranges.CLIP.least:
                rest.append(found.rows.value.ravel() / (1.5 * clip))
            clip = rule.following(clip, found.within.value, 6.0)
            assert clip >= ranges.CLIP.least
    assert len(rest) > 10
    assert stats.kstest(np.concatenate(rest), "norm").pvalue > 1e-6


# --- the algorithm ----------------------------------------------------------------------------------------


def test_the_clip_finds_the_quantile_of_the_norms() -> None:
    rng = np.random.default_rng(0)
    rule, clip, expected = AdaptiveClip(quantile=0.3), 50.0, 100.0
    norms = np.exp(rng.normal(size=(300, 100)))
    for row in norms:
        clip = rule.following(clip, float((row <= clip).sum() - 50) + rng.normal(0, 3), expected)
    assert clip == pytest.approx(np.quantile(norms, 0.3), rel=0.15)
    assert AdaptiveClip(rate=0.2).following(1.0, 1e9, 100) == pytest.approx(math.exp(-0.2 * 0.5))
    assert AdaptiveClip(rate=0.2).following(1.0, -1e9, 100) == pytest.approx(math.exp(0.2 * 0.5))


def test_no_count_drives_the_clip_out_of_its_range() -> None:
    for count, end in ((1e9, ranges.CLIP.least), (-1e9, ranges.CLIP.most)):
        clip = 1.0
        for _ in range(1000):
            clip = AdaptiveClip(rate=10.0).following(clip, count, 100)
            assert clip in ranges.CLIP
        assert clip == end


@pytest.mark.parametrize("name", ["dp-fedavg", "dp-fedprox", "dp-ifca", "dp-fesem", "dp-fedcam", "gmfsc"])
def test_every_algorithm_follows_the_count_and_spends_what_it_planned(name: str, tmp_path: Path) -> None:
    rebalance = {"rebalance": {"minimum": 2}} if name in ("dp-ifca", "dp-fesem", "dp-fedcam") else {}
    experiment = Experiment.model_validate(
        {
            "federation": {"sizes": [6, 6], "records_per_client": 12},
            "model": {"name": "softmax"},
            "privacy": {"unit": "client", "epsilon": 8, "delta": 0.01, "clip": 0.01},
            "algorithm": {"name": name, "rate": 0.5, "adaptive_clip": {"count_ratio": 2.0}, **rebalance}
            | ({} if name in ("dp-fedavg", "dp-fedprox") else {"clusters": 2}),
            "schedule": {"rounds": 4, "epochs": 1, "batch": 6, "lr": 0.1},
            "evaluation": {"references": False, "every": 4},
            "seeds": {"noise": 5},
        }
    )
    result = run(experiment, tmp_path / "run")
    assert "The clip follows a noisy count" in result.guarantee_text
    ledger = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    assert len(ledger) == 1 + 4
    assert result.epsilon == pytest.approx(8, rel=1e-6)
