"""What the members of a cohort compute from their records: which model fits them, what they learn from it.

Whoever opens a cohort flips the coins and releases sums (`cohorts`); this is the other half, without noise.
In a simulation all members are here; between sites each is at home, as the only member.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.algorithms.protocol import (
    Assignment,
    Choice,
    CohortJob,
    Drafts,
    LocalTraining,
    OwnChoice,
    Parts,
    Vector,
)
from coterie.engines.memory import keep_freed_memory
from coterie.engines.workers import Call, WorkerPool
from coterie.errors import PlanError
from coterie.models.check import one_thread
from coterie.privacy import CohortSums
from coterie.training.learner import Batch, Learner, on_device
from coterie.training.local_sgd import LocalSGD, LocalTrainer, stacks
from coterie.training.scoring import join, padded_loss_sums, score_sums, select_lowest

NO_ANSWER = -1
"""In place of a choice: a member that was sampled and did not answer. It adds nothing to any sum."""


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
        return self.job.choice is not Choice.GIVEN

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

    def choose(self, cohort: OpenCohort) -> NDArray[np.int64]:
        """The row that each sampled member chooses; NO_ANSWER where none came."""
        ...

    def learn(self, cohort: OpenCohort, waiting: Sequence[OpenCohort]) -> Tensor:
        """What each sampled member learnt, from the row it chose; zeros for who did not answer.

        Args:
            waiting: all open cohorts whose members have not learnt yet, this one among them; `updates` of the
                others may be filled in, too.
        """
        ...


class LocalMembers:
    """All members are on this machine."""

    def __init__(
        self,
        learner: Learner,
        records: Mapping[str, Batch],
        workers: Callable[[float], WorkerPool | None] = lambda gradients: None,
    ) -> None:
        """Args:

        workers: processes that compute on a CPU, a member each, if so many gradients repay their start.
        """
        self._learner = learner
        self._records = records
        self._workers = workers
        self._local = LocalTrainer(learner)
        self._personal: dict[str, Tensor] = {}

    def choose(self, cohort: OpenCohort) -> NDArray[np.int64]:
        job = cohort.job
        return self._choose(cohort.sampled, job.models, job.choice, job.training, job.parts, cohort)

    def learn(self, cohort: OpenCohort, waiting: Sequence[OpenCohort]) -> Tensor:
        """A GPU trains the members of all cohorts that learn alike in one program: the groups of an epoch."""
        if cohort.job.drafts is not None:
            return self._drafted(cohort, cohort.job.drafts)
        together = [cohort]
        if stacks(self._learner):
            together = [other for other in waiting if _alike(other.job, cohort.job)]
        starts = [self._starts(each) for each in together]
        members = [(member, each) for each in together for member in each.sampled]
        # Also for a group that nobody was sampled of: the shape must not tell.
        wave = sum(each.wave for each in together)
        updates = self._train(members, torch.cat(starts), cohort.job.training, wave)
        parts = torch.split(updates, [len(own) for own in starts])
        for each, own, learnt in zip(together, starts, parts, strict=True):
            each.updates = learnt
            self._keep_personal(each, own + learnt)
        assert cohort.updates is not None
        return cohort.updates

    def _drafted(self, cohort: OpenCohort, drafts: Drafts) -> Tensor:
        """What members learnt in all, each training but the first from a mean of raw updates."""
        starts, group = self._starts(cohort), on_device(drafts.model, self._learner.device)
        members, wave = [(member, cohort) for member in cohort.sampled], cohort.wave
        total = torch.zeros_like(starts)
        for turn in range(drafts.trainings):
            learnt = self._train(members, starts, cohort.job.training, wave, turn)
            total += learnt
            group = group + learnt.sum(dim=0) / drafts.divisor
            starts = group.expand(len(starts), -1)
        return total

    def _starts(self, cohort: OpenCohort) -> Tensor:
        """Where each sampled member starts, (members, parameters)."""
        models = on_device(cohort.job.models, self._learner.device)
        starts = [
            self._with_personal(member, models[row], cohort.job.parts)
            for member, row in zip(cohort.sampled, cohort.choices.tolist(), strict=True)
        ]
        return torch.stack(starts) if starts else models.new_zeros(0, models.shape[1])

    def _keep_personal(self, cohort: OpenCohort, learnt: Tensor) -> None:
        """Personal parts stay with their members."""
        job = cohort.job
        if job.parts is not None and bool(job.parts.personal.any()):
            personal = torch.from_numpy(job.parts.personal).to(learnt.device)
            for member, part in zip(cohort.sampled, learnt[:, personal], strict=True):
                if bool(torch.isfinite(part).all()):
                    self._personal[member] = part.clone()

    def _train(
        self,
        members: Sequence[tuple[str, OpenCohort | None]],
        starts: Tensor,
        training: LocalTraining,
        wave: int,
        turn: int = 0,
    ) -> Tensor:
        """The update of every member, each in the cohort that it was sampled for."""
        rule = LocalSGD(**vars(training))
        seeds = [0 if cohort is None else cohort.order(member, turn) for member, cohort in members]
        pool = self._workers(self._gradients(members, rule, wave))
        if pool is not None:
            return self._train_apart(pool, members, starts, rule, seeds)
        records = [self._records[member] for member, _ in members]
        batches = [rule.batches(len(own), seed) for own, seed in zip(records, seeds, strict=True)]
        keep_freed_memory()
        with one_thread():
            return self._local.train(starts, records, batches, rule, wave=wave)

    def _train_apart(
        self,
        pool: WorkerPool,
        members: Sequence[tuple[str, OpenCohort | None]],
        starts: Tensor,
        rule: LocalSGD,
        seeds: Sequence[int],
    ) -> Tensor:
        """A core per member."""
        calls: dict[str, Call] = {
            member: ("learn", (member, start, rule, seed))
            for (member, _), start, seed in zip(members, starts.numpy(), seeds, strict=True)
        }
        if len(calls) != len(members):
            raise PlanError("a member was asked to train twice at a time")
        learnt = pool.run(calls)
        updates = [torch.from_numpy(learnt[member]) for member, _ in members]
        return torch.stack(updates) if updates else torch.zeros_like(starts)

    def _gradients(
        self, members: Sequence[tuple[str, OpenCohort | None]], rule: LocalSGD, wave: int
    ) -> float:
        """Gradients of records in a whole run, in expectation; without a cohort, in this training."""
        cohort = members[0][1] if members else None
        population = tuple(self._records) if cohort is None else cohort.job.members
        sizes = [len(self._records[member]) for member in population]
        each = rule.batch * rule.steps(round(sum(sizes) / max(1, len(sizes))))
        if cohort is None:
            return each * wave
        return each * wave * cohort.times

    def serve(self, models: OwnChoice) -> Assignment:
        """The model that each client would choose for itself; for evaluation, outside any guarantee."""
        names = tuple(self._records)
        rows = self._choose(names, models.models, models.choice, models.training, models.parts)
        cluster_of = dict(zip(names, rows.tolist(), strict=True))
        own: dict[str, Vector] = {}
        if models.parts is not None:
            for name, part in self.personal.items():
                own[name] = models.models[cluster_of[name]].copy()
                own[name][models.parts.personal] = part
        return Assignment(models.models, cluster_of, own)

    # --- what members keep --------------------------------------------------------------------------

    @property
    def personal(self) -> dict[str, NDArray[np.float32]]:
        """The personal parts of those who have any; to be kept apart from everything released."""
        return {name: part.cpu().numpy() for name, part in self._personal.items()}

    @personal.setter
    def personal(self, parts: Mapping[str, NDArray[np.float32]]) -> None:
        self._personal = {name: on_device(part, self._learner.device) for name, part in parts.items()}

    def _with_personal(self, member: str, model: Tensor, parts: Parts | None) -> Tensor:
        own = self._personal.get(member)
        if parts is None or own is None:
            return model
        model = model.clone()
        model[torch.from_numpy(parts.personal).to(model.device)] = own
        return model

    # --- members' choices -----------------------------------------------------------------------------

    def _choose(
        self,
        members: Sequence[str],
        models: NDArray[np.float32],
        choice: Choice,
        training: LocalTraining,
        parts: Parts | None,
        cohort: OpenCohort | None = None,
    ) -> NDArray[np.int64]:
        """The row that each member chooses."""
        if choice is Choice.GIVEN or not members:
            return np.zeros(len(members), dtype=np.int64)
        stacked = on_device(models, self._learner.device)
        if choice is Choice.LOWEST_LOSS:
            wave = None if cohort is None else cohort.wave
            losses = self._losses(members, stacked, parts, wave)
            return np.array([select_lowest(own) for own in losses], dtype=np.int64)
        middle = stacked.mean(dim=0)
        each = [(member, cohort) for member in members]
        wave = len(members) if cohort is None else cohort.wave
        trained = self._train(each, middle.expand(len(members), -1), training, wave)
        return nearest(trained, stacked - middle)

    def _losses(
        self, members: Sequence[str], models: Tensor, parts: Parts | None, wave: int | None
    ) -> NDArray[np.float64]:
        """Sum of the losses of every model on each member's records: (members, models).

        Args:
            wave: members that a GPU computes at a time, so that what one finds has the same bits whoever
                else was sampled; on a processor each goes through the models alone. None for evaluation.
        """
        batches = [self._records[member] for member in members]
        personal = parts is not None and bool(parts.personal.any())
        with one_thread():
            if wave is None and not personal:
                table, sizes = join(batches), [len(batch) for batch in batches]
                return np.stack([score_sums(self._learner, model, table, sizes)[1] for model in models], 1)
            if wave is not None and not personal and stacks(self._learner):
                longest = max(len(own) for own in self._records.values())
                return padded_loss_sums(self._learner, models, batches, wave, longest)
            pool = None if personal else self._workers(0.0)
            if pool is not None:
                apart = pool.run({member: ("score", (member, models.numpy())) for member in members})
                return np.stack([apart[member][:, 1] for member in members])
            found = np.empty((len(members), len(models)))
            for position, (member, batch) in enumerate(zip(members, batches, strict=True)):
                for row, model in enumerate(models):
                    own = self._with_personal(member, model, parts)
                    found[position, row] = score_sums(self._learner, own, batch, [len(batch)])[1][0]
        return found


def nearest(updates: Tensor, directions: Tensor) -> NDArray[np.int64]:
    """The centre in whose direction each update from the mean of the centres points most.

    A client's model after one round is the mean plus a short step, while centres drift apart round by round:
    by plain distance the centre that moved least would win everybody. By angle no centre wins for being near.
    """
    lengths = torch.linalg.vector_norm(directions.double(), dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    cosines = (updates.double() @ directions.double().T) / lengths
    found: NDArray[np.int64] = np.argmax(np.nan_to_num(cosines.cpu().numpy(), nan=-np.inf), axis=1)
    return found


def _alike(one: CohortJob, other: CohortJob) -> bool:
    """May their members train as one program?"""
    return one.training == other.training and one.drafts is None and other.drafts is None
