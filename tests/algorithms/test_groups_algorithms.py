"""dp-ogl, dp-ogl-plus and dp-fedavg for workers, against scripted answers: no data, no noise."""

import math
from dataclasses import replace

import numpy as np
import pytest

from coterie import testing
from coterie.algorithms import find_algorithm
from coterie.algorithms.protocol import Cohort, CohortJob, Opened, PublicFacts, Sum
from coterie.algorithms.settings import PrivacySettings, Schedule
from coterie.engines.driver import drive
from coterie.errors import InputError
from coterie.groups import GroupAlgorithm, Structure, Threat, label, ring
from coterie.privacy import Adjacency, CohortSums, Mode, NoiseRule, PoissonSample, Unit
from coterie.privacy.plans import group_release

PARAMETERS = 3
PRIVACY = PrivacySettings(unit=Unit.WORKER, epsilon=float("inf"), delta=1e-5, clip=0.5)


def facts_of(structure):
    names = tuple(f"worker-{number}" for number in range(structure.workers))
    return testing.facts_of(
        structure.workers,
        PARAMETERS,
        20,
        structure=replace(structure, names=names),
        initialise=lambda seed: np.random.default_rng(seed).normal(size=PARAMETERS).astype(np.float32),
    )


def build(name, rounds=12, privacy=PRIVACY, epochs=1, **settings):
    algorithm = find_algorithm(Unit.WORKER, name)
    return algorithm(
        algorithm.settings_type(name=name, **settings),
        Schedule(rounds=rounds, epochs=epochs, batch=5, lr=0.1),
        privacy,
    )


class ScriptedMasters(testing.ScriptedEngine):
    """Every member takes part; its update is its number times a pull from where it starts."""

    def __init__(self):
        super().__init__(sums=lambda job, round: self.total(job)[None])

    @property
    def opened(self):
        return [(round, request) for round, request in self.asked if isinstance(request, Cohort)]

    @staticmethod
    def total(job: CohortJob):
        return sum(update(member, start_of(job, member)) for member in job.members)


def start_of(job, member):
    return job.models[0 if job.start_of is None else job.start_of[member]]


def update(member, start):
    return 0.1 * (int(member.split("-")[1]) - start.astype(np.float64))


def run(algorithm, facts, rounds):
    engine = ScriptedMasters()
    return engine, testing.play(algorithm, facts, engine, rounds)


STRUCTURE = Structure("mine", ((0, 1), (1, 2, 3), (3, 4)), 5)


def test_a_worker_starts_from_the_mean_of_its_groups_in_epochs_that_merge_and_else_from_the_group():
    facts = facts_of(STRUCTURE)
    engine, states = run(build("dp-ogl", period=3, rate=0.5, noise=1.0), facts, 7)
    assert [round for round, _ in engine.opened] == [epoch for epoch in range(1, 8) for _ in range(3)]
    for round, request in engine.opened:
        before, group = states[round - 1], int(request.release.split()[1])
        for member in request.job.members:
            mine = [g for g, who in enumerate(STRUCTURE.groups) if int(member[-1]) in who]
            merged = before.models[mine].mean(axis=0, dtype=np.float64).astype(np.float32)
            expected = merged if round in (1, 4, 7) else before.models[group]
            assert np.array_equal(start_of(request.job, member), expected)


def test_a_member_is_told_models_of_groups_that_its_fellows_are_in_only():
    algorithm = build("dp-ogl", period=1, rate=0.5, noise=1.0)
    engine, states = run(algorithm, facts_of(STRUCTURE), 3)
    for round, request in engine.opened:
        own = algorithm.models(states[round - 1])
        allowed = {own.model_of(member).tobytes() for member in request.job.members}
        assert {row.tobytes() for row in request.job.models} == allowed


def test_all_groups_start_from_one_public_model():
    facts = facts_of(STRUCTURE)
    state = build("dp-ogl", rate=0.5, noise=1.0).start(facts, np.random.default_rng(0))
    assert np.array_equal(state.models, np.repeat(facts.initialise(state.seed)[None], 3, axis=0))


def test_sums_are_divided_by_the_public_number_of_participants_to_be_expected():
    facts = facts_of(STRUCTURE)
    engine, states = run(build("dp-ogl", period=2, rate=[0.5, 0.25, 1.0], noise=1.0), facts, 3)
    for round, request in engine.opened:
        group, before = int(request.release.split()[1]), states[round - 1]
        mean = ScriptedMasters.total(request.job) / ((0.5, 0.25, 1.0)[group] * len(STRUCTURE.groups[group]))
        assert states[round].models[group] == pytest.approx(before.models[group] + mean, rel=1e-6)


