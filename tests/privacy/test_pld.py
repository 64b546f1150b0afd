"""Loss distributions against closed forms, against other constructions, and against enumerated mechanisms."""

import itertools
import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from scipy.special import ndtr

from coterie.privacy import (
    Adjacency,
    FullBatchSteps,
    PlannedRelease,
    PrivacyInputError,
    PrivacyPlan,
    ThreatModel,
    Unit,
    UnitPlan,
    delta_of,
    epsilon_of,
    guarantee,
    pld,
)
from coterie.privacy.events import SelectionDpEvent, gaussian, poisson_gaussian, repeated, selection

ZERO_OUT, REPLACE_ONE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE


def hockey_stick(upper, lower, epsilon):
    return float(np.maximum(upper - math.exp(epsilon) * lower, 0.0).sum())


def normal(points, mean):
    return np.exp(-((points - mean) ** 2) / 2) / math.sqrt(2 * math.pi)


def mixture_masses(rate, shift, noise, points):
    """(1-q) N(0) + q N(shift) on a fine grid, in units of the noise."""
    step = points[1] - points[0]
    return ((1 - rate) * normal(points, 0.0) + rate * normal(points, shift / noise)) * step


def test_one_gaussian_has_the_exact_delta():
    for noise in (0.8, 2.0):
        for epsilon in (0.0, 0.5, 2.0):
            exact = ndtr(0.5 / noise - epsilon * noise) - math.exp(epsilon) * ndtr(
                -0.5 / noise - epsilon * noise
            )
            found = delta_of(gaussian(noise), epsilon, "pld", ZERO_OUT)
            assert exact - 1e-13 <= found <= exact + 1e-7


@pytest.mark.parametrize(("rate", "noise"), [(0.1, 1.0), (0.7, 2.0), (0.004, 0.6)])
def test_one_sampled_release_has_the_integrated_delta(rate, noise):
    points = np.linspace(-14, 14 + 2 / noise, 400_001)
    mixture, plain = mixture_masses(rate, 1, noise, points), mixture_masses(0.0, 1, noise, points)
    opposite = mixture_masses(rate, -1, noise, points)
    event = poisson_gaussian(rate, noise)
    for epsilon in (0.0, 0.1, 1.0):
        both = max(hockey_stick(mixture, plain, epsilon), hockey_stick(plain, mixture, epsilon))
        assert delta_of(event, epsilon, "pld", ZERO_OUT) == pytest.approx(both, abs=1e-7)
        replaced = hockey_stick(mixture, opposite, epsilon)
        assert delta_of(event, epsilon, "pld", REPLACE_ONE) == pytest.approx(replaced, abs=1e-7)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(ZERO_OUT, NeighboringRelation.ADD_OR_REMOVE_ONE), (REPLACE_ONE, NeighboringRelation.REPLACE_ONE)],
)
def test_compositions_agree_with_dp_accounting(ours, theirs):
    event = dp.ComposedDpEvent([gaussian(3.0), repeated(poisson_gaussian(0.05, 1.2), 200)])
    accountant = dp.pld.PLDAccountant(theirs)
    accountant.compose(event)
    assert epsilon_of(event, 1e-5, "pld", ours) == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-5)


def test_search_for_epsilon_agrees_with_dp_accounting():
    event = dp.ComposedDpEvent([gaussian(2.0), repeated(poisson_gaussian(0.1, 1.0), 30)])
    for direction in pld.PldAccountant(event, ZERO_OUT)._directions():
        for delta in (0.9, 0.3, 1e-2, 1e-6, 1e-12):
            assert pld._epsilon(direction, delta) == pytest.approx(
                direction.get_epsilon_for_delta(delta), rel=1e-9, abs=1e-12
            )
        assert math.isinf(pld._epsilon(direction, 1e-18))


def test_distributions_keep_both_probabilities():
    for pieces in (
        pld._sampled_pieces(0.004, 1.3),
        pld._sampled_pieces(1.0, 0.7),
        pld._replaced_pieces(0.3, 0.9),
        pld._selection_pieces(0.3333),
        pld._either_way(pld._sampled_pieces(0.2, 1.0)),
    ):
        for side in (pieces, pieces.reversed()):
            one = pld._composed(side, 1)
            losses = (one._lower_loss + np.arange(one.size)) * pld.STEP
            assert one._probs.sum() + one._infinity_mass == pytest.approx(1, abs=1e-12)
            assert (one._probs * np.exp(-losses)).sum() <= 1 + 1e-12


