"""From what is public about a population to a run that is proven possible, on this machine or between sites.

Nothing is planned by looking at a record. A simulation knows its records and could; a server over Flower
cannot.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np
import torch

from coterie import __version__
from coterie.algorithms import AnyAlgorithm, find_algorithm
from coterie.algorithms.protocol import PublicFacts, State
from coterie.algorithms.smoothing import smoothed
from coterie.data import Federation
from coterie.data.records import Task
from coterie.engines.clients import behaviour, build_learner
from coterie.engines.feature_cache import FeatureCache
from coterie.engines.features import Featured, featured
from coterie.errors import BudgetError, InputError, check_memory
from coterie.experiment.own_code import planned_by
from coterie.experiment.private_scores import Wanted
from coterie.experiment.proven import ProvenPlan, one_delta
from coterie.experiment.schema import EvaluationKind, Experiment, refuse
from coterie.experiment.shown import plan_html
from coterie.files import Json
from coterie.groups import Structure
from coterie.models import build_model
from coterie.models.settings import NONE
from coterie.privacy import Adjacency, Budget, Custody, Guarantee, HeldOut, Mode, PrivacyPlan, Unit
from coterie.privacy import calibrate as calibrate_plan
from coterie.privacy.calibration import has_free_noise, smallest_noise, with_shared_noise
from coterie.privacy.evaluation import Asked, with_client_scores, with_held_out_records
from coterie.privacy.units import short_number
from coterie.training.augmentation import Augmentation
from coterie.training.learner import Learner
from coterie.training.parameters import flatten

log = logging.getLogger(__name__)

_TOLERANCE = 1e-4
MEMORABLE = 1.0
"""Epsilon of private evaluations where nobody says otherwise and the budget allows it."""
CLIENT_SHARE = 0.1
"""Of a client's whole budget, which its scores are a part of."""

HELD_OUT = "test scores are computed on held-out records, outside the guarantee"
REFERENCES = "fairness figures compare with central models trained without privacy, outside the guarantee"
OWN_CHOICE = "which model a client uses is its own affair: what a simulation prints of it is outside, too"
PUBLIC_COUNT = "the number of clients is public, a constant in both worlds: divisors are made of it"


@dataclass(frozen=True)
class Population:
    """Those who take part, as everybody may know them.

    Args:
        records: how many each trains on; where the unit is a person, how many persons.
        structure: who is in which group, where they work in groups.
        truth: the true cluster of each, where it is known.
        test_records: how many of those each holds out, where it is known.
        reported: what each reports about the records that it holds out.
        caveats: what a guarantee must add because of how the records were declared.
        label_range: for regression, the declared values that targets 0 and 1 stand for, where it is known.
    """

    task: Task
    records: Mapping[str, int]
    structure: Structure | None = None
    truth: Mapping[str, int] | None = None
    test_records: Mapping[str, int] | None = None
    reported: Mapping[str, HeldOut] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()
    label_range: tuple[float, float] | None = None

    def facts(self, parameters: int) -> Json:
        """For the run's folder and its report."""
        return {
            "coterie": __version__,
            "task": self.task.kind,
            "classes": self.task.classes,
            "parameters": parameters,
            "clients": [
                {
                    "name": name,
                    "records": count,
                    "test_records": self.test_records[name] if self.test_records else None,
                    "true_cluster": self.truth[name] if self.truth else None,
                }
                for name, count in self.records.items()
            ],
            **({"caveats": list(self.caveats)} if self.caveats else {}),
        }


@dataclass(frozen=True)
class CalibratedRun(ProvenPlan):
    """A run that is proven possible, before anything is written or released.

    Args:
        federation: the records themselves, where they are on this machine.
    """

    experiment: Experiment
    population: Population
    learner: Learner
    algorithm: AnyAlgorithm
    facts: PublicFacts
    augmentation: Augmentation | None
    guarantee: Guarantee
    federation: Federation | None = None

    def __repr__(self) -> str:
        return f"CalibratedRun({self.algorithm.name}: {self.guarantee.line})"

    def _repr_html_(self) -> str:
        return plan_html(repr(self.experiment), self.guarantee)

    def start(self) -> State:
        """The state before the first round."""
        rng = np.random.default_rng(self.experiment.seeds.simulation)
        return cast(State, self.algorithm.start(self.facts, rng))

    def context(self) -> str:
        """What decides, beside what a client is sent, what it computes: noise is bound to it."""
        settings = self.experiment
        features = self.featured.digest if self.federation is not None else ""
        return behaviour(
            settings.model, settings.schedule.lr, self.augmentation, self.plan, self.learner, features
        )

    @cached_property
    def featured(self) -> Featured:
        """The records as the network sees them: computed when they are first asked for, or found on disk."""
        assert self.federation is not None, "features are computed where records are"
        return featured(self.federation, self.experiment.model.features, self.learner.device, FeatureCache())