def test_every_cohort_is_open_before_the_first_is_added_up():
    """An engine can then train the workers of all groups as one program."""
    algorithm, facts = build("dp-ogl", rate=0.5, noise=1.0), facts_of(STRUCTURE)
    state = algorithm.start(facts, np.random.default_rng(0))
    asking = algorithm.round(state)
    requests = [next(asking)]
    for number in range(3):
        requests.append(asking.send(Opened(group_release(number), number)))
    assert [type(request) for request in requests] == [Cohort, Cohort, Cohort, Sum]


def test_the_plan_has_one_release_for_each_group_of_a_worker():
    algorithm = build("dp-ogl", rounds=9, rate=[0.5, 0.25, 1.0], noise=[1.0, 2.0, 3.0], clip=[0.1, 0.2, 0.3])
    plan = algorithm.plan(facts_of(STRUCTURE))
    assert plan.unit is Unit.WORKER
    names = {unit.subject: [release.name for release in unit.releases] for unit in plan.units}
    assert names["worker-0"] == ["group 0"]
    assert names["worker-1"] == ["group 0", "group 1"]
    assert names["worker-3"] == ["group 1", "group 2"]
    release = plan.for_subject("worker-3").release("group 1")
    assert release.mechanism == CohortSums(0.2, 2.0, PoissonSample(0.25), Adjacency.ZERO_OUT)
    assert release.times == 9


def test_plus_releases_once_a_block_with_a_wider_clip_and_longer_training():
    algorithm = build("dp-ogl-plus", rounds=10, period=4, rate=0.5, noise=1.0, iterations=3)
    facts = facts_of(STRUCTURE)
    release = algorithm.plan(facts).for_subject("worker-0").release("group 0")
    assert release.times == 2
    assert release.mechanism.clip == pytest.approx(math.sqrt(4) * 0.5)
    engine, states = run(algorithm, facts, 10)
    assert sorted({round for round, _ in engine.opened}) == [4, 8]
    assert all(request.job.training.iterations == 12 for _, request in engine.opened)
    for epoch in (1, 2, 3, 5, 6, 7, 9, 10):
        assert np.array_equal(states[epoch].models, states[epoch - 1].models)
    for epoch in (4, 8):
        assert not np.array_equal(states[epoch].models, states[epoch - 1].models)
    for round, request in engine.opened:
        own = algorithm.models(states[round - 1])
        assert all(np.array_equal(start_of(request.job, m), own.model_of(m)) for m in request.job.members)


def test_plus_with_passes_trains_so_many_more_of_them():
    algorithm = build("dp-ogl-plus", rounds=4, period=2, rate=0.5, noise=1.0, epochs=3)
    engine, _ = run(algorithm, facts_of(STRUCTURE), 4)
    assert {request.job.training.epochs for _, request in engine.opened} == {6}


def test_plus_with_period_1_is_dp_ogl_with_period_1():
    facts = facts_of(ring(8, 4))
    both = [
        run(build(name, period=1, rate=0.5, noise=1.0), facts, 5)[1][-1].models
        for name in ("dp-ogl", "dp-ogl-plus")
    ]
    assert np.array_equal(*both)


def test_dp_fedavg_puts_everybody_in_one_group():
    algorithm = build("dp-fedavg", rate=0.5, noise=1.0)
    engine, states = run(algorithm, facts_of(STRUCTURE), 2)
    assert {len(request.job.members) for _, request in engine.opened} == {5}
    assert states[-1].models.shape == (1, PARAMETERS)
    assert len(algorithm.models(states[-1]).models) == 1


def test_personal_models_are_means_and_workers_in_the_same_groups_share_one():
    _, states = run(build("dp-ogl", rate=0.5, noise=1.0), facts_of(STRUCTURE), 2)
    own = build("dp-ogl", rate=0.5, noise=1.0).models(states[-1])
    assert len(own.models) == 5
    assert own.model_of("worker-1") == pytest.approx(states[-1].models[:2].mean(axis=0), rel=1e-6)
    assert np.array_equal(own.model_of("worker-0"), states[-1].models[0])


@pytest.mark.parametrize("optimiser", ["momentum", "adam"])
def test_a_masters_optimiser_uses_its_own_groups_releases_only(optimiser):
    """With disjoint groups, what happens in one leaves the other's model as it was, to the last bit."""
    apart = Structure("apart", ((0, 1), (2, 3)), 4)
    master = {"optimiser": optimiser, "lr": 0.1}

    class Louder(ScriptedMasters):
        @staticmethod
        def total(job):
            return ScriptedMasters.total(job) * (10.0 if "worker-0" in job.members else 1.0)

    finals = []
    for engine in (ScriptedMasters(), Louder()):
        algorithm = build("dp-ogl", rate=0.5, noise=1.0, period=2, master=master)
        state = algorithm.start(facts_of(apart), np.random.default_rng(0))
        for _ in range(6):
            state = drive(algorithm.round(state), engine, state.round + 1)
        finals.append(state.models)
    assert np.array_equal(finals[0][1], finals[1][1])
    assert not np.array_equal(finals[0][0], finals[1][0])


