"""The in-process engine charges before it releases, refuses what was not planned, and repeats itself."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from coterie.algorithms.protocol import Choices, Select, Train, TrainJob, Updates
from coterie.data import Client, Federation, Records, Task
from coterie.engines.local import LocalEngine, coin_key, input_hash, randomness_caveat
from coterie.errors import BudgetError, PlanError
from coterie.models import ModelSettings, build_model
from coterie.privacy import (
    Adjacency,
    Budget,
    FullBatchSketch,
    FullBatchSteps,
    Ledger,
    PlannedRelease,
    PoissonSteps,
    PrivacyPlan,
    PrivateSelection,
    SecretKey,
    ThreatModel,
    Unit,
    UnitPlan,
)
from coterie.training.learner import Batch, Learner
from coterie.training.parameters import flatten
from coterie.training.scoring import total_score

TASK = Task(kind="classification", shape=(5,), classes=3)
CLIENTS = ("a", "b")
START = flatten(build_model(ModelSettings(name="softmax"), TASK, seed=0))


def federation(scale: float = 1.0, *, equal: bool = False) -> Federation:
    clients = []
    for index, name in enumerate(CLIENTS):
        rng = np.random.default_rng(index)
        features = (scale * rng.normal(size=(40, 5))).astype(np.float32)
        records = Records(features, np.zeros(40, dtype=np.int64) if equal else rng.integers(3, size=40))
        clients.append(Client(name, records, records.take(slice(0, 0)), records.take(slice(0, 10))))
    return Federation(tuple(clients), TASK)


def plan() -> PrivacyPlan:
    common = {"clip": 1.0, "records": 40, "adjacency": Adjacency.ZERO_OUT}
    releases = (
        PlannedRelease("sketch", FullBatchSketch(noise_multiplier=4.0, dimensions=6, **common), 1),  # type: ignore[arg-type]
        PlannedRelease("first", FullBatchSteps(noise_multiplier=4.0, epochs=1, **common), 1),  # type: ignore[arg-type]
        PlannedRelease("training", PoissonSteps(noise_multiplier=1.0, batch=8, epochs=1, **common), 3),  # type: ignore[arg-type]
        PlannedRelease("selection", PrivateSelection(epsilon=0.5, adjacency=Adjacency.ZERO_OUT), 2),
    )
    return PrivacyPlan(
        unit=Unit.RECORD,
        adjacency=Adjacency.ZERO_OUT,
        threat=ThreatModel("the server", "everything"),
        units=tuple(UnitPlan(name, releases) for name in CLIENTS),
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(
        tmp_path / "ledger.jsonl", plan(), budget=Budget(100.0, 1e-3), accountant="rdp"
    ) as opened:
        yield opened


def engine_on(
    ledger: Ledger, *, seed: int = 1, scale: float = 1.0, equal: bool = False, max_memory: int | None = None
) -> LocalEngine:
    learner = Learner(build_model(ModelSettings(name="softmax"), TASK, seed=0), TASK, torch.device("cpu"))
    key = SecretKey.from_seed(seed)
    given = federation(scale, equal=equal), learner, 0.1, plan(), ledger, key, coin_key(key, 0)
    return LocalEngine(*given, public_seed=0, max_memory=max_memory)


def training(start: np.ndarray = START, release: str = "training") -> Train:
    return Train(release, tuple(TrainJob(client, start) for client in CLIENTS))


def updates(engine: LocalEngine, request: Train, round: int) -> dict[str, np.ndarray]:
    reply = engine.answer(request, round)
    assert isinstance(reply, Updates)
    return {client: update.value for client, update in reply.by_client.items()}


def test_the_charge_is_on_disk_before_any_record_is_touched(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(ledger)
    lines: list[int] = []

    def look(*arguments: object) -> torch.Tensor:
        lines.append(len((tmp_path / "ledger.jsonl").read_text().splitlines()))
        return torch.zeros(len(START), dtype=torch.float64)

    monkeypatch.setattr("coterie.engines.clients.train_privately", look)
    engine.answer(training(), 1)
    # The header and the line that charges both clients stand before the first of them trains.
    assert lines == [2, 2]


def test_a_selection_is_charged_before_any_record_is_scored(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, charged = engine_on(ledger), []
    score = engine._score

    def look(request: Select) -> object:
        charged.append([ledger.executed(client)["selection"] for client in CLIENTS])
        return score(request)

    monkeypatch.setattr(engine, "_score", look)
    for round in (1, 2):
        engine.answer(Select("selection", CLIENTS, np.stack([START, START + round])), round)
    assert charged == [[1, 1], [2, 2]]
    with pytest.raises(BudgetError):
        engine.answer(Select("selection", CLIENTS, np.stack([START, START + 3])), 3)
    assert len(charged) == 2


def test_a_release_that_was_not_planned_is_refused_untouched(ledger: Ledger) -> None:
    with pytest.raises(PlanError):
        engine_on(ledger).answer(training(release="evaluation"), 1)
    assert ledger.spent() == 0


def test_one_release_more_than_planned_is_refused_untouched(ledger: Ledger) -> None:
    engine = engine_on(ledger)
    for round in (1, 2, 3):
        engine.answer(training(), round)
    before = ledger.head
    with pytest.raises(BudgetError):
        engine.answer(training(), 4)
    assert ledger.head == before


def test_a_release_is_executed_as_what_was_planned(ledger: Ledger) -> None:
    with pytest.raises(PlanError, match="not trainable"):
        engine_on(ledger).answer(training(release="selection"), 1)
    models = np.stack([START, START])
    with pytest.raises(PlanError, match="not a selection"):
        engine_on(ledger).answer(Select("training", CLIENTS, models), 1)
    assert ledger.spent() == 0


def test_one_client_cannot_be_asked_twice_in_one_request(ledger: Ledger) -> None:
    twice = Train("training", (TrainJob("a", START), TrainJob("a", START + 1)))
    with pytest.raises(PlanError, match="twice"):
        engine_on(ledger).answer(twice, 1)
    assert ledger.spent() == 0


def test_a_repeated_round_repeats_its_noise_and_costs_nothing_more(ledger: Ledger) -> None:
    first = updates(engine_on(ledger), training(), 1)
    spent = ledger.spent()
    again = updates(engine_on(ledger), training(), 1)
    assert ledger.spent() == spent
    for client in CLIENTS:
        np.testing.assert_array_equal(first[client], again[client])


def noise_alone(ledger: Ledger, release: str, round: int, start: np.ndarray = START) -> dict[str, np.ndarray]:
    """The noise in releases of clients whose features are all zero, which move no weight of the layer."""
    found = updates(engine_on(ledger, scale=0.0, equal=True), training(start, release), round)
    return {client: value[:15] for client, value in found.items()}


def test_no_two_releases_share_their_noise(ledger: Ledger) -> None:
    """Streams differ by client, by round, by release and by what the client was sent."""
    found = [
        *noise_alone(ledger, "training", 1).values(),
        *noise_alone(ledger, "training", 2).values(),
        *noise_alone(ledger, "training", 2, START + 0.5).values(),
        *noise_alone(ledger, "first", 1).values(),
    ]
    for one, value in enumerate(found):
        for other in found[:one]:
            correlation = np.corrcoef(value, other)[0, 1]
            assert abs(correlation) < 0.95  # equal or scaled noise gives 1


def test_engine_selects_at_the_odds_of_the_exponential_mechanism(tmp_path: Path) -> None:
    """Chi-square over 300 rounds of two clients, and independence of the two, at 1e-6 each."""
    many = tuple(replace(release, times=300) for release in plan().units[0].releases)
    long_plan = replace(plan(), units=tuple(UnitPlan(name, many) for name in CLIENTS))
    rng = np.random.default_rng(3)
    models = rng.normal(size=(3, len(START))).astype(np.float32)
    with Ledger.open(
        tmp_path / "long.jsonl", long_plan, budget=Budget(1e6, 1e-3), accountant="rdp"
    ) as opened:
        engine = engine_on(opened)
        engine.plan = long_plan
        chosen: dict[str, list[int]] = {client: [] for client in CLIENTS}
        for round in range(1, 301):
            reply = engine.answer(Select("selection", CLIENTS, models), round)
            assert isinstance(reply, Choices)
            for client in CLIENTS:
                chosen[client].append(reply.by_client[client].value)
        learner = engine.learner
        records = {c.name: Batch.of(c.train, torch.device("cpu")) for c in federation().clients}
        for client in CLIENTS:
            counts = np.array(
                [total_score(learner, model, records[client]) for model in torch.from_numpy(models)]
            )
            odds = np.exp(0.5 * (counts - counts.max()))
            expected = 300 * odds / odds.sum()
            kept = expected > 1e-3
            observed = np.bincount(chosen[client], minlength=3)
            assert observed[~kept].sum() == 0
            if kept.sum() > 1:
                scaled = expected[kept] * observed[kept].sum() / expected[kept].sum()
                assert stats.chisquare(observed[kept], scaled).pvalue > 1e-6


def test_another_start_model_draws_other_noise_and_is_charged(ledger: Ledger) -> None:
    first = updates(engine_on(ledger, scale=0.0), training(release="first"), 1)
    spent = ledger.spent()
    with pytest.raises(BudgetError):  # planned once, and this is another release
        engine_on(ledger).answer(training(START + 1e-3, release="first"), 1)
    engine_on(ledger).answer(training(), 1)
    assert ledger.spent() > spent
    assert not np.array_equal(first["a"], first["b"])


def test_sketches_of_equal_clients_differ_by_noise_alone(ledger: Ledger) -> None:
    reply = engine_on(ledger).answer(training(release="sketch"), 1)
    assert isinstance(reply, Updates)
    for release in reply.by_client.values():
        assert release.value.shape == (6,)
        assert release.noise_std == pytest.approx(4.0 / 40)


def test_selection_answers_everyone_with_an_index(ledger: Ledger) -> None:
    models = np.stack([START, START + 1, START - 1])
    reply = engine_on(ledger).answer(Select("selection", CLIENTS, models), 1)
    assert isinstance(reply, Choices)
    assert set(reply.by_client) == set(CLIENTS)
    assert all(choice.value in (0, 1, 2) for choice in reply.by_client.values())


def test_input_hash_tells_shapes_and_bits_apart() -> None:
    zero = np.zeros(6, dtype=np.float32)
    assert input_hash("", zero) == input_hash("", zero.copy())
    others = (zero, -zero, zero.reshape(2, 3), zero.reshape(3, 2), zero[:5])
    assert len({input_hash(context, other) for other in others for context in ("cpu", "cuda")}) == 10


def test_coins_are_secret_unless_the_noise_is_seeded() -> None:
    secret = SecretKey.from_os()
    assert coin_key(secret, 0) is secret
    seeded = SecretKey.from_seed(1)
    where = {"subject": "a", "round": 1, "release": "t", "input_hash": ""}
    same = [coin_key(seeded, 5).stream("coins", **where).uniform(3) for _ in range(2)]  # type: ignore[arg-type]
    np.testing.assert_array_equal(*same)


def test_stacked_clients_are_charged_alike_and_release_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full batches with next to no noise: nothing but rounding tells the two ways apart."""
    ways = {}
    for way in ("one by one", "together"):
        monkeypatch.setattr("coterie.engines.local.stacks", lambda learner, way=way: way == "together")
        path = tmp_path / f"{way}.jsonl"
        with Ledger.open(path, plan(), budget=Budget(100.0, 1e-3), accountant="rdp") as opened:
            engine = engine_on(opened)
            assert (randomness_caveat(engine.learner) is None) == (way == "one by one")
            quiet = dataclasses.replace(
                plan().for_subject("a").release("first").mechanism, noise_multiplier=1e-12, epochs=3
            )
            monkeypatch.setattr(PrivacyPlan, "planned", lambda self, kind, name, client, quiet=quiet: quiet)
            ways[way] = (updates(engine, training(release="first"), 1), path)
    for client in CLIENTS:
        np.testing.assert_allclose(*(ways[way][0][client] for way in ways), rtol=1e-4, atol=1e-7)
    lines = [ways[way][1].read_text().splitlines()[1:] for way in ways]
    assert [json.loads(line)["charges"] for line in lines[0]] == [
        json.loads(line)["charges"] for line in lines[1]
    ]


