"""What a writer of an algorithm needs: answers from a script, and a check of its plan against its rounds.

    from coterie.testing import ScriptedEngine, check_plan, facts_of, play

    def test_what_is_asked_is_what_is_planned():
        algorithm = Half(HalfSettings(), Schedule(rounds=4), PrivacySettings(delta=1e-3))
        check_plan(algorithm, facts_of(6), fewer={"training"})

No data, no model and no noise are involved, so that a test takes no time and says what it means.
"""

import copy
import dataclasses
import math
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.algorithms import AnyAlgorithm
from coterie.algorithms.protocol import (
    Assignment,
    Choices,
    Cohort,
    CohortJob,
    Count,
    Floats,
    Histogram,
    Models,
    Opened,
    PublicFacts,
    Reply,
    Request,
    Select,
    State,
    Sum,
    Sums,
    Train,
    TrainJob,
    Updates,
    Vector,
)
from coterie.engines.clients import TrainingFacts
from coterie.engines.cohorts import Cohorts
from coterie.engines.computing import Computing, at_hand
from coterie.engines.driver import drive
from coterie.engines.local import input_hash, job_hashes
from coterie.engines.members import OpenCohort
from coterie.errors import InputError, PlanError
from coterie.experiment import checkpoint
from coterie.experiment.checkpoint import Checkpoint
from coterie.groups import Structure
from coterie.privacy import (
    Budget,
    Charge,
    Ledger,
    ModelSelection,
    PrivacyPlan,
    RecordSums,
    Released,
    SecretKey,
    calibrate,
)

SCRIPTED_NOISE = 0.1
"""Standard deviation of the noise that every scripted release claims to have."""
_CONTEXT = "scripted"


def facts_of(
    clients: int,
    parameters: int = 4,
    records: int = 100,
    *,
    structure: Structure | None = None,
    layout: Mapping[str, int] | None = None,
    initialise: Callable[[int], Vector] | None = None,
) -> PublicFacts:
    """Public facts of so many clients with as many records each.

    Args:
        parameters: of the model that nobody trains.
        initialise: its first parameters from a seed; zeros, unless it says otherwise.
    """
    names = tuple(f"client-{index}" for index in range(clients))
    if structure is not None:
        names = structure.names or names
        structure = dataclasses.replace(structure, names=names)
    return PublicFacts(
        clients=names,
        records=dict.fromkeys(names, records),
        parameters=parameters,
        initialise=initialise or (lambda seed: np.zeros(parameters, dtype=np.float32)),
        layout=layout or {},
        structure=structure,
    )


class ScriptedEngine:
    """Answers every request from functions, and remembers what was asked.

    Args:
        update: of a client's training, from its job and the name of the release.
        choice: the model that a client selects.
        missing: clients that never answer.
        sums: of an open cohort, one row for each sum, from its job and the round.
        histogram: of the choices in a cohort, likewise.
        sizes: of the clusters, for releases that make them public.
        noise: standard deviation that every release claims.

    Attributes:
        asked: every request with its round, in order.
    """

    waited = 0.0

    def __init__(
        self,
        update: Callable[[TrainJob, str], Vector] = lambda job, release: np.zeros_like(job.start),
        choice: Callable[[str, Models], int] = lambda client, models: 0,
        missing: Collection[str] = frozenset(),
        *,
        sums: Callable[[CohortJob, int], Floats] = lambda job, round: np.zeros((job.sums, job.length)),
        histogram: Callable[[CohortJob, int], Floats] = lambda job, round: np.zeros(job.sums),
        sizes: tuple[int, ...] | None = None,
        noise: float = SCRIPTED_NOISE,
    ) -> None:
        self.update, self.choice, self.missing = update, choice, missing
        self.sums, self.histogram, self.sizes, self.noise = sums, histogram, sizes, noise
        self.asked: list[tuple[int, Request]] = []
        self._jobs: list[CohortJob] = []

    @property
    def personal(self) -> Mapping[str, Vector]:
        return {}

    def answer(self, request: Request, round: int) -> Reply:
        self.asked.append((round, request))
        match request:
            case Train():
                jobs = [job for job in request.jobs if job.client not in self.missing]
                found = {job.client: self.update(job, request.release) for job in jobs}
                return Updates({client: Released(value, self.noise) for client, value in found.items()})
            case Select():
                clients = [client for client in request.clients if client not in self.missing]
                return Choices({each: Released(self.choice(each, request.models), 0.0) for each in clients})
            case Cohort():
                self._jobs.append(request.job)
                return Opened(request.release, len(self._jobs) - 1)
            case Count():
                counts = self.histogram(self._jobs[request.cohort.number], round)
                return Histogram(Released(counts, self.noise))
            case Sum():
                rows = self.sums(self._jobs[request.cohort.number], round)
                return Sums(Released(rows, self.noise), self.sizes)

    def rounds_of(self, kind: type[Request], release: str) -> list[int]:
        """The rounds in which a release was asked for by this kind of request."""
        return [
            round
            for round, request in self.asked
            if isinstance(request, kind) and getattr(request, "release", None) == release
        ]