def test_momentum_and_adam_step_as_their_definitions_say():
    means = np.array([[1.0, -2.0, 0.5]])
    momentum = build("dp-ogl", master={"optimiser": "momentum", "lr": 0.5, "momentum": 0.8}).settings.master
    first, second = momentum.moments(1, 3)
    step, first, second = momentum.step(means, first, second)
    step, first, second = momentum.step(means, first, second)
    assert step == pytest.approx(0.5 * 1.8 * means, rel=1e-6)
    assert second.size == 0
    adam = build("dp-ogl", master={"optimiser": "adam", "lr": 0.1}).settings.master
    step, first, second = adam.step(means, *adam.moments(1, 3))
    assert step == pytest.approx(0.1 * 0.1 * means / (np.sqrt(0.01 * means**2) + 1e-3), rel=1e-6)


def test_what_is_accounted_for_is_read_from_the_plan_that_is_executed():
    facts = facts_of(STRUCTURE)
    algorithm = build("dp-ogl", rounds=9, rate=[0.5, 0.25, 1.0], noise=[1.0, 2.0, 3.0], period=4)
    observer = algorithm.observer(facts, algorithm.plan(facts))
    assert [(n.rate, n.multiplier) for n in observer.schedule.noises] == [(0.5, 1.0), (0.25, 2.0), (1.0, 3.0)]
    assert (observer.schedule.period, observer.epochs, observer.threat) == (4, 9, Threat.ANYONE)
    plus = build("dp-ogl-plus", rounds=9, rate=0.5, noise=1.0, period=4)
    observer = plus.observer(facts, plus.plan(facts))
    assert observer.schedule.algorithm is GroupAlgorithm.DP_OGL_PLUS
    assert observer.threat is Threat.OUTSIDERS


def test_noise_that_nobody_gave_is_left_to_be_found():
    plan = build("dp-ogl", rate=0.5).plan(facts_of(STRUCTURE))
    assert {r.mechanism.rule for unit in plan.units for r in unit.releases} == {NoiseRule.SHARED}


@pytest.mark.parametrize(
    ("name", "options", "privacy", "words"),
    [
        ("dp-ogl", {"rate": [0.5, 0.5]}, {}, "algorithm.rate: 2 numbers; allowed: 1, or 3"),
        ("dp-ogl-plus", {"period": 50}, {}, "algorithm.period: 50 is longer"),
        ("dp-ogl", {}, {"adjacency": Adjacency.ADD_REMOVE}, "privacy.adjacency: add-remove"),
        ("dp-ogl", {}, {"accountant": "pld"}, "privacy.accountant: 'pld'"),
        ("dp-ogl", {}, {"budgets": {"nobody": {"epsilon": 1.0}}}, "no client is called 'nobody'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(name, options, privacy, words):
    with pytest.raises(InputError, match=words):
        build(name, privacy=PrivacySettings(**{**PRIVACY.model_dump(), **privacy}), **options).plan(
            facts_of(STRUCTURE)
        )


def test_a_federation_without_groups_is_refused_by_all_but_dp_fedavg():
    facts = facts_of(STRUCTURE)
    without = PublicFacts(facts.clients, facts.records, facts.parameters, facts.initialise)
    with pytest.raises(InputError, match=r"federation.kind: 'dp-ogl' needs workers in groups"):
        build("dp-ogl").plan(without)
    assert len(build("dp-fedavg").plan(without).units) == 5


def test_labels_that_formed_the_groups_are_a_caveat_of_the_plan():
    plan = build("dp-ogl").plan(
        PublicFacts(
            ("a", "b"),
            {"a": 1, "b": 1},
            PARAMETERS,
            lambda seed: np.zeros(PARAMETERS, np.float32),
            structure=label([[0], [0, 1]], 2),
        )
    )
    assert any("formed from labels" in caveat for caveat in plan.caveats)


def test_paper_mode_says_what_the_publication_counts():
    facts = facts_of(ring(8, 4))
    algorithm = build(
        "dp-ogl", rate=0.5, noise=1.0, period=5, privacy=PRIVACY.model_copy(update={"mode": Mode.PAPER})
    )
    observer = algorithm.observer(facts, algorithm.plan(facts))
    promise, found = observer.guarantee(delta=1e-5), observer.leakage(delta=1e-5)
    assert promise.published_epsilon == np.nanmax(found.published_epsilon) < np.nanmax(found.epsilon_counts)
    assert promise.line.startswith("paper: published eps=")
    assert "As published: counts blocks that have ended" in promise.text
