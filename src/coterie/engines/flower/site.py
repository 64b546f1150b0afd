"""A site: its records, its books, and how it answers.

Its folder holds everything that must survive a restart: the contract it approved, the noise key (mode 0600),
the ledger, and the answers of the latest rounds. A message that comes again is answered from there, bit for
bit and at no further cost; one of a round that is over, or past its time, is not executed.

For a server that it trusts, a site learns without noise and sends its clipped update in the clear. Its ledger
then says what it sent; what that costs is the whole plan, because rounds in which it is not asked tell
something, too. Parameters that are its own stay here, beside its answers.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from flwr.app import Message, RecordDict
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
from coterie.engines.flower.approval import approve, learner_of
from coterie.engines.flower.contract import (
    Contract,
    Limits,
    TrustedWork,
    cost,
    cost_of_scores,
    promised,
)
from coterie.engines.flower.messages import (
    Asked,
    ContributeMessage,
    EvaluateMessage,
    GarbageError,
    RefusedError,
    SelectMessage,
    SiteFacts,
    TrainMessage,
    Values,
)
from coterie.engines.flower.words import site_log
from coterie.engines.local import LocalEngine, coin_key, input_hash, job_hash
from coterie.engines.members import OpenCohort
from coterie.engines.secret import SEEDED, RunSecret
from coterie.errors import BudgetError, CoterieError, InputError, LedgerError, ModelError, PlanError, where
from coterie.files import forget_rounds, read_arrays, read_json, read_notes, sync, write_arrays, write_json
from coterie.privacy import (
    EVALUATION,
    Budget,
    ChainHead,
    Charge,
    CohortSums,
    Guarantee,
    Ledger,
    LedgerView,
    SecretKey,
)
from coterie.privacy.errors import RangeError
from coterie.privacy.randomness import encode_fields
from coterie.privacy.units import number_from_json, number_to_json, round_up
from coterie.training.clipping import clip_rows
from coterie.training.learner import Batch, Learner
from coterie.training.scoring import total_score

log = site_log(__name__)

Records = Callable[[], tuple[Client, Federation]]
"""How a site reads its records, split as its operator said: the client, and the federation of it alone."""


@dataclass(frozen=True)
class SiteFolder:
    """Paths inside a site's folder."""

    path: Path

    @property
    def contract(self) -> Path:
        return self.path / "contract.json"

    @property
    def secret(self) -> Path:
        return self.path / "noise.key"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def answers(self) -> Path:
        return self.path / "answers"

    @property
    def finished(self) -> Path:
        return self.path / "finished.json"


