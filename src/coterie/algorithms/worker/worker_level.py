"""What algorithms share whose unit is one worker of overlapping groups: the plan, and one epoch.

"Overlapping Grouped Learning" with worker-level privacy; line numbers in comments are those of its
Algorithm 1. A worker may be in several groups. Epoch t merges iff (t - 1) mod S = 0: a worker then starts
from the mean of its groups' models, else from the group's own. Each group samples its workers with a coin for
each worker, group and epoch; what they learnt is clipped, summed, released with noise and divided by the
public expected number of participants.

What a worker leaks, and to whom, is not the sum of its releases: `observer` says who sees what when, and
coterie.groups counts from there. That count, and the bound for what passes through few workers, rests on what
this file does: all groups start from one public model, a worker keeps nothing from one epoch to the next, and
a group's model is a function of its own releases.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from coterie.algorithms.clusters import equal_starts
from coterie.algorithms.protocol import (
    Algorithm,
    Assignment,
    Cohort,
    CohortJob,
    Drafts,
    LocalTraining,
    Models,
    Opened,
    PublicFacts,
    Rng,
    Rounds,
    State,
    Sum,
    Sums,
    ask,
)
from coterie.algorithms.settings import (
    AlgorithmSettings,
    Clip,
    NoiseMultiplier,
    PrivacySettings,
    Rate,
    Schedule,
)
from coterie.algorithms.worker.masters import MasterSettings
from coterie.errors import InputError
from coterie.groups import GroupAlgorithm, GroupSchedule, Noise, Observer, Structure, Threat
from coterie.groups.schedule import one_each
from coterie.privacy import Adjacency, CohortSums, NoiseRule, PlannedRelease, PrivacyPlan, Unit
from coterie.privacy.plans import CohortReleases, group_release, plan_of
from coterie.privacy.ranges import STEPS


class WorkerLevelSettings(AlgorithmSettings):
    """Options of training in groups."""

    rate: Rate | tuple[Rate, ...] = Field(
        0.7, description="probability that a worker takes part in a release of a group; one, or one each"
    )
    noise: NoiseMultiplier | tuple[NoiseMultiplier, ...] | None = Field(
        None,
        description="noise on a group's sum over its clip; one number, or one each; null: the least that "
        "keeps every worker within privacy.epsilon",
    )
    clip: Clip | tuple[Clip, ...] | None = Field(
        None, description="largest norm of a worker's update; one number, or one each; null: privacy.clip"
    )
    iterations: int | None = Field(
        None,
        ge=1,
        le=STEPS.most,
        description="local steps in an epoch (L); null: schedule.epochs passes over the records",
    )
    threat_model: Literal[1, 2] | None = Field(
        None, description="observers: any other worker (1), or those of other groups (2); null: the usual one"
    )
    master: MasterSettings = Field(default_factory=MasterSettings, description="how masters step")


@dataclass(frozen=True)
class WorkerLevelState(State):
    """The model of every group, and what its master remembers.

    Args:
        groups: the workers of each group, by their place among the clients.
        models: one for each group (row).
    """

    fixed: ClassVar[frozenset[str]] = State.fixed | {"groups"}
    groups: tuple[tuple[int, ...], ...]
    models: Models
    first_moment: Models
    second_moment: Models


class WorkerLevel(Algorithm[WorkerLevelState]):
    """Groups that may overlap, each with a model that moves by a noisy sum of its workers' updates.

    Attributes:
        period: epochs from one merge to the next.
        block: epochs from one release of a group to the next, in which its workers train alone.
        drafts: how often the members of a group train before a release, sharing drafts without noise.
    """

    unit = Unit.WORKER
    settings: WorkerLevelSettings
    rule: ClassVar[GroupAlgorithm] = GroupAlgorithm.DP_OGL

    def __init__(self, settings: WorkerLevelSettings, schedule: Schedule, privacy: PrivacySettings) -> None:
        super().__init__(settings, schedule, privacy)
        self.period, self.block, self.drafts = 1, 1, 1
        if privacy.adjacency is Adjacency.ADD_REMOVE:
            raise InputError(
                "privacy.adjacency: add-remove would make the size of a group secret, but its updates are "
                "divided by it; allowed for unit worker: zero-out, replace-one"
            )
        if privacy.accountant != "rdp":
            raise InputError(
                f"privacy.accountant: '{privacy.accountant}' is not allowed for unit worker, rdp is: what "
                "passes through several groups is bounded by Renyi divergences"
            )

    # --- what is public ------------------------------------------------------------------------------

    def structure(self, facts: PublicFacts) -> Structure:
        """Who is in which group."""
        if facts.structure is None:
            raise InputError(f"federation.kind: '{self.name}' needs workers in groups; allowed: groups")
        return facts.structure

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        """For every worker, one kind of release for each group that it is in."""
        structure = self.structure(facts)
        self.privacy.check_budgets(facts.clients)
        sums, times = self._sums(len(structure.groups)), self.schedule.rounds // self.block
        releases = {
            worker: [
                PlannedRelease(group_release(group), sums[group], times)
                for group in sorted(structure.groups_of(number))
            ]
            for number, worker in enumerate(facts.clients)
        }
        return plan_of(Unit.WORKER, self.privacy.adjacency, releases, structure.caveats)

    def _sums(self, groups: int) -> list[CohortSums]:
        """The mechanism of every group; the clip of an epoch grows with the root of a block."""
        settings, length = self.settings, math.sqrt(self.block)
        rates = one_each("algorithm.rate", settings.rate, groups)
        own = self.privacy.clip if settings.clip is None else settings.clip
        clips = one_each("algorithm.clip", own, groups)
        noises: Sequence[float | NoiseRule] = [NoiseRule.SHARED] * groups
        if settings.noise is not None:
            noises = one_each("algorithm.noise", settings.noise, groups)
        return [
            CohortReleases(rate, length * clip, self.privacy.adjacency).sums(noise, drafted=self.drafts > 1)
            for rate, clip, noise in zip(rates, clips, noises, strict=True)
        ]

    def observer(self, facts: PublicFacts, plan: PrivacyPlan) -> Observer:
        """Who sees what when; rates and noise are read back from the plan that is executed."""
        structure = self.structure(facts)
        sums = (
            plan.planned(CohortSums, group_release(group), *(facts.clients[member] for member in members))
            for group, members in enumerate(structure.groups)
        )
        noises = tuple(Noise(own.rate, own.multiplier) for own in sums)
        schedule = GroupSchedule(self.rule, self.period, noises, self.privacy.mode)
        threat = Threat(self.settings.threat_model or schedule.usual_threat)
        return Observer(structure, schedule, threat, self.schedule.rounds)

    # --- epochs --------------------------------------------------------------------------------------

    def start(self, facts: PublicFacts, rng: Rng) -> WorkerLevelState:
        structure = self.structure(facts)
        groups = len(structure.groups)
        # One public model for all groups (line 1): the first merge then carries nothing across.
        seed, models = equal_starts(facts, rng, groups)
        moments = self.settings.master.moments(groups, facts.parameters)
        return WorkerLevelState(0, facts.clients, seed, structure.groups, models, *moments)

    def local_training(self) -> LocalTraining:
        epochs, own = self.block // self.drafts, self.schedule
        iterations = None if self.settings.iterations is None else epochs * self.settings.iterations
        return LocalTraining(epochs * own.epochs, own.batch, own.lr, iterations=iterations)

    def local_gradients(self, records: int) -> int:
        training = self.local_training()
        if training.iterations is None:
            return self.drafts * training.epochs * records
        return self.drafts * training.iterations * min(training.batch, records)

    def round(self, state: WorkerLevelState) -> Rounds[WorkerLevelState]:
        """Lines 4 to 25 for all groups; every cohort is open before the first is added up."""
        epoch = state.round + 1
        if epoch % self.block:
            return replace(state, round=epoch)
        merges = (epoch - self.block) % self.period == 0  # line 9, epochs numbered from 1
        own, training = self.models(state) if merges else None, self.local_training()
        cohorts = []
        rates = one_each("algorithm.rate", self.settings.rate, len(state.groups))
        expected = [rate * len(members) for rate, members in zip(rates, state.groups, strict=True)]
        for group, members in enumerate(state.groups):
            names = tuple(state.clients[member] for member in members)
            if own is None:
                job = CohortJob(names, state.models[group][None], training)  # line 15
            else:
                rows = sorted({own.cluster_of[name] for name in names})
                start_of = {name: rows.index(own.cluster_of[name]) for name in names}
                job = CohortJob(names, own.models[rows], training, start_of=start_of)  # line 12
            if self.drafts > 1:
                job = replace(job, drafts=Drafts(self.drafts, state.models[group], expected[group]))
            cohorts.append((yield from ask(Cohort(group_release(group), job), Opened)))
        means = np.empty(state.models.shape, dtype=np.float64)
        for group, cohort in enumerate(cohorts):
            sums = yield from ask(Sum(cohort), Sums)
            # Line 24: by the number of participants to be expected, which is public; never by who came.
            means[group] = sums.rows.value[0] / expected[group]
        step, first, second = self.settings.master.step(means, state.first_moment, state.second_moment)
        return replace(
            state,
            round=epoch,
            models=(state.models + step).astype(np.float32),
            first_moment=first,
            second_moment=second,
        )

    def models(self, state: WorkerLevelState) -> Assignment:
        """Every worker's own, the mean of its groups' (line 27); workers in the same groups share one."""
        groups_of: list[tuple[int, ...]] = [()] * len(state.clients)
        for group, members in enumerate(state.groups):
            for member in members:
                groups_of[member] += (group,)
        row_of = {kind: row for row, kind in enumerate(sorted(set(groups_of)))}
        means = [state.models[list(kind)].mean(axis=0, dtype=np.float64) for kind in row_of]
        rows = (row_of[kind] for kind in groups_of)
        return Assignment(np.stack(means).astype(np.float32), dict(zip(state.clients, rows, strict=True)))
