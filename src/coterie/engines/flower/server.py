"""The server's side: an algorithm's requests become messages to sites, and their answers its replies.

Nobody is trusted to answer. A reply counts if it came in time, answers exactly what was asked, has the right
shape and no value that an honest site could not have produced; everything else is a missing client. The
server's ledger is charged with what was asked, before it is asked: a site may have spent less, never more.

Requests of cohorts trust the server: `Cohorts` flips the coins, adds up and adds the noise, as in a
simulation, and `members` asks the sites.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from coterie.algorithms.protocol import (
    Choices,
    Cohort,
    Count,
    Reply,
    Request,
    Select,
    Train,
    TrainJob,
    Updates,
    Vector,
)
from coterie.engines.cohorts import Cohorts
from coterie.engines.flower import messages
from coterie.engines.flower.contract import Contract
from coterie.engines.flower.messages import (
    GarbageError,
    RequestId,
    SiteRequest,
    Values,
)
from coterie.engines.flower.transport import Journal, NobodyAnswered, Transport
from coterie.engines.local import input_hash, job_hash
from coterie.errors import PlanError
from coterie.files import read_notes, write_arrays
from coterie.privacy import (
    EVALUATION,
    Charge,
    Ledger,
    ModelSelection,
    NoisyScores,
    PrivacyPlan,
    RecordSums,
    Released,
    held_out,
)

NOISE_DEVIATIONS = 12.0
"""The noise streams reach 9.2 standard deviations per draw; an honest coordinate stays within this many."""
MISSING = "missing"
"""Under this name the journal keeps why the others did not answer."""


@dataclass(frozen=True)
class Participation:
    """What became of one request."""

    round: int
    release: str
    answered: tuple[str, ...]
    missing: Mapping[str, str]
    seconds: float


@dataclass
class FlowerEngine:
    """Answers `Train` and `Select` by asking the sites; the rest through cohorts, if it is trusted.

    Args:
        contracts: of every client, as it approved it.
        context: as for the in-process engine; equal to the sites' own where they run the same versions.
        journal: keeps the answers of the round under way.
        note: is told about every request, as it is answered.
        cohorts: of a server that the sites trust; None where they trust nobody.
    """

    transport: Transport
    contracts: Mapping[str, Contract]
    plan: PrivacyPlan
    ledger: Ledger
    lr: float
    parameters: int
    context: str
    journal: Journal
    note: Callable[[Participation], None]
    cohorts: Cohorts | None
    waited: float = 0.0
    personal: Mapping[str, Vector] = field(default_factory=dict)

    def answer(self, request: Request, round: int) -> Reply:
        if isinstance(request, Train):
            return self._train(request, round)
        if isinstance(request, Select):
            return self._select(request, round)
        if self.cohorts is None:
            raise PlanError(f"{type(request).__name__}: a request that trusts the server, which nobody does")
        if isinstance(request, Cohort):
            return self.cohorts.open(request, round)
        return self.cohorts.count(request) if isinstance(request, Count) else self.cohorts.add_up(request)

    # --- training ---------------------------------------------------------------------------------------

    def _train(self, request: Train, round: int) -> Updates:
        jobs = {job.client: job for job in request.jobs}
        twice = f"release '{request.release}' was asked of one client twice in one request"
        PlanError.when(len(jobs) != len(request.jobs), twice)
        mechanisms = {client: self.plan.planned(RecordSums, request.release, client) for client in jobs}

        def read(client: str, found: RecordDict, wanted: RequestId) -> Vector:
            mechanism = mechanisms[client]
            messages.read_answer(found, wanted, {})
            value: Vector = messages.read_vector(found, mechanism.length(self.parameters))
            largest = largest_release(jobs[client], mechanism, self.lr)
            GarbageError.when(
                float(np.abs(value).max()) > largest, "values that no honest site could have released"
            )
            return value

        answers = self._ask(
            messages.TRAIN,
            request.release,
            round,
            {client: job_hash(self.context, job) for client, job in jobs.items()},
            lambda client, wanted: SiteRequest(
                wanted, jobs[client].start[None], jobs[client].anchor, jobs[client].anchor_weight
            ),
            read,
        )
        return Updates(
            {
                client: Released(
                    answers[client].astype(np.float32, copy=False),
                    mechanisms[client].noise_in_release(self.lr, jobs[client].anchor_weight),
                    mechanisms[client].norm_in_release(self.lr, jobs[client].anchor_weight, self.parameters),
                )
                for client in jobs
                if client in answers
            }
        )

    # --- selection ----------------------------------------------------------------------------------

    def _select(self, request: Select, round: int) -> Choices:
        for client in request.clients:
            mechanism = self.plan.planned(ModelSelection, request.release, client)  # type: ignore[type-abstract]
            planned = f"release '{request.release}' is planned as {mechanism.name}"
            PlanError.when(not mechanism.at_sites, f"{planned}: no private selection")
        choices = len(request.models)
        answers = self._ask(
            messages.SELECT,
            request.release,
            round,
            dict.fromkeys(request.clients, input_hash(self.context, request.models)),
            lambda client, wanted: SiteRequest(wanted, request.models),
            lambda client, found, wanted: np.array([messages.read_choice(found, wanted, choices)]),
        )
        known = [client for client in request.clients if client in answers]
        return Choices({client: Released(int(answers[client][0]), 0.0) for client in known})

    # --- scores -----------------------------------------------------------------------------------------

    def evaluate(self, models: Mapping[str, Vector], round: int) -> dict[str, Released[float]]:
        """Noisy number of held-out records that each client's model gets right; of those that answer."""
        mechanisms = {
            client: self.plan.planned(NoisyScores, EVALUATION, held_out(client)) for client in models
        }

        stray = {client: NOISE_DEVIATIONS * mechanism.noise_std for client, mechanism in mechanisms.items()}
        answers = self._ask(
            messages.EVALUATE,
            EVALUATION,
            round,
            {client: input_hash(self.context, model) for client, model in models.items()},
            lambda client, wanted: SiteRequest(wanted, models[client][None]),
            lambda client, found, wanted: read_score(
                found, wanted, -stray[client], mechanisms[client].units + stray[client]
            ),
            held_out,
        )
        return {
            client: Released(float(value[0]), mechanisms[client].noise_std)
            for client, value in answers.items()
        }

    # --- all ----------------------------------------------------------------------------------------

    def _ask(
        self,
        kind: str,
        release: str,
        round: int,
        hashes: Mapping[str, str],
        asking: Callable[[str, RequestId], SiteRequest],
        read: Callable[[str, RecordDict, RequestId], Values],
        subject_of: Callable[[str], str] = lambda client: client,
    ) -> Mapping[str, Values]:
        """What the clients answered: from the journal, or by asking those that are there.

        Args:
            subject_of: whose records of a client answer, and are charged.
        """
        request = hashlib.sha256(repr((kind, release, sorted(hashes.items()))).encode()).hexdigest()
        path, known = self.journal.next(round, request)
        if known is not None:
            reasons = json.loads(read_notes(path).get(MISSING, "{}"))
            before = {client: reasons.get(client, "unknown") for client in hashes if client not in known}
            self.note(Participation(round, release, tuple(known), before, 0.0))
            return known
        present = self.transport.present(list(hashes))
        if present:
            self.ledger.charge(
                [Charge(subject_of(client), round, release, hashes[client]) for client in present]
            )
        requests = {
            client: asking(client, self.contracts[client].asked(round, release)) for client in present
        }
        found = self.transport.ask_sites(kind, requests, read)
        away = {client: "not there" for client in hashes if client not in present}
        missing = {**away, **found.missing}
        self.note(Participation(round, release, tuple(found.by_client), missing, found.seconds))
        nobody = f"round {round}: no client answered '{release}'; --resume tries it again"
        NobodyAnswered.when(not found.by_client, nobody)
        write_arrays(path, found.by_client, {MISSING: json.dumps(missing)})
        return found.by_client


def read_score(content: RecordDict, wanted: RequestId, least: float, most: float) -> NDArray[np.float64]:
    """The score in an answer, which an honest site keeps within these bounds."""
    value: float = messages.read_answer(content, wanted, {"value": float})["value"]
    GarbageError.when(not least <= value <= most, "a score that no honest site could have reported")
    return np.array([value])


def largest_release(job: TrainJob, mechanism: RecordSums, lr: float) -> float:
    """A bound on every coordinate of what an honest site releases, from public values alone.

    A step moves a coordinate by at most lr times (all records at full clip, plus noise) over the denominator,
    and by the pull towards the anchor, which the steps before have moved.
    """
    noise = NOISE_DEVIATIONS * mechanism.noise_std
    step = (mechanism.clip * mechanism.records + noise) / mechanism.denominator
    if mechanism.projected is not None:
        return step
    away = 0.0 if job.anchor is None else float(np.abs(job.anchor - job.start).max())
    pull, bound = lr * job.anchor_weight, 0.0
    for _ in range(mechanism.steps):
        bound = abs(1.0 - pull) * bound + lr * step + pull * away
    return 1.001 * bound  # float32 on the site's side
