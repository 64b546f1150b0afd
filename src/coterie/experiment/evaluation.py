"""What evaluation on held-out records costs and what must be said about it, before anything runs."""

from collections.abc import Mapping

from coterie.errors import InputError
from coterie.experiment.schema import EvaluationKind, Experiment
from coterie.privacy import Budget, HeldOut, PrivacyPlan, Unit
from coterie.privacy.evaluation import with_client_scores, with_held_out_records

MEMORABLE = 1.0
"""Epsilon of private evaluations where nobody says otherwise and the budget allows it."""
CLIENT_SHARE = 0.1
"""Of a client's whole budget, which its scores are a part of."""

HELD_OUT = "test scores are computed on held-out records, outside the guarantee"
REFERENCES = "fairness figures compare with central models trained without privacy, outside the guarantee"
OWN_CHOICE = "which model a client uses is its own affair: what a simulation prints of it is outside, too"


def reported_of(experiment: Experiment, allowed: Mapping[str, HeldOut]) -> dict[str, HeldOut]:
    """What each client reports about the records that it holds out: as much as is wanted, and is allowed."""
    reports = experiment.evaluation.times(EvaluationKind.PRIVATE, experiment.schedule.rounds)
    return {
        name: HeldOut(
            own.units,
            min(own.epsilon, evaluation_epsilon(experiment, experiment.privacy.epsilon_of(name))),
            min(own.reports, reports),
        )
        for name, own in allowed.items()
    }


def with_evaluation(
    draft: PrivacyPlan,
    budgets: Mapping[str, Budget],
    reported: Mapping[str, HeldOut],
    accountant: str,
) -> tuple[PrivacyPlan, dict[str, Budget]]:
    """The draft of a plan, and its budgets, with all private scores in it.

    Args:
        reported: of every client that reports. Where clients are protected, all report, and as often.
    """
    if not reported:
        return draft, dict(budgets)
    if draft.unit is Unit.RECORD:
        return with_held_out_records(draft, budgets, reported)
    each = {(own.epsilon, own.reports) for own in reported.values()}
    epsilon, reports = min(epsilon for epsilon, _ in each), min(reports for _, reports in each)
    together = HeldOut(len(reported), epsilon, reports)
    return with_client_scores(draft, budgets, together, accountant), dict(budgets)


def evaluation_epsilon(experiment: Experiment, budget: float) -> float:
    """What evaluations may cost where the whole budget is this."""
    asked = experiment.evaluation.epsilon
    if asked is None:
        share = 1.0 if experiment.privacy.unit is Unit.RECORD else CLIENT_SHARE
        return min(MEMORABLE, share * budget)
    if asked > budget:
        raise InputError(
            f"evaluation.epsilon: {asked:g} is more than the budget of {budget:g}; allowed: at most that"
        )
    return asked