@pytest.fixture
def grid_step(monkeypatch):
    """Sets another grid step, and forgets what was computed on the old one."""

    def forget():
        pld._compose_all.cache_clear()
        pld._repeated.cache_clear()

    def change(step):
        monkeypatch.setattr(pld, "STEP", step)
        forget()

    yield change
    forget()


def test_finer_grid_never_promises_less(grid_step):
    event = repeated(poisson_gaussian(0.004, 1.3), 5000)
    found = {}
    for step in (4e-4, 1e-4):
        grid_step(step)
        found[step] = epsilon_of(event, 1e-5, "pld", ZERO_OUT)
    assert found[1e-4] <= found[4e-4] <= found[1e-4] * 1.01


def test_selection_profile_is_the_best_interval():
    span = 0.8
    for epsilon in (0.0, 0.2, 0.5):
        best = 0.0
        for top in np.linspace(epsilon, span, 20001):
            p = math.expm1(span - top) / (math.exp(span - top) - math.exp(-top))
            best = max(best, p * -math.expm1(epsilon - top))
        found = delta_of(selection(1 / span), epsilon, "pld", ZERO_OUT)
        assert best - 1e-9 <= found <= best + 1e-6


def test_selection_bounds_every_exponential_mechanism_on_counts():
    # Three candidates, all ways in which one record can move the counts, both directions.
    scale = 1.4
    records = [np.array(bits) for bits in itertools.product((0, 1), repeat=3)]
    base = np.array([3, 1, 2])

    def probabilities(counts):
        weights = np.exp(counts / scale)
        return weights / weights.sum()

    for one, other in itertools.product(records, records):
        for epsilon in (0.0, 0.3, 0.6, 1.0):
            p, q = probabilities(base + one), probabilities(base + other)
            bound = delta_of(SelectionDpEvent(scale), epsilon, "pld", REPLACE_ONE)
            assert hockey_stick(p, q, epsilon) <= bound + 1e-12
            if not other.any() or not one.any():
                zero_out = delta_of(SelectionDpEvent(scale), epsilon, "pld", ZERO_OUT)
                assert hockey_stick(p, q, epsilon) <= zero_out + 1e-12


def test_composed_selections_bound_composed_two_point_mechanisms():
    span, times = 0.6, 6
    rng = np.random.default_rng(5)
    event = repeated(selection(1 / span), times)
    for _ in range(20):
        upper, lower = np.ones(1), np.ones(1)
        for top in rng.uniform(0.0, span, times):
            p = math.expm1(span - top) / (math.exp(span - top) - math.exp(-top))
            q = p * math.exp(-top)
            upper = np.concatenate([upper * p, upper * (1 - p)])
            lower = np.concatenate([lower * q, lower * (1 - q)])
        for epsilon in (0.2, 0.8, 1.5):
            assert hockey_stick(upper, lower, epsilon) <= delta_of(event, epsilon, "pld", ZERO_OUT) + 1e-12


def test_replacement_of_any_two_contributions_is_dominated_by_opposite_ones():
    rate, noise = 0.3, 1.0
    grid = np.linspace(-7, 7, 281)
    x, y = np.meshgrid(grid, grid)
    area = (grid[1] - grid[0]) ** 2

    def density(mean):
        return np.exp(-((x - mean[0]) ** 2 + (y - mean[1]) ** 2) / 2) / (2 * math.pi) * area

    rng = np.random.default_rng(1)
    for _ in range(30):
        one, other = rng.normal(size=(2, 2))
        one *= rng.choice([1.0, 0.4]) / np.linalg.norm(one)
        other *= rng.choice([1.0, 0.7]) / np.linalg.norm(other)
        p = (1 - rate) * density((0, 0)) + rate * density(one)
        q = (1 - rate) * density((0, 0)) + rate * density(other)
        for epsilon in (-0.3, 0.0, 0.3, 0.8):
            # At negative epsilon the bound follows from the other direction.
            bound = delta_of(poisson_gaussian(rate, noise), abs(epsilon), "pld", REPLACE_ONE)
            if epsilon < 0:
                bound = -math.expm1(epsilon) + math.exp(epsilon) * bound
            assert hockey_stick(p, q, epsilon) <= bound + 1e-6


