"""The one builder of plans: what training on records, clients or workers releases, in public numbers.

Algorithms, `coterie plan` and reproductions say here what they release; names of releases, threat models and
defaults are then the same in all of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from coterie.privacy.accounting import epsilon_of
from coterie.privacy.calibration import FIRST_ROUND_SHARE, calibrate
from coterie.privacy.cohort_sums import CohortSums, FixedSample, PoissonSample
from coterie.privacy.errors import BudgetError
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.mechanisms import Mechanism, Multiplier, NoiseRule
from coterie.privacy.plain import Json
from coterie.privacy.plan import POPULATION, PlannedRelease, PrivacyPlan, UnitPlan
from coterie.privacy.rdp import shares
from coterie.privacy.record_sums import FullBatchSketch, FullBatchSteps, PoissonSteps, ShuffledSteps
from coterie.privacy.selections import AccuracySelection, LowestLoss, PrivateSelection
from coterie.privacy.threats import SERVER, THREATS
from coterie.privacy.units import Adjacency, Budget, Mode, PersonBounds, ThreatModel, Unit

# How plans and ledgers call what is released: about records one of the first four, about clients sums.
FIRST_ROUND, TRAINING, SELECTION, CHOICE, SUMS = "first round", "training", "selection", "choice", "sums"
# Epsilon of one private selection, as a share of the budget.
SELECTION_SHARE = 0.03
# Noise of a histogram of choices over that of the sums by cluster.
HISTOGRAM_RATIO = 4.0
# Noise of the published rebalancing's identifiers over its sigma_theta.
IDENTIFIER_RATIO = 1.0


def group_release(group: int) -> str:
    """How plans and ledgers call what a group of workers releases."""
    return f"group {group}"


def plan_of(
    unit: Unit,
    adjacency: Adjacency,
    releases: Mapping[str, Sequence[PlannedRelease]],
    caveats: Sequence[str] = (),
    threat: ThreatModel | None = None,
    persons: PersonBounds | None = None,
) -> PrivacyPlan:
    """The plan in which each subject's data are released so, by default against whom such a unit fears."""
    units = tuple(UnitPlan(subject, tuple(own)) for subject, own in releases.items())
    return PrivacyPlan(unit, adjacency, threat or THREATS[unit], units, tuple(caveats), persons)


def client_plan(
    sums: Mechanism, rounds: int, caveats: Sequence[str] = (), first: Sequence[PlannedRelease] = ()
) -> PrivacyPlan:
    """One plan for every client: all are sampled alike, so all are charged alike, in one entry a round.

    Args:
        first: what is released before there are any sums.
    """
    releases = {POPULATION: [*first, *([PlannedRelease(SUMS, sums, rounds)] if rounds else [])]}
    return plan_of(Unit.CLIENT, sums.adjacency, releases, caveats)


class Sampling(StrEnum):
    """How batches are made: of records that come by a coin each, or of a shuffled order (not amplified)."""

    POISSON = "poisson"
    SHUFFLE = "shuffle"


_STEPS = {Sampling.POISSON: PoissonSteps, Sampling.SHUFFLE: ShuffledSteps}


@dataclass(frozen=True)
class RecordReleases:
    """What a client with so many records may release about them."""

    records: int
    epochs: int = 1
    clip: float = 1.0
    adjacency: Adjacency = Adjacency.ZERO_OUT
    mode: Mode = Mode.SOUND

    def steps(
        self,
        name: str,
        times: int,
        batch: int | None,
        noise: Multiplier = NoiseRule.SHARED,
        sampling: Sampling = Sampling.POISSON,
    ) -> PlannedRelease:
        """DP-SGD, released once a round: over batches of this size, or over all records in each step."""
        rest, steps = (self.epochs, self.adjacency), _STEPS[sampling]
        if batch is None:
            return PlannedRelease(name, FullBatchSteps(self.clip, noise, self.records, *rest), times)
        return PlannedRelease(name, steps(self.clip, noise, self.records, batch, *rest), times)

    def sketch(self, dimensions: int, noise: Multiplier) -> PlannedRelease:
        """A first round of which a random projection is released."""
        sketch = FullBatchSketch(self.clip, noise, self.records, dimensions, self.adjacency)
        return PlannedRelease(FIRST_ROUND, sketch, 1)

    def selections(self, epsilon: float, times: int) -> list[PlannedRelease]:
        """Private choices of a model, if any are made; in mode paper the published ones, by accuracy."""
        kind = AccuracySelection if self.mode is Mode.PAPER else PrivateSelection
        return [PlannedRelease(SELECTION, kind(epsilon, self.adjacency), times)] if times else []

    def choices(self, times: int) -> PlannedRelease:
        """Choices of the model with the lowest loss, told as they are."""
        return PlannedRelease(CHOICE, LowestLoss(self.adjacency), times)