@pytest.mark.parametrize("asked", [CLIENTS, CLIENTS[::-1], CLIENTS[1:]], ids="".join)
def test_stacked_clients_are_scored_on_all_their_own_records(
    asked: tuple[str, ...], ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.engines.local.stacks", lambda learner: True)
    models = np.random.default_rng(3).normal(size=(3, len(START))).astype(np.float32)
    engine = engine_on(ledger)
    found = engine._score(Select("selection", asked, models))
    assert set(found) == set(asked)
    for client in federation().clients:
        if client.name in asked:
            records = Batch.of(client.train, torch.device("cpu"))
            counts = [total_score(engine.learner, model, records) for model in torch.from_numpy(models)]
            assert found[client.name][:, 0].tolist() == counts


def test_stacked_releases_repeat_after_a_crash(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.engines.local.stacks", lambda learner: True)
    first = updates(engine_on(ledger), training(), 1)
    again = updates(engine_on(ledger), training(), 1)
    other = updates(engine_on(ledger), training(), 2)
    for client in CLIENTS:
        np.testing.assert_array_equal(first[client], again[client])
        assert not np.array_equal(first[client], other[client])
    assert not np.array_equal(first["a"], first["b"])


def test_one_wave_or_many_release_the_same(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's coins and noise do not depend on who is computed beside it."""
    monkeypatch.setattr("coterie.engines.local.stacks", lambda learner: True)
    together = updates(engine_on(ledger), training(), 1)
    monkeypatch.setattr("coterie.training.stacked.StackedTrainer._clients_at_once", lambda self, jobs: 1)
    apart = updates(engine_on(ledger), training(), 1)
    for client in CLIENTS:
        np.testing.assert_allclose(apart[client], together[client], rtol=1e-5, atol=1e-7)


def test_runs_that_may_take_other_memory_are_no_one_program(ledger: Ledger) -> None:
    small, alike, large = (engine_on(ledger, max_memory=most) for most in (2**28, 2**28, 2**30))
    assert small.network == alike.network
    assert small.network != large.network
