"""A client's round: as many steps as planned, Poisson batches, private selection at exact odds."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from coterie.data.records import Task
from coterie.models import ModelSettings, build_model
from coterie.privacy import (
    AccuracySelection,
    Adjacency,
    FullBatchSteps,
    PoissonSteps,
    PrivateSelection,
    SecretKey,
)
from coterie.training import dpsgd
from coterie.training.clipping import clipped_sum
from coterie.training.dpsgd import train_privately
from coterie.training.learner import Batch, Learner
from coterie.training.parameters import flatten
from coterie.training.scoring import total_score

CPU = torch.device("cpu")
TASK = Task(kind="classification", shape=(5,), classes=3)
ALPHA = 1e-6


def streams(round: int = 1) -> dict[str, object]:
    key = SecretKey.from_seed(4)
    where = {"subject": "a", "round": round, "release": "training", "input_hash": ""}
    return {purpose: key.stream(purpose, **where) for purpose in ("noise", "coins")}  # type: ignore[arg-type]


@pytest.fixture
def learner() -> Learner:
    return Learner(build_model(ModelSettings(name="softmax"), TASK, seed=0), TASK, CPU)


@pytest.fixture
def start() -> torch.Tensor:
    return torch.from_numpy(flatten(build_model(ModelSettings(name="softmax"), TASK, seed=0)))


@pytest.fixture
def records() -> Batch:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(50, 5)).astype(np.float32)
    return Batch(torch.from_numpy(features), torch.from_numpy((features[:, 0] > 0).astype(np.int64)))


def poisson(noise: float = 0.0, batch: int = 8, epochs: int = 1) -> PoissonSteps:
    return PoissonSteps(
        clip=1.0,
        noise_multiplier=noise,
        records=50,
        batch=batch,
        epochs=epochs,
        adjacency=Adjacency.ZERO_OUT,
    )


def test_every_planned_step_is_taken_and_no_more(
    learner: Learner, start: torch.Tensor, records: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    once = dpsgd.noisy_mean
    monkeypatch.setattr(dpsgd, "noisy_mean", lambda *a, **k: (sizes.append(len(a[2])), once(*a, **k))[1])
    train_privately(learner, start, records, poisson(epochs=3), 0.1, **streams())  # type: ignore[arg-type]
    assert len(sizes) == 3 * math.ceil(50 / 8)
    sizes.clear()
    full = FullBatchSteps(clip=1.0, noise_multiplier=0.0, records=50, epochs=2, adjacency=Adjacency.ZERO_OUT)
    train_privately(learner, start, records, full, 0.1, **streams())  # type: ignore[arg-type]
    assert sizes == [50, 50]


def test_batches_are_poisson(
    learner: Learner, start: torch.Tensor, records: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are binomial and records enter independently (three tests at 1e-6 each)."""
    drawn: list[np.ndarray] = []

    def record(
        _learner: object, parameters: torch.Tensor, batch: Batch, *_: object, **__: object
    ) -> torch.Tensor:
        present = (batch.features[:, None] == records.features[None]).all(-1).any(0)
        drawn.append(present.numpy())
        return torch.zeros_like(parameters, dtype=torch.float64)

    monkeypatch.setattr(dpsgd, "noisy_mean", record)
    for round in range(120):
        train_privately(learner, start, records, poisson(epochs=2), 0.1, **streams(round))  # type: ignore[arg-type]
    coins = np.array(drawn, dtype=float)
    steps, rate = len(coins), 8 / 50
    assert stats.binomtest(int(coins.sum()), coins.size, rate).pvalue > ALPHA
    sizes = coins.sum(axis=1)
    expected_variance = 50 * rate * (1 - rate)
    chi = (steps - 1) * sizes.var(ddof=1) / expected_variance
    assert 2 * min(stats.chi2.cdf(chi, steps - 1), stats.chi2.sf(chi, steps - 1)) > ALPHA
    both = coins.T @ coins
    pairs = both[np.triu_indices(50, 1)]
    p = 2 * stats.binom.sf(np.abs(pairs - steps * rate**2) + steps * rate**2 - 1, steps, rate**2)
    assert p.min() > ALPHA / len(pairs)


