"""What a site keeps for one experiment, and how it computes under the contract that it approved.

The folder holds everything that must survive a restart: the contract, the noise key (mode 0600), the ledger,
and the answers of the latest rounds. A message that comes again is answered from there, bit for bit and at no
further cost; one of a round that is over is not executed.

For a server that it trusts, a site learns without noise and sends its clipped update in the clear. Its ledger
then says what it sent; what that costs is the whole plan, because rounds in which it is not asked tell
something, too. Parameters that are its own stay here, beside its answers.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray

from coterie.algorithms.protocol import (
    Choices,
    CohortJob,
    OwnChoice,
    Select,
    Train,
    TrainJob,
    Updates,
    Vector,
)
from coterie.data import Client, Federation
from coterie.engines.clients import behaviour
from coterie.engines.evaluation import PrivateScores
from coterie.engines.flower import messages
from coterie.engines.flower.contract import Contract, TrustedWork, cost, promised
from coterie.engines.flower.messages import GarbageError, RefusedError, RequestId, SiteRequest, Values
from coterie.engines.flower.words import site_log
from coterie.engines.local import LocalEngine, coin_key, input_hash, job_hash
from coterie.engines.members import OpenCohort
from coterie.engines.secret import SEEDED
from coterie.errors import CoterieError
from coterie.files import forget_rounds, read_arrays, read_json, read_notes, sync, write_arrays, write_json
from coterie.privacy import (
    EVALUATION,
    Budget,
    ChainHead,
    Charge,
    CohortSums,
    Guarantee,
    Ledger,
    SecretKey,
)
from coterie.privacy.randomness import encode_fields
from coterie.privacy.units import round_up
from coterie.training.clipping import clip_rows
from coterie.training.learner import Batch, Learner
from coterie.training.scoring import total_score

log = site_log(__name__)


class SiteFolder:
    """Paths inside a site's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.contract = path / "contract.json"
        self.secret = path / "noise.key"
        self.ledger = path / "ledger.jsonl"
        self.answers = path / "answers"
        self.finished = path / "finished.json"


@dataclass(frozen=True)
class Agreed:
    """A contract and what follows from it alone: all that can fail, before anything is written."""

    contract: Contract
    learner: Learner
    context: str
    guarantee: Guarantee

    @classmethod
    def on(cls, contract: Contract, learner: Learner, *, simulation: bool) -> "Agreed":
        context = behaviour(contract.model, contract.lr, contract.augmentation, contract.plan, learner)
        try:
            promise = promised(contract, [SEEDED] if simulation else [])
        except CoterieError:  # epsilon can be bounded, but what it is good for cannot be said
            raise RefusedError("not planned") from None
        return cls(contract, learner, context, promise)


