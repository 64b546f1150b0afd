"""The pull towards an anchor reaches the parameters, costs nothing, and is part of what was asked."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.algorithms.protocol import Choices, Select, Train, TrainJob, Updates
from coterie.data import Client, Federation, Records, Task
from coterie.engines.local import LocalEngine, coin_key, job_hash, job_hashes
from coterie.errors import PlanError
from coterie.models import ModelSettings, build_model
from coterie.privacy import (
    Adjacency,
    Budget,
    FullBatchSketch,
    FullBatchSteps,
    Ledger,
    LowestLoss,
    Mechanism,
    PlannedRelease,
    PoissonSteps,
    PrivacyPlan,
    Released,
    SecretKey,
    ThreatModel,
    Unit,
    UnitPlan,
)
from coterie.training.learner import Learner
from coterie.training.parameters import flatten

TASK = Task(kind="classification", shape=(5,), classes=3)
MODEL = ModelSettings(name="softmax")
START = flatten(build_model(MODEL, TASK, seed=0))
ANCHOR = flatten(build_model(MODEL, TASK, seed=1))
LR, WEIGHT = 0.1, 4.0
BARELY = 1e-9  # noise that no comparison below can see


def steps(epochs: int, noise: float = BARELY) -> FullBatchSteps:
    return FullBatchSteps(
        clip=1.0, noise_multiplier=noise, records=40, epochs=epochs, adjacency=Adjacency.ZERO_OUT
    )


def answer(mechanism: Mechanism, request: Train | Select, folder: Path) -> Updates | Choices:
    rng = np.random.default_rng(0)
    records = Records(rng.normal(size=(40, 5)).astype(np.float32), rng.integers(3, size=40))
    client = Client("a", records, records.take(slice(0, 0)), records.take(slice(0, 10)))
    plan = PrivacyPlan(
        unit=Unit.RECORD,
        adjacency=Adjacency.ZERO_OUT,
        threat=ThreatModel("the server", "everything"),
        units=(UnitPlan("a", (PlannedRelease("release", mechanism, 9),)),),
    )
    learner = Learner(build_model(MODEL, TASK, seed=0), TASK, torch.device("cpu"))
    key = SecretKey.from_seed(1)
    with Ledger.open(folder / "ledger.jsonl", plan, budget=Budget(np.inf, 1e-3), accountant="rdp") as ledger:
        engine = LocalEngine(
            Federation((client,), TASK), learner, LR, plan, ledger, key, coin_key(key, 0), public_seed=0
        )
        reply = engine.answer(request, 1)
    assert isinstance(reply, Updates | Choices)
    return reply


def trained(mechanism: Mechanism, job: TrainJob, folder: Path) -> Released[np.ndarray]:
    reply = answer(mechanism, Train("release", (job,)), folder)
    assert isinstance(reply, Updates)
    return reply.by_client["a"]


PULLED = TrainJob("a", START, ANCHOR, WEIGHT)
PLAIN = TrainJob("a", START)


def test_one_step_is_the_plain_step_plus_the_pull(tmp_path: Path) -> None:
    plain = trained(steps(1), PLAIN, tmp_path).value
    pulled = trained(steps(1), PULLED, tmp_path).value
    np.testing.assert_allclose(pulled - plain, -LR * WEIGHT * (START - ANCHOR), atol=1e-6)
    assert np.abs(pulled - plain).max() > 0.05


def test_every_step_pulls(tmp_path: Path) -> None:
    # After 60 steps that each keep 0.6 of the distance, only the last few gradients (of norm at most 1)
    # hold the model away from the anchor.
    update = trained(steps(60), PULLED, tmp_path).value
    assert np.linalg.norm(START + update - ANCHOR) <= LR / (LR * WEIGHT) + 1e-3
    assert np.linalg.norm(START - ANCHOR) > 2 * LR / (LR * WEIGHT)


def test_poisson_steps_pull_too(tmp_path: Path) -> None:
    mechanism = PoissonSteps(
        clip=1.0, noise_multiplier=BARELY, records=40, batch=8, epochs=12, adjacency=Adjacency.ZERO_OUT
    )
    update = trained(mechanism, PULLED, tmp_path).value
    assert np.linalg.norm(START + update - ANCHOR) < 0.6 * np.linalg.norm(START - ANCHOR)


def test_the_stated_noise_is_that_of_a_pulled_descent(tmp_path: Path) -> None:
    # Gradients cancel between two descents over the same records only if noise is all that differs.
    loud = [trained(steps(5, noise=1e6), replace(PULLED, start=START + k), tmp_path) for k in range(9)]
    spread = np.std([release.value for release in loud])
    # 162 normal numbers: their standard deviation is within 30 % of the truth but with probability 1e-6.
    assert spread == pytest.approx(loud[0].noise_std, rel=0.3)
    kept = 1 - LR * WEIGHT
    assert loud[0].noise_std == pytest.approx(LR * 1e6 / 40 * np.sqrt(sum(kept ** (2 * k) for k in range(5))))


def test_anchor_and_weight_are_part_of_what_was_asked() -> None:
    asked = [
        PLAIN,
        PULLED,
        replace(PULLED, anchor_weight=WEIGHT / 2),
        replace(PULLED, anchor=START),
        TrainJob("a", ANCHOR, START, WEIGHT),
    ]
    assert len({job_hash("", job) for job in asked}) == len(asked)
    assert job_hash("", PULLED) == job_hash("", replace(PULLED, anchor=ANCHOR.copy()))


def test_a_row_that_many_clients_are_sent_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    models = np.stack([START, ANCHOR, START])
    jobs = [
        TrainJob(f"c{k}", models[k % 3], models[1] if k > 5 else None, WEIGHT * (k > 5)) for k in range(9)
    ]
    expected = {job.client: job_hash("x", job) for job in jobs}
    read: list[TrainJob] = []

    def counted(context: str, job: TrainJob) -> str:
        read.append(job)
        return job_hash(context, job)

    monkeypatch.setattr("coterie.engines.local.job_hash", counted)
    assert job_hashes("x", jobs) == expected
    assert len(read) == 6
    assert len(set(expected.values())) == 4, "equal rows at two places have one digest"


def test_a_sketch_has_no_step_to_pull_at(tmp_path: Path) -> None:
    sketch = FullBatchSketch(
        clip=1.0, noise_multiplier=1.0, records=40, dimensions=6, adjacency=Adjacency.ZERO_OUT
    )
    with pytest.raises(PlanError, match="sketch"):
        trained(sketch, PULLED, tmp_path)


def test_the_lowest_loss_is_told_as_it_is(tmp_path: Path) -> None:
    update = trained(steps(40), PLAIN, tmp_path).value
    models = np.stack([START, START + update, START - update])
    for order in ([0, 1, 2], [1, 0, 2], [2, 0, 1]):
        folder = tmp_path / str(order)
        folder.mkdir()
        request = Select("release", ("a",), models[order])
        reply = answer(LowestLoss(Adjacency.ZERO_OUT), request, folder)
        assert isinstance(reply, Choices)
        assert reply.by_client["a"].value == order.index(1)
