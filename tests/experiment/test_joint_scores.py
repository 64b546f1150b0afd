"""Several private scores in one release: how far one record moves it, its noise, its cost, its intervals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from coterie.data import Client
from coterie.data.records import Task
from coterie.engines.clients import TrainingFacts
from coterie.engines.evaluation import PrivateScores
from coterie.errors import InputError
from coterie.experiment import local
from coterie.experiment.evaluator import LocalScores
from coterie.experiment.loop import Run
from coterie.experiment.private_scores import Wanted, bounded_rmse, joint_scores
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.experiment.scores import exact_scores
from coterie.privacy import (
    EVALUATION,
    POPULATION,
    Adjacency,
    Ledger,
    PlanError,
    Released,
    SecretKey,
    held_out,
)
from coterie.privacy.errors import NoiseError
from coterie.privacy.joint_scores import JointScores, Statistic, joint_clip
from coterie.training.learner import Learner
from coterie.training.statistics import statistic_rows

ALL = ("accuracy", "base_rate", "balanced_accuracy", "f1", "auc")
ERRORS = ("rmse", "mae", "r2")
CLASSES = Task("classification", (1,), 4)
NUMBERS = Task("regression", (1,), 0, error_cap=0.1)


def mechanism_of(task: Task, units: int, scores: tuple[str, ...]) -> tuple[Wanted, JointScores]:
    wanted = Wanted.of(scores, task, (0.0, 70.0))
    clip = joint_clip(len(wanted.statistics))
    return wanted, JointScores(clip, 1.0, units, wanted.statistics, task.classes, Adjacency.ZERO_OUT)


def rows_of(task: Task, outputs: NDArray[Any], targets: NDArray[Any], *statistics: Statistic) -> NDArray[Any]:
    learner: Any = SimpleNamespace(task=task)
    learner.scores = lambda said, true: Learner.scores(learner, said, true)
    return statistic_rows(learner, torch.from_numpy(outputs), torch.from_numpy(targets), statistics).numpy()


outputs = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(2, 5).flatmap(
        lambda k: st.tuples(st.lists(outputs, min_size=k, max_size=k), st.integers(0, k - 1))
    )
)
def test_no_record_of_a_classification_adds_more_than_the_clip(drawn: tuple[list[float], int]) -> None:
    said, label = drawn
    wanted, mechanism = mechanism_of(replace(CLASSES, classes=len(said)), 1, ALL)
    task = replace(CLASSES, classes=len(said))
    row = rows_of(task, np.array([said], np.float32), np.array([label]), *wanted.statistics)[0]
    added = mechanism.centred(row, 1.0)
    assert np.linalg.norm(added) <= mechanism.clip * (1 + 1e-12)
    for place in mechanism.places().values():
        assert np.linalg.norm(added[place]) == pytest.approx(0.5), "every block uses all of its half"
    assert mechanism.natural(added, 1.0) == pytest.approx(row)


@settings(max_examples=80, deadline=None)
@given(outputs, st.floats(-3, 3, width=32))
def test_no_record_of_a_regression_adds_more_than_the_clip(said: float, label: float) -> None:
    wanted, mechanism = mechanism_of(NUMBERS, 1, ERRORS)
    row = rows_of(NUMBERS, np.array([[said]], np.float32), np.array([label], np.float32), *wanted.statistics)[
        0
    ]
    assert np.linalg.norm(mechanism.centred(row, 1.0)) <= mechanism.clip * (1 + 1e-12)


def test_counts_and_histograms_are_those_of_the_records() -> None:
    rng = np.random.default_rng(0)
    said, true = rng.normal(size=(200, 4)).astype(np.float32), rng.integers(4, size=200)
    total = rows_of(CLASSES, said, true, Statistic.CLASSES, Statistic.RANKS).sum(axis=0)
    hits, misses, alarms = total[:12].reshape(3, 4)
    predicted = said.argmax(axis=1)
    for label in range(4):
        assert hits[label] == np.sum((true == label) & (predicted == label))
        assert misses[label] == np.sum((true == label) & (predicted != label))
        assert alarms[label] == np.sum((true != label) & (predicted == label))
    cells = total[12:].reshape(4, 2, 16)
    assert cells[:, 0].sum(axis=1).tolist() == [np.sum(true == label) for label in range(4)]
    assert cells[:, 1].sum(axis=1).tolist() == [np.sum(true != label) for label in range(4)]


def drawn(task: Task, records: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(seed)
    if task.classes:
        true = rng.choice(task.classes, size=records, p=np.array([4, 3, 2, 1]) / 10)
        return (rng.normal(size=(records, 4)) + 2 * np.eye(4)[true]).astype(np.float32), true
    label = rng.beta(2, 3, size=records).astype(np.float32)
    return (label + 0.1 * rng.normal(size=records)).astype(np.float32)[:, None], label


@pytest.mark.parametrize(("task", "names"), [(CLASSES, ALL), (NUMBERS, ERRORS)], ids=["classes", "numbers"])
def test_intervals_cover_the_exact_scores_as_often_as_they_say(task: Task, names: tuple[str, ...]) -> None:
    """300 draws of the noise: fewer than 92 % would come from an interval of 95 % in 1 of 80 tests."""
    said, true = drawn(task, 4000, 1)
    wanted, mechanism = mechanism_of(task, len(true), names)
    sums = mechanism.centred(rows_of(task, said, true, *wanted.statistics).sum(axis=0), len(true))
    exact = exact_scores(task, {"all": (said, true)}, (0.0, 70.0))
    rng, inside, repetitions = np.random.default_rng(2), dict.fromkeys(names, 0), 300
    widths = dict.fromkeys(names, 0.0)
    for _ in range(repetitions):
        noisy = Released(sums + 6.0 * rng.normal(size=len(sums)), 6.0)
        found = joint_scores(wanted, mechanism, noisy, len(true), task, (0.0, 70.0))
        for name, score in found.items():
            assert score.interval is not None
            assert score.kind == "private"
            value = exact[name].value
            assert value is not None
            inside[name] += score.interval[0] <= value <= score.interval[1]
            widths[name] += (score.interval[1] - score.interval[0]) / repetitions
    for name in found:
        assert inside[name] / repetitions >= 0.92, name
        assert widths[name] < (0.3 if task.classes else 2.0), name


def test_noise_that_hides_everything_gives_no_score() -> None:
    wanted, mechanism = mechanism_of(CLASSES, 10, ALL)
    lost = Released(1e6 * np.random.default_rng(0).normal(size=len(mechanism.weights)), 1e6)
    found = joint_scores(wanted, mechanism, lost, 10, CLASSES, None)
    assert found["auc"].value is None
    wanted, mechanism = mechanism_of(NUMBERS, 10, ERRORS)
    lost = Released(np.zeros(len(mechanism.weights)), 1e6)
    assert joint_scores(wanted, mechanism, lost, 10, NUMBERS, (0.0, 1.0))["r2"].value is None


def test_one_sum_of_bounded_scores_is_an_error_in_the_labels_units() -> None:
    [rmse] = bounded_rmse(Released(80.0, 0.0), 100, NUMBERS, (0.0, 70.0)).values()
    assert rmse.value == pytest.approx(70 * np.sqrt(0.1 * 0.2))
    assert bounded_rmse(Released(80.0, 0.0), 100, CLASSES, None) == {}


# --- what is planned and released ------------------------------------------------------------------------


def experiment(**sections: Any) -> Experiment:
    return Experiment.model_validate(
        {
            "federation": {"kind": "clusters", "sizes": [2, 1], "records_per_client": 60},
            "algorithm": {"name": "global"},
            "schedule": {"rounds": 1, "batch": 20},
            "seeds": {"simulation": 0, "noise": 0},
            "evaluation": {"kind": "private", "epsilon": 1.0, "scores": list(ALL)},
            **sections,
        }
    )


def test_several_scores_cost_no_more_than_one(tmp_path: Path) -> None:
    several, one = local.calibrate(experiment()), local.calibrate(experiment(evaluation={"kind": "private"}))
    assert several.guarantee.epsilon == one.guarantee.epsilon
    subject = held_out("client-0")
    mine = several.plan.for_subject(subject).planned(JointScores, EVALUATION)
    plain = one.plan.for_subject(subject).release(EVALUATION).mechanism
    assert mine.multiplier == plain.multiplier
    assert mine.clip == pytest.approx(0.5 * np.sqrt(3)), "three statistics in one vector"
    with pytest.raises(PlanError, match=r"a clip of 0\.5 for 3 statistics"):
        replace(mine, clip=0.5)


def scores_of(prepared: Any, ledger: Any, key: SecretKey, federation: Any) -> tuple[LocalScores, Any]:
    names = tuple(client.name for client in federation.clients)
    facts = TrainingFacts(names, (1,) * len(names), 0.1, noise_key=key, coin_key=key, public_seed=0)
    engine: Any = SimpleNamespace(
        facts=facts, plan=prepared.plan, ledger=ledger, context="test", learner=prepared.learner
    )
    return LocalScores(federation, engine), prepared.algorithm.models(prepared.start())


def test_one_held_out_record_moves_the_release_of_its_client_by_at_most_twice_the_clip() -> None:
    """Same coins, one record replaced: the others' releases stay, and its own moves as far as is charged."""
    prepared = local.calibrate(experiment())
    ledger: Any = SimpleNamespace(charge=lambda charges: None)
    first, *others = prepared.federation.clients

    def released(federation: Any) -> dict[str, Released[NDArray[Any]]]:
        scores, served = scores_of(prepared, ledger, SecretKey.from_seed(7), federation)
        return scores.jointly_of_records(served, [client.name for client in federation.clients], 1)

    before = released(prepared.federation)
    mechanism = prepared.plan.for_subject(held_out(first.name)).planned(JointScores, EVALUATION)
    moved = []
    for label in range(prepared.federation.task.classes):
        targets, features = first.test.targets.copy(), first.test.features.copy()
        targets[3], features[3] = label, -features[3]
        changed = Client(
            first.name, first.train, first.validation, replace(first.test, targets=targets, features=features)
        )
        after = released(replace(prepared.federation, clients=(changed, *others)))
        assert all((after[own.name].value == before[own.name].value).all() for own in others)
        moved.append(float(np.linalg.norm(after[first.name].value - before[first.name].value)))
    assert 0.1 < max(moved) <= 2 * mechanism.clip


