"""Numbers for keys that are auto, from public facts alone, and whether a budget is usable at all.

What is public: how many records clients have, features, classes, clients, epsilon and delta. For a linear
model the whole of DP-SGD comes down to one number, the noise that is left when all steps are averaged,

    noise = sqrt(parameters) / (records * mu * sqrt(clients)),   mu = sqrt(2 L + 2 epsilon) - sqrt(2 L),

in units of the clip (mu by the central limit theorem of Gaussian privacy, L = log(1 / delta)): which batch
and how many rounds hardly matter to it, as long as batches are a small share of the records. So both are
fixed, at what was best where it was measured, and the length of the way that all steps may go together, step
size times clip times steps, is `scale * noise ** -power` between two ends. `benchmarks/recipe.py` tries
these numbers on generated federations and prints how they do; docs/recipe.md has its table.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from coterie.data.records import Task
from coterie.errors import InputError
from coterie.experiment.calibrated import CalibratedRun, default_delta
from coterie.experiment.schema import AUTO, Experiment
from coterie.models import network_task, parameters_of
from coterie.models.settings import NONE
from coterie.privacy.plans import SUMS, TRAINING
from coterie.privacy.ranges import STEP_SIZE

ROUNDS = 30
AVERAGING = 8.0
"""Of models over rounds: it takes noise out at no cost, so that steps may be longer."""
BATCH_SHARE = 1 / 8
"""Of the records of a client that has few: three quarters of all clients have more."""
ALONE = ("local", "mr-mtl")
"""Algorithms whose models are each learnt by one client."""
CLUSTERS = 3
"""As many as are expected where nobody says how many there are."""
USABLE, HARD = 0.15, 0.5
"""Noise that is left, in clips: up to the first a budget is usable, beyond the second it is not."""


@dataclass(frozen=True)
class Way:
    """How far all steps together may go, in step size times clip, and the clip that goes with it."""

    clip: float
    scale: float
    power: float
    shortest: float
    longest: float

    def length(self, noise: float, steps: int) -> float:
        """For so many steps, none of which is longer than any that was tried."""
        wanted = self.scale * noise**-self.power if noise > 0 else math.inf
        return min(max(wanted, self.shortest), self.longest, steps * self.longest * BATCH_SHARE / ROUNDS)


CLASSIFICATION = Way(clip=0.25, scale=8.0, power=1.3, shortest=6.0, longest=800.0)
REGRESSION = Way(clip=0.05, scale=0.2, power=1.2, shortest=1.0, longest=32.0)
ON_FEATURES = Way(clip=0.25, scale=500.0, power=0.9, shortest=300.0, longest=25_000.0)
"""A head's, on public features: thousands of them share a norm of 1, so that weights have far to go."""


def sized(experiment: Experiment, task: Task, records: Mapping[str, int]) -> Experiment:
    """The experiment with a number for whatever is auto.

    Args:
        records: how many each client trains on.
    """
    if not experiment.auto:
        return experiment
    if not experiment.privacy.unit.within_client:
        raise InputError(
            f"{experiment.auto[0]}: auto with privacy.unit {experiment.privacy.unit}, for which no recipe is "
            "known; allowed: a number"
        )
    way = _way(experiment, task)
    counts = sorted(records.values())
    schedule = experiment.schedule
    rounds = ROUNDS if "schedule.rounds" in experiment.auto else schedule.rounds
    batch = batch_for(counts) if "schedule.batch" in experiment.auto else schedule.batch
    typical = round(statistics.median(counts))
    steps = rounds * schedule.epochs * math.ceil(typical / batch)
    averaging = AVERAGING * (rounds > 1) if "schedule.averaging" in experiment.auto else schedule.averaging
    length = way.length(_noise_left(experiment, task, counts), steps)
    fixed_clip, fixed_lr = (key not in experiment.auto for key in ("privacy.clip", "schedule.lr"))
    # A pull towards an anchor allows no longer steps than one over it: there the clip takes over.
    pull = float(getattr(experiment.algorithm, "pull", None) or 0.0)
    clip = max(way.clip, length * pull / steps)
    if fixed_clip or fixed_lr:
        clip = experiment.privacy.clip if fixed_clip else length / (steps * schedule.lr)
    lr = length / (steps * clip)
    numbers = {
        "schedule.rounds": rounds,
        "schedule.batch": batch,
        "schedule.lr": STEP_SIZE.nearest(min(_rounded(lr), 1.0 / pull) if pull else _rounded(lr)),
        "schedule.averaging": averaging,
        "privacy.clip": _rounded(min(max(clip, 1e-3), 10.0)),
    }
    return experiment.with_numbers({key: numbers[key] for key in experiment.auto})