class SiteSession:
    """An approved contract with its ledger, its noise and the engine that works under both."""

    def __init__(
        self,
        files: SiteFolder,
        agreed: Agreed,
        budgets: Mapping[str, Budget],
        key: SecretKey,
        client: Client,
        alone: Federation,
        head: ChainHead,
    ) -> None:
        """Args:
        head: the ledger's, when the contract was last written: the file may be ahead of it, never behind.
        """
        self.contract = contract = agreed.contract
        self.digest = contract.digest()
        self.guarantee = agreed.guarantee
        self._files = files
        self._subject = contract.client
        self._learner = agreed.learner
        self.parameters = self._learner.layout.size
        self._test = Batch.of(client.test, self._learner.device)
        self._context = agreed.context
        self._head = head
        self.ledger = Ledger.open(
            files.ledger,
            contract.own_plan,
            budget=budgets,
            accountant=contract.accountant,
            anchor=head,
            seen_by=files.contract.name,
        )
        try:
            self._check_answers()
            self._engine = LocalEngine(
                alone,
                self._learner,
                contract.lr,
                contract.own_plan,
                self.ledger,
                noise_key=key,
                coin_key=coin_key(key, contract.public_seed),
                public_seed=contract.public_seed,
                context=self._context,
                workers=1,
                augmentation=contract.augmentation,
            )
            files.answers.mkdir(mode=0o700, exist_ok=True)
            self._engine.members.personal = self._kept()
        except BaseException:
            self.ledger.close()
            raise

    @property
    def consent(self) -> str:
        """What a site that trusts the server agreed to: how often it may see what."""
        unit = self.contract.plan.unit
        releases = [release for release in self.contract.own.releases if release.name != EVALUATION]
        clips = sorted({self.contract.own.planned(release.name, CohortSums).clip for release in releases})
        times = sum(release.times for release in releases)
        scored = sum(release.times for release in self.contract.own.releases) - times
        shares = f" and {scored} shares of held-out records that a model gets right" if scored else ""
        return (
            f"in {self.contract.rounds} rounds it may see up to {times} updates of this {unit} in the clear, "
            f"clipped to {', '.join(f'{clip:g}' for clip in clips)}{shares}; all of it tells others up to "
            f"epsilon {round_up(self.spent)}"
        )

    @property
    def spent(self) -> float:
        """Epsilon so far; where others flip the coins, that of the whole plan, sampled or not."""
        if self.contract.trusted is not None:
            return cost(self.contract, self.contract.delta)
        return self.ledger.spent()

    def close(self) -> None:
        self._engine.close()
        self.ledger.close()

    # --- answers ------------------------------------------------------------------------------------

    def train(self, request: SiteRequest) -> RecordDict:
        """One released vector."""
        job = TrainJob(self._subject, request.models[0], request.anchor, request.anchor_weight)

        def compute() -> dict[str, Values]:
            reply = self._engine.answer(Train(request.id.release, (job,)), request.id.round)
            assert isinstance(reply, Updates)
            return {"value": reply.by_client[self._subject].value}

        value = self._once(request.id, job_hash(self._context, job), compute)["value"]
        return messages.answer(request.id, value=value.astype(np.float32, copy=False))

    def select(self, request: SiteRequest) -> RecordDict:
        """One released index."""

        def compute() -> dict[str, Values]:
            wanted = Select(request.id.release, (self._subject,), request.models)
            reply = self._engine.answer(wanted, request.id.round)
            assert isinstance(reply, Choices)
            return {"value": np.array([reply.by_client[self._subject].value], dtype=np.int64)}

        value = self._once(request.id, input_hash(self._context, request.models), compute)["value"]
        return messages.answer(request.id, {"value": int(value[0])})

    def contribute(self, request: SiteRequest) -> RecordDict:
        """For a trusted server: which model fits, and what was learnt from it, clipped, in the clear."""
        work, wanted = self.contract.trusted, request.id
        if work is None:
            raise RefusedError("not trusted")
        mechanism = self.contract.own.planned(wanted.release, CohortSums)
        hashed = input_hash(f"{self._context} {request.order:x}", request.models)

        def compute() -> dict[str, Values]:
            self.ledger.charge([Charge(self._subject, wanted.round, wanted.release, hashed)])
            choice, update = self._learn(work, request, hashed)
            parts = work.parts(self.parameters)
            leaves = np.ones(self.parameters, np.bool_) if parts is None else ~parts.personal
            clipped = clip_rows(torch.from_numpy(update[leaves])[None], mechanism.clip)[0]
            answer = {"value": clipped.numpy(), "choice": np.array([choice], dtype=np.int64)}
            return {**answer, **self._own_parameters()}

        found = self._once(wanted, hashed, compute)
        return messages.answer(wanted, {"choice": int(found["choice"][0])}, found["value"], "float64")

    def evaluate(self, request: SiteRequest) -> RecordDict:
        """How well a model does on held-out records: one planned, noisy score, charged like any release.

        For a trusted server, which adds the noise to the sum over all sites, it is this site's own share.
        """
        wanted, scored = request.id, self.contract.scored
        if wanted.release != EVALUATION:
            raise RefusedError("not planned")
        subject = self._subject if scored is None else scored.subject
        hashed = input_hash(self._context, request.models if scored is None else _only(request.models))

        def compute() -> dict[str, Values]:
            if scored is None:
                self.ledger.charge([Charge(subject, wanted.round, wanted.release, hashed)])
                share = self._count(self._used(request.models)) / len(self._test)
                return {"value": np.array([share]), **self._own_parameters()}
            model = self._used(request.models)
            scores = PrivateScores(self._engine.facts, self.contract.own_plan, self.ledger, self._context)
            found = scores.of_records(
                {self._subject: model}, wanted.round, lambda: {self._subject: self._count(model)}
            )
            return {"value": np.array([found[self._subject].value])}

        value = self._once(wanted, hashed, compute, subject)["value"]
        return messages.answer(wanted, {"value": float(value[0])})

    def _learn(self, work: TrustedWork, request: SiteRequest, hashed: str) -> tuple[int, Vector]:
        """The row that fits these records, and the whole update from there."""
        parts = work.parts(self.parameters)
        job = CohortJob((self._subject,), request.models, work.training, work.choice, parts=parts)
        if job.sums != len(request.models):
            raise GarbageError(SEVERAL)
        cohort = OpenCohort(
            release=request.id.release,
            job=job,
            mechanism=self.contract.own.planned(request.id.release, CohortSums),
            times=1,
            round=request.id.round,
            input_hash=hashed,
            sampled=job.members,
            order=lambda member, turn: request.order,
            choices=np.zeros(1, dtype=np.int64),
        )
        cohort.choices = self._engine.members.choose(cohort)
        update: Vector = self._engine.members.learn(cohort, [cohort])[0].numpy()
        return int(cohort.choices[0]), update

    def _own_parameters(self) -> dict[str, Values]:
        """What stays here, to be kept with every answer: older ones are forgotten."""
        own = self._engine.members.personal.get(self._subject)
        return {} if own is None else {"personal": own}

    def _kept(self) -> dict[str, NDArray[np.float32]]:
        """The parameters that are this site's own, as its latest answer left them."""
        latest = max(self._files.answers.glob("*.safetensors"), key=lambda path: path.name, default=None)
        found = (read_arrays(latest) or {}) if latest is not None else {}
        return {self._subject: found["personal"]} if "personal" in found else {}

    def _count(self, model: Vector) -> float:
        """Score of all held-out records."""
        return total_score(self._learner, torch.from_numpy(model), self._test)

    def _used(self, models: NDArray[np.float32]) -> Vector:
        """The one of the models that this site would use, with the parameters that are its own."""
        work = self.contract.trusted
        if work is None:
            return _only(models)
        own = OwnChoice(models, work.choice, work.training, work.parts(self.parameters))
        return self._engine.members.serve(own).model_of(self._subject)

    # --- charged and kept ---------------------------------------------------------------------------

    def _once(
        self,
        wanted: RequestId,
        hashed: str,
        compute: Callable[[], dict[str, Values]],
        subject: str | None = None,
    ) -> Mapping[str, Values]:
        """The answer to a request: as it was given before, or computed, charged and kept.

        Args:
            subject: whose records answer: those that train, or those that are held out.
        """
        subject = subject or self._subject
        if wanted.contract != self.digest:
            raise RefusedError("other contract")
        if wanted.round > self.contract.rounds:
            raise RefusedError("not planned")
        self.contract.own_plan.for_subject(subject).release(wanted.release)
        charge = Charge(subject, wanted.round, wanted.release, hashed)
        again = self.ledger.knows(charge)
        if not again and wanted.round < self.ledger.latest_round(subject):
            raise RefusedError("passed")
        # A subject and a release may be called anything.
        fields = (name.encode("utf-8", "surrogatepass") for name in (subject, wanted.release, hashed))
        named = hashlib.sha256(encode_fields(*fields)).hexdigest()
        path = self._files.answers / f"{wanted.round:06d}-{named}.safetensors"
        # None where a crash came before the answer was kept: it is computed again with the same noise.
        found = read_arrays(path) if again else None
        if found is None:
            began = time.perf_counter()
            found = compute()
            write_arrays(path, found, {"ledger": json.dumps(self.ledger.head.to_json())})
            self._log_release(wanted, time.perf_counter() - began)
            forget_rounds(self._files.answers, before=wanted.round - 1)
        else:
            log.info("round %d, %s: the answer given before", wanted.round, wanted.release)
        self._keep_head()
        return found

    def _keep_head(self) -> None:
        """Let the contract know how far the ledger is, before what was charged leaves the site."""
        if self._head != self.ledger.head:
            stored = read_json(self._files.contract)
            write_json(self._files.contract, {**stored, "ledger": self.ledger.head.to_json()})
            sync(self._files.path)
            self._head = self.ledger.head

    def _check_answers(self) -> None:
        """Refuse a ledger that lacks what it held when an answer was kept; a damaged answer is made again."""
        for path in sorted(self._files.answers.glob("*.safetensors")):
            notes = read_notes(path)
            if "ledger" in notes:
                seen = ChainHead.from_json(json.loads(notes["ledger"]))
                self.ledger.check_seen(seen, f"{self._files.answers.name}/{path.name}")

    def _log_release(self, wanted: RequestId, seconds: float) -> None:
        """One line in the site's own log about what leaves it."""
        if self.contract.trusted is None:
            told = f", {wanted.release}: released in {seconds:.1f} s, spent epsilon {round_up(self.spent)}"
        elif wanted.release == EVALUATION:
            told = ": share of held-out records that are right, sent to the trusted server"
        else:
            told = (
                f", {wanted.release}: learnt in {seconds:.1f} s, sent to the trusted server in the clear, "
                f"clipped to {self.contract.own.planned(wanted.release, CohortSums).clip:g}"
            )
        log.info("round %d of %d%s", wanted.round, self.contract.rounds, told)


SEVERAL = "several models, and nothing to choose by"


def _only(models: NDArray[np.float32]) -> Vector:
    """The one model that was sent."""
    if len(models) != 1:
        raise GarbageError(SEVERAL)
    only: Vector = models[0]
    return only
