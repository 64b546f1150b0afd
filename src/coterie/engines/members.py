"""What the members of a cohort compute from their records: which model fits them, what they learn from it.

Whoever opens a cohort flips the coins and releases sums (`cohorts`); this is the other half, without noise.
In a simulation all members are here; between sites each is at home, as the only member.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.algorithms.protocol import (
    Assignment,
    Choice,
    CohortJob,
    Drafts,
    OwnChoice,
    Parts,
    Sketch,
    Vector,
)
from coterie.engines.clients import Clients
from coterie.engines.computing import Computing, PendingJobs, at_once
from coterie.models.check import one_thread
from coterie.privacy import CohortSums
from coterie.training.learner import on_device
from coterie.training.local_sgd import LocalJob, LocalSGD, LocalTrainer, stacks
from coterie.training.scoring import join, padded_loss_sums, same_bits_anywhere, score_sums, select_lowest

log = logging.getLogger(__name__)

NO_ANSWER = -1
"""In place of a choice: a member that was sampled and did not answer. It adds nothing to any sum."""
SERVED_AT_ONCE = 64
"""Members that a GPU trains at one time where all of them choose a model to use."""


@dataclass
class OpenCohort:
    """A secret sample until its sums are released: what it is asked, and what it answered.

    Args:
        times: how often the plan allows such a cohort.
        sampled: who takes part.
        order: seed of the order in which a member goes through its records, by name and turn;
            nothing rests on it being secret.
        choices: the row that each sampled member chose, or was told; or NO_ANSWER.
        updates: what the sampled members learnt, once they have: (members, parameters).
    """

    release: str
    job: CohortJob
    mechanism: CohortSums
    times: int
    round: int
    input_hash: str
    sampled: tuple[str, ...]
    order: Callable[[str, int], int]
    choices: NDArray[np.int64]
    counted: bool = False
    updates: Tensor | None = None

    @property
    def chooses(self) -> bool:
        return self.job.chooses

    @property
    def wave(self) -> int:
        """Members to compute at once: a function of public numbers, not of how many were sampled."""
        return self.mechanism.sampling.room(len(self.job.members))

    def told(self) -> NDArray[np.int64]:
        """The row that each sampled member is told to start from."""
        start_of = self.job.start_of or dict.fromkeys(self.sampled, 0)
        return np.array([start_of[member] for member in self.sampled], dtype=np.int64)


class Members(Protocol):
    """Whoever computes for the members of a cohort: here, or elsewhere."""

    def choose(self, cohort: OpenCohort) -> Computing[NDArray[np.int64]]:
        """The row that each sampled member chooses; NO_ANSWER where none came."""

    def learn(self, cohort: OpenCohort, waiting: Sequence[OpenCohort]) -> Computing[Tensor]:
        """What each sampled member learnt, from the row it chose; zeros for who did not answer.

        Args:
            waiting: all open cohorts whose members have not learnt yet, this one among them; `updates` of the
                others may be filled in, too.
        """


@dataclass(frozen=True)
class Lesson:
    """What some members are to learn.

    Args:
        starts: makes the parameters from which each starts, (members, parameters).
        order: seed of the order in which a member goes through its records.
        wave: members for which there is room, a public number.
        everyone, times: of whom the members are a sample, and how often there is one in a run.
    """

    members: tuple[str, ...]
    starts: Callable[[], Tensor]
    rule: LocalSGD
    order: Callable[[str], int]
    wave: int
    everyone: tuple[str, ...] = ()
    times: int = 1

    @classmethod
    def of(cls, cohort: OpenCohort, starts: Callable[[], Tensor], turn: int = 0) -> "Lesson":
        """For the sampled members of a cohort."""
        job = cohort.job
        return cls(
            members=cohort.sampled,
            starts=starts,
            rule=LocalSGD(**vars(job.training)),
            order=lambda member: cohort.order(member, turn),
            wave=cohort.wave,
            everyone=job.members,
            times=cohort.times,
        )


class LocalMembers:
    """All members are on this machine.

    Args:
        personal: the personal parts of those who have any; to be kept apart from everything released.
    """

    def __init__(self, clients: Clients) -> None:
        self._clients, self._learner, self._records = clients, clients.learner, clients.records
        self.trainer = LocalTrainer(clients.learner, tf32=not clients.learner.full_precision)
        """Where members learn in one program; it may be shared with those of other runs."""
        self.personal: Mapping[str, Vector] = {}
        self._sketched: tuple[bytes, int] | None = None
        self._known: dict[str, NDArray[np.float64]] = {}

    def choose(self, cohort: OpenCohort) -> Computing[NDArray[np.int64]]:
        return self._choose(cohort.sampled, cohort.job, cohort)

    def learn(self, cohort: OpenCohort, waiting: Sequence[OpenCohort]) -> Computing[Tensor]:
        """A GPU trains the members of all cohorts that learn alike in one program: the groups of an epoch."""
        if cohort.job.drafts is not None:
            return (yield from self._drafted(cohort, cohort.job.drafts))
        if (sketch := cohort.job.sketch) is not None and sketch.statistic is not None:
            points = self._sketches(cohort.sampled, sketch)
            added = [torch.from_numpy(sketch.contribution(points[member])) for member in cohort.sampled]
            return torch.stack(added) if added else torch.zeros(0, sketch.numbers)
        together = [cohort]
        if stacks(self._learner):
            alike = [other for other in waiting if other.job.training == cohort.job.training]
            alike = [other for other in alike if other.job.sketch is None or other.chooses]
            together = [other for other in alike if other.job.drafts is None]
        learnt = yield from self._train([Lesson.of(each, partial(self._starts, each)) for each in together])
        for each, own in zip(together, learnt, strict=True):
            each.updates = own
        self._keep_personal(together)
        assert cohort.updates is not None
        return cohort.updates

    def _drafted(self, cohort: OpenCohort, drafts: Drafts) -> Computing[Tensor]:
        """What members learnt in all, each training but the first from a mean of raw updates."""
        starts, group = self._starts(cohort), on_device(drafts.model, self._learner.device)
        total = torch.zeros_like(starts)
        for turn in range(drafts.trainings):
            (learnt,) = yield from self._train([Lesson.of(cohort, partial(_same, starts), turn)])
            total += learnt
            group = group + learnt.sum(dim=0) / drafts.divisor
            starts = group.expand(len(starts), -1)
        return total

    def _starts(self, cohort: OpenCohort) -> Tensor:
        """Where each sampled member starts, (members, parameters)."""
        job, device = cohort.job, self._learner.device
        starts = on_device(job.models, device)[torch.from_numpy(cohort.choices).to(device)]
        if _any_personal(job.parts):
            personal = torch.from_numpy(job.parts.personal).to(device)
            for start, member in zip(starts, cohort.sampled, strict=True):
                if member in self.personal:
                    start[personal] = on_device(self.personal[member], device)
        return starts

    def _keep_personal(self, cohorts: Sequence[OpenCohort]) -> None:
        """Personal parts stay with their members, who all started from those of before."""
        kept: dict[str, Vector] = {}
        for cohort in cohorts:
            if _any_personal(cohort.job.parts) and cohort.updates is not None:
                learnt = self._starts(cohort) + cohort.updates
                parts = learnt[:, torch.from_numpy(cohort.job.parts.personal).to(learnt.device)].cpu().numpy()
                own = dict(zip(cohort.sampled, parts, strict=True))
                kept |= {member: part.copy() for member, part in own.items() if np.isfinite(part).all()}
        self.personal = {**self.personal, **kept}

    def _own(self, member: str, models: NDArray[np.float32], parts: Parts | None) -> NDArray[np.float32]:
        """The models as a member uses them, with its personal parts."""
        if parts is not None and member in self.personal:
            models = models.copy()
            models[..., parts.personal] = self.personal[member]
        return models

    def _train(self, lessons: Sequence[Lesson]) -> Computing[list[Tensor]]:
        """By lesson, the update of every member."""
        seeds = [[lesson.order(member) for member in lesson.members] for lesson in lessons]
        if not stacks(self._learner):
            return [self._apart(*each) for each in zip(lessons, seeds, strict=True)]
        jobs = []
        for lesson, own_seeds in zip(lessons, seeds, strict=True):
            records, rule = [self._records[member] for member in lesson.members], lesson.rule
            batches = [rule.batches(len(own), seed) for own, seed in zip(records, own_seeds, strict=True)]
            jobs.append(LocalJob(lesson.starts, records, batches, rule, lesson.wave))
        return list((yield PendingJobs(self.trainer, jobs)))

    def _apart(self, lesson: Lesson, seeds: Sequence[int]) -> Tensor:
        """The same on a processor, one member after the other or a core each."""
        starts = lesson.starts()
        given = zip(lesson.members, starts.cpu().numpy(), seeds, strict=True)
        learnt = self._clients.run(
            {name: ("learn", (name, start, lesson.rule, seed)) for name, start, seed in given},
            self._gradients(lesson),
        )
        updates = [torch.from_numpy(learnt[name]) for name in lesson.members]
        return torch.stack(updates).to(starts.device) if updates else torch.zeros_like(starts)

    def _gradients(self, lesson: Lesson) -> float:
        """Gradients of records in a whole run, in expectation; without a cohort, in this training."""
        everyone, rule = lesson.everyone or tuple(self._records), lesson.rule
        records = sum(len(self._records[member]) for member in everyone)
        steps = rule.steps(round(records / max(1, len(everyone))))
        return rule.batch * steps * lesson.wave * lesson.times

    def serve(self, models: OwnChoice) -> Assignment:
        """The model that each client would choose for itself; for evaluation, outside any guarantee."""
        names = tuple(self._records)
        cluster_of = dict(zip(names, at_once(self._choose(names, models)).tolist(), strict=True))
        personal = self.personal if models.parts is not None else ()
        own = {name: self._own(name, models.models[cluster_of[name]], models.parts) for name in personal}
        return Assignment(models.models, cluster_of, own)

    # --- members' choices -----------------------------------------------------------------------------

    def _choose(
        self, members: Sequence[str], asked: CohortJob | OwnChoice, cohort: OpenCohort | None = None
    ) -> Computing[NDArray[np.int64]]:
        """The row that each member chooses."""
        if asked.choice is Choice.GIVEN or not members:
            return np.zeros(len(members), dtype=np.int64)
        if asked.sketch is not None:
            points = self._sketches(members, asked.sketch)
            return np.array([asked.sketch.nearest(points[member]) for member in members], dtype=np.int64)
        if asked.choice is Choice.LOWEST_LOSS:
            losses = self._losses(members, asked.models, asked.parts, sampled=cohort is not None)
            return np.array([select_lowest(own) for own in losses], dtype=np.int64)
        models = on_device(asked.models, self._learner.device)
        middle = models.mean(dim=0)
        starts = partial(_same, middle.expand(len(members), -1))
        if cohort is None:
            rule = LocalSGD(**vars(asked.training))
            wave = min(len(members), SERVED_AT_ONCE)
            lesson = Lesson(tuple(members), starts, rule, lambda member: 0, wave)
        else:
            lesson = Lesson.of(cohort, starts)
        (trained,) = yield from self._train([lesson])
        return nearest(trained, models - middle)

    def _sketches(self, members: Sequence[str], sketch: Sketch) -> Mapping[str, NDArray[np.float64]]:
        """The sketch of each member, of its own records alone; computed once and kept here."""
        of = (sketch.start.tobytes(), sketch.dimensions)
        if self._sketched != of:
            self._sketched, self._known = of, {}
        new = [member for member in members if member not in self._known]
        calls = {member: ("sketch", (member, sketch.start, sketch.dimensions)) for member in new}
        self._known |= self._clients.run(calls, gradients=0.0)
        return self._known

    @cached_property
    def _same_bits_anywhere(self) -> bool:
        found = same_bits_anywhere(self._learner)
        if not found:
            log.info("members choose one after the other: outputs differ by where a record stands")
        return found

    def _losses(
        self, members: Sequence[str], models: NDArray[np.float32], parts: Parts | None, *, sampled: bool
    ) -> NDArray[np.float64]:
        """Sum of the losses of every model on each member's records: (members, models).

        Args:
            sampled: whether what one finds must have the same bits whoever else was sampled, and not for
                evaluation: a GPU then computes in constant shapes, where that is enough; else, each alone.
        """
        if _any_personal(parts) or (sampled and not stacks(self._learner)):
            apart = self._clients.run(
                {member: ("score", (member, self._own(member, models, parts))) for member in members},
                gradients=0.0,
            )
            return np.stack([apart[member][:, 1] for member in members])
        batches = [self._records[member] for member in members]
        stacked = on_device(models, self._learner.device)
        with one_thread():
            if sampled and self._same_bits_anywhere:
                return padded_loss_sums(self._learner, stacked, batches)
            if sampled:
                alone = [padded_loss_sums(self._learner, stacked, [own], len(own)) for own in batches]
                return np.concatenate([np.zeros((0, len(models))), *alone])
            table, sizes = join(batches), [len(batch) for batch in batches]
            return np.stack([score_sums(self._learner, model, table, sizes)[1] for model in stacked], axis=1)


def _any_personal(parts: Parts | None) -> TypeGuard[Parts]:
    return parts is not None and bool(parts.personal.any())


def _same(starts: Tensor) -> Tensor:
    return starts


def nearest(updates: Tensor, directions: Tensor) -> NDArray[np.int64]:
    """The centre in whose direction each update from the mean of the centres points most.

    A client's model after one round is the mean plus a short step, while centres drift apart round by round:
    by plain distance the centre that moved least would win everybody. By angle no centre wins for being near.
    """
    lengths = torch.linalg.vector_norm(directions.double(), dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    # One product for each member: of several rows at a time, last bits depend on how many there are.
    products = [directions.double() @ update.double() for update in updates]
    cosines = torch.stack(products) / lengths if products else updates.new_zeros(0, len(lengths))
    return np.asarray(np.argmax(np.nan_to_num(cosines.cpu().numpy(), nan=-np.inf), axis=1))
