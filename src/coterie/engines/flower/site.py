"""A site: its records, what its operator allows, and how it meets the messages of a server.

Before the first release it considers a contract, and puts it into its folder if it agrees (`approval`). From
then on a `SiteSession` answers what the contract allows; whatever else comes is refused in fixed words.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from flwr.app import Message, RecordDict

from coterie.data import Client, Federation
from coterie.engines.flower import messages
from coterie.engines.flower.approval import approve, learner_of
from coterie.engines.flower.contract import Contract, Limits, cost, cost_of_scores
from coterie.engines.flower.messages import GarbageError, RefusedError, SiteFacts, SiteRequest
from coterie.engines.flower.session import Agreed, SiteFolder, SiteSession
from coterie.engines.flower.words import site_log
from coterie.engines.secret import RunSecret
from coterie.errors import BudgetError, CoterieError, InputError, LedgerError, ModelError, PlanError, where
from coterie.files import read_json, sync, write_json
from coterie.privacy import Budget, ChainHead, Ledger, LedgerView, SecretKey
from coterie.privacy.errors import RangeError
from coterie.privacy.units import number_from_json, number_to_json

log = site_log(__name__)

Records = Callable[[], tuple[Client, Federation]]
"""How a site reads its records, split as its operator said: the client, and the federation of it alone."""

ANSWERS: Mapping[str, Callable[[SiteSession, SiteRequest], RecordDict]] = {
    messages.TRAIN: SiteSession.train,
    messages.SELECT: SiteSession.select,
    messages.CONTRIBUTE: SiteSession.contribute,
    messages.EVALUATE: SiteSession.evaluate,
}
"""What is computed for each kind of request."""

REASONS: Mapping[type[CoterieError], str] = {
    GarbageError: "garbage",
    BudgetError: "over budget",
    PlanError: "not planned",
    RangeError: "out of range",
}
"""How a site refuses what is wrong with a message."""


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
        folder: what it keeps for one experiment; created when missing.
        limits: what its operator allows.
        noise_seed: makes the noise repeatable and the whole a simulation; the server is told.
        """
        self.name = name
        self.limits = limits
        self.files = SiteFolder(folder)
        self._records = records
        self._seed = noise_seed
        self._clock = clock
        self.session: SiteSession | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if self.files.finished.exists():
            self._check_closed()
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

    def handle(self, message: Message) -> RecordDict:
        """The answer to a message: what the contract allows, or a refusal in fixed words.

        Nothing that goes wrong in here can leave the site as text.
        """
        kind = str(message.metadata.message_type)
        try:
            if not message.has_content():
                raise GarbageError("a message without content")
            return self._answer(kind, message)
        except Exception as mistake:  # whatever it is, its text stays here
            reason = _reason(mistake)
            if reason == "failed":
                said = mistake if isinstance(mistake, ModelError) else where(mistake)
                log.error("a message of type %s failed: %s", kind, said)
            else:
                log.warning("refused a message of type %s: %s", kind, reason)
            return messages.refusal(reason)

    def _answer(self, kind: str, message: Message) -> RecordDict:
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
            return self._finish(session, str(messages.plain_of(content, {"contract": str})["contract"]))
        expires = float(message.metadata.created_at) + float(message.metadata.ttl)
        if self._clock() > expires:
            raise RefusedError("late")
        if kind not in ANSWERS:
            raise GarbageError("an unknown type of message")
        return ANSWERS[kind](session, SiteRequest.from_content(kind, content, session.parameters))

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
        if self.session is None:
            client, alone = self._records()
            counts = {"records": len(client.train), "held_out": len(client.test)}
            learner = approve(contract, self.limits, name=self.name, task=alone.task, **counts)
            self.session = self._sign(Agreed.on(contract, learner, simulation=self._seed is not None))
        elif contract != self.session.contract:
            raise RefusedError("other experiment")
        return messages.pack({"accepted": contract.digest()})

    def _sign(self, agreed: Agreed) -> SiteSession:
        """Put the contract into the folder: from then on it binds, whatever happens to this process.

        Where no session can be opened after all, it leaves again: nothing was released under it.
        """
        self._check_nothing_spent()
        written = (self.files.contract, self.files.secret, self.files.ledger)
        for leftover in written:
            leftover.unlink(missing_ok=True)  # of an approval cut short
        try:
            self._write(agreed.contract)
            session = self._reopen(agreed)
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise
        log.info("approved %s", session.guarantee.line)
        log.info("%s", session.guarantee.text)
        if agreed.contract.trusted is not None:
            log.info("the server is trusted: %s", session.consent)
        return session

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

    def _reopen(self, agreed: Agreed | None = None) -> SiteSession:
        """The session as it is on disk; an error where records, limits or files no longer fit them.

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
                f"{self.files.contract}: missing, though something was spent under it; restore it, or "
                "--state names another folder, whose spending adds to this"
            )

    def _check_closed(self) -> None:
        """Refuse a finished session of which a part is gone or changed."""
        contract, _, _, head = self._signed()
        stored = read_json(self.files.finished)
        try:
            last = ChainHead.from_json(stored["ledger"])
        except (KeyError, TypeError, LedgerError):
            raise InputError(f"{self.files.finished}: not written by this version") from None
        ledger = LedgerView.read(self.files.ledger, contract.own_plan)
        ledger.check_seen(head, self.files.contract.name)
        ledger.check_seen(last, self.files.finished.name)

    def _finish(self, session: SiteSession, contract: str) -> RecordDict:
        """End the session: the key is deleted, the ledger stays."""
        if contract != session.digest:
            raise RefusedError("other contract")
        spent, head = session.spent, session.ledger.head
        self.close()
        write_json(
            self.files.finished,
            {"contract": contract, "epsilon": number_to_json(spent), "ledger": head.to_json()},
        )
        self.files.secret.unlink(missing_ok=True)
        return messages.pack({"closed": contract})


def _reason(mistake: Exception) -> str:
    """Why a message is not answered, in one of the fixed words."""
    if isinstance(mistake, RefusedError):
        return mistake.reason
    return next((reason for kind, reason in REASONS.items() if isinstance(mistake, kind)), "failed")


def _budgets(contract: Contract, epsilon: float, reported: float | None) -> dict[str, Budget]:
    """Of the records that are learnt from, and of those that are held out, where scores are reported."""
    budgets = {contract.client: Budget(epsilon, contract.delta)}
    if contract.scored is not None:
        if reported is None:
            raise ValueError("scores without a budget")
        budgets[contract.scored.subject] = Budget(float(reported), contract.delta)
    return budgets
