"""Games on a secret sample of clients or workers: sums, counts and choices, as one composed release.

A trial is a round of its own, with coins and noise of its own. The canary is a client whose records make its
update longer than the clip, in a direction of its own; what it does is learnt by the engine, not assumed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from coterie.algorithms.protocol import (
    Choice,
    Cohort,
    CohortJob,
    Count,
    Histogram,
    LocalTraining,
    Opened,
    Reply,
    Request,
    Sum,
    Sums,
    Vector,
)
from coterie.audit.arena import Audited, client_of, engine_of, finite
from coterie.audit.bounds import Scores
from coterie.audit.claims import Claim
from coterie.audit.games import Floats, Game
from coterie.audit.scenes import LOUD, SURE, one_record, repeated, sure_start
from coterie.engines.local import LocalEngine
from coterie.engines.members import LocalMembers
from coterie.privacy import (
    POPULATION,
    Adjacency,
    CohortSums,
    PlannedRelease,
    Released,
    SecretKey,
    Unit,
    UnitPlan,
)
from coterie.training.local_sgd import LocalSGD

CANARY, OPPOSITE, BYSTANDER = "canary", "opposite", "bystander"
EVERYTHING, SUMS = "everything that is released", "the sums alone"
COUNTS, WITHIN = "the counts alone", "the count within the clip alone"
BETWEEN_ROUNDS = "the sums, less those of another round"
RESUMED = "the sums, against those of the same round after a crash"
FIRST_ROUNDS = 2
"""In which an algorithm asks for every release that it plans."""
ROUNDS = 10**6
"""Rounds that the plan of a game allows, of which each trial takes one or two."""


@dataclass(frozen=True)
class AskedCohort:
    """How an algorithm asks for a release of a cohort."""

    job: CohortJob
    minimum: int = 0


def asked_by(audited: Audited) -> dict[str, AskedCohort]:
    """What an algorithm asks of cohorts in its first rounds, by release; answers are zeros, nobody
    computes. One that finds clusters first trains from its second round on."""
    found: dict[str, AskedCohort] = {}
    if audited.algorithm is None or audited.facts is None:
        return found
    state = audited.algorithm.start(audited.facts, np.random.default_rng(audited.public_seed))
    for _ in range(min(FIRST_ROUNDS, audited.algorithm.schedule.rounds)):
        rounds = audited.algorithm.round(state)
        asked: dict[str, AskedCohort] = {}
        opened: dict[int, Cohort] = {}
        try:
            request: Request = next(rounds)
            while True:
                request = rounds.send(_nothing(request, opened, asked))
        except StopIteration as done:
            state = done.value
        found = asked | found
    return found


def _nothing(request: Request, opened: dict[int, Cohort], found: dict[str, AskedCohort]) -> Reply:
    match request:
        case Cohort(release=release, job=job):
            opened[len(opened)] = request
            found[release] = AskedCohort(job)
            return Opened(release, len(opened) - 1)
        case Count(cohort=handle):
            sums = opened[handle.number].job.sums
            return Histogram(Released(np.zeros(sums), 1.0))
        case Sum(cohort=handle, minimum=minimum):
            job = opened[handle.number].job
            found[handle.release] = replace(found[handle.release], minimum=minimum)
            sizes = (len(job.members) // job.sums,) * job.sums if minimum else None
            rows = Released(np.zeros((job.sums, job.length)), 1.0)
            return Sums(rows, sizes, None if job.clip is None else Released(0.0, 1.0))
    raise TypeError(f"{type(request).__name__}: not asked of cohorts")


@dataclass(frozen=True)
class Seen:
    """What one cohort released: projections of its sums in clips, its counts, its count within the clip."""

    sums: Floats
    counts: Floats | None
    within: float | None
    sizes: tuple[int, ...] | None


class CohortGame(Game):
    """Sums of a sample, with whatever comes with them."""

    chunk = 100

    def __init__(
        self,
        audited: Audited,
        unit: UnitPlan,
        planned: PlannedRelease,
        mechanism: CohortSums,
        asked: AskedCohort,
    ) -> None:
        self.audited, self.unit, self.planned, self.asked = audited, unit, planned, asked
        self.name, self.what, self.delta = (
            planned.name,
            mechanism.summary(audited.plan.unit),
            audited.deltas[unit.subject],
        )
        self.mechanism = mechanism if asked.job.clip is None else mechanism.at(asked.job.clip)
        self.claim = Claim.of(mechanism.event, mechanism.adjacency, audited.accountant)
        self.usual = EVERYTHING
        self.fixed: int | None = mechanism.sampling.clients
        self.counts = mechanism.histogram_ratio is not None
        self.models = self._models()
        self.names = self._names()

    def scenes(self) -> list[str]:
        one = "a client whose update is a Dirac"
        return [one, f"{one}, sent to a cluster by chance"] if self.counts else [one]

    def thorough(self, scene: int) -> bool:
        return True

    # --- the worlds ---------------------------------------------------------------------------------------

    def _start(self) -> Vector:
        parts, found = self.asked.job.parts, sure_start(self.audited.learner, self.audited.initial)
        if found is None or (parts is not None and bool(parts.personal.any())):
            return self.audited.initial  # a sure model learns in its last layer alone, which may stay at home
        return found

    def _models(self) -> Any:
        """The models that members are sent; the canary chooses the last, who does not mind the first."""
        job, start = self.asked.job, self._start()
        rows = 1 if job.choice is Choice.GIVEN else len(job.models)
        models = np.repeat(start[None], rows, axis=0)
        surest = int(np.argmax(start))
        if start[surest] == np.float32(SURE):
            models[:, surest] = SURE * np.arange(rows, 0, -1)
        return models

    def _names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The members in both worlds."""
        if self.fixed is not None:
            # A cohort of fixed size has the same number in both worlds: another takes the canary's slot.
            rest = tuple(f"{OPPOSITE}-{number}" for number in range(self.fixed - 1))
            return (CANARY, *rest), (OPPOSITE, *rest)
        replaced = self.mechanism.adjacency is Adjacency.REPLACE_ONE
        return (CANARY, BYSTANDER), ((OPPOSITE, BYSTANDER) if replaced else (BYSTANDER,))

    @contextmanager
    def _engine(self, key: SecretKey) -> Iterator[LocalEngine]:
        task = self.audited.learner.task
        other = 1 if task.kind == "classification" else -LOUD
        holds = {
            CANARY: one_record(task, other, 0),
            OPPOSITE: one_record(task, other, 0, -LOUD),
            BYSTANDER: one_record(task, 0),
        }
        names = dict.fromkeys(name for world in self.names for name in world)
        clients = [client_of(name, repeated(holds[name.partition("-")[0]], 2)) for name in names]
        own = [PlannedRelease(self.name, self.planned.mechanism, ROUNDS)]
        # Workers have plans of their own; for clients, one stands for all.
        subjects = tuple(names) if self.audited.plan.unit is Unit.WORKER else (POPULATION,)
        with engine_of(self.audited, clients, dict.fromkeys(subjects, own), key) as engine:
            yield engine

    def _way(self, engine: LocalEngine) -> tuple[Floats, float]:
        """The canary's direction in what is released, and how far it moves a sum, in clips."""
        rule = LocalSGD(**vars(self.asked.job.training))
        start = self.models[-1] if len(self.models) > 1 else self.models[0]
        parts, sketch = self.asked.job.parts, self.asked.job.sketch
        kept = np.ones(len(start), np.bool_) if parts is None else ~parts.personal

        def clipped(name: str) -> Floats:
            if sketch is not None and sketch.statistic is not None:
                return sketch.contribution(engine.clients.sketch(name, sketch.start, sketch.dimensions))
            update = np.where(kept, engine.clients.learn(name, start, rule, 0).astype(np.float64), 0.0)
            return np.asarray(update / max(float(np.linalg.norm(update)), self.mechanism.clip))

        apart = clipped(CANARY) - (clipped(OPPOSITE) if OPPOSITE in self.names[1] else 0.0)
        length = float(np.linalg.norm(apart))
        return apart / max(length, 1e-30), length

    # --- trials -------------------------------------------------------------------------------------------

    def play(self, scene: int, trials: int, wanted: str | None = None) -> dict[str, Scores]:
        route = None
        if scene == 1:
            k = len(self.models)
            route = np.full((k, k), 1.0 / k)
        worlds: list[dict[str, list[float]]] = [{}, {}]
        key = SecretKey.from_os()
        with self._engine(key) as engine, self._engine(key) as resumed:
            way, shift = self._way(engine)
            rounds = count(1)
            for world, names in enumerate(self.names):
                for _ in range(trials):
                    number = next(rounds)
                    seen = self._ask(engine, names, number, route, way)
                    found = self._statistics(seen, shift, routed=route is not None)
                    if wanted in (None, RESUMED):
                        again = self._ask(resumed, names, number, route, way)
                        found[RESUMED] = float(np.abs(seen.sums - again.sums).sum())
                    if wanted in (None, BETWEEN_ROUNDS):
                        quiet = self._ask(engine, self.names[1], next(rounds), route, way)
                        found[BETWEEN_ROUNDS] = float((seen.sums - quiet.sums).sum())
                    for name, value in found.items():
                        worlds[world].setdefault(name, []).append(value)
        return {name: Scores(finite(worlds[0][name]), finite(worlds[1][name])) for name in worlds[0]}

    def _ask(
        self, engine: LocalEngine, names: Sequence[str], number: int, route: Floats | None, way: Floats
    ) -> Seen:
        """One round of the release."""
        job = replace(self.asked.job, members=tuple(names), models=self.models, start_of=None)
        if isinstance(engine.members, LocalMembers):
            engine.members.personal = {}
        opened = engine.answer(Cohort(self.name, job), number)
        assert isinstance(opened, Opened)
        counts = None
        if self.counts:
            told = engine.answer(Count(opened), number)
            assert isinstance(told, Histogram)
            counts = told.counts.value
        reply = engine.answer(Sum(opened, route, self.asked.minimum), number)
        assert isinstance(reply, Sums)
        within = None if reply.within is None else reply.within.value
        return Seen(reply.rows.value @ way / self.mechanism.clip, counts, within, reply.sizes)

    def _statistics(self, seen: Seen, shift: float, *, routed: bool) -> dict[str, float]:
        """Log-likelihood ratios: sampled or not, and where the canary went if nobody tells."""
        mechanism, noise, rate = self.mechanism, self.mechanism.multiplier, self.mechanism.rate
        own, k = seen.sums.copy(), len(seen.sums)
        if seen.sizes is not None:  # everyone else pulls the other way, and sizes are public
            own = own + np.array(seen.sizes) * (shift / 2.0)
        each = (own * shift - shift**2 / 2.0) / noise**2
        if seen.sizes is not None:
            chances = np.maximum(np.array(seen.sizes, dtype=np.float64), 1e-9)
            sums = float(np.logaddexp.reduce(np.log(chances / chances.sum()) + each))
        elif routed:
            sums = float(np.logaddexp.reduce(each - np.log(k)))
        else:
            sums = float(each[-1])
        beside = 0.0
        if seen.counts is not None and mechanism.histogram_multiplier > 0:
            beside += float(seen.counts[-1] - 0.5) / mechanism.histogram_multiplier**2
        if seen.within is not None and mechanism.count_std > 0:
            beside += float(-seen.within / 2.0 - 0.125) / mechanism.count_std**2
        found = {EVERYTHING: _sampled(sums + beside, rate), SUMS: float(own.sum())}
        if seen.counts is not None:
            found[COUNTS] = float(seen.counts[-1])
        if seen.within is not None:
            found[WITHIN] = -seen.within
        return found


def _sampled(exponent: float, rate: float) -> float:
    if rate >= 1:
        return exponent
    return float(np.logaddexp(np.log1p(-rate), np.log(rate) + exponent))


def asked_at_site(audited: Audited) -> AskedCohort | None:
    """What a trusted server asks of a site, as its contract says."""
    work = audited.trusted
    if work is None:
        return None
    rows = 1 if work.choice is Choice.GIVEN else 2
    training: LocalTraining = work.training
    models = np.repeat(audited.initial[None], rows, axis=0)
    parts = work.parts(audited.learner.layout.size)
    return AskedCohort(CohortJob(("site",), models, training, work.choice, parts=parts))
