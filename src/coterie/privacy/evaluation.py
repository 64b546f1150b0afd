"""What a plan says about private scores: whose held-out records answer, how often, and at which price.

Where a unit is a record, the records that a client holds out are never trained on. Which they are is decided
by their position, before anything is read. So the two parts of a client are units of their own, and a record
pays for training or for scores, never for both. Persons are held out whole, and one scores by the mean of its
records: at one client it, too, pays once. A client owns both its parts: there the score is one more
release of the same unit, and composes with the training.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from coterie.privacy.calibration import budget_of, calibrate
from coterie.privacy.errors import PlanError
from coterie.privacy.joint_scores import JointScores, Statistic, joint_clip
from coterie.privacy.mechanisms import HALF, NoiseRule, NoisyScores
from coterie.privacy.plan import PlannedRelease, PrivacyPlan, UnitPlan, held_out
from coterie.privacy.units import Adjacency, Budget, Unit

EVALUATION = "evaluation"
"""The name under which plans and ledgers know it."""


@dataclass(frozen=True)
class HeldOut:
    """What is reported about held-out units, all of it public.

    Args:
        units: how many records, or persons, are held out; where clients are protected, how many there are.
        epsilon: what all reports together may cost.
        reports: how often a model is scored.
    """

    units: int
    epsilon: float
    reports: int


@dataclass(frozen=True)
class Asked:
    """What every report tells: by default one score, else several statistics at once.

    Args:
        statistics: one is the score of a record or of a client alone.
        classes: of the labels; 0 for a regression.
    """

    statistics: tuple[Statistic, ...] = (Statistic.RIGHT,)
    classes: int = 0


ONE_SCORE = Asked()


def scores_release(
    units: int, reports: int, adjacency: Adjacency, asked: Asked = ONE_SCORE
) -> PlannedRelease:
    """So many reports about so many units, with noise still to be found."""
    scores: NoisyScores | JointScores = NoisyScores(HALF, NoiseRule.SHARED, units, adjacency)
    if (number := len(asked.statistics)) > 1:
        rest = (units, asked.statistics, asked.classes, adjacency)
        scores = JointScores(joint_clip(number), NoiseRule.SHARED, *rest)
    return PlannedRelease(EVALUATION, scores, reports)


def with_held_out_records(
    plan: PrivacyPlan,
    budgets: Mapping[str, Budget],
    reported: Mapping[str, HeldOut],
    asked: Asked = ONE_SCORE,
) -> tuple[PrivacyPlan, dict[str, Budget]]:
    """The plan and its budgets, with a unit for the held-out records of every client that reports."""
    if not plan.unit.within_client:
        raise PlanError(f"evaluation: a {plan.unit} owns the records it holds out, they are no units")
    units = [
        UnitPlan(held_out(client), (scores_release(own.units, own.reports, plan.adjacency, asked),))
        for client, own in reported.items()
    ]
    allowed = {
        held_out(client): Budget(own.epsilon, budget_of(budgets, client).delta)
        for client, own in reported.items()
    }
    return replace(plan, units=(*plan.units, *units)), {**budgets, **allowed}


def with_client_scores(
    plan: PrivacyPlan,
    budgets: Mapping[str, Budget],
    reported: HeldOut,
    accountant: str,
    asked: Asked = ONE_SCORE,
) -> PrivacyPlan:
    """The plan with one more release of every client: the mean over all of what each gets right.

    Its noise is found first, from what it may cost alone; the noise of everything else then makes room.
    """
    if plan.unit is not Unit.CLIENT:
        raise PlanError(f"evaluation: one {plan.unit} is not a client; its score cannot be composed so")
    draft = scores_release(reported.units, reported.reports, plan.adjacency, asked)
    units = []
    for unit in plan.units:
        alone = replace(plan, units=(UnitPlan(unit.subject, (draft,)),))
        price = Budget(reported.epsilon, budget_of(budgets, unit.subject).delta)
        [found] = calibrate(alone, price, accountant=accountant).units
        units.append(replace(unit, releases=(*unit.releases, *found.releases)))
    return replace(plan, units=tuple(units))
