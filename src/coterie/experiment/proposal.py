"""From what is public about a population to a proven plan: the same for a simulation and for real sites.

Nothing here looks at a record. A simulation knows its records and could; a server over Flower cannot.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from coterie import __version__
from coterie.algorithms import AnyAlgorithm, find_algorithm
from coterie.algorithms.protocol import PublicFacts, Vector
from coterie.algorithms.smoothing import smoothed
from coterie.data.records import Task
from coterie.engines.clients import build_learner
from coterie.errors import InputError
from coterie.experiment.evaluation import with_evaluation
from coterie.experiment.folder import Json
from coterie.experiment.promises import Promise, make_promise
from coterie.experiment.schema import Experiment
from coterie.groups import Structure
from coterie.models import build_model
from coterie.privacy import Adjacency, Budget, Custody, HeldOut, PrivacyPlan, Unit
from coterie.training.augmentation import Augmentation
from coterie.training.learner import Learner
from coterie.training.parameters import flatten

PUBLIC_COUNT = "the number of clients is public, a constant in both worlds: divisors are made of it"


@dataclass(frozen=True)
class Population:
    """Those who take part, as everybody may know them.

    Args:
        records: how many each trains on.
        structure: who is in which group, where they work in groups.
        truth: the true cluster of each, where it is known.
        test_records: how many each holds out, where it is known.
        reported: what each reports about the records that it holds out.
    """

    task: Task
    records: Mapping[str, int]
    structure: Structure | None = None
    truth: Mapping[str, int] | None = None
    test_records: Mapping[str, int] | None = None
    reported: Mapping[str, HeldOut] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.records)

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
        }


@dataclass(frozen=True)
class Proposal:
    """A run that is known to be possible: what would be released, and what that promises."""

    population: Population
    learner: Learner
    algorithm: AnyAlgorithm
    facts: PublicFacts
    promise: Promise
    augmentation: Augmentation | None

    @property
    def plan(self) -> PrivacyPlan:
        return self.promise.plan


Caveats = Callable[[Learner, Mapping[str, Budget]], Iterable[str]]
"""What a guarantee must add because of how a run is set up, given its model and budgets."""


def propose(
    experiment: Experiment,
    population: Population,
    device: torch.device,
    caveats: Caveats,
    held_by: Custody,
) -> Proposal:
    """Let the algorithm declare its plan, and find the noise that keeps the promise.

    Args:
        held_by: who will hold the records and the noise key.
    """
    additive = find_algorithm(experiment.privacy.unit, experiment.algorithm.name).additive
    learner = build_learner(
        experiment.model,
        population.task,
        experiment.seeds.simulation,
        device,
        additive=additive,
        max_memory=experiment.engine.max_bytes,
    )
    algorithm = build_algorithm(experiment, population.truth)

    def initialise(seed: int) -> Vector:
        return flatten(build_model(experiment.model, population.task, seed, additive=additive))

    facts = PublicFacts(
        clients=population.names,
        records=population.records,
        parameters=learner.layout.size,
        initialise=initialise,
        layout={name: shape.numel() for name, shape in learner.layout.shapes.items()},
        structure=population.structure,
    )
    draft = algorithm.plan(facts)
    accountant = experiment.privacy.accountant
    draft, budgets = with_evaluation(
        draft, _budgets(experiment, draft, facts), population.reported, accountant
    )
    said = list(caveats(learner, budgets))
    promise = make_promise(algorithm, facts, draft, budgets, experiment.privacy, said, held_by)
    views = augmentation_of(experiment, population.task)
    return Proposal(population, learner, algorithm, facts, promise, views)


def build_algorithm(experiment: Experiment, truth: Mapping[str, int] | None) -> AnyAlgorithm:
    """The algorithm with its settings; one that needs the true clusters is handed them."""
    algorithm = find_algorithm(experiment.privacy.unit, experiment.algorithm.name)
    arguments = (experiment.algorithm, experiment.schedule, experiment.privacy)
    if not algorithm.needs_truth:
        return smoothed(algorithm(*arguments))
    if truth is None:
        raise InputError(
            f"algorithm.name: '{experiment.algorithm.name}' needs the true clusters, which this federation "
            "does not know; allowed here: algorithms that find them"
        )
    return smoothed(algorithm(*arguments, truth=truth))  # type: ignore[call-arg]


def augmentation_of(experiment: Experiment, task: Task) -> Augmentation | None:
    """The views of a record that the experiment asks for, if these records can have any."""
    wanted, shape = experiment.schedule.augmentation, task.shape
    if wanted is None:
        return None
    if experiment.privacy.unit is not Unit.RECORD:
        raise InputError(
            f"schedule.augmentation: with unit {experiment.privacy.unit} no record's gradient is clipped, so "
            "nothing is averaged before a clip; allowed with unit record"
        )
    if task.vocabulary is not None or len(shape) != 3:
        raise InputError(
            f"schedule.augmentation: {experiment.data.name} has records of shape {list(shape)}; "
            "views are made of images, [channels, height, width]; allowed here: null"
        )
    shift = wanted.pixels if "shift" in wanted.kinds else 0
    if shift >= min(shape[1:]):
        raise InputError(
            f"schedule.augmentation.pixels: {shift} moves all of an image of {shape[1]} x {shape[2]} away; "
            f"allowed: 1 to {min(shape[1:]) - 1}"
        )
    return Augmentation(wanted.copies, shift, "flip" in wanted.kinds)


# --- budgets ----------------------------------------------------------------------------------------


def default_delta(units: int) -> float:
    """A tenth of one over the number of units, rounded down to one digit."""
    exact = 0.1 / units
    digit = 10.0 ** math.floor(math.log10(exact))
    return math.floor(exact / digit) * digit


def delta_caveats(
    experiment: Experiment, population: Population, budgets: Mapping[str, Budget]
) -> Iterator[str]:
    """A delta of one over the number of units allows to publish one of them outright."""
    if experiment.privacy.unit is not Unit.RECORD:
        members = len(population.names)
        if max(budget.delta for budget in budgets.values()) >= 1 / members:
            yield f"delta is not below 1/{members}, the share of one {experiment.privacy.unit}"
        return
    for name, records in population.records.items():
        if budgets[name].delta >= 1 / records:
            yield f"delta is not below 1/{records}, the share of one record of {name}"
            return


def count_caveats(experiment: Experiment) -> Iterator[str]:
    """A client that may be there or not is one more or less of a number that everybody knows."""
    privacy = experiment.privacy
    if privacy.unit is Unit.CLIENT and privacy.adjacency is Adjacency.ADD_REMOVE:
        yield PUBLIC_COUNT


def _budgets(experiment: Experiment, draft: PrivacyPlan, facts: PublicFacts) -> dict[str, Budget]:
    privacy = experiment.privacy
    return {
        unit.subject: Budget(
            privacy.epsilon_of(unit.subject),
            privacy.delta_of(unit.subject, default_delta(_protected(draft, unit.subject, facts))),
        )
        for unit in draft.units
    }


def _protected(plan: PrivacyPlan, subject: str, facts: PublicFacts) -> int:
    """How many units there are beside the one that is protected: what delta must be small against."""
    return facts.records[subject] if plan.unit is Unit.RECORD else len(facts.clients)