@dataclass(frozen=True)
class CohortReleases:
    """What a sample of clients, or of a group's workers, may release in one round.

    `tracking_ratio`, if given, is the noise of the count that the next clip follows over that of the sums.
    """

    rate: float
    clip: float = 1.0
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    tracking_ratio: float | None = None

    def sums(
        self,
        noise: Multiplier = NoiseRule.SHARED,
        histogram_ratio: float | None = None,
        *,
        drafted: bool = False,
    ) -> CohortSums:
        """Sums of a Poisson sample: after a histogram of choices, or of drafts that members have shared."""
        return CohortSums(
            self.clip,
            noise,
            PoissonSample(self.rate),
            self.adjacency,
            histogram_ratio=histogram_ratio,
            tracking_ratio=self.tracking_ratio,
            drafted=drafted,
        )

    def rebalanced(
        self,
        clients: int,
        identifier_ratio: float = IDENTIFIER_RATIO,
        noise: Multiplier = NoiseRule.SHARED,
    ) -> CohortSums:
        """The published rule: identifiers, then sums by cluster, of a sample of fixed size."""
        # A share that is no whole number of clients is rounded up: more are sampled, and charged.
        sampling = FixedSample(clients, math.ceil(self.rate * clients - 1e-9))
        return CohortSums(self.clip, noise, sampling, self.adjacency, identifier_ratio=identifier_ratio)


# --- what a run would cost, before there is any -----------------------------------------------------


def noise_of(plan: PrivacyPlan, name: str) -> float | None:
    """The largest noise multiplier of the releases of this name; None if there is none."""
    named = (release.mechanism for unit in plan.units for release in unit.releases if release.name == name)
    return max((each.multiplier for each in named if each.multiplier is not None), default=None)


def parts_of(plan: PrivacyPlan, promise: Guarantee) -> list[Json]:
    """What each release of a plan's one unit is and costs: alone, and as a share of the divergence of all."""
    releases = plan.units[0].releases
    portions = shares([release.event for release in releases], delta=promise.delta, adjacency=plan.adjacency)
    noises = (release.mechanism.multiplier for release in releases)
    return [
        {
            "release": release.name.replace(" ", "-"),
            "what": cost.what,
            "times": release.times,
            "noise": cost.noise,
            "share": portion,
            "epsilon_alone": cost.epsilon,
            **({} if noise is None else {"noise_multiplier": noise}),
        }
        for release, cost, portion, noise in zip(releases, promise.releases, portions, noises, strict=True)
    ]