Caveats = Callable[[Learner, Mapping[str, Budget]], Mapping[str | None, bool]]
"""What a guarantee may have to add because of how a run is set up, and whether it must, given its model and
budgets."""


def calibrate_run(
    experiment: Experiment,
    population: Population,
    device: torch.device,
    caveats: Caveats,
    held_by: Custody,
    federation: Federation | None = None,
) -> CalibratedRun:
    """Let the algorithm declare its plan, and find the noise that keeps every unit within its budget.

    Args:
        held_by: who will hold the records and the noise key.
        federation: the records, where they are on this machine.

    Raises:
        BudgetError: no noise does, or the given noise does not.
    """
    assert not experiment.auto, "a plan needs numbers"
    privacy = experiment.privacy
    additive = find_algorithm(privacy.unit, experiment.algorithm.name).additive
    log.info("checking the model")
    learner = build_learner(
        experiment.model,
        population.task,
        experiment.seeds.simulation,
        device,
        additive=additive,
        max_memory=experiment.engine.max_bytes,
        full_precision=experiment.engine.precision == "float32",
    )
    algorithm, models = build_algorithm(experiment, population.truth), _models(experiment)
    check_memory(f"algorithm.clusters: {models}", 4 * models * learner.layout.size)
    facts = PublicFacts(
        clients=tuple(population.records),
        records=population.records,
        parameters=learner.layout.size,
        initialise=lambda seed: flatten(
            build_model(experiment.model, population.task, seed, additive=additive)
        ),
        layout={name: shape.numel() for name, shape in learner.layout.shapes.items()},
        structure=population.structure,
    )
    declared = planned_by(experiment, algorithm, facts)
    draft, budgets = _with_evaluation(experiment, declared, population)
    log.info("calibrating the noise")
    said = [caveat for caveat, holds in caveats(learner, budgets).items() if holds and caveat is not None]
    # What own code shows to whom nobody has proven: then everyone is taken to see every release.
    unobserved = experiment.own_algorithm or (
        algorithm.observer(facts, with_shared_noise(draft, 1.0)) is None
    )
    private = all(budget.is_private for budget in budgets.values())
    if unobserved or (has_free_noise(draft) and not private):
        # Without noise nothing is promised to anyone, and no publication claims it.
        mode, observer = privacy.mode if unobserved else Mode.SOUND, None
        plan = calibrate_plan(draft, budgets, accountant=privacy.accountant, mode=mode)
    else:
        mode, plan = privacy.mode, _least_noise_between_workers(algorithm, facts, draft, budgets)
        observer = algorithm.observer(facts, plan)
    proven = ProvenPlan(plan, budgets, privacy.accountant, mode, held_by, observer)
    return CalibratedRun(
        **vars(proven),
        experiment=experiment,
        population=population,
        learner=learner,
        algorithm=algorithm,
        facts=facts,
        augmentation=augmentation_of(experiment, population.task),
        guarantee=proven.prove(said),
        federation=federation,
    )


def _models(experiment: Experiment) -> int:
    """How many models the server keeps, where the experiment says it."""
    said = getattr(experiment.algorithm, "clusters", 1)
    return said if isinstance(said, int) else 1


def _least_noise_between_workers(
    algorithm: AnyAlgorithm, facts: PublicFacts, draft: PrivacyPlan, budgets: Mapping[str, Budget]
) -> PrivacyPlan:
    """The plan with the least common noise under which no worker leaks more to anyone than it allows."""
    allowed, delta = {name: budget.epsilon for name, budget in budgets.items()}, one_delta(budgets)

    def excess(noise: float) -> float:
        observer = algorithm.observer(facts, with_shared_noise(draft, noise))
        assert observer is not None
        return observer.excess(allowed, delta=delta, adjacency=draft.adjacency)

    wanted = f"privacy.epsilon: {min(allowed.values()):g} at delta {short_number(delta)}"
    if not has_free_noise(draft):
        if (worst := excess(1.0)) > 1:
            raise BudgetError(
                f"{wanted} is not kept with the noise given, which costs {worst:.4g} times as much; "
                "algorithm.noise: null finds what keeps it"
            )
        return draft
    noise = smallest_noise(excess, 1.0, _TOLERANCE)
    if noise is None:
        raise BudgetError(f"{wanted} is not kept between workers by any noise")
    return with_shared_noise(draft, noise)


def build_algorithm(experiment: Experiment, truth: Mapping[str, int] | None) -> AnyAlgorithm:
    """The algorithm with its settings; one that needs the true clusters is handed them."""
    algorithm = find_algorithm(experiment.privacy.unit, experiment.algorithm.name)
    told = {"truth": truth} if algorithm.needs_truth else {}
    if algorithm.needs_truth and truth is None:
        raise InputError(
            f"algorithm.name: '{experiment.algorithm.name}' needs the true clusters, which this federation "
            "does not know; allowed here: algorithms that find them"
        )
    return smoothed(algorithm(experiment.algorithm, experiment.schedule, experiment.privacy, **told))


