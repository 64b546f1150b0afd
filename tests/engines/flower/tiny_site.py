"""One site with forty small records, and the contract that it would sign."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from coterie.data import Client, Federation, Records, Task
from coterie.engines.flower import messages
from coterie.engines.flower.contract import Contract, Limits
from coterie.engines.flower.messages import FinalModels, RequestId, SiteRequest
from coterie.engines.flower.site import Site
from coterie.models import ModelSettings, build_model
from coterie.privacy import (
    EVALUATION,
    Adjacency,
    Budget,
    FullBatchSketch,
    HeldOut,
    NoisyScores,
    PlannedRelease,
    PoissonSteps,
    PrivacyPlan,
    PrivateSelection,
    ThreatModel,
    Unit,
    UnitPlan,
    held_out,
)
from coterie.training.parameters import flatten

TASK = Task(kind="classification", shape=(5,), classes=3)
START = flatten(build_model(ModelSettings(name="softmax"), TASK, seed=0))
LIMITS = Limits(Budget(20.0, 1e-2))
REPORTING = Limits(Budget(20.0, 1e-2), reported=HeldOut(0, 1.0, 2))
ZERO_OUT = Adjacency.ZERO_OUT


def records(shift: float = 0.0) -> Federation:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(40, 5)).astype(np.float32) + np.float32(shift)
    found = Records(features, rng.integers(3, size=40))
    held_out = Records(rng.normal(size=(10, 5)).astype(np.float32), rng.integers(3, size=10))
    client = Client("a", found, found.take(slice(0, 0)), held_out)
    return Federation((client,), TASK)


def releases(*, noise: float = 2.0, times: int = 3) -> tuple[PlannedRelease, ...]:
    common: Any = {"clip": 1.0, "records": 40, "adjacency": ZERO_OUT}
    return (
        PlannedRelease("sketch", FullBatchSketch(noise_multiplier=4.0, dimensions=6, **common), 1),
        PlannedRelease("training", PoissonSteps(noise_multiplier=noise, batch=8, epochs=1, **common), times),
        PlannedRelease("selection", PrivateSelection(epsilon=0.5, adjacency=ZERO_OUT), 2),
    )


def scores(*, noise: float = 6.0, times: int = 2, units: int = 10, name: str = EVALUATION) -> PlannedRelease:
    """Reports about the ten records that the site holds out."""
    return PlannedRelease(name, NoisyScores(0.5, noise, units, ZERO_OUT), times)


def plan_of(planned: tuple[PlannedRelease, ...], *reports: PlannedRelease) -> PrivacyPlan:
    scored = (UnitPlan(held_out("a"), reports),) if reports else ()
    return PrivacyPlan(
        unit=Unit.RECORD,
        adjacency=ZERO_OUT,
        threat=ThreatModel("the server", "everything"),
        units=(*(UnitPlan(name, planned) for name in ("a", "b")), *scored),
    )


def contract(**changes: Any) -> Contract:
    made = Contract(
        experiment="test",
        algorithm="global",
        client="a",
        records=40,
        task=TASK,
        held_out=10,
        model=ModelSettings(name="softmax"),
        lr=0.1,
        augmentation=None,
        public_seed=0,
        rounds=9,
        plan=plan_of(releases()),
        accountant="rdp",
        delta=1e-3,
    )
    return replace(made, **changes)


FINAL = FinalModels(contract().digest, START[None], 0)
"""What the site takes home in the end."""


def site(folder: Path, limits: Limits = LIMITS, **options: Any) -> Site:
    shift = options.pop("shift", 0.0)
    return Site(records(shift), folder, limits, **options)


def deliver(
    to: Site | Callable[[Message], RecordDict], kind: str, content: RecordDict, *, ttl: float = 60.0
) -> RecordDict:
    """Send a message as a server would, and take the answer's content."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    handle = to.handle if isinstance(to, Site) else to
    return handle(Message(content, 100, kind, ttl=ttl))


def joined(folder: Path, agreed: Contract | None = None, **options: Any) -> Site:
    """A site that has signed."""
    made = site(folder, **options)
    answer = deliver(made, messages.OFFER, (agreed or contract()).to_content())
    assert messages.is_refusal(answer) is None
    return made


def training(round: int = 1, *, agreed: Contract | None = None, **changes: Any) -> RecordDict:
    wanted = RequestId((agreed or contract()).digest, round, changes.pop("release", "training"))
    start = changes.pop("start", START)
    return SiteRequest(wanted, start[None], **changes).to_content(messages.TRAIN)


def selection(round: int = 1, models: np.ndarray | None = None) -> RecordDict:
    wanted = RequestId(contract().digest, round, "selection")
    stacked = np.stack([START, START + 1]) if models is None else models
    return SiteRequest(wanted, stacked).to_content(messages.SELECT)


def evaluation(round: int = 1, *, agreed: Contract, model: np.ndarray = START, **changes: Any) -> RecordDict:
    wanted = RequestId(agreed.digest, round, changes.pop("release", EVALUATION))
    return SiteRequest(wanted, model[None]).to_content(messages.EVALUATE)