def test_noise_is_independent_between_clients_rounds_and_releases() -> None:
    """Correlations of the noise in 12 releases of 903 parameters: largest of 66, at 1e-6 together."""
    task = Task(kind="classification", shape=(300,), classes=3)
    model = build_model(ModelSettings(name="softmax"), task, seed=0)
    learner, start = Learner(model, task, CPU), torch.from_numpy(flatten(model))
    records = Batch(torch.zeros(20, 300), torch.arange(20) % 3)
    full = FullBatchSteps(clip=1.0, noise_multiplier=50.0, records=20, epochs=1, adjacency=Adjacency.ZERO_OUT)
    key = SecretKey.from_seed(9)
    table = np.array(
        [
            train_privately(learner, start, records, full, 0.1, key.stream("noise", **where), coins)  # type: ignore[arg-type]
            for coins in [streams()["coins"]]
            for subject in ("a", "b", "c")
            for round in (1, 2)
            for release in ("first round", "training")
            for where in [{"subject": subject, "round": round, "release": release, "input_hash": ""}]
        ]
    )
    assert len(np.unique(table)) == table.size
    correlations = np.corrcoef(table)[np.triu_indices(len(table), 1)]
    limit = stats.norm.isf(ALPHA / 2 / len(correlations)) / math.sqrt(table.shape[1])
    assert np.abs(correlations).max() < limit
    inside = np.corrcoef(table.T[:40])[np.triu_indices(40, 1)]
    assert abs(inside.mean()) < 0.1


def test_training_without_noise_learns(learner: Learner, start: torch.Tensor, records: Batch) -> None:
    update = train_privately(learner, start, records, poisson(epochs=40), 0.5, **streams())  # type: ignore[arg-type]
    assert total_score(learner, (start + update).float(), records) >= 45


def test_selection_frequencies_match_the_exponential_mechanism(learner: Learner, records: Batch) -> None:
    """Chi-square against the exact odds exp(epsilon * count) under zero-out, at 1e-6."""
    rng = np.random.default_rng(1)
    models = torch.from_numpy(rng.normal(size=(4, learner.layout.size)).astype(np.float32))
    counts = np.array([total_score(learner, model, records) for model in models])
    key = SecretKey.from_seed(5)
    cases = (
        (PrivateSelection, Adjacency.ZERO_OUT, 1.0),
        (PrivateSelection, Adjacency.REPLACE_ONE, 0.5),
        (AccuracySelection, Adjacency.ZERO_OUT, 0.5),
    )
    for kind, adjacency, factor in cases:
        mechanism = kind(epsilon=0.08, adjacency=adjacency)
        streams = [
            key.stream("noise", subject="a", round=draw, release=str(adjacency), input_hash="")
            for draw in range(3000)
        ]
        chosen = [mechanism.choose(counts, -counts, stream) for stream in streams]
        again = key.stream("noise", subject="a", round=0, release=str(adjacency), input_hash="")
        assert mechanism.choose(counts, -counts, again) == chosen[0]
        odds = np.exp(factor * 0.08 * (counts - counts.max()))
        expected = 3000 * odds / odds.sum()
        assert stats.chisquare(np.bincount(chosen, minlength=4), expected).pvalue > ALPHA


def test_one_record_moves_every_selection_score_by_at_most_one(learner: Learner, records: Batch) -> None:
    model = torch.from_numpy(np.random.default_rng(2).normal(size=learner.layout.size).astype(np.float32))
    whole = total_score(learner, model, records)
    for gone in range(len(records)):
        rest = torch.arange(len(records)) != gone
        assert 0 <= whole - total_score(learner, model, records.take(rest)) <= 1


def test_regression_scores_are_bounded_whatever_the_prediction() -> None:
    task = Task(kind="regression", shape=(2,), classes=0, error_cap=4.0)
    learner = Learner(build_model(ModelSettings(name="linear"), task, seed=0), task, CPU)
    batch = Batch(torch.tensor([[1.0, 2.0], [3e38, 3e38], [float("nan"), 0.0]]), torch.zeros(3))
    for size in (0.0, 1.0, 1e38):
        outputs = learner.predict(torch.full((learner.layout.size,), size), batch.features)
        scores = learner.scores(outputs, batch.targets)
        assert ((scores >= 0) & (scores <= 1)).all()


