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
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

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
from coterie.data import Federation
from coterie.engines.clients import behaviour
from coterie.engines.computing import at_once
from coterie.engines.evaluation import PrivateScores
from coterie.engines.feature_cache import FeatureCache
from coterie.engines.features import featured
from coterie.engines.flower import messages
from coterie.engines.flower.contract import cost, leaving, promised
from coterie.engines.flower.kept import Signed, SiteFolder
from coterie.engines.flower.messages import (
    FinalModels,
    GarbageError,
    RefusedError,
    RequestId,
    SiteRequest,
    Values,
    site_log,
)
from coterie.engines.flower.taken_home import write_taken_home
from coterie.engines.local import LocalEngine, coin_key, input_hash, job_hash
from coterie.engines.members import OpenCohort
from coterie.engines.secret import SEEDED
from coterie.errors import CoterieError
from coterie.files import (
    forget_rounds,
    read_arrays,
    read_notes,
    write_arrays,
)
from coterie.privacy import EVALUATION, ChainHead, Charge, CohortSums, NoisyScores, SecretKey
from coterie.privacy.randomness import encode_fields
from coterie.privacy.units import round_up
from coterie.training.clipping import clip_rows
from coterie.training.learner import Batch, Learner
from coterie.training.scoring import total_score

log = site_log(__name__)

ROOM_BESIDE = 2**18
"""Bytes beside an answer: lines of the ledger, the contract."""
SEVERAL = "several models, and nothing to choose by"


