"""The members of a cohort as sites: each computes at home and sends its choice and its clipped update.

The server that opens the cohort is trusted with both, and trusts no site: whatever one sends adds one vector
of norm at most the clip to one sum, or nothing. Who was sampled is a secret that the noise counts on. So only
those are sent a message, nothing about them is kept but the journal of the round under way, and each has its
own time: what one site does decides nothing about whether another's answer counts.
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor

from coterie.algorithms.protocol import Choice
from coterie.engines.computing import Computing, at_hand
from coterie.engines.flower import messages
from coterie.engines.flower.contract import Contract, TrustedWork, leaving, ranges_of
from coterie.engines.flower.messages import GarbageError, RequestId, SiteRequest
from coterie.engines.flower.server import read_score
from coterie.engines.flower.transport import Journal, NobodyAnswered, Transport
from coterie.engines.members import NO_ANSWER, OpenCohort
from coterie.errors import InputError, PlanError
from coterie.files import write_arrays
from coterie.privacy import EVALUATION

log = logging.getLogger(__name__)

Contribution: TypeAlias = tuple[int, NDArray[np.float64]]
"""The row that a member chose, and its clipped update without what is its own."""
Gathered: TypeAlias = dict[str, NDArray[Any]]
"""`choices` and `updates` of the sampled in their order; for who did not answer, `NO_ANSWER` and zeros."""


@dataclass
class RemoteMembers:
    """Asks the sites."""

    transport: Transport
    contracts: Mapping[str, Contract]
    parameters: int
    journal: Journal

    def choose(self, cohort: OpenCohort) -> Computing[NDArray[np.int64]]:
        """The choices of those who answered. Their updates come with them: models travel once."""
        return at_hand(self._gather([cohort])[0])

    def learn(self, cohort: OpenCohort, waiting: Sequence[OpenCohort]) -> Computing[Tensor]:
        """The updates of all cohorts that wait, so that the groups of an epoch are asked side by side."""
        self._gather([other for other in waiting if other.updates is None])
        assert cohort.updates is not None
        return at_hand(cohort.updates)

    def shares(self, models: Mapping[str, NDArray[np.float32]], round: int) -> dict[str, float]:
        """The share of its held-out records that each site's model gets right; of those who answer.

        Everybody is asked: who was sampled in this round stays a secret.

        Args:
            models: one for each site, in a row; or several that it chooses from itself.
        """
        digest = hashlib.sha256(b"".join(rows.tobytes() for rows in models.values())).hexdigest()
        path, known = self.journal.next(round, digest)
        if known is None:
            requests = {
                name: SiteRequest(self.contracts[name].asked(round, EVALUATION), models[name])
                for name in self.transport.present(list(models))
            }
            answers = self.transport.ask_sites(
                messages.EVALUATE,
                requests,
                lambda name, content, wanted: read_score(content, wanted, 0.0, 1.0),
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
        gathered: list[Gathered] = []
        unknown: dict[Path, tuple[OpenCohort, Gathered]] = {}
        for cohort in cohorts:
            self._check(cohort)
            path, found = self.journal.next(cohort.round, cohort.input_hash)
            if found is None:
                choices = np.full(len(cohort.sampled), NO_ANSWER, dtype=np.int64)
                found = {"choices": choices, "updates": np.zeros((len(choices), self.parameters))}
                unknown[path] = (cohort, found)
            InputError.when(
                found.keys() != {"choices", "updates"},
                f"{path}: kept by an earlier version, which alone can go on from it; or begin another run",
            )
            gathered.append(found)
        for wave in _waves(unknown.values()):
            self._ask(wave)
        for path, (_, found) in unknown.items():
            # Before anything is released: if this process dies, the round is repeated with the same answers,
            # or the same noise would be added to another sum.
            write_arrays(path, found)
        for cohort, found in zip(cohorts, gathered, strict=True):
            cohort.updates = torch.from_numpy(found["updates"])
        return [found["choices"] for found in gathered]

    def _check(self, cohort: OpenCohort) -> None:
        """Sites do what they signed: a job that asks for something else would not get it."""
        job = cohort.job
        personal = () if job.parts is None else ranges_of(job.parts.personal)
        # To a site, being told a model is the same whichever sum its update is added to.
        wanted = TrustedWork(job.training, job.choice if job.chooses else Choice.GIVEN, personal)
        signed = {self.contracts[member].trusted for member in job.members}
        same = all(work is not None and replace(work, watched=None) == wanted for work in signed)
        PlanError.when(
            job.drafts is not None or not same,
            f"release '{cohort.release}': not the training that the sites signed",
        )

    def _ask(self, wave: Mapping[str, tuple[OpenCohort, Gathered]]) -> None:
        """Ask each of these members for a cohort, and put what it answers in its place."""
        if not self.transport.online():
            # Of all sites, not of those that were sampled: stopping must not tell who they are.
            [round, *_] = (cohort.round for cohort, _ in wave.values())
            raise NobodyAnswered(f"round {round}: no site is connected; --resume tries it again")
        requests = {name: self._request(name, cohort) for name, (cohort, _) in wave.items()}

        def read(name: str, content: RecordDict, wanted: RequestId) -> Contribution:
            cohort, choices = wave[name][0], len(requests[name].models)
            length = int(leaving(cohort.job.parts, self.parameters).sum())
            return read_contribution(content, wanted, choices, length, cohort.mechanism.clip)

        answers = self.transport.ask_sites(messages.CONTRIBUTE, requests, read, apart=True)
        for name, reason in answers.missing.items():
            cohort, _ = wave[name]
            log.warning("round %d, %s: %s adds nothing (%s)", cohort.round, cohort.release, name, reason)
        for name, (choice, update) in answers.by_client.items():
            cohort, found = wave[name]
            place = cohort.sampled.index(name)
            found["choices"][place] = choice
            found["updates"][place, leaving(cohort.job.parts, self.parameters)] = update

    def _request(self, member: str, cohort: OpenCohort) -> SiteRequest:
        """All models for a member that chooses; for one that is told where to start, that one alone."""
        models, wanted = cohort.job.models, self.contracts[member].asked(cohort.round, cohort.release)
        if not cohort.chooses:
            models = models[[cohort.told()[cohort.sampled.index(member)]]]
        return SiteRequest(wanted, models, order=cohort.order(member, 0))


# --- plain functions --------------------------------------------------------------------------------


def read_contribution(
    content: RecordDict, wanted: RequestId, choices: int, length: int, clip: float
) -> Contribution:
    """The choice and the clipped update in an answer to exactly this request."""
    choice = messages.read_choice(content, wanted, choices, "choice")
    value: NDArray[np.float64] = messages.read_vector(content, length, "float64")
    # What an honest site sends is shorter than the clip by more than rounding takes.
    longer = np.abs(value).max(initial=0.0) > clip or np.linalg.norm(value) > clip
    GarbageError.when(bool(longer), "an update longer than the clip")
    return choice, value


def _waves(asked: Iterable[tuple[OpenCohort, Gathered]]) -> list[dict[str, tuple[OpenCohort, Gathered]]]:
    """Nobody twice at a time: a member of several cohorts is asked once in each wave."""
    waves: list[dict[str, tuple[OpenCohort, Gathered]]] = []
    for cohort, found in asked:
        for member in cohort.sampled:
            wave = sum(member in other for other in waves)
            if wave == len(waves):
                waves.append({})
            waves[wave][member] = (cohort, found)
    return waves
