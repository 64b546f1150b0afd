"""The members of a cohort as sites: each computes at home and sends its choice and its clipped update.

The server that opens the cohort is trusted with both, and trusts no site: whatever one sends adds one vector
of norm at most the clip to one sum, or nothing. Who was sampled is a secret that the noise counts on. So only
those are sent a message, nothing about them is kept but the journal of the round under way, and each has its
own time: what one site does decides nothing about whether another's answer counts.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor

from coterie.algorithms.protocol import CohortJob
from coterie.engines.flower import messages
from coterie.engines.flower.contract import Contract, TrustedWork, ranges_of
from coterie.engines.flower.messages import GarbageError, RequestId, SiteRequest
from coterie.engines.flower.server import read_score
from coterie.engines.flower.transport import Journal, NobodyAnswered, Transport
from coterie.engines.members import NO_ANSWER, OpenCohort
from coterie.errors import PlanError
from coterie.files import read_arrays, write_arrays
from coterie.privacy import EVALUATION

log = logging.getLogger(__name__)

Contribution: TypeAlias = tuple[int, NDArray[np.float64]]
"""The row that a member chose, and its clipped update without what is its own."""


@dataclass(frozen=True)
class _Sampled:
    """One sampled member of one of several cohorts."""

    member: str
    cohort: OpenCohort
    number: int


@dataclass
class RemoteMembers:
    """Asks the sites."""

    transport: Transport
    contracts: Mapping[str, Contract]
    parameters: int
    journal: Journal

    def __post_init__(self) -> None:
        self.digests = {name: contract.digest for name, contract in self.contracts.items()}

    def choose(self, cohort: OpenCohort) -> NDArray[np.int64]:
        """The choices of those who answered. Their updates come with them: models travel once."""
        return self._gather([cohort])[0]

    def learn(self, cohort: OpenCohort, waiting: Sequence[OpenCohort]) -> Tensor:
        """The updates of all cohorts that wait, so that the groups of an epoch are asked side by side."""
        self._gather([other for other in waiting if other.updates is None])
        assert cohort.updates is not None
        return cohort.updates

    def shares(self, models: Mapping[str, NDArray[np.float32]], round: int) -> dict[str, float]:
        """The share of its held-out records that each site's model gets right; of those who answer.

        Everybody is asked: who was sampled in this round stays a secret.

        Args:
            models: one for each site, in a row; or several that it chooses from itself.
        """
        digest = hashlib.sha256(b"".join(rows.tobytes() for rows in models.values())).hexdigest()
        path = self.journal.next(round, digest)
        if (known := read_arrays(path)) is None:
            there = self.transport.present(list(models))
            wanted = {name: RequestId(self.digests[name], round, EVALUATION) for name in there}
            kind = messages.EVALUATE
            answers = self.transport.ask(
                kind,
                {name: SiteRequest(wanted[name], models[name]).to_content(kind) for name in there},
                lambda name, content: read_score(content, wanted[name], 0.0, 1.0),
                group=str(round),
                apart=True,
            )
            for name, reason in answers.missing.items():
                log.warning("round %d, %s: %s adds nothing (%s)", round, EVALUATION, name, reason)
            known = dict(answers.by_client)
            # Before anything is released: the same noise on other answers would cancel.
            write_arrays(path, known)
        return {name: float(value[0]) for name, value in known.items()}

    # --- asking -------------------------------------------------------------------------------------

    def _gather(self, cohorts: Sequence[OpenCohort]) -> list[NDArray[np.int64]]:
        """Fill in the updates of these cohorts; the rows that their members chose."""
        found: dict[int, dict[str, Contribution]] = {}
        unknown: dict[int, Path] = {}
        for number, cohort in enumerate(cohorts):
            self._check(cohort)
            path = self.journal.next(cohort.round, cohort.input_hash)
            known = read_arrays(path)
            found[number] = {} if known is None else _from_arrays(known)
            if known is None:
                unknown[number] = path
        everyone = [
            _Sampled(member, cohorts[number], number)
            for number in unknown
            for member in cohorts[number].sampled
        ]
        for wave in _waves(everyone):
            for sampled, contribution in self._ask(wave):
                found[sampled.number][sampled.member] = contribution
        for number, path in unknown.items():
            # Before anything is released: if this process dies, the round is repeated with the same answers,
            # or the same noise would be added to another sum.
            write_arrays(path, _to_arrays(found[number]))
        return [self._fill(cohort, found[number]) for number, cohort in enumerate(cohorts)]

    def _check(self, cohort: OpenCohort) -> None:
        """Sites do what they signed: a job that asks for something else would not get it."""
        signed = {self.contracts[member].trusted for member in cohort.job.members}
        if any(work is None or not _same_work(cohort.job, work) for work in signed):
            raise PlanError(f"release '{cohort.release}': not the training that the sites signed")

    def _ask(self, wave: Sequence[_Sampled]) -> list[tuple[_Sampled, Contribution]]:
        by_name = {sampled.member: sampled for sampled in wave}
        first = wave[0].cohort
        if not self.transport.online():
            # Of all sites, not of those that were sampled: stopping must not tell who they are.
            raise NobodyAnswered(f"round {first.round}: no site is connected; --resume tries it again")
        contents = {name: self._content(sampled) for name, sampled in by_name.items()}
        answers = self.transport.ask(
            messages.CONTRIBUTE,
            contents,
            lambda name, content: self._read(by_name[name], content),
            group=str(first.round),
            apart=True,
        )
        for name, reason in answers.missing.items():
            cohort = by_name[name].cohort
            log.warning("round %d, %s: %s adds nothing (%s)", cohort.round, cohort.release, name, reason)
        return [(by_name[name], contribution) for name, contribution in answers.by_client.items()]

    def _wanted(self, sampled: _Sampled) -> RequestId:
        return RequestId(self.digests[sampled.member], sampled.cohort.round, sampled.cohort.release)

    def _models(self, sampled: _Sampled) -> NDArray[np.float32]:
        """All models for a member that chooses; for one that is told where to start, that one alone."""
        cohort, models = sampled.cohort, sampled.cohort.job.models
        if cohort.chooses:
            return models
        row = int(cohort.told()[cohort.sampled.index(sampled.member)])
        return models[row : row + 1]

    def _content(self, sampled: _Sampled) -> RecordDict:
        order = sampled.cohort.order(sampled.member, 0)
        request = SiteRequest(self._wanted(sampled), self._models(sampled), order=order)
        return request.to_content(messages.CONTRIBUTE)

    def _read(self, sampled: _Sampled, content: RecordDict) -> Contribution:
        cohort = sampled.cohort
        choices, length = len(self._models(sampled)), int(_leaves(cohort.job, self.parameters).sum())
        return read_contribution(content, self._wanted(sampled), choices, length, cohort.mechanism.clip)

    # --- answers ------------------------------------------------------------------------------------

    def _fill(self, cohort: OpenCohort, found: Mapping[str, Contribution]) -> NDArray[np.int64]:
        """Put the updates in the order of the sample, zeros for who did not answer."""
        updates = np.zeros((len(cohort.sampled), self.parameters), dtype=np.float64)
        leaves = _leaves(cohort.job, self.parameters)
        choices = np.full(len(cohort.sampled), NO_ANSWER, dtype=np.int64)
        for position, member in enumerate(cohort.sampled):
            if member in found:
                choices[position], updates[position, leaves] = found[member]
        cohort.updates = torch.from_numpy(updates)
        return choices


# --- plain functions --------------------------------------------------------------------------------


def read_contribution(
    content: RecordDict, wanted: RequestId, choices: int, length: int, clip: float
) -> Contribution:
    """The choice and the clipped update in an answer to exactly this request."""
    choice = messages.read_choice(content, wanted, choices, "choice")
    value: NDArray[np.float64] = messages.read_vector(content, length, "float64")
    # What an honest site sends is shorter than the clip by more than rounding takes.
    if np.abs(value).max(initial=0.0) > clip or np.linalg.norm(value) > clip:
        raise GarbageError("an update longer than the clip")
    return choice, value


def _waves(everyone: Sequence[_Sampled]) -> list[list[_Sampled]]:
    """Nobody twice at a time: a member of several cohorts is asked once in each wave."""
    waves: list[list[_Sampled]] = []
    for sampled in everyone:
        for wave in waves:
            if all(other.member != sampled.member for other in wave):
                wave.append(sampled)
                break
        else:
            waves.append([sampled])
    return waves


def _same_work(job: CohortJob, work: TrustedWork) -> bool:
    personal = () if job.parts is None else ranges_of(job.parts.personal)
    signed = (work.training, work.choice, work.personal)
    return job.drafts is None and (job.training, job.choice, personal) == signed


def _leaves(job: CohortJob, parameters: int) -> NDArray[np.bool_]:
    """Which parameters leave a member."""
    return np.ones(parameters, np.bool_) if job.parts is None else ~job.parts.personal


def _to_arrays(found: Mapping[str, Contribution]) -> dict[str, NDArray[Any]]:
    updates: dict[str, NDArray[Any]] = {f"update {name}": value for name, (_, value) in found.items()}
    choices = {f"choice {name}": np.array([row], dtype=np.int64) for name, (row, _) in found.items()}
    return {**updates, **choices}


def _from_arrays(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Contribution]:
    names = [key.removeprefix("update ") for key in arrays if key.startswith("update ")]
    return {name: (int(arrays[f"choice {name}"][0]), arrays[f"update {name}"]) for name in names}
