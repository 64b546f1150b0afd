"""Laws that every correct accountant obeys, on random plans."""

import math

import dp_accounting as dp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from privacy_oracles import noise_of, record_plan

from coterie.privacy import (
    Adjacency,
    Budget,
    CohortSums,
    FixedSample,
    PoissonSample,
    calibrate,
    delta_of,
    epsilon_of,
)
from coterie.privacy.events import gaussian, poisson_gaussian, repeated, selection

ZERO_OUT, REPLACE_ONE, ADD_REMOVE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE, Adjacency.ADD_REMOVE

noises = st.floats(0.5, 6.0)
rates = st.floats(0.002, 0.9)
counts = st.integers(1, 300)
loud, few = st.floats(0.8, 6.0), st.integers(1, 60)
deltas = st.sampled_from([1e-3, 1e-5, 1e-7])
spans = st.floats(0.02, 0.8)
adjacencies = st.sampled_from([ZERO_OUT, REPLACE_ONE])

rdp_law = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
pld_law = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def mixed(rate, noise, steps, span, selections):
    return dp.ComposedDpEvent(
        [
            gaussian(4.0),
            repeated(poisson_gaussian(rate, noise), steps),
            repeated(selection(1 / span), selections),
        ]
    )


def rdp(event, delta=1e-5, adjacency=ZERO_OUT):
    return epsilon_of(event, delta, "rdp", adjacency)


def pld(event, delta=1e-5, adjacency=ZERO_OUT):
    return epsilon_of(event, delta, "pld", adjacency)


@rdp_law
@given(rates, noises, counts, spans, counts, deltas, adjacencies)
def test_epsilon_falls_with_noise_and_delta_and_grows_with_everything_else(
    rate, noise, steps, span, selections, delta, adjacency
):
    base = rdp(mixed(rate, noise, steps, span, selections), delta, adjacency)
    slack = 1 + 1e-9
    assert rdp(mixed(rate, noise * 1.1, steps, span, selections), delta, adjacency) <= base * slack
    assert rdp(mixed(rate, noise, steps, span, selections), delta * 1.5, adjacency) <= base * slack
    assert rdp(mixed(min(1.0, rate * 1.1), noise, steps, span, selections), delta, adjacency) >= base / slack
    assert rdp(mixed(rate, noise, steps + 1, span, selections), delta, adjacency) >= base / slack
    assert rdp(mixed(rate, noise, steps, span * 1.1, selections), delta, adjacency) >= base / slack
    assert rdp(mixed(rate, noise, steps, span, selections + 1), delta, adjacency) >= base / slack


@pld_law
@given(rates, loud, few, spans)
def test_loss_distributions_obey_the_same_laws(rate, noise, steps, span):
    base = pld(mixed(rate, noise, steps, span, 5))
    slack = 1 + 2e-3
    assert pld(mixed(rate, noise * 1.1, steps, span, 5)) <= base * slack
    assert pld(mixed(min(1.0, rate * 1.1), noise, steps, span, 5)) >= base / slack
    assert pld(mixed(rate, noise, steps, span, 6)) >= base / slack


@pld_law
@given(rates, loud, few, spans, adjacencies)
def test_loss_distributions_are_never_looser_than_divergences(rate, noise, steps, span, adjacency):
    event = mixed(rate, noise, steps, span, 3)
    assert pld(event, adjacency=adjacency) <= rdp(event, adjacency=adjacency) * 1.002 + 1e-3


@rdp_law
@given(st.permutations(range(4)), rates, noises)
def test_order_of_releases_does_not_matter(order, rate, noise):
    parts = [gaussian(3.0), poisson_gaussian(rate, noise), selection(2.0), repeated(gaussian(5.0), 3)]
    shuffled = dp.ComposedDpEvent([parts[index] for index in order])
    assert math.isclose(rdp(dp.ComposedDpEvent(parts)), rdp(shuffled), rel_tol=1e-12)


@rdp_law
@given(rates, noises, counts, spans, counts)
def test_joint_accounting_never_costs_more_than_adding_epsilons(rate, noise, steps, span, selections):
    training = repeated(poisson_gaussian(rate, noise), steps)
    choosing = repeated(selection(1 / span), selections)
    joint = rdp(dp.ComposedDpEvent([training, choosing]), 2e-5)
    assert joint <= rdp(training, 1e-5) + rdp(choosing, 1e-5) + 1e-9


@rdp_law
@given(rates, noises, counts, spans)
def test_replacing_costs_more_than_zeroing(rate, noise, steps, span):
    event = mixed(rate, noise, steps, span, 4)
    assert rdp(event) <= rdp(event, adjacency=REPLACE_ONE) * (1 + 1e-9)


@pld_law
@given(rates, loud, few, spans, st.floats(0.1, 2.0))
def test_replacing_costs_at_most_zeroing_twice(rate, noise, steps, span, epsilon):
    event = mixed(rate, noise, steps, span, 4)
    group = (1 + math.exp(epsilon)) * delta_of(event, epsilon, "pld", ZERO_OUT)
    assert delta_of(event, 2 * epsilon, "pld", REPLACE_ONE) <= group * (1 + 1e-6) + 1e-12


