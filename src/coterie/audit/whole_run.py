"""A whole run under attack in one run: many canaries, each in or out by a coin, and how many coins are
guessed.

The run is the algorithm's own, round after round through the engine, under the plan and a ledger. One client
holds the canaries; whoever attacks sees all that it releases, every noisy step among it. Canaries have
directions of their own, as far as the model has room for them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.algorithms.protocol import Reply, Request, Train, Updates, Vector
from coterie.audit.arena import Audited, client_of, engine_of, finite
from coterie.audit.bounds import Floats, Guesses, Scores
from coterie.audit.claims import Claim
from coterie.audit.games import likelihood
from coterie.audit.result import ReleaseAudit, points
from coterie.audit.scenes import one_record, sure_start
from coterie.audit.verdicts import ENOUGH, AuditVerdict
from coterie.data.records import Records
from coterie.engines.driver import drive
from coterie.engines.local import LocalEngine
from coterie.privacy import RecordSums, SecretKey
from coterie.training.learner import Batch
from coterie.training.sketch import Projection

NAME = "whole run"
DELTA = 1e-5
MOST_CANARIES = 4000
LEAST_CANARIES = 20


@dataclass(frozen=True)
class Canaries:
    """Records with their directions in a model's gradient, and the coin of each.

    Args:
        shift: by how many clips a canary moves a sum along its direction.
    """

    records: Records
    ways: Floats
    present: Floats
    shift: float

    def __len__(self) -> int:
        return len(self.present)


def room_for(audited: Audited, records: int) -> int:
    """How many canaries a client with so many records can hold in directions of their own."""
    task = audited.learner.task
    return min(MOST_CANARIES, records - 1, math.prod(task.shape) * (task.classes - 1))


def no_room(audited: Audited) -> str | None:
    """Why a whole run cannot be attacked in one run; None where it can."""
    task = audited.learner.task
    reasons = {
        "at a site only what it releases itself is known": audited.algorithm is None,
        "canaries are records: units that are clients or workers have too few": (
            not audited.plan.unit.within_client
        ),
        "canaries are made for numeric features and classes": (
            task.kind != "classification" or task.vocabulary is not None
        ),
        "no start is known from which the model's gradients lie in directions of their own": (
            sure_start(audited.learner, audited.initial) is None
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def canaries_of(audited: Audited, start: Vector, count: int, coins: np.random.Generator) -> Canaries:
    """So many canaries, each loud in one feature and of one wrong class."""
    learner, task = audited.learner, audited.learner.task
    features, wrong = math.prod(task.shape), task.classes - 1
    classes = (1 + place // features % wrong for place in range(count))
    records = Records.joined([one_record(task, wanted, place) for place, wanted in enumerate(classes)])
    rows = learner.gradients(torch.from_numpy(start), Batch.of(records, learner.device)).double().numpy()
    shift = 1.0
    if count > features:
        # Wrong classes share the coordinates of the first class: what is left tells them apart.
        rows, shift = np.where(rows > 0, 0.0, rows), math.sqrt(0.5)
    ways = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    return Canaries(records, ways, coins.integers(2, size=count).astype(np.float64), shift)


class Recorder:
    """The engine that runs, with a listener: what one client releases scores its canaries."""

    waited = 0.0

    def __init__(self, engine: LocalEngine, audited: Audited, client: str, canaries: Canaries) -> None:
        self.engine, self.audited, self.client = engine, audited, client
        self.ways, self.scores = torch.from_numpy(canaries.ways.T.copy()), np.zeros(len(canaries))
        self.final = np.zeros(len(canaries))
        self.personal, self.shift = engine.personal, canaries.shift

    def answer(self, request: Request, round: int) -> Reply:
        """As the engine does, while every noisy step of the client is heard."""
        if not isinstance(request, Train):
            return self.engine.answer(request, round)
        plan, release = self.engine.plan, request.release
        planned = {job.client: plan.planned(RecordSums, release, job.client) for job in request.jobs}
        turns = iter(
            [
                job.client
                for job in request.jobs
                if planned[job.client].projected is None
                for _ in range(planned[job.client].steps)
            ]
        )
        learner = self.audited.learner
        learner.listener = self._listener(turns, planned[self.client]) if self.client in planned else None
        try:
            reply = self.engine.answer(request, round)
        finally:
            learner.listener = None
        if self.client in planned and isinstance(reply, Updates):
            self._released(reply, planned[self.client])
        return reply

    def _listener(self, turns: Iterator[str], mechanism: RecordSums) -> Callable[[Tensor], None]:
        scale = mechanism.denominator / mechanism.clip

        def listen(gradient: Tensor) -> None:
            if next(turns) == self.client:
                seen = scale * (gradient @ self.ways).numpy()
                self.scores += likelihood(seen, self.shift, mechanism.multiplier, mechanism.rate)

        return listen

    def _released(self, reply: Updates, mechanism: RecordSums) -> None:
        value = torch.from_numpy(reply.by_client[self.client].value.astype(np.float64))
        scale = mechanism.denominator / mechanism.clip
        if mechanism.projected is None:
            self.final -= scale / self.audited.lr * (value @ self.ways).numpy()
            return
        project = Projection(
            len(self.ways), mechanism.projected, self.audited.public_seed, self.audited.learner.device
        )
        ways = project(self.ways.T.float()).double()
        lengths = torch.linalg.vector_norm(ways, dim=1).clamp(min=1e-30)
        seen = scale * (ways @ value / lengths).numpy()
        self.scores += likelihood(seen, self.shift, mechanism.multiplier, mechanism.rate)


def attack_whole_run(
    audited: Audited, significance: float, tell: Callable[[str], None] = lambda text: None
) -> ReleaseAudit:
    """The verdict on all releases of a client together, from one run."""
    algorithm, facts = audited.algorithm, audited.facts
    assert algorithm is not None
    assert facts is not None
    start = sure_start(audited.learner, audited.initial)
    assert start is not None
    client = max(facts.clients, key=lambda name: facts.records[name])
    stream = SecretKey.from_os().stream("coins", subject=client, round=0, release=NAME, input_hash="canaries")
    unit, coins = audited.plan.for_subject(client), np.random.default_rng(stream.integers(64))
    claim = Claim.of(unit.event, audited.plan.adjacency, audited.accountant)
    count = room_for(audited, facts.records[client])
    canaries = canaries_of(audited, start, count, coins)
    null = one_record(audited.learner.task, 0)
    held = np.where(canaries.present > 0)[0]
    nulls = [null] * (facts.records[client] - len(held))
    holds = Records.joined([canaries.records.take(held), *nulls])
    clients = [client_of(name, holds if name == client else null) for name in facts.clients]
    told = replace(facts, initialise=lambda seed: start.copy())
    with engine_of(audited, clients, {own.subject: own.releases for own in audited.plan.units}) as engine:
        recorder = Recorder(engine, audited, client, canaries)
        state = algorithm.start(told, np.random.default_rng(audited.public_seed))
        rounds = algorithm.schedule.rounds
        for number in range(1, rounds + 1):
            tell(f"{NAME}: round {number} of {rounds}, {count:,} canaries")
            state = drive(algorithm.round(state), recorder, number)
    return judged(claim, canaries, finite(recorder.scores), significance, rounds)


def judged(
    claim: Claim, canaries: Canaries, scores: Floats, significance: float, rounds: int
) -> ReleaseAudit:
    """The bound from guesses about one half of the canaries, with a threshold that the other half chose."""
    there, even = canaries.present > 0, np.arange(len(canaries)) % 2 == 0

    def guesses(half: NDArray[np.bool_], threshold: float) -> Guesses:
        accused = half & (scores >= threshold)
        return Guesses(int(half.sum()), int(accused.sum()), int((accused & there).sum()))

    shares = np.quantile(scores[even], np.linspace(0.5, 0.99, 50))
    best = max(shares, key=lambda cut: guesses(even, cut).epsilon(DELTA, significance))
    found = guesses(~even, float(best))
    lower, claimed = found.epsilon(DELTA, significance), claim.epsilon(DELTA)
    gaussian = found.gaussian_epsilon(DELTA, significance)
    verdict = AuditVerdict.HOLDS if lower >= ENOUGH * claimed else AuditVerdict.UNDERPOWERED
    curve = Scores(scores[there], scores[~there])
    false, true = curve.receiver_curve()
    allowed = 1.0 - claim.false_negatives(false)
    return ReleaseAudit(
        name=NAME,
        what=f"all releases of one client in {rounds} rounds",
        uses=1,
        adjacency=str(claim.adjacency),
        claimed_epsilon=claimed,
        lower_bound=lower,
        delta=DELTA,
        accountant=claim.accountant,
        confidence=1.0 - significance,
        trials=len(canaries),
        verdict=AuditVerdict.VIOLATED if lower > claimed else verdict,
        canary=f"{len(canaries):,} canaries in one run, {found.right} of {found.made} guesses right",
        statistic=f"every step of every release; a Gaussian so easy to guess has epsilon {gaussian:.2f}",
        mu_estimate=curve.separation,
        curve=points(false, true),
        claimed_curve=points(false, allowed),
    )