def _way(experiment: Experiment, task: Task) -> Way:
    if task.kind != "classification":
        return REGRESSION
    return CLASSIFICATION if experiment.model.features == NONE else ON_FEATURES


def batch_for(counts: list[int]) -> int:
    """An eighth of the records of a client that has few, never more than half of those of any."""
    few = counts[(len(counts) - 1) // 4]
    return max(1, min(round(BATCH_SHARE * few), counts[0] // 2))


def _rounded(number: float) -> float:
    """Two digits: nothing that was known says more."""
    return float(f"{number:.2g}")


def _noise_left(experiment: Experiment, task: Task, counts: list[int]) -> float:
    """What is left of the noise, in clips, when all steps of those who learn a model are averaged."""
    typical, privacy = statistics.median(counts), experiment.privacy
    if math.isinf(privacy.epsilon):
        return 0.0
    doubled = 2.0 * math.log(1.0 / (privacy.delta or default_delta(math.ceil(typical))))
    mu = math.sqrt(doubled + 2.0 * privacy.epsilon) - math.sqrt(doubled)
    return math.sqrt(_parameters(experiment, task)) / (
        typical * mu * math.sqrt(_learners(experiment, counts))
    )


def _parameters(experiment: Experiment, task: Task) -> int:
    if experiment.model.own:
        task = network_task(experiment.model.features, task)
        return (math.prod(task.shape) + 1) * task.outputs
    return parameters_of(experiment.model, task)


def _learners(experiment: Experiment, counts: list[int]) -> float:
    """How many clients learn a model together, as far as anybody can know beforehand."""
    algorithm = experiment.algorithm
    if algorithm.name in ALONE:
        return 1.0
    clusters = getattr(algorithm, "clusters", 1)
    return max(1.0, len(counts) / (CLUSTERS if clusters == AUTO else clusters))


# --- is a budget usable? --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usability:
    """What noise does to training, in public numbers.

    Args:
        step: length of a step's noise over the clip, for the client in the middle.
        left: the same when all steps of those who learn a model are averaged.
        steps: of that client, in the whole run.
    """

    parameters: int
    step: float
    steps: int
    left: float

    @property
    def verdict(self) -> str:
        if self.left <= USABLE:
            return "usable"
        return "hard: expect scores well below those without privacy" if self.left <= HARD else "not usable"

    @property
    def line(self) -> str:
        """In words, with advice where it is needed."""
        advice = "; more records, a larger epsilon or fewer features would help" if self.left > USABLE else ""
        return (
            f"noise of a step is {self.step:.2g} of the clip over {self.parameters:,} parameters, and "
            f"{self.left:.2g} when {self.steps:,} steps of all who learn a model are averaged: "
            f"{self.verdict}{advice}"
        )


def usability(calibrated: CalibratedRun) -> Usability | None:
    """Whether the noise of a plan leaves anything to learn; None of plans in groups, and without training."""
    found: list[tuple[float, int, float]] = []
    parameters, counts = calibrated.facts.parameters, sorted(calibrated.population.records.values())
    learners = _learners(calibrated.experiment, counts)
    for unit in calibrated.plan.units:
        for release in unit.releases:
            noise, mechanism = release.mechanism.multiplier, release.mechanism
            if noise is not None and release.name == TRAINING:
                steps = int(getattr(mechanism, "steps", 1)) * release.times
                found.append((noise / float(getattr(mechanism, "denominator", 1)), steps, steps * learners))
            elif noise is not None and release.name == SUMS:  # of whole clients, of whom a part is sampled
                sampled = float(getattr(getattr(mechanism, "sampling", None), "rate", 1.0)) * learners
                found.append((noise / sampled, release.times, float(release.times)))
    if not found:
        return None
    each, steps, averaged = sorted(found)[len(found) // 2]
    step = each * math.sqrt(parameters)
    return Usability(parameters, step, steps, step / math.sqrt(averaged))
