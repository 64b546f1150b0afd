"""A site: its records, what its operator allows, and how it meets the messages of a server.

Before the first release it considers a contract, and puts it into its folder if it agrees (`approval`). From
then on a `SiteSession` answers what the contract allows; whatever else comes is refused in fixed words.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flwr.app import Message, RecordDict

from coterie.data import Federation
from coterie.engines.flower import messages
from coterie.engines.flower.approval import approve, learner_of
from coterie.engines.flower.booking import SiteBooking
from coterie.engines.flower.contract import Contract, Limits, cost, cost_of_scores, promised
from coterie.engines.flower.kept import Finished, Signed, SiteFolder
from coterie.engines.flower.messages import (
    FinalModels,
    GarbageError,
    RefusedError,
    SiteFacts,
    SiteRequest,
    printable,
    site_log,
)
from coterie.engines.flower.review import Reviewer, in_words, note_consent, time_is_over
from coterie.engines.secret import SEEDED, RunSecret
from coterie.errors import BudgetError, CoterieError, InputError, ModelError, PlanError, where
from coterie.privacy import ChainHead, LedgerView, SecretKey
from coterie.privacy.errors import RangeError

if TYPE_CHECKING:
    from coterie.engines.flower.session import SiteSession
    from coterie.training.learner import Learner

log = site_log(__name__)

REASONS: Mapping[type[CoterieError], str] = {
    GarbageError: "garbage",
    BudgetError: "over budget",
    PlanError: "not planned",
    RangeError: "out of range",
}
"""How a site refuses what is wrong with a message."""


class Peer(Protocol):
    """The server, as far as a site asks it something."""

    def now(self) -> float:
        """The time by its clock."""

    def is_open(self, message: Message) -> bool:
        """Whether it still waits for the answer to a message."""


class AtHome:
    """A server that is not asked: its clock is ours, and it waits."""

    def now(self) -> float:
        return time.time()

    def is_open(self, message: Message) -> bool:
        return True


AT_HOME = AtHome()


class Site:
    """Answers messages, one at a time."""

    def __init__(
        self,
        alone: Federation,
        folder: Path,
        limits: Limits,
        *,
        noise_seed: int | None = None,
        reviewer: Reviewer | None = None,
        booking: SiteBooking | None = None,
    ) -> None:
        """Args:
        alone: a federation of the site as its only client: its name, by which its operator is known to the
            server's, and its records, split as the operator decided.
        folder: what it keeps for one experiment; created when missing.
        limits: what its operator allows.
        noise_seed: makes the noise repeatable and the whole a simulation; the server is told.
        reviewer: has the operator decide about a contract that the limits allow; by default it is signed.
        booking: enters contracts in the register of what these records have paid; None: nobody counts.
        """
        self.reviewer = reviewer or Reviewer()
        self.alone, self.limits = alone, limits
        self.files = SiteFolder(folder)
        self._seed, self._booking = noise_seed, booking
        self.session: SiteSession | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if self.finished:
            self._check_closed()
            self.files.secret.unlink(
                missing_ok=True
            )  # a crash may have come between the end and its deletion
        elif self.files.contract.exists():
            self.session = self._reopen()
        else:
            self._check_nothing_spent()

    @property
    def finished(self) -> bool:
        return self.files.finished.exists()

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None

    def handle(self, message: Message, peer: Peer = AT_HOME) -> RecordDict:
        """The answer to a message: what the contract allows, or a refusal in fixed words.

        Nothing that goes wrong in here can leave the site as text.

        Args:
            peer: the server that sent it, as far as a site can ask it something.
        """
        kind = str(message.metadata.message_type)
        try:
            GarbageError.when(not message.has_content(), "a message without content")
            return self._answer(kind, message, peer)
        except Exception as mistake:  # whatever it is, its text stays here
            reason = _reason(mistake)
            if reason == "failed":
                said = mistake if isinstance(mistake, ModelError) else where(mistake)
                told = f"a message of type {kind} failed: {said}"
                log.event("failed", told, level=logging.ERROR, kind=printable(kind))
            else:
                told = f"refused a message of type {kind}: {reason}"
                log.event("refused", told, level=logging.WARNING, kind=printable(kind), reason=reason)
            return messages.refusal(reason)

    def _answer(self, kind: str, message: Message, peer: Peer) -> RecordDict:
        content = message.content
        if kind == messages.FACTS:
            messages.plain_of(content, {})
            return self._facts().to_content()
        if kind == messages.OFFER:
            return self._consider(Contract.from_content(content))
        session = self.session
        if session is None:
            raise RefusedError("closed" if self.finished else "no contract")
        if kind == messages.FINISHED:
            return self._finish(session, FinalModels.from_content(content, session.parameters))
        RefusedError.when(time_is_over(self.files.consent), "rule hours")
        expires = float(message.metadata.created_at) + float(message.metadata.ttl)
        RefusedError.when(peer.now() > expires, "late")
        GarbageError.when(kind not in messages.REQUESTS, "an unknown type of message")
        # This process may have slept since the message came: what nobody waits for is not released.
        RefusedError.when(not peer.is_open(message), "passed")
        return session.answer(kind, SiteRequest.from_content(kind, content, session.parameters))

    # --- before the first release -------------------------------------------------------------------

    def _facts(self) -> SiteFacts:
        [client] = self.alone.clients
        records, held_out, reported = len(client.train), len(client.test), self.limits.reported
        if reported is not None:
            reported = replace(reported, units=held_out)
        rest = (self.alone.task, self._seed is not None, self.alone.records_per_person)
        return SiteFacts(client.name, records, held_out, reported, *rest)

    def _consider(self, contract: Contract) -> RecordDict:
        RefusedError.when(self.finished, "closed")
        if self.session is None:
            learner = approve(contract, self.limits, self._facts())
            self._review(contract, learner)
            self.session = self._sign(contract, learner)
        RefusedError.when(contract != self.session.contract, "other experiment")
        return messages.pack({"accepted": contract.digest})

    def _review(self, contract: Contract, learner: "Learner") -> None:
        """Raise `RefusedError` unless the operator, where asked, has agreed."""
        try:
            promise = promised(contract, [SEEDED] if self._seed is not None else [])
        except CoterieError:  # epsilon can be bounded, but what it is good for cannot be said
            raise RefusedError("not planned") from None
        self.reviewer.check(contract, in_words(contract, promise, learner.layout.size))

    def _sign(self, contract: Contract, learner: "Learner") -> "SiteSession":
        """Put the contract into the folder: from then on it binds, whatever happens to this process.

        It gets there last, when a session is open: a folder that was left before has no contract, and where
        no session can be opened nothing stays of it. Nothing was released under it.
        """
        self._check_nothing_spent()
        self._unsign()  # of an approval cut short
        with ExitStack() as undone:
            undone.callback(self._unsign)
            key = SecretKey.from_os() if self._seed is None else SecretKey.from_seed(self._seed)
            secret = RunSecret(key, self.alone.fingerprint(), contract.plan.digest())
            secret.save(self.files.secret)
            reported = self.limits.reported.epsilon if self.limits.reported else None
            signed = Signed(contract, self.limits.budget.epsilon, reported, key.fingerprint, ChainHead(0, ""))
            with signed.open_ledger(self.files, None) as ledger:
                signed = replace(signed, ledger=ledger.head)
            # What a later process will read, to the letter.
            session = self._open(signed.as_read(), secret, learner)
            undone.callback(session.close)
            self._enter(contract)
            note_consent(self.files.consent, contract, self.reviewer.by, self.limits)
            signed.save(self.files.contract)
            undone.pop_all()
        told = f"approved {session.guarantee.line}"
        log.event("approved", told, contract=contract.digest, epsilon=session.guarantee.epsilon)
        log.info("%s", session.guarantee.text)
        if contract.trusted is not None:
            log.info("the server is trusted: %s", session.consent)
        return session

    def _enter(self, contract: Contract) -> None:
        """Have the register count the whole contract, beside all else that these records have paid."""
        if self._booking is not None:
            self._booking.reserve(contract, self.files.path, seeded=self._seed is not None)

    def _unsign(self) -> None:
        for path in (self.files.contract, self.files.secret, self.files.ledger, self.files.consent):
            path.unlink(missing_ok=True)

    def _reopen(self) -> "SiteSession":
        """The session as it is on disk."""
        signed = Signed.load(self.files.contract)
        self._enter(signed.contract)
        return self._open(signed, RunSecret.load(self.files.secret, signed.key))

    def _open(self, signed: Signed, secret: RunSecret, learner: "Learner | None" = None) -> "SiteSession":
        """A session; an error where records, limits or files do not fit it, or no longer.

        Args:
            learner: of the contract, where it is just signed.
        """
        contract, limit, between = signed.contract, self.limits.budget, self.limits.adjacency
        records = (self.alone.clients[0].name, self.alone.fingerprint())
        InputError.when(
            (contract.client, secret.data) != records,
            f"{self.files.path}: its ledger belongs to other records, where the same noise would cancel; "
            "--state names another folder",
        )
        InputError.when(
            (secret.plan, secret.key.simulation) != (contract.plan.digest(), self._seed is not None),
            f"{self.files.path}: its noise key belongs to another plan or --noise-seed",
        )
        approved = f"what was approved in {self.files.contract}; allowed: at least that, or another --state"
        InputError.when(
            cost(contract, limit.delta, between) > limit.epsilon,
            f"--epsilon: {limit.epsilon} at delta {limit.delta} is less than {approved}",
        )
        allowed = 0.0 if self.limits.reported is None else self.limits.reported.epsilon
        InputError.when(
            cost_of_scores(contract, limit.delta, between) > allowed,
            f"--evaluation-epsilon: {allowed:g} is less than {approved}",
        )
        from coterie.engines.flower.session import SiteSession  # brings torch

        return SiteSession(self.files, signed, learner or learner_of(contract), secret.key, self.alone)

    def _check_nothing_spent(self) -> None:
        """Refuse a folder whose contract is gone: what was spent under it does not come back."""
        lines = self.files.ledger.read_bytes().count(b"\n") if self.files.ledger.exists() else 0
        InputError.when(
            lines > 1 or any(self.files.answers.glob("*.safetensors")),
            f"{self.files.contract}: missing, though something was spent under it; restore it, or "
            "--state names another folder, whose spending adds to this",
        )

    def _check_closed(self) -> None:
        """Refuse a finished session of which a part is gone or changed."""
        signed, end = Signed.load(self.files.contract), Finished.load(self.files.finished)
        ledger = LedgerView.read(self.files.ledger, signed.contract.own_plan)
        ledger.check_seen(signed.ledger, self.files.contract.name)
        ledger.check_seen(end.ledger, self.files.finished.name)

    def _finish(self, session: "SiteSession", final: FinalModels) -> RecordDict:
        """End the session: the models are kept, the key is deleted, the ledger stays."""
        contract = final.contract
        RefusedError.when(contract != session.contract.digest, "other contract")
        session.take_home(final)
        end = Finished(contract, session.spent, session.ledger.head)
        if self._booking is not None:
            self._booking.settle(session.contract, self.files.path, session.ledger)
        self.close()
        end.save(self.files.finished)
        self.files.secret.unlink(missing_ok=True)
        return messages.pack({"closed": contract})


def _reason(mistake: Exception) -> str:
    """Why a message is not answered, in one of the fixed words."""
    if isinstance(mistake, RefusedError):
        return mistake.reason
    return next((reason for kind, reason in REASONS.items() if isinstance(mistake, kind)), "failed")