def test_noise_is_what_was_planned_and_nine_tenths_of_it_is_not_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared, name = local.calibrate(experiment()), "client-0"
    mechanism = prepared.plan.for_subject(held_out(name)).planned(JointScores, EVALUATION)
    facts = TrainingFacts((name,), (1,), 0.1, SecretKey.from_os(), SecretKey.from_os(), 0)
    scores = PrivateScores(facts, prepared.plan, SimpleNamespace(charge=lambda charges: None), "test")  # type: ignore[arg-type]
    nothing = mechanism.natural(np.zeros(len(mechanism.weights)), mechanism.units)
    models = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    noise = np.stack(
        [scores.jointly_of_records({name: model}, 1, lambda: {name: nothing})[name].value for model in models]
    )
    assert noise.size > 10_000
    assert np.std(noise) == pytest.approx(mechanism.noise_std, rel=0.04), "5 deviations of its own error"
    assert np.mean(noise) == pytest.approx(0.0, abs=5 * mechanism.noise_std / np.sqrt(noise.size))
    monkeypatch.setattr(JointScores, "noise_std", property(lambda self: 0.9 * self.clip * self.multiplier))
    with pytest.raises(NoiseError):
        scores.jointly_of_records({name: models[0]}, 1, lambda: {name: nothing})


