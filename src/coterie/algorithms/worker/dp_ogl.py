"""`dp-ogl`, `dp-ogl-plus` and, for one group of all, `dp-fedavg`: workers learn in overlapping groups.

"Overlapping Grouped Learning" with worker-level privacy; line numbers in comments are those of its
Algorithm 1. A worker may be in several groups. Epoch t merges iff (t - 1) mod S = 0: a worker then starts
from the mean of its groups' models, else from the group's own. Each group samples its workers with a coin for
each worker, group and epoch; what they learnt is clipped, summed, released with noise and divided by the
public expected number of participants.

What a worker leaks, and to whom, is not the sum of its releases: `watched` says who sees what when, and
coterie.groups counts from there. That count, and the bound for what passes through few workers, rests on what
this file does: all groups start from one public model, a worker keeps nothing from one epoch to the next, and
a group's model is a function of its own releases.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from coterie.algorithms.protocol import (
    Algorithm,
    Assignment,
    CohortJob,
    Drafts,
    LocalTraining,
    PublicFacts,
    Rounds,
    State,
    add_up,
    open_cohort,
)
from coterie.algorithms.record.planning import check_budgets
from coterie.algorithms.registry import register
from coterie.algorithms.settings import (
    AlgorithmSettings,
    Clip,
    NoiseMultiplier,
    PrivacySettings,
    Rate,
    Schedule,
)
from coterie.algorithms.worker.masters import MasterSettings, Models
from coterie.errors import InputError
from coterie.groups import GroupAlgorithm, Noise, Observer, Structure, Threat
from coterie.groups import Schedule as GroupSchedule
from coterie.groups.leakage import default_threat
from coterie.privacy import (
    Adjacency,
    DraftedSum,
    Mode,
    NoiseRule,
    PlannedRelease,
    PrivacyPlan,
    SampledSum,
    Unit,
    UnitPlan,
)
from coterie.privacy.ranges import STEPS
from coterie.privacy.threats import THREATS

EachGroup = float | tuple[float, ...]
"""One number for all groups, or one for each."""


class WorkerSettings(AlgorithmSettings):
    """Options of training in groups."""

    rate: Rate | tuple[Rate, ...] = Field(
        0.7,
        description="probability that a worker takes part in a release of a group; one, or one each",
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


class GroupedSettings(WorkerSettings):
    """Options of training in overlapping groups."""

    period: int = Field(10, ge=1, description="epochs from one merge of models to the next (S)")


@dataclass(frozen=True)
class GroupedState(State):
    groups: tuple[tuple[int, ...], ...]
    """The workers of each group, by their place among the clients."""
    models: Models
    """One for each group (row)."""
    first_moment: Models
    second_moment: Models


class Grouped(Algorithm[GroupedState]):
    """What the algorithms here share: the structure, the plan and one epoch."""

    unit = Unit.WORKER
    state_type = GroupedState
    settings: WorkerSettings
    rule: ClassVar[GroupAlgorithm] = GroupAlgorithm.DP_OGL

    def __init__(self, settings: WorkerSettings, schedule: Schedule, privacy: PrivacySettings) -> None:
        super().__init__(settings, schedule, privacy)
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

    @property
    def period(self) -> int:
        """Epochs from one merge to the next."""
        return 1

    @property
    def releases(self) -> int:
        """Releases of each group in the whole run."""
        return self.schedule.rounds

    @property
    def clip_factor(self) -> float:
        """The clip of a release over the clip of an epoch."""
        return 1.0

    def structure(self, facts: PublicFacts) -> Structure:
        """Who is in which group."""
        if facts.structure is None:
            raise InputError(f"federation.kind: '{self.name}' needs workers in groups; allowed: groups")
        return facts.structure

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        """For every worker, one kind of release for each group that it is in."""
        structure = self.structure(facts)
        check_budgets(facts, self.privacy)
        sums = self._sums(len(structure.groups))
        units = tuple(
            UnitPlan(
                worker,
                tuple(
                    PlannedRelease(release_name(group), sums[group], self.releases)
                    for group in sorted(structure.groups_of(number))
                ),
            )
            for number, worker in enumerate(facts.clients)
        )
        return PrivacyPlan(
            Unit.WORKER, self.privacy.adjacency, THREATS[Unit.WORKER], units, structure.caveats
        )

    @property
    def mechanism(self) -> type[SampledSum]:
        """What a group releases."""
        return SampledSum

    def _sums(self, groups: int) -> list[SampledSum]:
        """The mechanism of every group."""
        settings = self.settings
        rates = _each("algorithm.rate", settings.rate, groups)
        own = self.privacy.clip if settings.clip is None else settings.clip
        clips = _each("algorithm.clip", own, groups)
        noises: Sequence[float | NoiseRule] = [NoiseRule.SHARED] * groups
        if settings.noise is not None:
            noises = _each("algorithm.noise", settings.noise, groups)
        return [
            self.mechanism(self.clip_factor * clip, noise, rate, self.privacy.adjacency)
            for clip, noise, rate in zip(clips, noises, rates, strict=True)
        ]

    def watched(self, facts: PublicFacts, plan: PrivacyPlan) -> Observer:
        """Who sees what when; rates and noise are read back from the plan that is executed."""
        structure = self.structure(facts)
        noises = []
        for group, members in enumerate(structure.groups):
            sums = plan.release_of([facts.clients[member] for member in members], release_name(group))
            assert isinstance(sums, SampledSum)
            noises.append(Noise(sums.rate, sums.multiplier))
        schedule = GroupSchedule(self.rule, self.period, tuple(noises), self.privacy.mode)
        wanted = self.settings.threat_model
        threat = default_threat(schedule) if wanted is None else Threat(wanted)
        return Observer(structure, schedule, threat, self.schedule.rounds)

    # --- epochs --------------------------------------------------------------------------------------

    def start(self, facts: PublicFacts, rng: np.random.Generator) -> GroupedState:
        structure, seed = self.structure(facts), int(rng.integers(2**31))
        groups = len(structure.groups)
        first, second = self.settings.master.moments(groups, facts.parameters)
        return GroupedState(
            round=0,
            clients=facts.clients,
            seed=seed,
            groups=structure.groups,
            # One public model for all groups (line 1): the first merge then carries nothing across.
            models=np.repeat(facts.initialise(seed)[None], groups, axis=0),
            first_moment=first,
            second_moment=second,
        )

    def round(self, state: GroupedState) -> Rounds[GroupedState]:
        merges = state.round % self.period == 0  # line 9, epochs numbered from 1
        return (yield from self._epoch(state, merges))

    @property
    def drafts(self) -> int:
        """How often the members of a group train before a release, sharing drafts without noise."""
        return 1

    def local_training(self) -> LocalTraining:
        return self._training(1)

    def _training(self, epochs: int) -> LocalTraining:
        """So many epochs of a worker in a row."""
        iterations = self.settings.iterations
        return LocalTraining(
            epochs=epochs * self.schedule.epochs,
            batch=self.schedule.batch,
            lr=self.schedule.lr,
            iterations=None if iterations is None else epochs * iterations,
        )

    def local_gradients(self, records: int) -> int:
        training = self.local_training()
        if training.iterations is None:
            return self.drafts * training.epochs * records
        return self.drafts * training.iterations * min(training.batch, records)

    def _epoch(self, state: GroupedState, merges: bool) -> Rounds[GroupedState]:
        """Lines 4 to 25 for all groups; every cohort is open before the first is added up."""
        own, training = personal_models(state) if merges else None, self.local_training()
        cohorts = []
        rates = _each("algorithm.rate", self.settings.rate, len(state.groups))
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
            cohorts.append((yield from open_cohort(release_name(group), job)))
        means = np.empty(state.models.shape, dtype=np.float64)
        for group in range(len(state.groups)):
            sums = yield from add_up(cohorts[group])
            # Line 24: by the number of participants to be expected, which is public; never by who came.
            means[group] = sums.rows.value[0] / expected[group]
        step, first, second = self.settings.master.step(means, state.first_moment, state.second_moment)
        return replace(
            state,
            round=state.round + 1,
            models=(state.models + step).astype(np.float32),
            first_moment=first,
            second_moment=second,
        )

    def models(self, state: GroupedState) -> Assignment:
        return personal_models(state)


@register
class DPOGL(Grouped):
    """One release for each group and epoch."""

    name = "dp-ogl"
    settings_type = GroupedSettings
    settings: GroupedSettings

    @property
    def period(self) -> int:
        return self.settings.period


@register
class DPOGLPlus(DPOGL):
    """One release for each group and block of S epochs, in which workers train alone.

    Nothing is exchanged inside a block, so a block is one local training of S times the length, from the
    merged models at its start, with the clip sqrt(S) c. Models change at the end of a block only.

    As published (`privacy.mode: paper` alone) members exchange models inside a block, neither clipped nor
    noisy: one worker then moves what all of them send. The guarantee of such a run says what that leaves.
    """

    name = "dp-ogl-plus"
    rule = GroupAlgorithm.DP_OGL_PLUS

    def __init__(self, settings: GroupedSettings, schedule: Schedule, privacy: PrivacySettings) -> None:
        super().__init__(settings, schedule, privacy)
        if schedule.rounds < settings.period:
            raise InputError(
                f"algorithm.period: {settings.period} is longer than the run; allowed: 1 to {schedule.rounds}"
            )

    @property
    def releases(self) -> int:
        return self.schedule.rounds // self.period

    @property
    def clip_factor(self) -> float:
        return math.sqrt(self.period)

    def round(self, state: GroupedState) -> Rounds[GroupedState]:
        if (state.round + 1) % self.period:
            return replace(state, round=state.round + 1)
        return (yield from self._epoch(state, True))

    def local_training(self) -> LocalTraining:
        return self._training(self.period // self.drafts)

    @property
    def drafts(self) -> int:
        return self.period if self.privacy.mode is Mode.PAPER else 1

    @property
    def mechanism(self) -> type[SampledSum]:
        return DraftedSum if self.drafts > 1 else SampledSum


@register
class WorkerFedAvg(Grouped):
    """DP-FedAvg: everybody in one group, whatever groups there are."""

    name = "dp-fedavg"
    settings_type = WorkerSettings

    def structure(self, facts: PublicFacts) -> Structure:
        count = len(facts.clients)
        return Structure("global", (tuple(range(count)),), count, names=facts.clients)


def release_name(group: int) -> str:
    """How the plan and the ledger call what this group releases."""
    return f"group {group}"


def personal_models(state: GroupedState) -> Assignment:
    """Every worker's own model, the mean of its groups' (line 27); workers in the same groups share one."""
    groups_of: list[list[int]] = [[] for _ in state.clients]
    for group, members in enumerate(state.groups):
        for member in members:
            groups_of[member].append(group)
    kinds = sorted({tuple(mine) for mine in groups_of})
    means: list[NDArray[np.float64]] = [
        state.models[list(kind)].mean(axis=0, dtype=np.float64) for kind in kinds
    ]
    row_of = {kind: row for row, kind in enumerate(kinds)}
    return Assignment(
        np.stack(means).astype(np.float32),
        {worker: row_of[tuple(mine)] for worker, mine in zip(state.clients, groups_of, strict=True)},
    )


def _each(key: str, value: EachGroup, groups: int) -> tuple[float, ...]:
    if isinstance(value, int | float):
        return (float(value),) * groups
    if len(value) not in (1, groups):
        raise InputError(f"{key}: {len(value)} numbers; allowed: 1, or {groups}, one for each group")
    return tuple(value) if len(value) == groups else tuple(value) * groups