@pytest.mark.parametrize("piece", [1, 7, 17, 18, 2**16])
def test_every_number_gets_the_noise_of_its_place(
    piece: int, learner: Learner, start: torch.Tensor, records: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever pieces it is added: 18 parameters, of which a last piece may be short."""
    monkeypatch.setattr(dpsgd, "_NOISE_AT_ONCE", piece)
    mechanism, nobody = poisson(noise=2.0), records.take(torch.tensor([], dtype=torch.int64))
    found = dpsgd.noisy_mean(learner, start, nobody, mechanism, streams()["noise"])  # type: ignore[arg-type]
    drawn = streams()["noise"].normal(18, std=mechanism.noise_std)  # type: ignore[attr-defined]
    assert np.array_equal(found.numpy(), drawn / mechanism.denominator)


@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("piece", [1, 7, 17, 2**16])
def test_steps_are_taken_with_every_piece_and_told_whole(
    piece: int, pulled: bool, learner: Learner, start: torch.Tensor, records: Batch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The same bits as by the loop below, which a listener hears step by step."""
    monkeypatch.setattr(dpsgd, "_NOISE_AT_ONCE", piece)
    mechanism, lr, weight, told = poisson(noise=1.0, epochs=2), 0.3, 0.7, []
    anchor = start + 0.5 if pulled else None
    coins, noise = streams()["coins"], streams()["noise"]
    parameters = start.double()
    wanted = []
    for coin in coins.bernoulli(mechanism.rate, (mechanism.steps, 50)):  # type: ignore[attr-defined]
        batch = records.take(torch.from_numpy(np.flatnonzero(coin)))
        total = clipped_sum(learner, parameters.float(), batch, mechanism.clip)
        drawn = noise.normal(len(total), std=mechanism.noise_std)  # type: ignore[attr-defined]
        wanted.append((total + torch.from_numpy(drawn)) / mechanism.denominator)
        pull = 0.0 if anchor is None else weight * (parameters - anchor.double())
        parameters = parameters - lr * (wanted[-1] + pull)
    monkeypatch.setattr(learner, "listener", lambda gradient: told.append(gradient.clone()))
    given = (learner, start, records, mechanism, lr)
    found = train_privately(*given, **streams(), anchor=anchor, anchor_weight=weight)  # type: ignore[arg-type]
    assert torch.equal(torch.stack(told), torch.stack(wanted))
    torch.testing.assert_close(found, parameters - start, rtol=1e-12, atol=1e-14)


def test_a_large_model_gets_noise_everywhere(learner: Learner) -> None:
    """More numbers than are in a piece."""
    task = Task(kind="classification", shape=(40_000,), classes=2)
    large = Learner(nn.Linear(40_000, 2), task, CPU)
    nobody = Batch(torch.zeros(0, 40_000), torch.zeros(0, dtype=torch.int64))
    mechanism = poisson(noise=1.0)
    found = dpsgd.noisy_mean(large, large.initial(), nobody, mechanism, streams()["noise"])  # type: ignore[arg-type]
    assert len(found) == 80_002 > dpsgd._NOISE_AT_ONCE
    assert bool((found != 0).all())
    spread = mechanism.noise_std / mechanism.denominator
    for part in torch.split(found, 8192)[:-1]:
        # A variance of 8,192 normals is off by a tenth once in 10^9 times.
        assert abs(float(part.var()) / spread**2 - 1.0) < 0.1


def test_training_leaves_the_model_that_was_sent_as_it_is(
    learner: Learner, start: torch.Tensor, records: Batch
) -> None:
    for sent in (start, start.double()):
        before = sent.clone()
        update = train_privately(learner, sent, records, poisson(noise=1.0), 0.1, **streams())  # type: ignore[arg-type]
        assert torch.equal(sent, before)
        assert bool((update != 0).all())
