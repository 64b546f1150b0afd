"""`coterie.testing`: our algorithms ask for exactly what they plan, and what does not is found out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from coterie.algorithms import AnyAlgorithm, algorithm_names, find_algorithm
from coterie.algorithms.protocol import (
    Assignment,
    Cohort,
    Count,
    PublicFacts,
    Rng,
    Rounds,
    Select,
    Sum,
    Train,
    TrainJob,
    select,
    train,
)
from coterie.algorithms.record.global_model import Global, GlobalState
from coterie.algorithms.settings import AlgorithmSettings, PrivacySettings, Schedule
from coterie.algorithms.smoothing import smoothed
from coterie.errors import BudgetError, InputError, PlanError
from coterie.groups import ring
from coterie.plugins import ALGORITHM
from coterie.privacy import Unit
from coterie.testing import ScriptedEngine, check_plan, facts_of, play
from own_package import EXAMPLE, forget, put_on_path

ALL = [(unit, name) for unit in (Unit.RECORD, Unit.CLIENT, Unit.WORKER) for name in algorithm_names(unit)]
SCHEDULE = Schedule(rounds=6, batch=10)
FACTS = facts_of(8, 6, 60, layout={"a.weight": 4, "b.bias": 2})
GROUPED = facts_of(8, 6, 60, structure=ring(8, 4))


def build(unit: Unit, name: str) -> AnyAlgorithm:
    kind = find_algorithm(unit, name)
    given = {"clusters": 2, "period": 3, "sketch_dimensions": 5}
    options = {key: given[key] for key in given if key in kind.settings_type.model_fields}
    told = {"truth": {client: place % 2 for place, client in enumerate(FACTS.clients)}}
    mode = "paper" if name == "rc-dpfl" else "sound"
    privacy = PrivacySettings.model_validate({"unit": unit, "mode": mode, "delta": 1e-3})
    settings = kind.settings_type.model_validate({"name": name, **options})
    return kind(settings, SCHEDULE, privacy, **(told if kind.needs_truth else {}))


@pytest.mark.parametrize(("unit", "name"), ALL, ids=lambda part: str(part))
def test_every_algorithm_asks_for_exactly_what_it_plans(unit: Unit, name: str) -> None:
    use = check_plan(build(unit, name), GROUPED if unit is Unit.WORKER else FACTS)
    assert use.asked == use.planned
    assert use.state.round == SCHEDULE.rounds


def test_means_over_rounds_ask_for_nothing_more() -> None:
    plain = build(Unit.RECORD, "r-dpcfl")
    plain.schedule = SCHEDULE.model_copy(update={"averaging": 8.0})
    averaged = check_plan(smoothed(plain), FACTS)
    assert averaged.asked == check_plan(build(Unit.RECORD, "r-dpcfl"), FACTS).asked


def test_the_example_asks_half_of_the_clients_and_its_plan_charges_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_on_path(monkeypatch, EXAMPLE)
    half = ALGORITHM.find("own_algorithm.algorithm:Half")
    forget()
    algorithm = half(half.settings_type(name="half"), SCHEDULE, PrivacySettings(delta=1e-3))
    use = check_plan(algorithm, FACTS, fewer={"training"})
    assert sum(asked["training"] for asked in use.asked.values()) == 6 * 4
    with pytest.raises(PlanError, match=r"release 'training' is planned 6 times and was asked for \d"):
        check_plan(algorithm, FACTS)


# --- what is found out -----------------------------------------------------------------------------------


class Honest(Global):
    """A base for what is wrong in one way each."""

    def jobs(self, state: GlobalState) -> list[TrainJob]:
        return list(super().jobs(state))


class Undeclared(Honest):
    def round(self, state: GlobalState) -> Rounds[GlobalState]:
        yield from select("selection", state.clients, state.model[None])
        return (yield from super().round(state))


class TooOften(Honest):
    def round(self, state: GlobalState) -> Rounds[GlobalState]:
        yield from train("training", [TrainJob(state.clients[0], state.model + 1)])
        return (yield from super().round(state))


class OtherKind(Honest):
    def round(self, state: GlobalState) -> Rounds[GlobalState]:
        yield from select("training", state.clients, state.model[None])
        return (yield from super().round(state))


class Remembers(Honest):
    before: Any = None

    def jobs(self, state: GlobalState) -> list[TrainJob]:
        jobs = super().jobs(state)
        if self.before is not None:
            jobs = [replace(job, start=self.before) for job in jobs]
        self.before = state.model
        return jobs


class Draws(Honest):
    def moved(self, state: GlobalState, models: Any) -> GlobalState:
        return super().moved(state, models + np.float32(np.random.default_rng().normal()))


@dataclass(frozen=True)
class Callable_(GlobalState):
    function: Any = None


class Unstorable(Honest):
    def start(self, facts: PublicFacts, rng: Rng) -> Callable_:
        return Callable_(**vars(super().start(facts, rng)), function=len)


class ListHolder(Honest):
    def start(self, facts: PublicFacts, rng: Rng) -> Callable_:
        return Callable_(**vars(super().start(facts, rng)), function=[1, 2])


class Forgetful(Honest):
    def models(self, state: GlobalState) -> Assignment:
        return Assignment(state.model[None], {client: 0 for client in state.clients if state.round < 6})


class Stuck(Honest):
    def moved(self, state: GlobalState, models: Any) -> GlobalState:
        return replace(state, model=models[0])


FOUND = {
    Undeclared: (PlanError, r"release 'selection' is not declared, declared are: training"),
    TooOften: (BudgetError, r"release 'training' in round 4 would be number 7, the plan allows 6"),
    OtherKind: (PlanError, r"release 'training' is planned as poisson-steps: not"),
    Remembers: (InputError, r"GlobalState.model: round 2, resumed from its stored state, gives another"),
    Draws: (InputError, r"GlobalState.model: round 1, resumed from its stored state, gives another value"),
    Unstorable: (InputError, r"Callable_: a state that cannot be kept \(Object of type builtin_function"),
    ListHolder: (InputError, r"Callable_.function: storing and loading it gives another value"),
    Forgetful: (InputError, r"models: not every client has one"),
    Stuck: (InputError, r"round 1 returned a state of round 0"),
}


@pytest.mark.parametrize("kind", FOUND, ids=lambda kind: kind.__name__)
def test_what_a_plan_or_a_state_hides_is_found_out(kind: type[Global]) -> None:
    expected, line = FOUND[kind]
    algorithm = kind(AlgorithmSettings(name="mine"), SCHEDULE, PrivacySettings(delta=1e-3))
    with pytest.raises(expected, match=line):
        check_plan(algorithm, FACTS)


def test_the_base_of_what_is_wrong_is_right() -> None:
    check_plan(Honest(AlgorithmSettings(name="mine"), SCHEDULE, PrivacySettings(delta=1e-3)), FACTS)


def test_a_plan_about_strangers_is_refused() -> None:
    algorithm = build(Unit.RECORD, "global")
    plan = algorithm.plan(facts_of(9, 6, 60))
    algorithm.plan = lambda facts: plan  # type: ignore[method-assign]
    with pytest.raises(PlanError, match=r"plan: it is about 'client-8'; allowed: clients, or the population"):
        check_plan(algorithm, FACTS)


# --- scripted answers ------------------------------------------------------------------------------------


def test_scripted_answers_reach_the_rounds_and_what_was_asked_is_remembered() -> None:
    engine = ScriptedEngine(lambda job, release: np.full(6, 2.0, np.float32), missing={"client-7"})
    states = play(build(Unit.RECORD, "global"), FACTS, engine)
    assert [state.model[0] for state in states] == [2.0 * round for round in range(7)]
    assert engine.rounds_of(Train, "training") == list(range(1, 7))
    assert engine.rounds_of(Select, "training") == []


def test_scripted_cohorts_answer_with_what_their_job_says() -> None:
    engine = ScriptedEngine(
        sums=lambda job, round: np.full((job.sums, 6), round),
        histogram=lambda job, round: np.arange(job.sums),
    )
    play(build(Unit.CLIENT, "dp-ifca"), FACTS, engine, rounds=2)
    kinds = [type(request) for _, request in engine.asked]
    assert kinds in ([Cohort, Count, Sum] * 2, [Cohort, Sum] * 2)
    opening = engine.asked[0][1]
    assert isinstance(opening, Cohort)
    assert opening.job.sums == 2