@pytest.mark.parametrize(("population", "size"), [(3, 1), (4, 2), (5, 2)])
def test_fixed_size_sampling_is_dominated(population, size):
    # All cohorts of a small population whose members contribute +1 or -1, enumerated.
    noise = 1.1
    points = np.linspace(-12, 12, 40_001)
    event = dp.SampledWithoutReplacementDpEvent(population, size, dp.GaussianDpEvent(noise))

    def released(values):
        cohorts = list(itertools.combinations(values, size))
        total = sum(normal(points, sum(cohort) / noise) for cohort in cohorts)
        return total * (points[1] - points[0]) / len(cohorts)

    bounds = {
        (epsilon, adjacency): delta_of(event, epsilon, "pld", adjacency)
        for epsilon in (0.0, 0.2, 0.7, 1.5)
        for adjacency in Adjacency
    }
    for values in itertools.product((-1.0, 1.0), repeat=population):
        whole = released(values)
        others = {
            Adjacency.ADD_REMOVE: released(values[1:]),
            REPLACE_ONE: released((-values[0], *values[1:])),
            ZERO_OUT: released((0.0, *values[1:])),
        }
        for (epsilon, adjacency), bound in bounds.items():
            other = others[adjacency]
            assert hockey_stick(whole, other, epsilon) <= bound + 1e-8
            assert hockey_stick(other, whole, epsilon) <= bound + 1e-8


def test_no_noise_costs_everything():
    assert math.isinf(epsilon_of(gaussian(0.0), 1e-5, "pld", ZERO_OUT))
    assert delta_of(gaussian(0.0), 1.0, "pld", ZERO_OUT) == 1.0
    assert delta_of(gaussian(1.0), math.inf, "pld", ZERO_OUT) == 0.0


@pytest.mark.parametrize("event", [gaussian(1e-3), selection(1e-4)])
def test_hopeless_grids_are_refused_with_advice(event):
    with pytest.raises(PrivacyInputError, match="use rdp"):
        epsilon_of(event, 1e-5, "pld", ZERO_OUT)


@pytest.mark.parametrize("lowest", [0, 7_000_000, 20_000_000])
@pytest.mark.filterwarnings("error")
def test_epsilons_beyond_the_range_of_exponentials_are_found_exactly(lowest):
    """Losses from 0 to 3 on top of 0, 700 and 2000: exp of the larger ones is no number any more."""
    rng = np.random.default_rng(lowest)
    masses = rng.dirichlet(np.full(30_001, 0.01)) * (1 - 1e-6)
    distribution = pld.pld_pmf.DensePLDPmf(pld.STEP, lowest, masses, 1e-6, True)
    losses = pld.STEP * (lowest + np.arange(len(masses)))

    def exact_delta(epsilon):
        above = losses > epsilon
        return 1e-6 - float(np.sum(masses[above] * np.expm1(epsilon - losses[above])))

    for delta in (1e-5, 1e-2, 0.3):
        found = pld._epsilon(distribution, delta)
        assert exact_delta(found) == pytest.approx(delta, rel=1e-6)
    assert pld._epsilon(distribution, 1e-7) == math.inf


@pytest.mark.filterwarnings("error")
def test_a_run_with_next_to_no_noise_has_an_epsilon_and_not_a_smaller_one():
    event = repeated(poisson_gaussian(0.5, 0.25), 160)
    found = epsilon_of(event, 1e-5, "pld", ZERO_OUT)
    assert 709 < found <= epsilon_of(event, 1e-5, "rdp", ZERO_OUT)
    assert delta_of(event, found, "pld", ZERO_OUT) == pytest.approx(1e-5, rel=1e-6)
    assert delta_of(event, 0.99 * found, "pld", ZERO_OUT) > 1.5e-5


def test_a_replace_one_line_that_the_grid_cannot_prove_is_infinite():
    release = PlannedRelease("sum", FullBatchSteps(1.0, 0.1, 100, 1, ZERO_OUT), 1)
    plan = PrivacyPlan(Unit.RECORD, ZERO_OUT, ThreatModel("server", "sums"), (UnitPlan("a", (release,)),))
    promise = guarantee(plan, delta=1e-5, accountant="pld")
    assert promise.epsilon < 100
    assert math.isinf(promise.epsilon_replace_one)
    assert "replace-one inf" in promise.line
