"""What the trials of a game say of a claim: it is violated, it holds as far as was seen, or they are too few.

The trials of a release have two halves. On the first, one threshold is chosen where the bound on epsilon at
the plan's delta is best, and another where the error rates come closest to the claimed trade-off curve, or
fall below it. On the second half the error rates at both are bounded, together at the confidence of this
release. Bounds on error rates bound epsilon at every delta at once, so looking for the delta at which a claim
breaks costs nothing."""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from coterie.audit.bounds import Floats, Rates, Scores, upper_rates
from coterie.audit.claims import Claim

ENOUGH = 0.5
"""Share of the claim that a lower bound must reach for "holds": below it, too little was tried to say so."""
_MOST_TRIALS = 10**9


class AuditVerdict(StrEnum):
    """`HOLDS`: an attack that finds at least half of what is claimed found no more than that."""

    HOLDS = "holds"
    VIOLATED = "violated"
    UNDERPOWERED = "underpowered"


@dataclass(frozen=True)
class Judgement:
    """A claim, what was found against it, and what follows.

    Args:
        delta: the plan's; or, where the claim breaks at another one only, that.
        mu_lower: the largest mu of Gaussian differential privacy that is ruled out.
        mu_estimate: of a Gaussian that would be as easy to tell apart; an estimate, no bound.
        trials_needed: how many an attack would have needed that is as strong as the claim allows, where these
            were too few; None where none would do.
    """

    verdict: AuditVerdict
    claimed: float
    lower: float
    delta: float
    mu_lower: float
    mu_estimate: float
    trials: int
    trials_needed: int | None = None


def judge(
    claim: Claim, first: Scores, second: Scores, delta: float, significance: float, trials: int | None = None
) -> Judgement:
    """The verdict on a claim at this delta, from trials that choose thresholds and trials that bound.

    Args:
        significance: the probability with which a claim that holds may be called violated.
        trials: how many there were in all, where not only these.
    """
    half = significance / 2.0
    tail, _ = first.best_threshold(lambda rates: rates.epsilons(delta), half)
    middle, _ = first.best_threshold(lambda rates: below_curve(claim, rates), half)
    found = [second.rates(threshold, half) for threshold in (tail, middle)]
    lower, claimed, where = max(rates.epsilon(delta) for rates in found), claim.epsilon(delta), delta
    if lower <= claimed:
        broken = [(at, rates) for rates in found if (at := claim.broken_at(rates.epsilon)) is not None]
        if broken:
            where, rates = max(broken, key=lambda each: each[1].epsilon(each[0]) - claim.epsilon(each[0]))
            lower, claimed = rates.epsilon(where), claim.epsilon(where)
    verdict = AuditVerdict.VIOLATED if lower > claimed else _unbroken(lower, claimed)
    estimate = first.with_more(second).separation
    needed = trials_for(claim, delta, half) if verdict is AuditVerdict.UNDERPOWERED else None
    return Judgement(
        verdict,
        claimed,
        lower,
        where,
        max(rates.mu for rates in found),
        estimate,
        trials or first.trials + second.trials,
        needed,
    )


def _unbroken(lower: float, claimed: float) -> AuditVerdict:
    return AuditVerdict.HOLDS if lower >= ENOUGH * claimed else AuditVerdict.UNDERPOWERED


def below_curve(claim: Claim, rates: Rates) -> Floats:
    """How far below the claimed curve both errors lie; negative above it."""
    return claim.false_negatives(rates.false_positive) - rates.false_negative


def trials_for(claim: Claim, delta: float, significance: float) -> int | None:
    """How many trials would show half the claim, were the attack as strong as the claim allows any to be."""
    claimed = claim.epsilon(delta)
    if not math.isfinite(claimed):
        return None
    cuts = np.concatenate([np.geomspace(1e-6, 0.1, 60), np.linspace(0.12, 0.9, 40)])
    missed, trials, half = claim.false_negatives(cuts), 100, significance / 2.0
    while trials < _MOST_TRIALS:
        each = trials // 4
        errors = (np.rint(each * share).astype(np.int64) for share in (cuts, missed))
        if (
            Rates(*(upper_rates(found, each, half) for found in errors)).epsilons(delta).max()
            >= ENOUGH * claimed
        ):
            return trials
        trials = round(1.3 * trials)
    return None