class SiteSession:
    """An approved contract with its ledger, its noise and the engine that works under both."""

    def __init__(
        self, files: SiteFolder, signed: Signed, learner: Learner, key: SecretKey, alone: Federation
    ) -> None:
        self.contract = contract = signed.contract
        try:
            self.guarantee = promised(contract, [SEEDED] if key.simulation else [])
        except CoterieError:  # epsilon can be bounded, but what it is good for cannot be said
            raise RefusedError("not planned") from None
        self._files, self._signed, self._alone = files, signed, alone
        self._subject, self._learner = contract.client, learner
        cache = FeatureCache(files.features)
        seen = featured(alone, contract.model.features, learner.device, cache)
        self._context = behaviour(
            contract.model, contract.lr, contract.augmentation, contract.plan, learner, seen.digest
        )
        self.parameters = learner.layout.size
        self._test = Batch.of(seen.federation.clients[0].test, learner.device)
        self.ledger = signed.open_ledger(files, signed.ledger)
        try:
            self._check_answers()
            self._engine = LocalEngine(
                seen.federation,
                learner,
                contract.lr,
                contract.own_plan,
                self.ledger,
                noise_key=key,
                coin_key=coin_key(key, contract.public_seed),
                public_seed=contract.public_seed,
                context=self._context,
                workers=1,
                augmentation=contract.augmentation,
                table=seen.table(learner.device),
            )
            self._seen = seen  # its file stays while the session does
            files.answers.mkdir(mode=0o700, exist_ok=True)
            self._engine.members.personal = self._kept()
        except BaseException:
            self.ledger.close()
            raise

    @property
    def consent(self) -> str:
        """What a site that trusts the server agreed to: how often it may see what."""
        own, unit = self.contract.own, self.contract.plan.unit
        sums = [release for release in own.releases if isinstance(release.mechanism, CohortSums)]
        clips = sorted({own.planned(CohortSums, release.name).clip for release in sums})
        times = sum(release.times for release in sums)
        scored = sum(release.times for release in own.releases) - times
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

    def answer(self, kind: str, request: SiteRequest) -> RecordDict:
        """What is computed for each kind of request."""
        answers: Mapping[str, Callable[[SiteRequest], RecordDict]] = {
            messages.TRAIN: self.train,
            messages.SELECT: self.select,
            messages.CONTRIBUTE: self.contribute,
            messages.EVALUATE: self.evaluate,
        }
        return answers[kind](request)

    def train(self, request: SiteRequest) -> RecordDict:
        """One released vector."""
        job = TrainJob(self._subject, request.models[0], request.anchor, request.anchor_weight)
        value = self._release(request.id, job_hash(self._context, job), Train(request.id.release, (job,)))
        return messages.answer(request.id, value=value.astype(np.float32, copy=False))

    def select(self, request: SiteRequest) -> RecordDict:
        """One released index."""
        hashed = input_hash(self._context, request.models)
        select = Select(request.id.release, (self._subject,), request.models)
        return messages.answer(request.id, {"value": int(self._release(request.id, hashed, select)[0])})

    def _release(self, wanted: RequestId, hashed: str, request: Train | Select) -> Values:
        def compute() -> dict[str, Values]:
            reply = self._engine.answer(request, wanted.round)
            assert isinstance(reply, Updates | Choices)
            return {"value": np.atleast_1d(reply.by_client[self._subject].value)}

        return self._once(wanted, hashed, compute)["value"]

    def contribute(self, request: SiteRequest) -> RecordDict:
        """For a trusted server: which model fits, and what was learnt from it, clipped, in the clear."""
        work, wanted = self.contract.trusted, request.id
        if work is None:
            raise RefusedError("not trusted")
        mechanism, parts = self.contract.own.planned(CohortSums, wanted.release), work.parts(self.parameters)
        hashed = input_hash(f"{self._context} {request.order:x}", request.models)

        def compute() -> dict[str, Values]:
            self.ledger.charge([Charge(self._subject, wanted.round, wanted.release, hashed)])
            job = CohortJob((self._subject,), request.models, work.training, work.choice, parts=parts)
            GarbageError.when(job.sums != len(request.models), SEVERAL)
            cohort = OpenCohort(
                release=wanted.release,
                job=job,
                mechanism=mechanism,
                times=1,
                round=wanted.round,
                input_hash=hashed,
                sampled=job.members,
                order=lambda member, turn: request.order,
                choices=np.zeros(1, dtype=np.int64),
            )
            cohort.choices = at_once(self._engine.members.choose(cohort))
            update = at_once(self._engine.members.learn(cohort, [cohort]))[0]
            leaves = torch.from_numpy(leaving(parts, self.parameters))
            clipped = clip_rows(update[leaves][None], mechanism.clip)[0]
            return {"value": clipped.numpy(), "choice": cohort.choices, **self._own_parameters()}

        found = self._once(wanted, hashed, compute)
        return messages.answer(wanted, {"choice": int(found["choice"][0])}, found["value"], "float64")

    def evaluate(self, request: SiteRequest) -> RecordDict:
        """How well a model does on held-out records: one planned, noisy score, charged like any release.

        For a trusted server, which adds the noise to the sum over all sites, it is this site's own share.
        """
        wanted, scored, models = request.id, self.contract.scored, request.models
        RefusedError.when(wanted.release != EVALUATION, "not planned")
        planned, sent = (self.contract.own, models) if scored is None else (scored, models[0])
        planned.planned(NoisyScores, EVALUATION)
        GarbageError.when(scored is not None and len(models) != 1, SEVERAL)
        hashed = input_hash(self._context, sent)

        def share() -> dict[str, Values]:
            work = self.contract.trusted
            assert work is not None
            self.ledger.charge([Charge(self._subject, wanted.round, wanted.release, hashed)])
            # Of the model that this site would use, with the parameters that are its own.
            own = OwnChoice(models, work.choice, work.training, work.parts(self.parameters))
            right = self._count(self._engine.members.serve(own).model_of(self._subject))
            return {"value": np.array([right / len(self._test)]), **self._own_parameters()}

        def noisy() -> dict[str, Values]:
            scores = PrivateScores(self._engine.facts, self.contract.own_plan, self.ledger, self._context)
            found = scores.of_records(
                {self._subject: sent}, wanted.round, lambda: {self._subject: self._count(sent)}
            )
            return {"value": np.array([found[self._subject].value])}

        found = self._once(wanted, hashed, share if scored is None else noisy, planned.subject)
        return messages.answer(wanted, {"value": float(found["value"][0])})

    def take_home(self, final: FinalModels) -> None:
        """Keep the model that this site uses, in its own folder, with what was promised to it."""
        contract, work, row = self.contract, self.contract.trusted, final.cluster
        if row is None and work is not None:  # among several, which one fits is this site's to find out
            own = OwnChoice(final.models, work.choice, work.training, work.parts(self.parameters))
            row = self._engine.members.serve(own).cluster_of[self._subject]
        facts = {
            "client": self._subject,
            "experiment": contract.experiment,
            "contract": contract.digest,
            "algorithm": contract.algorithm,
            "unit": contract.plan.unit,
            "rounds": contract.rounds,
            "cluster": row,
            "personal": () if work is None else work.personal,
            "model": contract.model,
            "seed": contract.public_seed,
            "additive": contract.additive,
            "epsilon": self.spent,
        }
        personal = self._engine.members.personal.get(self._subject)
        write_taken_home(self._files.path, self._alone, self.guarantee, final.models, personal, facts)

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
        RefusedError.when(wanted.contract != self.contract.digest, "other contract")
        RefusedError.when(wanted.round > self.contract.rounds, "not planned")
        self.contract.own_plan.for_subject(subject).release(wanted.release)
        charge = Charge(subject, wanted.round, wanted.release, hashed)
        again = self.ledger.knows(charge)
        RefusedError.when(not again and wanted.round < self.ledger.latest_round(subject), "passed")
        # A subject and a release may be called anything.
        fields = (name.encode("utf-8", "surrogatepass") for name in (subject, wanted.release, hashed))
        named = hashlib.sha256(encode_fields(*fields)).hexdigest()
        path = self._files.answers / f"{wanted.round:06d}-{named}.safetensors"
        # None where a crash came before the answer was kept: it is computed again with the same noise.
        found = read_arrays(path) if again else None
        if found is None:
            began = time.perf_counter()
            with self._room():
                found = compute()
            write_arrays(path, found, {"ledger": json.dumps(self.ledger.head.to_json())})
            self._log_release(wanted, time.perf_counter() - began)
            forget_rounds(self._files.answers, before=wanted.round - 1)
        else:
            told = f"round {wanted.round}, {wanted.release}: the answer given before"
            log.event("repeated", told, round=wanted.round, release=wanted.release)
        self._keep_head()
        return found

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Hold room on the disk for an answer while it is charged and computed: what is paid for is sent."""
        held = self._files.answers / ".room"
        size = 8 * (2 * self.parameters + 1024) + ROOM_BESIDE
        try:
            with held.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
            free = os.statvfs(self._files.path)
            short = free.f_bavail * free.f_frsize < ROOM_BESIDE
        except OSError as trouble:
            held.unlink(missing_ok=True)
            log.error("no room on the disk of %s for an answer (%s)", self._files.path, trouble.strerror)
            raise RefusedError("disk") from None
        if short:
            held.unlink(missing_ok=True)
            log.error("less than %d bytes are left on the disk of %s", ROOM_BESIDE, self._files.path)
            raise RefusedError("disk")
        try:
            yield
        finally:
            held.unlink(missing_ok=True)

    def _keep_head(self) -> None:
        """Let the contract know how far the ledger is, before what was charged leaves the site."""
        if self._signed.ledger != self.ledger.head:
            self._signed = replace(self._signed, ledger=self.ledger.head)
            self._signed.save(self._files.contract)

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
        elif isinstance(self.contract.own.release(wanted.release).mechanism, NoisyScores):
            told = ": share of held-out records that are right, sent to the trusted server"
        else:
            told = (
                f", {wanted.release}: learnt in {seconds:.1f} s, sent to the trusted server in the clear, "
                f"clipped to {self.contract.own.planned(CohortSums, wanted.release).clip:g}"
            )
        log.event(
            "released",
            f"round {wanted.round} of {self.contract.rounds}{told}",
            round=wanted.round,
            rounds=self.contract.rounds,
            release=wanted.release,
            seconds=round(seconds, 3),
            epsilon_spent=self.spent,
        )