def augmentation_of(experiment: Experiment, task: Task) -> Augmentation | None:
    """The views of a record that the experiment asks for, if these records can have any."""
    wanted, shape = experiment.schedule.augmentation, task.shape
    if wanted is None:
        return None
    shift, least = wanted.pixels if "shift" in wanted.kinds else 0, min(shape[1:], default=0)
    unit, image = experiment.privacy.unit, " x ".join(map(str, shape[1:]))
    features = experiment.model.features
    refuse(
        {
            f"schedule.augmentation: with model.features {features} a record's features are computed once, "
            "and no views of it in every step; allowed with model.features none": features != NONE,
            f"schedule.augmentation: with unit {unit} no record's gradient is clipped, so nothing is "
            "averaged before a clip; allowed with unit record or person": not unit.within_client,
            f"schedule.augmentation: {experiment.data.name} has records of shape {list(shape)}; views are "
            "made of images, [channels, height, width]; allowed here: null": (
                task.vocabulary is not None or len(shape) != 3
            ),
            f"schedule.augmentation.pixels: {shift} moves all of an image of {image} away; allowed: 1 to "
            f"{least - 1}": shift >= least,
        }
    )
    return Augmentation(wanted.copies, shift, "flip" in wanted.kinds)


# --- budgets ----------------------------------------------------------------------------------------


def default_delta(units: int) -> float:
    """A tenth of one over the number of units, rounded down to one digit."""
    exact = 0.1 / units
    digit = 10.0 ** math.floor(math.log10(exact))
    return math.floor(exact / digit) * digit


def delta_caveat(experiment: Experiment, population: Population, budgets: Mapping[str, Budget]) -> str | None:
    """A delta of one over the number of units allows to publish one of them outright."""
    unit, records = experiment.privacy.unit, population.records
    alike = records if unit.within_client else dict.fromkeys(budgets, len(records))
    for name, count in alike.items():
        if budgets[name].delta >= 1 / count:
            whose = f"{unit} of {name}" if unit.within_client else unit
            return f"delta is not below 1/{count}, the share of one {whose}"
    return None


def counts_clients(experiment: Experiment) -> bool:
    """Whether a client may be there or not, one more or less of a number that everybody knows."""
    privacy = experiment.privacy
    return privacy.unit is Unit.CLIENT and privacy.adjacency is Adjacency.ADD_REMOVE


# --- private evaluation ------------------------------------------------------------------------------


def reported_of(experiment: Experiment, allowed: Mapping[str, HeldOut]) -> dict[str, HeldOut]:
    """What each client reports about the records that it holds out: as much as is wanted, and is allowed."""
    reports = len(experiment.evaluation.due(EvaluationKind.PRIVATE, experiment.schedule.rounds))
    return {
        name: HeldOut(
            own.units,
            min(own.epsilon, _evaluation_epsilon(experiment, experiment.privacy.epsilon_of(name))),
            min(own.reports, reports),
        )
        for name, own in allowed.items()
    }


def _with_evaluation(
    experiment: Experiment, draft: PrivacyPlan, population: Population
) -> tuple[PrivacyPlan, dict[str, Budget]]:
    """The draft of a plan with all private scores in it, and the budget of each unit.

    Where no delta is given, it is small against how many there are like the protected one. Where clients are
    protected, all of them report, and as often.
    """
    privacy, reported, by_record = experiment.privacy, population.reported, draft.unit.within_client
    budgets = {}
    for subject in (unit.subject for unit in draft.units):
        delta = default_delta(population.records[subject] if by_record else len(population.records))
        budgets[subject] = Budget(privacy.epsilon_of(subject), privacy.delta_of(subject, delta))
    if not reported:
        return draft, budgets
    wanted = wanted_scores(experiment, population)
    asked = Asked(wanted.statistics, wanted.classes)
    if by_record:
        return with_held_out_records(draft, budgets, reported, asked)
    epsilon = min(own.epsilon for own in reported.values())
    together = HeldOut(len(reported), epsilon, min(own.reports for own in reported.values()))
    return with_client_scores(draft, budgets, together, privacy.accountant, asked), budgets


def wanted_scores(experiment: Experiment, population: Population) -> Wanted:
    """The private scores that are released, and what they need."""
    return Wanted.of(experiment.evaluation.scores, population.task, population.label_range)


def _evaluation_epsilon(experiment: Experiment, budget: float) -> float:
    """What evaluations may cost where the whole budget is this."""
    asked = experiment.evaluation.epsilon
    if asked is None:
        return min(MEMORABLE, budget if experiment.privacy.unit.within_client else CLIENT_SHARE * budget)
    if asked > budget:
        raise InputError(
            f"evaluation.epsilon: {asked:g} is more than the budget of {budget:g}; allowed: at most that"
        )
    return asked
