"""Bounds on epsilon from below: right on known distributions, never from trials that chose the threshold."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from scipy.stats import binom, norm

from coterie.audit.bounds import Guesses, Rates, Scores, upper_rates
from coterie.audit.claims import Claim
from coterie.audit.verdicts import AuditVerdict, judge, trials_for
from coterie.privacy import Adjacency


def normal_scores(mu: float, trials: int, seed: int) -> Scores:
    rng = np.random.default_rng(seed)
    return Scores(mu + rng.normal(size=trials), rng.normal(size=trials))


def gaussian_claim(noise: float) -> Claim:
    return Claim.of(dp.GaussianDpEvent(noise), Adjacency.ZERO_OUT)


@pytest.mark.parametrize(("found", "trials"), [(0, 10), (3, 50), (49, 50), (50, 50)])
def test_upper_rate_is_where_so_few_become_unlikely(found: int, trials: int) -> None:
    rate = float(upper_rates(np.array(found), trials, 0.05))
    if found == trials:
        assert rate == 1.0
    else:
        assert binom.cdf(found, trials, rate) == pytest.approx(0.05)


def test_epsilon_of_error_rates_by_hand() -> None:
    def rates(false_positive: float, false_negative: float) -> Rates:
        return Rates(np.array(false_positive), np.array(false_negative))

    assert rates(0.01, 0.5).epsilon(0.1) == pytest.approx(math.log(0.4 / 0.01))
    assert rates(0.5, 0.01).epsilon(0.1) == pytest.approx(math.log(0.4 / 0.01))
    assert rates(0.6, 0.6).epsilon(0.0) == 0.0
    assert rates(norm.sf(1.0), norm.cdf(1.0 - 2.5)).mu == pytest.approx(2.5)


def test_bounds_stay_below_the_truth_as_often_as_they_promise() -> None:
    """60 honest audits of a Gaussian at 80 %: above the truth in at most a fifth, with room for chance."""
    claim = gaussian_claim(1.0)
    truth, above = claim.epsilon(1e-2), 0
    for seed in range(60):
        first, second = normal_scores(1.0, 400, 2 * seed), normal_scores(1.0, 400, 2 * seed + 1)
        above += judge(claim, first, second, 1e-2, 0.2).verdict is AuditVerdict.VIOLATED
    assert truth > 2
    assert above <= binom.ppf(0.999, 60, 0.2)


def test_half_the_noise_is_a_violation_and_more_noise_is_underpowered() -> None:
    def verdict(noise: float, mu: float, trials: int) -> AuditVerdict:
        scores = normal_scores(mu, trials, 1), normal_scores(mu, trials, 2)
        return judge(gaussian_claim(noise), *scores, 1e-3, 0.05).verdict

    assert verdict(1.0, 2.0, 300) is AuditVerdict.VIOLATED
    assert verdict(1.0, 1.0, 10_000) is AuditVerdict.HOLDS
    assert verdict(1.0, 0.1, 300) is AuditVerdict.UNDERPOWERED
    assert verdict(1.0, 1 / 0.9, 30_000) is AuditVerdict.VIOLATED  # a tenth of the noise is missing


def test_a_claim_may_break_at_another_delta_than_the_plans() -> None:
    found = judge(gaussian_claim(1.0), normal_scores(1.6, 300, 3), normal_scores(1.6, 300, 4), 1e-6, 0.05)
    assert found.verdict is AuditVerdict.VIOLATED
    assert found.delta != 1e-6
    assert found.lower > found.claimed == gaussian_claim(1.0).epsilon(found.delta)


def test_trials_that_are_said_to_be_enough_are_about_enough() -> None:
    claim = gaussian_claim(1.0)
    needed = trials_for(claim, 1e-3, 0.05)
    assert needed is not None
    wanted = 0.5 * claim.epsilon(1e-3)
    reached = [
        judge(claim, normal_scores(1.0, n, 5), normal_scores(1.0, n, 6), 1e-3, 0.1).lower >= wanted
        for n in (needed // 16, 4 * needed)
    ]
    assert reached == [False, True]


def test_the_claimed_curve_is_that_of_the_gaussian() -> None:
    rates = np.array([0.01, 0.1, 0.3, 0.6])
    expected = norm.cdf(-norm.ppf(rates) - 1 / 1.3)
    curve = gaussian_claim(1.3).false_negatives(rates)
    assert np.all(curve <= expected + 1e-6)
    np.testing.assert_allclose(curve, expected, atol=4e-3)


def test_separation_estimates_mu() -> None:
    assert normal_scores(1.7, 20_000, 7).separation == pytest.approx(1.7, abs=0.05)


def test_guesses_of_nobodys_coins_rule_out_nothing_and_all_right_ones_much() -> None:
    assert Guesses(1000, 100, 50).epsilon(1e-5, 0.05) == 0.0
    assert Guesses(1000, 100, 100).epsilon(1e-5, 0.05) > 3.0
    assert Guesses(1000, 100, 50).gaussian_epsilon(1e-5, 0.05) == pytest.approx(0.0, abs=0.2)
    assert Guesses(1000, 100, 100).gaussian_epsilon(1e-5, 0.05) > 3.0


def test_one_run_bound_without_delta_is_that_of_the_binomial() -> None:
    """Randomised response: 100 coins, 80 right; where 80 or more become likelier than 5 %."""
    epsilon = Guesses(100, 100, 80).epsilon(0.0, 0.05)
    rate = 1 / (1 + math.exp(-epsilon))
    assert binom.sf(79, 100, rate) == pytest.approx(0.05, rel=1e-5)
