"""The server's side: an algorithm's requests become messages to sites, and their answers its replies.

Nobody is trusted to answer. A reply counts if it came in time, answers exactly what was asked, has the right
shape and no value that an honest site could not have produced; everything else is a missing client. The
server's ledger is charged with what was asked, before it is asked: a site may have spent less, never more.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from coterie.algorithms.protocol import Choices, Reply, Request, Select, Train, TrainJob, Updates, Vector
from coterie.engines.clients import Trainable, noise_in_release
from coterie.engines.flower import messages
from coterie.engines.flower.contract import Contract
from coterie.engines.flower.messages import (
    Asked,
    EvaluateMessage,
    GarbageError,
    SelectMessage,
    SiteFacts,
    Split,
    TrainMessage,
    Values,
)
from coterie.engines.local import input_hash, job_hash
from coterie.errors import CoterieError, PlanError
from coterie.files import forget_rounds, read_arrays, write_arrays
from coterie.privacy import (
    Charge,
    FullBatchSketch,
    FullBatchSteps,
    Ledger,
    PoissonSteps,
    PrivacyPlan,
    PrivateSelection,
    Released,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
EXPIRED = frozenset({3, 4})
"""Flower's codes for a message, or its reply, that is past its time."""
NODE_UNAVAILABLE = 5
"""Flower's code for a node that went away with a message."""
TOO_LATE = "no answer in time"
NOISE_DEVIATIONS = 12.0
"""The noise streams reach 9.2 standard deviations per draw; an honest coordinate stays within this many."""


class NobodyAnswered(CoterieError):
    """A request that no site answered."""


@dataclass(frozen=True)
class Patience:
    """How long the server waits.

    Args:
        answer: seconds for an answer; after that the client is missing, and its message void.
        rejoin: seconds to wait for a client that was there in the last request and is not now.
        poll: seconds between two looks into the post box.
    """

    answer: float = 600.0
    rejoin: float = 120.0
    poll: float = 0.3


@dataclass(frozen=True)
class Answers(Generic[T]):
    """Who answered what, and why the others did not."""

    by_client: Mapping[str, T]
    missing: Mapping[str, str]
    seconds: float