class Site:
    """Answers messages, one at a time."""

    def __init__(
        self,
        name: str,
        records: Records,
        folder: Path,
        limits: Limits,
        *,
        noise_seed: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Args:
        name: the site's own name, by which its operator is known to the server's.
        records: reads the records, split as the operator decided.
        folder: its books; created when missing.
        limits: what its operator allows.
        noise_seed: makes the noise repeatable and the whole a simulation; the server is told.
        """
        self.name = name
        self.limits = limits
        self.files = SiteFolder(folder)
        self._records = records
        self._seed = noise_seed
        self._clock = clock
        self._books: SiteSession | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if self.files.finished.exists():
            self._check_closed()
        elif self.files.contract.exists():
            self._books = self._reopen()
        else:
            self._check_nothing_spent()

    @property
    def finished(self) -> bool:
        return self.files.finished.exists()

    @property
    def books(self) -> "SiteSession | None":
        """The open books, once a contract was approved."""
        return self._books

    def close(self) -> None:
        if self._books is not None:
            self._books.close()
            self._books = None

    def handle(self, message: Message) -> RecordDict:
        """The answer to a message: what the contract allows, or a refusal in fixed words.

        Nothing that goes wrong in here can leave the site as text.
        """
        kind = str(message.metadata.message_type)
        try:
            if not message.has_content():
                raise GarbageError("a message without content")
            return self._answer(kind, message)
        except RefusedError as refused:
            log.warning("refused a message of type %s: %s", kind, refused.reason)
            return messages.refusal(refused.reason)
        except GarbageError:
            log.warning("refused a message of type %s: garbage", kind)
            return messages.refusal("garbage")
        except BudgetError:
            log.warning("refused a message of type %s: over budget", kind)
            return messages.refusal("over budget")
        except PlanError:
            log.warning("refused a message of type %s: not planned", kind)
            return messages.refusal("not planned")
        except RangeError:
            log.warning("refused a message of type %s: out of range", kind)
            return messages.refusal("out of range")
        except ModelError as mistake:
            log.error("a message of type %s failed: %s", kind, mistake)
            return messages.refusal("failed")
        except Exception as mistake:  # whatever it is, its text stays here
            log.error("a message of type %s failed: %s", kind, where(mistake))
            return messages.refusal("failed")

    def _answer(self, kind: str, message: Message) -> RecordDict:
        content = message.content
        if kind == messages.FACTS:
            messages.plain_of(content, {})
            return self._facts().to_content()
        if kind == messages.OFFER:
            return self._consider(Contract.from_content(content))
        books = self._books
        if books is None:
            raise RefusedError("closed" if self.finished else "no contract")
        if kind == messages.FINISHED:
            return self._finish(str(messages.plain_of(content, {"contract": str})["contract"]))
        expires = float(message.metadata.created_at) + float(message.metadata.ttl)
        if self._clock() > expires:
            raise RefusedError("late")
        if kind == messages.TRAIN:
            return books.train(TrainMessage.from_content(content, books.parameters))
        if kind == messages.SELECT:
            return books.select(SelectMessage.from_content(content, books.parameters))
        if kind == messages.CONTRIBUTE:
            return books.contribute(ContributeMessage.from_content(content, books.parameters))
        if kind == messages.EVALUATE:
            return books.evaluate(EvaluateMessage.from_content(content, books.parameters))
        raise GarbageError("a type of message that is none")

    # --- before the first release -------------------------------------------------------------------

    def _facts(self) -> SiteFacts:
        client, alone = self._records()
        held_out, reported = len(client.test), self.limits.reported
        if reported is not None:
            reported = replace(reported, units=held_out)
        seeded = self._seed is not None
        return SiteFacts(self.name, len(client.train), held_out, reported, alone.task, seeded)

    def _consider(self, contract: Contract) -> RecordDict:
        if self.finished:
            raise RefusedError("closed")
        if self._books is None:
            client, alone = self._records()
            counts = {"records": len(client.train), "held_out": len(client.test)}
            learner = approve(contract, self.limits, name=self.name, task=alone.task, **counts)
            self._books = self._sign(Agreed.on(contract, learner, simulation=self._seed is not None))
        elif contract != self._books.contract:
            raise RefusedError("other experiment")
        return messages.pack({"accepted": contract.digest()})

    def _sign(self, agreed: "Agreed") -> "SiteSession":
        """Put the contract into the folder: from then on it binds, whatever happens to this process.

        Where its books cannot be opened after all, it leaves again: nothing was released under it.
        """
        self._check_nothing_spent()
        written = (self.files.contract, self.files.secret, self.files.ledger)
        for leftover in written:
            leftover.unlink(missing_ok=True)  # of an approval cut short
        try:
            self._write(agreed.contract)
            books = self._reopen(agreed)
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise
        log.info("approved %s", books.guarantee.line)
        log.info("%s", books.guarantee.text)
        if agreed.contract.trusted is not None:
            log.info("the server is trusted: %s", books.consent)
        return books

    def _write(self, contract: Contract) -> None:
        _client, alone = self._records()
        key = SecretKey.from_os() if self._seed is None else SecretKey.from_seed(self._seed)
        RunSecret(key, alone.fingerprint(), contract.plan.digest()).save(self.files.secret)
        reported = self.limits.reported.epsilon if self.limits.reported else None
        budgets = _budgets(contract, self.limits.budget.epsilon, reported)
        # The ledger first: from the moment the contract is there, it knows a head of it.
        with Ledger.open(
            self.files.ledger, contract.own_plan, budget=budgets, accountant=contract.accountant
        ) as ledger:
            head = ledger.head
        write_json(
            self.files.contract,
            {
                "contract": contract.to_json(),
                "epsilon": number_to_json(self.limits.budget.epsilon),
                "evaluation_epsilon": reported,
                "key": key.fingerprint,
                "ledger": head.to_json(),
            },
        )
        sync(self.files.path)

    def _reopen(self, agreed: "Agreed | None" = None) -> "SiteSession":
        """The books as they are on disk; an error where records, limits or files no longer fit them.

        Args:
            agreed: what follows from the contract, where it was just signed.
        """
        contract, budgets, key, head = self._signed()
        secret = RunSecret.load(self.files.secret, key)
        client, alone = self._records()
        if (contract.client, secret.data) != (self.name, alone.fingerprint()):
            raise InputError(
                f"{self.files.path}: its ledger belongs to other records, where the same noise would cancel; "
                "--state names another folder"
            )
        if (secret.plan, secret.key.simulation) != (contract.plan.digest(), self._seed is not None):
            raise InputError(f"{self.files.path}: its noise key belongs to another plan or --noise-seed")
        limit = self.limits.budget
        if cost(contract, limit.delta, self.limits.adjacency) > limit.epsilon:
            raise InputError(
                f"--epsilon: {limit.epsilon} at delta {limit.delta} is less than what was approved in "
                f"{self.files.contract}; allowed: at least that, or another --state"
            )
        allowed = 0.0 if self.limits.reported is None else self.limits.reported.epsilon
        if cost_of_scores(contract, limit.delta, self.limits.adjacency) > allowed:
            raise InputError(
                f"--evaluation-epsilon: {allowed:g} is less than what was approved in {self.files.contract}; "
                "allowed: at least that, or another --state"
            )
        if agreed is None:
            agreed = Agreed.on(contract, learner_of(contract), simulation=secret.key.simulation)
        return SiteSession(self.files, agreed, budgets, secret.key, client, alone, head)

    def _signed(self) -> tuple[Contract, dict[str, Budget], str, ChainHead]:
        """The contract in the folder, its budgets, its key's fingerprint, and the ledger's head."""
        stored = read_json(self.files.contract)
        try:
            contract = Contract.from_json(stored["contract"])
            budgets = _budgets(contract, number_from_json(stored["epsilon"]), stored["evaluation_epsilon"])
            return contract, budgets, str(stored["key"]), ChainHead.from_json(stored["ledger"])
        except (KeyError, TypeError, ValueError, GarbageError, RefusedError, LedgerError):
            raise InputError(f"{self.files.contract}: not a contract of this version") from None

    def _check_nothing_spent(self) -> None:
        """Refuse a folder whose contract is gone: what was spent under it does not come back."""
        lines = self.files.ledger.read_bytes().count(b"\n") if self.files.ledger.exists() else 0
        if lines > 1 or any(self.files.answers.glob("*.safetensors")):
            raise InputError(
                f"{self.files.contract}: missing beside books that something was spent from; restore it, or "
                "--state names another folder, whose spending adds to this"
            )

    def _check_closed(self) -> None:
        """Refuse closed books of which a part is gone or changed."""
        contract, _, _, head = self._signed()
        stored = read_json(self.files.finished)
        try:
            last = ChainHead.from_json(stored["ledger"])
        except (KeyError, TypeError, LedgerError):
            raise InputError(f"{self.files.finished}: not written by this version") from None
        books = LedgerView.read(self.files.ledger, contract.own_plan)
        books.check_seen(head, self.files.contract.name)
        books.check_seen(last, self.files.finished.name)

    def _finish(self, contract: str) -> RecordDict:
        """Close the books: the key is deleted, the ledger stays."""
        assert self._books is not None
        if contract != self._books.digest:
            raise RefusedError("other contract")
        spent, head = self._books.spent, self._books.ledger.head
        self.close()
        write_json(
            self.files.finished,
            {"contract": contract, "epsilon": number_to_json(spent), "ledger": head.to_json()},
        )
        self.files.secret.unlink(missing_ok=True)
        return messages.pack({"closed": contract})


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
        self._files = files
        self._subject = contract.client
        self._learner = agreed.learner
        self._test = Batch.of(client.test, self._learner.device)
        self._context = agreed.context
        self.guarantee = agreed.guarantee
        self._head = head
        self._ledger = Ledger.open(
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
                self._ledger,
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
            self._ledger.close()
            raise

    @property
    def parameters(self) -> int:
        return self._learner.layout.size

    @property
    def consent(self) -> str:
        """What a site that trusts the server agreed to: how often it may see what."""
        unit = self.contract.plan.unit
        releases = [release for release in self.contract.own.releases if release.name != EVALUATION]
        clips = sorted({self.contract.own.planned(release.name, CohortSums).clip for release in releases})
        times = sum(release.times for release in releases)
        scored = sum(release.times for release in self.contract.own.releases if release.name == EVALUATION)
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
        return self._ledger.spent()

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    def close(self) -> None:
        self._engine.close()
        self._ledger.close()

    def train(self, message: TrainMessage) -> RecordDict:
        """One released vector."""
        job = TrainJob(self._subject, message.start, message.anchor, message.anchor_weight)

        def compute() -> dict[str, Values]:
            reply = self._engine.answer(Train(message.asked.release, (job,)), message.asked.round)
            assert isinstance(reply, Updates)
            return {"value": reply.by_client[self._subject].value}

        value = self._once(message.asked, job_hash(self._context, job), compute)["value"]
        return messages.answer_with_vector(message.asked, value.astype(np.float32, copy=False))

    def select(self, message: SelectMessage) -> RecordDict:
        """One released index."""

        def compute() -> dict[str, Values]:
            request = Select(message.asked.release, (self._subject,), message.models)
            reply = self._engine.answer(request, message.asked.round)
            assert isinstance(reply, Choices)
            return {"value": np.array([reply.by_client[self._subject].value], dtype=np.int64)}

        value = self._once(message.asked, input_hash(self._context, message.models), compute)["value"]
        return messages.answer_with_index(message.asked, int(value[0]))

    def contribute(self, message: ContributeMessage) -> RecordDict:
        """For a trusted server: which model fits, and what was learnt from it, clipped, in the clear."""
        work, asked = self.contract.trusted, message.asked
        if work is None:
            raise RefusedError("not trusted")
        mechanism = self.contract.own.planned(asked.release, CohortSums)
        hashed = input_hash(f"{self._context} {message.order:x}", message.models)

        def compute() -> dict[str, Values]:
            self._ledger.charge([Charge(self._subject, asked.round, asked.release, hashed)])
            choice, update = self._learn(work, message, hashed)
            parts = work.parts(self.parameters)
            leaves = np.ones(self.parameters, np.bool_) if parts is None else ~parts.personal
            clipped = clip_rows(torch.from_numpy(update[leaves])[None], mechanism.clip)[0]
            answer = {"value": clipped.numpy(), "choice": np.array([choice], dtype=np.int64)}
            return {**answer, **self._own_parameters()}

        found = self._once(asked, hashed, compute)
        value = found["value"].astype(np.float64, copy=False)
        return messages.answer_with_contribution(asked, int(found["choice"][0]), value)

    def _learn(self, work: TrustedWork, message: ContributeMessage, hashed: str) -> tuple[int, Vector]:
        """The row that fits these records, and the whole update from there."""
        asked, parts = message.asked, work.parts(self.parameters)
        job = CohortJob((self._subject,), message.models, work.training, work.choice, parts=parts)
        if job.sums != len(message.models):
            raise GarbageError("several models, and nothing to choose by")
        cohort = OpenCohort(
            release=asked.release,
            job=job,
            mechanism=self.contract.own.planned(asked.release, CohortSums),
            times=1,
            round=asked.round,
            input_hash=hashed,
            sampled=job.members,
            order=lambda member, turn: message.order,
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

    def evaluate(self, message: EvaluateMessage) -> RecordDict:
        """How well a model does on held-out records: one planned, noisy score, charged like any release.

        For a trusted server, which adds the noise to the sum over all sites, it is this site's own share.
        """
        asked = message.asked
        if asked.release != EVALUATION:
            raise RefusedError("not planned")
        subject = self._subject if self.contract.scored is None else self.contract.scored.subject

        def compute() -> dict[str, Values]:
            if self.contract.scored is None:
                self._ledger.charge([Charge(subject, asked.round, asked.release, hashed)])
                share = self._count(self._used(message.models)) / len(self._test)
                return {"value": np.array([share]), **self._own_parameters()}
            model = self._used(message.models)
            scores = PrivateScores(self._engine.facts, self.contract.own_plan, self._ledger, self._context)
            found = scores.of_records(
                {self._subject: model}, asked.round, lambda: {self._subject: self._count(model)}
            )
            return {"value": np.array([found[self._subject].value])}

        hashed = self._scored_hash(message.models)
        value = self._once(asked, hashed, compute, subject)["value"]
        return messages.answer_with_score(asked, float(value[0]))

    def _scored_hash(self, models: NDArray[np.float32]) -> str:
        if self.contract.scored is None:
            return input_hash(self._context, models)
        if len(models) != 1:
            raise GarbageError("several models, and nothing to choose by")
        return input_hash(self._context, models[0])

    def _count(self, model: Vector) -> float:
        """Score of all held-out records."""
        return total_score(self._learner, torch.from_numpy(model), self._test)

    def _used(self, models: NDArray[np.float32]) -> Vector:
        """The one of the models that this site would use, with the parameters that are its own."""
        work = self.contract.trusted
        if work is None:
            if len(models) != 1:
                raise GarbageError("several models, and nothing to choose by")
            used: Vector = models[0]
            return used
        own = OwnChoice(models, work.choice, work.training, work.parts(self.parameters))
        return self._engine.members.serve(own).model_of(self._subject)

    def _once(
        self, asked: Asked, hashed: str, compute: Callable[[], dict[str, Values]], subject: str | None = None
    ) -> Mapping[str, Values]:
        """The answer to a request: as it was given before, or computed, charged and kept.

        Args:
            subject: whose records answer: those that train, or those that are held out.
        """
        subject = subject or self._subject
        if asked.contract != self.digest:
            raise RefusedError("other contract")
        if asked.round > self.contract.rounds:
            raise RefusedError("not planned")
        self.contract.own_plan.for_subject(subject).release(asked.release)
        charge = Charge(subject, asked.round, asked.release, hashed)
        again = self._ledger.knows(charge)
        if not again and asked.round < self._ledger.latest_round(subject):
            raise RefusedError("passed")
        named = _file_name(subject, asked.release, hashed)
        path = self._files.answers / f"{asked.round:06d}-{named}.safetensors"
        # None where a crash came before the answer was kept: it is computed again with the same noise.
        found = read_arrays(path) if again else None
        if found is None:
            began = time.perf_counter()
            found = compute()
            write_arrays(path, found, {"ledger": json.dumps(self._ledger.head.to_json())})
            self._say(asked, time.perf_counter() - began)
            forget_rounds(self._files.answers, before=asked.round - 1)
        else:
            log.info("round %d, %s: the answer given before", asked.round, asked.release)
        self._keep_head()
        return found

    def _keep_head(self) -> None:
        """Let the contract know how far the ledger is, before what was charged leaves the site."""
        if self._head != self._ledger.head:
            stored = read_json(self._files.contract)
            write_json(self._files.contract, {**stored, "ledger": self._ledger.head.to_json()})
            sync(self._files.path)
            self._head = self._ledger.head

    def _check_answers(self) -> None:
        """Refuse a ledger that lacks what it held when an answer was kept; a damaged answer is made again."""
        for path in sorted(self._files.answers.glob("*.safetensors")):
            notes = read_notes(path)
            if "ledger" in notes:
                seen = ChainHead.from_json(json.loads(notes["ledger"]))
                self._ledger.check_seen(seen, f"{self._files.answers.name}/{path.name}")

    def _say(self, asked: Asked, seconds: float) -> None:
        """One line in the site's own log about what leaves it."""
        if self.contract.trusted is None:
            log.info(
                "round %d of %d, %s: released in %.1f s, spent epsilon %s",
                *(asked.round, self.contract.rounds, asked.release, seconds, round_up(self.spent)),
            )
            return
        if asked.release == EVALUATION:
            log.info(
                "round %d of %d: share of held-out records that are right, sent to the trusted server",
                *(asked.round, self.contract.rounds),
            )
            return
        log.info(
            "round %d of %d, %s: learnt in %.1f s, sent to the trusted server in the clear, clipped to %g",
            *(asked.round, self.contract.rounds, asked.release, seconds),
            self.contract.own.planned(asked.release, CohortSums).clip,
        )


def _file_name(*names: str) -> str:
    """Of a subject, a release and what it was computed from: whatever they are called, a file name."""
    fields = encode_fields(*(name.encode("utf-8", "surrogatepass") for name in names))
    return hashlib.sha256(fields).hexdigest()


def _budgets(contract: Contract, epsilon: float, reported: float | None) -> dict[str, Budget]:
    """Of the records that are learnt from, and of those that are held out, where scores are reported."""
    budgets = {contract.client: Budget(epsilon, contract.delta)}
    if contract.scored is not None:
        if reported is None:
            raise ValueError("scores without a budget")
        budgets[contract.scored.subject] = Budget(float(reported), contract.delta)
    return budgets