@dataclass(frozen=True)
class RecordRun:
    """A record-level run of one client in public numbers: what it would release, and what that costs.

    `first_round` is the noise of a full-batch first round; None: there is no such round.
    """

    records: int
    batch: int
    rounds: int
    epochs: int = 1
    first_round: Multiplier | None = NoiseRule.SHARED
    selections: int = 0
    selection_epsilon: float = 1.0
    adjacency: Adjacency = Adjacency.ZERO_OUT
    sampling: Sampling = Sampling.POISSON
    mode: Mode = Mode.SOUND

    def plan(self, noise: Multiplier = NoiseRule.SHARED) -> PrivacyPlan:
        """What is released, with this noise in training."""
        own = RecordReleases(self.records, self.epochs, adjacency=self.adjacency, mode=self.mode)
        releases, rounds = [], self.rounds
        if self.first_round is not None:
            releases.append(own.steps(FIRST_ROUND, 1, None, self.first_round))
            rounds -= 1
        if rounds:
            releases.append(own.steps(TRAINING, rounds, self.batch, noise, self.sampling))
        releases += own.selections(self.selection_epsilon, self.selections)
        return plan_of(Unit.RECORD, self.adjacency, {"one client": releases}, threat=SERVER)

    def calibrated(self, budget: Budget, accountant: str = "rdp") -> PrivacyPlan:
        """The plan with the least noise that stays within the budget."""
        return calibrate(self.plan(), budget, accountant=accountant, mode=self.mode)

    def with_noise(self, noise: float, delta: float, accountant: str) -> PrivacyPlan:
        """The plan at a known training noise; `auto` then spends what 2 % of that noise are worth."""
        plan = self.plan(noise)
        if self.first_round is not NoiseRule.AUTO:
            return plan
        quieter = self.plan(noise / (1.0 + FIRST_ROUND_SHARE)).units[0].without(FIRST_ROUND)
        allowed = epsilon_of(quieter.event, delta, accountant, plan.adjacency)
        return calibrate(plan, Budget(allowed, delta), accountant=accountant)

    def needed(self, budget: Budget, accountant: str = "rdp") -> float | None:
        """The training noise that the budget takes; None where no noise would do."""
        try:
            return self.training_noise(self.calibrated(budget, accountant))
        except BudgetError:
            return None

    def training_noise(self, plan: PrivacyPlan) -> float | None:
        """The noise of training in such a plan; of the first round, where that is all there is."""
        return noise_of(plan, TRAINING if self.rounds > 1 or self.first_round is None else FIRST_ROUND)

    def alternatives(self, budget: Budget) -> dict[str, float | None]:
        """Noise for the same budget with round 1 sharing it, by the publication, and under replace-one."""
        shared = NoiseRule.SHARED if self.first_round is not None else None
        others: dict[str, RecordRun] = {}
        if self.mode is Mode.SOUND and self.first_round is not shared:
            others["shared_noise_multiplier"] = replace(self, first_round=shared)
        if self.mode is Mode.SOUND and self.sampling is Sampling.POISSON:
            others["published_noise_multiplier"] = replace(self, first_round=shared, mode=Mode.PAPER)
        if self.mode is Mode.PAPER:
            others["sound_noise_multiplier"] = replace(self, mode=Mode.SOUND)
        if self.adjacency is not Adjacency.REPLACE_ONE:
            others["replace_one_noise_multiplier"] = replace(
                self, adjacency=Adjacency.REPLACE_ONE, mode=Mode.SOUND
            )
        return {name: other.needed(budget) for name, other in others.items()}


# How clusters are filled up and noised; `paper` is `rebalance` by the publication's own arithmetic.
ClientRule = Literal["route", "rebalance", "paper", "fedavg"]


@dataclass(frozen=True)
class ClientRun:
    """A client-level run in public numbers.

    Noise is that on a cluster's sum over the clip; of the published rule its sigma_theta, half as much.

    Args:
        ratio: of the histogram's noise to that of the sums (route), or of sigma_s to sigma_theta.
    """

    clients: int
    rate: float
    rounds: int
    rule: ClientRule = "route"
    ratio: float | None = None

    @property
    def is_published(self) -> bool:
        return self.rule in ("rebalance", "paper")

    @property
    def mode(self) -> Mode:
        return Mode.PAPER if self.rule == "paper" else Mode.SOUND

    def plan(self, noise: float | None = None) -> PrivacyPlan:
        """What is released, with this noise or with one that is still to be found."""
        own = CohortReleases(self.rate)
        start: Multiplier = NoiseRule.SHARED if noise is None else self._scale * noise
        if self.is_published:
            sums = own.rebalanced(self.clients, self.ratio or IDENTIFIER_RATIO, start)
        else:
            sums = own.sums(start, (self.ratio or HISTOGRAM_RATIO) if self.rule == "route" else None)
        return client_plan(sums, self.rounds)

    def noises(self, plan: PrivacyPlan) -> dict[str, float]:
        """Every noise multiplier of such a plan, by the name under which it is printed."""
        sums = plan.planned(CohortSums, SUMS, POPULATION)
        found = {"noise_multiplier": sums.multiplier / self._scale, "noise_on_sum": sums.multiplier}
        if sums.histogram_ratio is not None:
            found["histogram_noise_multiplier"] = sums.histogram_multiplier
        if sums.identifier_ratio is not None:
            found["identifier_noise_multiplier"] = sums.identifier_multiplier
        return found

    @property
    def _scale(self) -> float:
        return 2.0 if self.is_published else 1.0