@rdp_law
@given(rates, noises, st.floats(0.5, 10.0), counts)
def test_histogram_and_sums_on_one_sample_cost_at_least_each_alone(rate, noise, ratio, rounds):
    routed = repeated(
        CohortSums(1.0, noise, PoissonSample(rate), ADD_REMOVE, histogram_ratio=ratio).event, rounds
    )
    sums = repeated(poisson_gaussian(rate, noise), rounds)
    counted = repeated(poisson_gaussian(rate, noise * ratio), rounds)
    assert rdp(routed) >= max(rdp(sums), rdp(counted)) * (1 - 1e-9)


@rdp_law
@given(noises, st.floats(0.3, 3.0), st.integers(1, 99))
def test_fixed_size_cohorts_cost_no_less_for_replacing_than_for_removing(noise, ratio, cohort):
    event = CohortSums(1.0, noise, FixedSample(100, cohort), ADD_REMOVE, identifier_ratio=ratio).event
    assert rdp(event, adjacency=ADD_REMOVE) <= rdp(event, adjacency=REPLACE_ONE) * (1 + 1e-9)


@settings(max_examples=12, deadline=None)
@given(
    st.floats(0.5, 12.0), deltas, st.integers(50, 5000), st.integers(1, 50), st.integers(0, 10), adjacencies
)
def test_calibration_meets_every_budget_from_the_safe_side(
    epsilon, delta, records, rounds, selections, adjacency
):
    options = {
        "records": records,
        "batch": max(1, records // 20),
        "rounds": rounds + 1,
        "selections": selections,
        "selection_epsilon": 0.02 * epsilon,
        "adjacency": adjacency,
    }
    noise = noise_of(calibrate(record_plan(**options), Budget(epsilon, delta)))
    event = record_plan(noise=noise, first=noise, **options).units[0].event
    less = record_plan(noise=noise * 0.9999, first=noise * 0.9999, **options).units[0].event
    assert epsilon_of(event, delta, "rdp", adjacency) <= epsilon
    assert epsilon_of(less, delta, "rdp", adjacency) > epsilon


def test_routed_cohort_is_bounded_by_one_amplification_of_the_pair():
    # One client against two others, two clusters, exact likelihoods over all samples and routes.
    rate, count_noise, sum_noise, clip = 0.4, 1.5, 1.0, 1.0
    rng = np.random.default_rng(11)
    draws = 40_000
    updates = np.array([1.0, -1.0, 1.0]) * clip
    choices = np.array([0, 1, 0])

    def stay(histogram):
        # A routing rule that reacts strongly to the histogram: probability to keep one's own choice.
        return 1.0 / (1.0 + np.exp(-2.0 * (histogram[:, 0] - histogram[:, 1])))

    def log_likelihood(histogram, sums, members):
        keep = stay(histogram)
        total = np.zeros(len(histogram))
        for sampled in np.ndindex(*(2,) * members):
            weight = math.prod(rate if coin else 1 - rate for coin in sampled)
            present = [index for index in range(members) if sampled[index]]
            counted = np.bincount(choices[present], minlength=2) if present else np.zeros(2)
            first = np.exp(-((histogram - counted) ** 2).sum(axis=1) / (2 * count_noise**2))
            second = np.zeros(len(histogram))
            for moves in np.ndindex(*(2,) * len(present)):
                chance = np.ones(len(histogram))
                mean = np.zeros(2)
                for index, moved in zip(present, moves, strict=True):
                    chance *= 1 - keep if moved else keep
                    mean[choices[index] ^ moved] += updates[index]
                second += chance * np.exp(-((sums - mean) ** 2).sum(axis=1) / (2 * sum_noise**2))
            total += weight * first * second
        return np.log(total)

    def draw(members):
        present = rng.random((draws, members)) < rate
        counted = np.stack([(present & (choices[:members] == c)).sum(axis=1) for c in (0, 1)], axis=1)
        histogram = counted + count_noise * rng.normal(size=(draws, 2))
        moved = rng.random((draws, members)) > stay(histogram)[:, None]
        target = choices[:members] ^ moved
        sums = np.stack(
            [((target == c) * present * updates[:members]).sum(axis=1) for c in (0, 1)], axis=1
        ) + sum_noise * rng.normal(size=(draws, 2))
        return histogram, sums

    event = CohortSums(
        clip, sum_noise, PoissonSample(rate), ADD_REMOVE, histogram_ratio=count_noise / sum_noise
    ).event
    for one, other in ((3, 2), (2, 3)):
        histogram, sums = draw(one)
        losses = log_likelihood(histogram, sums, one) - log_likelihood(histogram, sums, other)
        for epsilon in (0.0, 0.2, 0.5, 0.9):
            gains = np.maximum(-np.expm1(epsilon - losses), 0.0)
            bound = delta_of(event, epsilon, "pld", ADD_REMOVE)
            # Five standard errors: by chance once in three million.
            assert gains.mean() - 5 * gains.std() / math.sqrt(draws) <= bound