def play(
    algorithm: AnyAlgorithm,
    facts: PublicFacts,
    engine: ScriptedEngine,
    rounds: int | None = None,
    seed: int = 0,
) -> list[Any]:
    """The states of a run against scripted answers: the first one, then one after each round.

    Args:
        rounds: how many; all of the schedule, unless it says otherwise.
    """
    states = [algorithm.start(facts, np.random.default_rng(seed))]
    for _ in range(algorithm.schedule.rounds if rounds is None else rounds):
        states.append(drive(algorithm.round(states[-1]), engine, states[-1].round + 1))
    return states


# --- does a plan charge what its rounds ask for? --------------------------------------------------------


@dataclass(frozen=True)
class PlanUse:
    """How often each release may run and was asked for, by the subject that is charged and the name."""

    planned: Mapping[str, Mapping[str, int]]
    asked: Mapping[str, Mapping[str, int]]
    state: State


def check_plan(
    algorithm: AnyAlgorithm, facts: PublicFacts, *, fewer: Collection[str] = (), seed: int = 0
) -> PlanUse:
    """Play all rounds against an engine that charges, refuses and answers as a real one, from no records.

    Every round is played twice, the second time by a copy of the algorithm as it was before the first round
    and from a state that was stored and loaded: an algorithm that remembers anything beside its state, or
    draws from anywhere but `state.rng()`, is found out, as its runs would not resume.

    Args:
        fewer: releases that may be asked for less often than they are planned.
        seed: of the start, and of the made-up answers.

    Raises:
        PlanError: a round asks for what the plan does not declare, or a release that is not in `fewer` is
            planned more often than it is asked for.
        BudgetError: a round asks for a release more often than it is planned.
        InputError: a state cannot be stored, or what follows from it is not all that follows.
    """
    known = {*facts.clients}
    draft = algorithm.plan(facts)
    strangers = [unit.subject for unit in draft.units if unit.subject not in {*known, *draft.subjects_of(())}]
    if strangers:
        raise PlanError(f"plan: it is about {strangers[0]!r}; allowed: clients, or the population")
    # Without a promise noise is nought; what it is changes nothing of what is asked for.
    budget = Budget(math.inf, 1e-5)
    plan = calibrate(draft, budget, accountant="rdp")
    before = copy.deepcopy(algorithm)
    with tempfile.TemporaryDirectory(prefix="coterie-") as scratch:
        path = Path(scratch) / "ledger.jsonl"
        with Ledger.open(path, plan, budget=budget, accountant="rdp") as ledger:
            state = algorithm.start(facts, np.random.default_rng(seed))
            again = copy.deepcopy(before).start(facts, np.random.default_rng(seed))
            _check_same(state, again, "start, called twice with the same seed,")
            while True:
                loaded = _stored(Path(scratch) / f"round-{state.round}", state, algorithm.state_type, ledger)
                _check_same(state, loaded, "storing and loading it")
                round = state.round + 1
                if round > algorithm.schedule.rounds:
                    break
                engines = [_ChargingEngine(plan, ledger, facts, seed) for _ in range(2)]
                following = drive(algorithm.round(state), engines[0], round)
                repeated = drive(copy.deepcopy(before).round(loaded), engines[1], round)
                if following.round != round:
                    raise InputError(f"round {round} returned a state of round {following.round}")
                _check_same(following, repeated, f"round {round}, resumed from its stored state,")
                state = following
            _check_models(algorithm, facts, state)
            use = PlanUse(
                {unit.subject: {each.name: each.times for each in unit.releases} for unit in plan.units},
                {unit.subject: ledger.executed(unit.subject) for unit in plan.units},
                state,
            )
    for subject, planned in use.planned.items():
        for name, times in planned.items():
            asked = use.asked[subject].get(name, 0)
            if asked < times and name not in fewer:
                raise PlanError(
                    f"plan of {subject}: release {name!r} is planned {times} times and was asked for {asked}"
                )
    return use