def test_a_client_adds_no_more_than_the_clip_whatever_it_says(tmp_path: Path) -> None:
    chosen = experiment(
        privacy={"unit": "client", "epsilon": 8, "delta": 0.02},
        algorithm={"name": "dp-fedavg", "rate": 0.5},
    )
    prepared = local.calibrate(chosen)
    mechanism = prepared.plan.for_subject(POPULATION).planned(JointScores, EVALUATION)
    names, models = prepared.facts.clients, np.zeros((1, 3), np.float32)
    facts = TrainingFacts(names, (1,) * len(names), 0.1, SecretKey.from_seed(1), SecretKey.from_seed(1), 0)
    silent = mechanism.natural(np.zeros(len(mechanism.weights)), 1.0)

    def total(means: dict[str, NDArray[Any]], folder: str) -> NDArray[Any]:
        with Ledger.open(
            tmp_path / folder, prepared.plan, budget=prepared.budgets, accountant="rdp"
        ) as ledger:
            scores = PrivateScores(facts, prepared.plan, ledger, "test")
            return scores.jointly_of_clients(models, 1, lambda: means).value

    usual = total(dict.fromkeys(names, silent), "usual")
    liar = total({**dict.fromkeys(names, silent), names[0]: silent + 1e9}, "liar")
    assert np.linalg.norm(liar - usual) == pytest.approx(mechanism.clip)
    assert (total({}, "nobody") == usual).all(), "who is silent adds nothing"


def test_a_run_releases_what_was_asked_for_and_tells_it_again_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = local.run(experiment(), tmp_path / "run")
    assert set(result.scores) == set(ALL) - {"accuracy"}
    assert result.accuracy is not None
    assert result.accuracy.is_private
    assert all(score.kind == "private" for score in result.scores.values())
    assert RunResult.load(tmp_path / "run").scores == result.scores

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    told = Run.result
    monkeypatch.setattr(Run, "result", killed)
    with pytest.raises(KeyboardInterrupt):
        local.run(experiment(), tmp_path / "cut")
    monkeypatch.setattr(Run, "result", told)
    monkeypatch.setattr(LocalScores, "jointly_of_records", killed)
    assert local.run(experiment(), tmp_path / "cut", resume=True).scores == result.scores, "nobody is asked"


def test_a_population_releases_scores_of_its_mean(tmp_path: Path) -> None:
    chosen = experiment(
        privacy={"unit": "client", "epsilon": 8, "delta": 0.02},
        algorithm={"name": "dp-ifca", "clusters": 2, "rate": 0.5},
    )
    result = local.run(chosen, tmp_path / "run")
    assert result.accuracy is not None
    assert result.accuracy.per_client == {}
    assert set(result.scores) == set(ALL) - {"accuracy"}
    assert result.epsilon <= 8.0


REFUSED = {
    "another task's": (["accuracy", "rmse"], r"evaluation.scores: rmse is no score of a classification"),
    "without the first": (["f1"], r"evaluation.scores: \['f1'\] lacks accuracy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_scores_that_cannot_be_released_are_refused(case: str) -> None:
    scores, reason = REFUSED[case]
    with pytest.raises(InputError, match=reason):
        local.calibrate(experiment(evaluation={"kind": "private", "scores": scores}))


def test_explained_variance_needs_a_declared_range() -> None:
    with pytest.raises(InputError, match="r2 needs labels with a declared range"):
        Wanted.of(("rmse", "r2"), NUMBERS, None)
