"""The publications' arithmetic, and that it is only ever shown beside what holds."""

import math

import pytest
from privacy_oracles import noise_of, record_plan

from coterie.privacy import (
    Adjacency,
    Budget,
    BudgetError,
    CohortSums,
    FixedSample,
    Mode,
    NoiseRule,
    PlannedRelease,
    PoissonSample,
    PrivacyPlan,
    ThreatModel,
    Unit,
    UnitPlan,
    calibrate,
    guarantee,
    paper,
)
from coterie.privacy.errors import PrivacyInputError

ADD_REMOVE = Adjacency.ADD_REMOVE
MODELS = ThreatModel("whoever sees the models", "all models", trusted="the server")


def client_plan(mechanism, rounds=100):
    unit = UnitPlan("the population", (PlannedRelease("sums", mechanism, rounds),))
    return PrivacyPlan(Unit.CLIENT, ADD_REMOVE, MODELS, (unit,))


@pytest.mark.parametrize(
    ("epsilon", "noise"), [(2, 4.2467), (3, 2.9081), (5, 1.8509), (10, 1.0889), (15, 0.8565)]
)
def test_split_budget_needs_the_published_noise(epsilon, noise):
    plan = record_plan(selection_epsilon=0.03 * epsilon)
    found = noise_of(calibrate(plan, Budget(epsilon, 1e-4), mode=Mode.PAPER))
    assert found == pytest.approx(noise, rel=1e-4)


def test_split_charges_one_selection_fewer_and_converts_the_classic_way():
    # rho + 2 sqrt(rho log 1/delta) is the classic conversion of rho-zCDP at its best order.
    plan = record_plan(noise=1e6, first=1e6)
    rho = 20 * 0.15**2 / 8
    split = paper.epsilon(plan.units[0], 1e-4)
    training_floor = -math.log(1e-4) / 62
    classic = rho + 2 * math.sqrt(rho * math.log(1e4))
    assert split == pytest.approx(classic + training_floor, rel=2e-3)


def test_joint_accounting_needs_less_noise_than_the_split():
    for epsilon in (2, 15):
        plan = record_plan(selection_epsilon=0.03 * epsilon)
        budget = Budget(epsilon, 1e-4)
        assert noise_of(calibrate(plan, budget)) < noise_of(calibrate(plan, budget, mode=Mode.PAPER))


def test_published_noise_breaks_the_published_claim_under_its_own_adjacency():
    plan = calibrate(record_plan(selections=0), Budget(5.0, 1e-4), mode=Mode.PAPER)
    promise = guarantee(plan, delta=1e-4, mode=Mode.PAPER)
    assert promise.published_epsilon == pytest.approx(5.0, rel=1e-6)
    assert promise.epsilon < 5.0 < promise.epsilon_replace_one


def wang_reference(rate, sum_noise, identifier_noise, rounds, delta):
    """The printed display, term by term with exact integers."""
    slope = 0.5 / sum_noise**2 + 0.5 / identifier_noise**2
    best = math.inf
    for order in range(2, 25):
        moment = 1 + rate**2 * math.comb(order, 2) * min(
            4 * (math.exp(2 * slope) - 1), 2 * math.exp(2 * slope)
        )
        for j in range(3, order + 1):
            moment += rate**j * math.comb(order, j) * math.exp((j - 1) * j * slope) * 2
        best = min(best, rounds * math.log(moment) / (order - 1) + math.log(1 / delta) / (order - 1))
    return best


def test_theorem_1_equals_its_display():
    for noises in ((3.64, 3.64), (2.0, 5.0), (8.0, 1.5)):
        found = paper.rebalance_epsilon(0.1, *noises, 100, 1e-3)
        assert found == pytest.approx(wang_reference(0.1, *noises, 100, 1e-3), rel=1e-9)


@pytest.mark.parametrize(("rounds", "floor"), [(100, 2.226), (200, 2.767), (73, 1.998), (74, 2.0064)])
def test_theorem_1_has_a_floor_that_no_noise_lowers(rounds, floor):
    assert paper.rebalance_epsilon(0.1, math.inf, math.inf, rounds, 1e-3) == pytest.approx(floor, rel=1e-3)


@pytest.mark.parametrize(
    ("epsilon", "published", "sound", "routed"),
    [(4, 7.2755, 4.1665, 1.2088), (8, 3.8618, 2.9157, 0.8459), (16, 2.2645, 2.1379, 0.6202)],
)
def test_noise_on_a_cluster_sum(epsilon, published, sound, routed):
    budget = Budget(epsilon, 1e-3)
    rebalanced = client_plan(
        CohortSums(1.0, NoiseRule.SHARED, FixedSample(1000, 100), ADD_REMOVE, identifier_ratio=1.0)
    )
    route = client_plan(
        CohortSums(1.0, NoiseRule.SHARED, PoissonSample(0.1), ADD_REMOVE, histogram_ratio=10.0)
    )
    assert noise_of(calibrate(rebalanced, budget, mode=Mode.PAPER), "sums") == pytest.approx(
        published, rel=1e-4
    )
    assert noise_of(calibrate(rebalanced, budget), "sums") == pytest.approx(sound, rel=1e-4)
    assert noise_of(calibrate(route, budget), "sums") == pytest.approx(routed, rel=1e-4)


def test_budget_below_the_floor_is_refused_by_its_number():
    plan = client_plan(
        CohortSums(1.0, NoiseRule.SHARED, FixedSample(1000, 100), ADD_REMOVE, identifier_ratio=1.0)
    )
    with pytest.raises(BudgetError, match=r"published bound.* 2\.23"):
        calibrate(plan, Budget(2.0, 1e-3), mode=Mode.PAPER)


def test_sound_accounting_of_the_published_rule_is_the_sampled_gaussian_of_the_joint_noise():
    sum_noise, identifier_noise = 2.0, 3.0
    mechanism = CohortSums(
        1.0, 2 * sum_noise, FixedSample(1000, 100), ADD_REMOVE, identifier_ratio=identifier_noise / sum_noise
    )
    assert mechanism.identifier_multiplier == pytest.approx(identifier_noise)
    joint = (2 / identifier_noise**2 + 1 / sum_noise**2) ** -0.5
    equal = client_plan(CohortSums(1.0, joint, PoissonSample(0.1), ADD_REMOVE))
    for accountant in ("rdp", "pld"):
        found = guarantee(client_plan(mechanism), delta=1e-3, accountant=accountant).epsilon
        assert found == pytest.approx(guarantee(equal, delta=1e-3, accountant=accountant).epsilon, rel=1e-9)


def test_mechanisms_without_a_publication_are_refused():
    with pytest.raises(PrivacyInputError, match="routed-sums"):
        paper.epsilon(
            client_plan(CohortSums(1.0, 1.0, PoissonSample(0.1), ADD_REMOVE, histogram_ratio=4.0)).units[0],
            1e-3,
        )