class _ChargingEngine:
    """Charges a ledger and refuses as an engine does; what it answers is made up from what it was asked."""

    waited = 0.0

    def __init__(self, plan: PrivacyPlan, ledger: Ledger, facts: PublicFacts, seed: int) -> None:
        self._plan, self._ledger, self._size, self._seed = plan, ledger, facts.parameters, seed
        key = SecretKey.from_seed(seed)
        records = tuple(facts.records[client] for client in facts.clients)
        training = TrainingFacts(facts.clients, records, 1.0, key, key, seed)
        self._cohorts = Cohorts(
            training, _MadeUpMembers(facts.parameters, seed), self._size, plan, ledger, _CONTEXT
        )

    @property
    def personal(self) -> Mapping[str, Vector]:
        return {}

    def answer(self, request: Request, round: int) -> Reply:
        match request:
            case Train():
                return self._train(request, round)
            case Select():
                return self._select(request, round)
            case Cohort():
                return self._cohorts.open(request, round)
            case Count():
                return self._cohorts.count(request)
            case Sum():
                return self._cohorts.add_up(request)

    def _train(self, request: Train, round: int) -> Updates:
        name = request.release
        planned = {job.client: self._plan.planned(RecordSums, name, job.client) for job in request.jobs}
        if len(planned) != len(request.jobs):
            raise PlanError(f"release '{name}' was asked of one client twice in one request")
        for job in request.jobs:
            if job.start.shape != (self._size,):
                raise PlanError(
                    f"release '{name}': a model of shape {job.start.shape} for {self._size} parameters"
                )
        hashes = job_hashes(_CONTEXT, request.jobs)
        self._ledger.charge([Charge(client, round, name, hashed) for client, hashed in hashes.items()])
        return Updates(
            {
                client: Released(
                    _made_up(self._seed, client, hashed, planned[client].length(self._size)).astype(
                        np.float32
                    ),
                    SCRIPTED_NOISE,
                )
                for client, hashed in hashes.items()
            }
        )

    def _select(self, request: Select, round: int) -> Choices:
        name, hashed = request.release, input_hash(_CONTEXT, request.models)
        for client in request.clients:
            self._plan.planned(ModelSelection, name, client)  # type: ignore[type-abstract]
        self._ledger.charge([Charge(client, round, name, hashed) for client in request.clients])
        drawn = {
            client: _made_up(self._seed, client, hashed, len(request.models)) for client in request.clients
        }
        return Choices({client: Released(int(scores.argmax()), 0.0) for client, scores in drawn.items()})


@dataclass(frozen=True)
class _MadeUpMembers:
    """Members of cohorts whose choices and updates follow from nothing but what they were sent."""

    parameters: int
    seed: int

    def choose(self, cohort: OpenCohort) -> Computing[NDArray[np.int64]]:
        scores = (
            _made_up(self.seed, member, cohort.input_hash, cohort.job.sums) for member in cohort.sampled
        )
        return at_hand(np.array([own.argmax() for own in scores], dtype=np.int64))

    def learn(self, cohort: OpenCohort, waiting: Sequence[OpenCohort]) -> Computing[torch.Tensor]:
        length = cohort.mechanism.length(self.parameters)
        rows = [_made_up(self.seed, each, cohort.input_hash, length) for each in cohort.sampled]
        return at_hand(torch.tensor(np.array(rows).reshape(-1, length), dtype=torch.float32))


def _made_up(seed: int, who: str, hashed: str, length: int) -> Floats:
    """Numbers that look like a release: they depend on who is asked, and on what."""
    # By position in the alphabet of names: clients form two kinds, so that there is something to find.
    own = [seed, int(hashed[:12], 16), *who.encode()]
    rng = np.random.default_rng(own)
    return rng.normal(1.0 if who.encode()[-1] % 2 else -1.0, 0.1, length)


def _stored(folder: Path, state: State, kind: type[State], ledger: Ledger) -> State:
    """The state as a run that resumes would have it."""
    heads = dict.fromkeys(("ledger", "metrics", "seal"), ledger.head)
    checkpoint.save(folder, Checkpoint(state, heads))
    loaded = checkpoint.load(folder, kind)
    assert loaded is not None
    return loaded.state


def _check_same(one: State, other: State, what: str) -> None:
    for field in dataclasses.fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name, None)
        if isinstance(mine, np.ndarray):
            same = (
                isinstance(theirs, np.ndarray)
                and mine.dtype == theirs.dtype
                and np.array_equal(mine, theirs, equal_nan=mine.dtype.kind in "fc")
            )
        else:
            same = type(mine) is type(theirs) and mine == theirs
        if not same:
            raise InputError(f"{type(one).__name__}.{field.name}: {what} gives another value")


def _check_models(algorithm: AnyAlgorithm, facts: PublicFacts, state: State) -> None:
    """Everybody has a model of the right size, or chooses among such."""
    served = algorithm.models(state)
    if served.models.ndim != 2 or served.models.shape[1] != facts.parameters:
        raise InputError(
            f"models: of shape {served.models.shape}; allowed: rows of {facts.parameters} parameters"
        )
    if isinstance(served, Assignment) and set(served.cluster_of) != set(facts.clients):
        raise InputError("models: not every client has one, or somebody has who is not a client")