class Post:
    """Messages to named sites over a Flower grid."""

    def __init__(self, grid: Grid, nodes: Mapping[str, int], patience: Patience) -> None:
        self.grid = grid
        self.nodes = dict(nodes)
        self.patience = patience
        self._steady = set(nodes)
        self._late: set[str] = set()

    def online(self) -> set[str]:
        """The sites that the link has heard of lately."""
        there = set(self.grid.get_node_ids())
        return {name for name, node in self.nodes.items() if node in there}

    def present(self, wanted: Sequence[str]) -> list[str]:
        """Those of the wanted who are there; who was there before is waited for."""
        until = time.monotonic() + self.patience.rejoin
        while True:
            there = self.online()
            if self._steady & set(wanted) <= there or time.monotonic() >= until:
                break
            time.sleep(self.patience.poll)
        self._steady = set(there)
        return [name for name in wanted if name in there]

    def ask(
        self,
        kind: str,
        contents: Mapping[str, RecordDict],
        read: Callable[[str, RecordDict], T],
        group: str = "",
    ) -> Answers[T]:
        """Send each site its message and read what comes back in time.

        A site that went away and came back is sent the same message again: it answers as it did before, or
        as it would have, and is charged once.
        """
        began = time.monotonic()
        names = list(contents)
        waiting, missing = self._send(kind, contents, group, self.patience.answer)
        pending = set(waiting.values())
        answered: dict[str, T] = {}
        away: dict[str, float] = {}
        others_done: float | None = None
        while pending:
            now = time.monotonic()
            for reply in self.grid.pull_messages(list(waiting)) if waiting else ():
                # By what it replies to: an error made by the link itself carries no other name.
                name = waiting.pop(str(reply.metadata.reply_to_message_id), None)
                if name is None:
                    continue  # an answer that nobody waits for any more
                if reply.has_error() and reply.error.code == NODE_UNAVAILABLE:
                    away.setdefault(name, now)
                    continue
                pending.discard(name)
                try:
                    answered[name] = self._read(name, reply, read)
                    self._late.discard(name)
                except GarbageError as mistake:
                    missing[name] = f"garbage: {mistake}"
                except _Unanswered as reason:
                    missing[name] = str(reason)
            left = self.patience.answer - (now - began)
            if pending <= self._late and others_done is None:
                others_done = now
            # Who was late before is given as long again as the others took, not the whole time.
            grace = others_done is not None and now - others_done >= others_done - began
            if pending and (grace or left <= 0):
                missing.update(dict.fromkeys(pending, TOO_LATE))
                self._late |= pending
                break
            for name in self._returned(pending, away, now):
                waiting = {identity: other for identity, other in waiting.items() if other != name}
                waiting.update(self._send(kind, {name: contents[name]}, group, left)[0])
            lost = {name for name in pending if now - away.get(name, now) > self.patience.rejoin}
            missing.update(dict.fromkeys(lost, "went away"))
            pending -= lost
            if pending:
                time.sleep(self.patience.poll)
        return Answers(
            {name: answered[name] for name in names if name in answered},
            {name: missing[name] for name in names if name in missing},
            time.monotonic() - began,
        )

    def _send(
        self, kind: str, contents: Mapping[str, RecordDict], group: str, seconds: float
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Who waits under which number, and who could not be sent anything."""
        names = list(contents)
        sent = self.grid.push_messages(
            [Message(contents[name], self.nodes[name], kind, ttl=seconds, group_id=group) for name in names]
        )
        waiting = {identity: name for identity, name in zip(sent, names, strict=True) if identity}
        return waiting, {name: "not sent" for name in names if name not in waiting.values()}

    def _returned(self, waiting: set[str], away: dict[str, float], now: float) -> list[str]:
        """Those who were away and are there again; notes since when the others are not."""
        if not waiting:
            return []
        there = self.online()
        back = [name for name in away if name in waiting and name in there]
        for name in back:
            del away[name]
        for name in waiting - there:
            away.setdefault(name, now)
        return back

    def _read(self, name: str, reply: Message, read: Callable[[str, RecordDict], T]) -> T:
        if reply.has_error():
            if reply.error.code in EXPIRED:
                self._late.add(name)
                raise _Unanswered(TOO_LATE)
            raise _Unanswered(f"Flower's error {reply.error.code}")
        if (reason := messages.is_refusal(reply.content)) is not None:
            raise _Unanswered(f"refused: {messages.REFUSALS[reason]}")
        return read(name, reply.content)


class _Unanswered(Exception):
    """Why there is no answer."""


# --- before the first round -------------------------------------------------------------------------


def gather_facts(post: Post, splits: Mapping[str, Split]) -> Answers[SiteFacts]:
    """Ask every site for its public facts."""

    def read(name: str, content: RecordDict) -> SiteFacts:
        facts = SiteFacts.from_content(content)
        if facts.name != name:
            raise GarbageError("a site under another's name")
        return facts

    contents = {name: split.to_content() for name, split in splits.items()}
    return post.ask(messages.FACTS, contents, read)


def names_of(grid: Grid, nodes: Sequence[int], patience: Patience) -> dict[str, int]:
    """The names that nodes give themselves, where no keys say who they are."""
    post = Post(grid, {str(node): node for node in nodes}, patience)
    split = Split(0, 0, 0.5, 0.0).to_content()
    found = post.ask(
        messages.FACTS,
        dict.fromkeys(post.nodes, split),
        lambda node, content: SiteFacts.from_content(content),
    )
    for node, reason in found.missing.items():
        raise CoterieError(f"node {node}: no facts ({reason})")
    names = {facts.name: post.nodes[node] for node, facts in found.by_client.items()}
    if len(names) < len(nodes):
        raise CoterieError("two nodes give themselves the same name")
    return names


def offer(post: Post, contracts: Mapping[str, Contract]) -> Answers[str]:
    """Propose its contract to every site."""

    def read(name: str, content: RecordDict) -> str:
        accepted: str = messages.plain_of(content, {"accepted": str})["accepted"]
        if accepted != contracts[name].digest():
            raise GarbageError("another contract")
        return accepted

    contents = {name: contract.to_content() for name, contract in contracts.items()}
    return post.ask(messages.OFFER, contents, read)


def finish(post: Post, contracts: Mapping[str, Contract]) -> Answers[str]:
    """Tell the sites that are there that nothing more will be asked."""
    there = post.online()
    contents = {
        name: messages.pack({"contract": contract.digest()})
        for name, contract in contracts.items()
        if name in there
    }

    def read(name: str, content: RecordDict) -> str:
        closed: str = messages.plain_of(content, {"closed": str})["closed"]
        return closed

    return post.ask(messages.FINISHED, contents, read)


# --- rounds -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Participation:
    """What became of one request."""

    round: int
    release: str
    answered: tuple[str, ...]
    missing: Mapping[str, str]
    seconds: float


@dataclass
class Journal:
    """The answers of the round that is under way, so that a resumed round goes on from them.

    Without it, a round that runs again after a crash could meet other clients present, send other models, and
    have all of it charged once more.
    """

    folder: Path
    _round: int = field(default=0, init=False)
    _count: int = field(default=0, init=False)

    def next(self, round: int, request: str) -> Path:
        """Where the answers to the next request of the round belong."""
        self._count = self._count + 1 if round == self._round else 1
        self._round = round
        self.folder.mkdir(parents=True, exist_ok=True)
        forget_rounds(self.folder, before=round)
        return self.folder / f"{round:06d}-{self._count:02d}-{request[:32]}.safetensors"


class FlowerEngine:
    """Answers `Train` and `Select` by asking the sites."""

    def __init__(
        self,
        post: Post,
        contracts: Mapping[str, Contract],
        plan: PrivacyPlan,
        ledger: Ledger,
        lr: float,
        parameters: int,
        context: str,
        journal: Journal | None = None,
        watch: Callable[[Participation], None] | None = None,
    ) -> None:
        """Args beside the obvious:

        contracts: of every client, as it approved it.
        context: as for the in-process engine; equal to the sites' own where they run the same versions.
        journal: keeps the answers of the round under way.
        watch: is told about every request, as it is answered.
        """
        self._post = post
        self._plan = plan
        self._ledger = ledger
        self._lr = lr
        self._parameters = parameters
        self._context = context
        self._journal = journal
        self._watch = watch or (lambda participation: None)
        self._digests = {name: contract.digest() for name, contract in contracts.items()}

    def answer(self, request: Request, round: int) -> Reply:
        if isinstance(request, Train):
            return self._train(request, round)
        if isinstance(request, Select):
            return self._select(request, round)
        raise PlanError(
            f"{type(request).__name__}: a request that trusts the server; over Flower, only sites that trust "
            "nobody are asked"
        )

    # --- training -----------------------------------------------------------------------------------

    def _train(self, request: Train, round: int) -> Updates:
        jobs = {job.client: job for job in request.jobs}
        if len(jobs) != len(request.jobs):
            raise PlanError(f"release '{request.release}' was asked of one client twice in one request")
        mechanisms = {client: self._trainable(client, request.release) for client in jobs}
        hashes = {client: job_hash(self._context, job) for client, job in jobs.items()}

        def content(client: str) -> RecordDict:
            job = jobs[client]
            asked = self._asked(client, round, request.release)
            return TrainMessage(asked, job.start, job.anchor, job.anchor_weight).to_content()

        def read(client: str, found: RecordDict) -> Vector:
            mechanism = mechanisms[client]
            sketch = isinstance(mechanism, FullBatchSketch)
            length = mechanism.dimensions if sketch else self._parameters  # type: ignore[union-attr]
            value = messages.vector_in(found, self._asked(client, round, request.release), length)
            if float(np.abs(value).max()) > largest_release(jobs[client], mechanism, self._lr):
                raise GarbageError("values that no honest site could have released")
            return value

        answers = self._ask(messages.TRAIN, request.release, round, hashes, content, read)
        return Updates(
            {
                client: Released(
                    answers[client].astype(np.float32, copy=False),
                    noise_in_release(jobs[client], mechanisms[client], self._lr),
                )
                for client in jobs
                if client in answers
            }
        )

    def _trainable(self, client: str, release: str) -> Trainable:
        mechanism = self._plan.for_subject(client).release(release).mechanism
        if not isinstance(mechanism, PoissonSteps | FullBatchSteps | FullBatchSketch):
            raise PlanError(f"release '{release}' is planned as {mechanism.name}: not trainable")
        return mechanism

    # --- selection ----------------------------------------------------------------------------------

    def _select(self, request: Select, round: int) -> Choices:
        for client in request.clients:
            mechanism = self._plan.for_subject(client).release(request.release).mechanism
            if not isinstance(mechanism, PrivateSelection):
                raise PlanError(
                    f"release '{request.release}' is planned as {mechanism.name}: no private selection"
                )
        hashed = input_hash(self._context, request.models)

        def content(client: str) -> RecordDict:
            return SelectMessage(self._asked(client, round, request.release), request.models).to_content()

        def read(client: str, found: RecordDict) -> NDArray[np.int64]:
            asked = self._asked(client, round, request.release)
            return np.array([messages.index_in(found, asked, len(request.models))], dtype=np.int64)

        hashes = dict.fromkeys(request.clients, hashed)
        answers = self._ask(messages.SELECT, request.release, round, hashes, content, read)
        return Choices(
            {
                client: Released(int(answers[client][0]), 0.0)
                for client in request.clients
                if client in answers
            }
        )

    # --- both ---------------------------------------------------------------------------------------

    def _asked(self, client: str, round: int, release: str) -> Asked:
        return Asked(self._digests[client], round, release)

    def _ask(
        self,
        kind: str,
        release: str,
        round: int,
        hashes: Mapping[str, str],
        content: Callable[[str], RecordDict],
        read: Callable[[str, RecordDict], Values],
    ) -> Mapping[str, Values]:
        """What the clients answered: from the journal, or by asking those that are there."""
        path = None
        if self._journal is not None:
            request = hashlib.sha256(repr((kind, release, sorted(hashes.items()))).encode()).hexdigest()
            path = self._journal.next(round, request)
            known = read_arrays(path)
            if known is not None:
                before = {client: "missing before the restart" for client in hashes if client not in known}
                self._watch(Participation(round, release, tuple(known), before, 0.0))
                return known
        present = self._post.present(list(hashes))
        if present:
            self._ledger.charge([Charge(client, round, release, hashes[client]) for client in present])
        found = self._post.ask(kind, {client: content(client) for client in present}, read, group=str(round))
        away = {client: "not there" for client in hashes if client not in present}
        self._watch(
            Participation(round, release, tuple(found.by_client), {**away, **found.missing}, found.seconds)
        )
        if not found.by_client:
            raise NobodyAnswered(f"round {round}: no client answered '{release}'; --resume tries it again")
        if path is not None:
            write_arrays(path, found.by_client)
        return found.by_client


def evaluate(
    post: Post, contracts: Mapping[str, Contract], models: Mapping[str, Vector], round: int
) -> Answers[tuple[float, float]]:
    """Accuracy and loss of each client's model on its own held-out records; a caveat of the guarantee."""
    there = post.present(list(models))
    asked = {name: Asked(contracts[name].digest(), round, "evaluation") for name in there}
    contents = {name: EvaluateMessage(asked[name], models[name]).to_content() for name in there}
    return post.ask(
        messages.EVALUATE, contents, lambda name, content: messages.score_in(content, asked[name])
    )


def largest_release(job: TrainJob, mechanism: Trainable, lr: float) -> float:
    """A bound on every coordinate of what an honest site releases, from public values alone.

    A step moves a coordinate by at most lr times (all records at full clip, plus noise) over the denominator,
    and by the pull towards the anchor, which the steps before have moved.
    """
    noise = NOISE_DEVIATIONS * mechanism.noise_std
    step = (mechanism.clip * mechanism.records + noise) / mechanism.denominator
    if isinstance(mechanism, FullBatchSketch):
        return step
    away = 0.0 if job.anchor is None else float(np.abs(job.anchor - job.start).max())
    pull, bound = lr * job.anchor_weight, 0.0
    for _ in range(mechanism.steps):
        bound = abs(1.0 - pull) * bound + lr * step + pull * away
    return 1.001 * bound  # float32 on the site's side
