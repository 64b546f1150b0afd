"""Messages to named sites over a Flower grid, and the answers of the round that is under way."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from coterie.engines.flower import messages
from coterie.engines.flower.bell import Bell
from coterie.engines.flower.internals import ErrorCode
from coterie.engines.flower.messages import GarbageError, RequestId, SiteRequest
from coterie.errors import CoterieError, InputError
from coterie.files import forget_rounds, read_arrays
from coterie.privacy.ranges import Range

T = TypeVar("T")
UNFINISHED = frozenset({ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE})
"""A message, or its reply, is past its time, or never became whole."""
TOO_LATE = "no answer in time"
RUNG_POLL = 1.0
"""Seconds between two looks for answers where a bell tells of them."""


class NobodyAnswered(CoterieError):
    """A request that no site answered."""


PATIENCE = Range(0, 1e6)
"""Seconds: eleven days."""
TIME_TO_ANSWER = Range(0.1, PATIENCE.most)
"""Seconds: a message that is void when it is sent is answered by nobody."""


@dataclass(frozen=True)
class Timeouts:
    """How long the server waits.

    Args:
        answer: seconds for an answer, once all was sent; after that the client is missing.
        rejoin: seconds to wait for a client that was there in the last request and is not now.
        consent: seconds for operators of sites to decide about the plan.
        poll: seconds between two looks for new answers.
    """

    answer: float = 600.0
    rejoin: float = 120.0
    consent: float = 600.0
    poll: float = 0.3

    @property
    def again(self) -> float:
        """Seconds after which a site that has not answered is asked once more; it answers and pays once."""
        return max(30.0, self.answer / 10.0)

    def __post_init__(self) -> None:
        InputError.unless_within(TIME_TO_ANSWER, "--answer", self.answer)
        InputError.unless_within(PATIENCE, "--rejoin", self.rejoin)


@dataclass(frozen=True)
class Answers(Generic[T]):
    """Who answered what, and why the others did not."""

    by_client: Mapping[str, T]
    missing: Mapping[str, str]
    seconds: float


class Transport:
    """Messages to named sites over a Flower grid."""

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[str, int],
        timeouts: Timeouts,
        sent: Callable[[int], None] = lambda size: None,
    ) -> None:
        """Args:

        nodes: numbers of the sites' nodes by name; whoever opened the link may add more.
        sent: is told the bytes of arrays in the largest of the messages that were sent at a time.
        """
        self.grid = grid
        self._sent = sent
        self.nodes = nodes
        self.arrivals: Callable[[str], int] = lambda name: 0
        self.bell = Bell()
        self._waiting: dict[str, str] = {}
        self._given_up: set[str] = set()
        self._pushing = False
        self.timeouts = timeouts
        self._steady = set(nodes)
        self._late: set[str] = set()

    def online(self) -> set[str]:
        """The sites that the link has heard of lately."""
        there = set(self.grid.get_node_ids())
        return {name for name, node in self.nodes.items() if node in there}

    def is_open(self, identity: str) -> bool:
        """Whether the answer to a message is still waited for."""
        return identity in self._waiting or (self._pushing and identity not in self._given_up)

    def present(self, wanted: Sequence[str]) -> list[str]:
        """Those of the wanted who are there; who was there before is waited for."""
        until = time.monotonic() + self.timeouts.rejoin
        expected = self._steady & set(wanted)
        while not expected <= (there := self.online()) and time.monotonic() < until:
            time.sleep(self.timeouts.poll)
        self._steady = there
        return [name for name in wanted if name in there]

    def ask_sites(
        self,
        kind: str,
        requests: Mapping[str, SiteRequest],
        read: Callable[[str, RecordDict, RequestId], T],
        *,
        apart: bool = False,
    ) -> Answers[T]:
        """Ask each site for a release of a round; answers are read as those to exactly that."""
        return self.ask(
            kind,
            {name: request.to_content(kind) for name, request in requests.items()},
            lambda name, content: read(name, content, requests[name].id),
            apart=apart,
        )

    def ask(
        self,
        kind: str,
        contents: Mapping[str, RecordDict],
        read: Callable[[str, RecordDict], T],
        *,
        apart: bool = False,
        seconds: float | None = None,
    ) -> Answers[T]:
        """Send each site its message and read what comes back in time.

        A site that went away and came back is sent the same message again: it answers as it did before, or
        as it would have, and is charged once.

        Args:
            apart: everyone has the whole time, whatever others do. Else who was late before is given only as
                long again as the others took; where all were late before, all have the whole time.
            seconds: for the answers; by default what `Timeouts` says.
        """
        whole = self.timeouts.answer if seconds is None else seconds
        begun = time.monotonic()
        self._waiting = waiting = self._send(kind, contents, whole)
        began = time.monotonic()  # what sending takes is not the sites' time
        pending = set(waiting.values())
        missing = {name: "not sent" for name in contents if name not in pending}
        answered: dict[str, T] = {}
        away: dict[str, float] = {}
        asked = {name: (began, self.arrivals(name)) for name in pending}
        others = pending - self._late
        others_done: float | None = None
        while pending:
            now = time.monotonic()
            left = whole - (now - began)
            again: set[str] = set()
            for reply in self.grid.pull_messages(list(waiting)) if waiting else ():
                # By what it replies to: an error made by the link itself carries no other name.
                name = waiting.pop(str(reply.metadata.reply_to_message_id), None)
                if name is None:
                    continue  # an answer that nobody waits for any more
                if reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE:
                    away.setdefault(name, now)
                    continue
                if reply.has_error() and reply.error.code in UNFINISHED and left > 0:
                    again.add(name)  # it was cut off, or its message was lost: the site has its answer
                    continue
                pending.discard(name)
                reason = _why_no_answer(reply)
                try:
                    if reason is None:
                        answered[name] = read(name, reply.content)
                        self._late.discard(name)
                except GarbageError as mistake:
                    reason = f"garbage: {mistake}"
                if reason is not None:
                    missing[name] = reason
                    self._late |= {name} if reason == TOO_LATE else set()
            if others and pending <= self._late and others_done is None:
                others_done = now
            enough = others_done is not None and now - others_done >= others_done - began
            if pending and ((enough and not apart) or left <= 0):
                missing.update(dict.fromkeys(pending, TOO_LATE))
                self._late |= pending
                break
            again |= {
                name
                for name in pending - away.keys()
                if now - asked[name][0] > self.timeouts.again or self.arrivals(name) != asked[name][1]
            }
            again |= set(self._returned(pending, away, now))
            for name in sorted(again & pending):
                for identity in [each for each, other in waiting.items() if other == name]:
                    del waiting[identity]
                    self._given_up.add(identity)
                asked[name] = (now, self.arrivals(name))
                waiting.update(self._send(kind, {name: contents[name]}, left))
            lost = {name for name in pending if now - away.get(name, now) > self.timeouts.rejoin}
            missing.update(dict.fromkeys(lost, "went away"))
            pending -= lost
            if pending:
                self.bell.wait(RUNG_POLL if self.bell.used else self.timeouts.poll)
        self._given_up |= waiting.keys()
        waiting.clear()
        return Answers(
            {name: answered[name] for name in contents if name in answered},
            {name: missing[name] for name in contents if name in missing},
            time.monotonic() - begun,
        )

    def _send(self, kind: str, contents: Mapping[str, RecordDict], seconds: float) -> dict[str, str]:
        """Who waits under which number; who could not be sent anything does not."""
        self._sent(max((_bytes_in(content) for content in contents.values()), default=0))
        self._pushing = True  # a site may have a message before its number is known here
        try:
            with self.bell.sending(contents):
                # A site that gets a message twice answers it once. By its own account a message is void after
                # twice the time, since sending counts there; a site asks whether it is still waited for.
                sent = self.grid.push_messages(
                    [
                        Message(content, self.nodes[name], kind, ttl=2 * seconds)
                        for name, content in contents.items()
                    ]
                )
            return {identity: name for identity, name in zip(sent, contents, strict=True) if identity}
        finally:
            self._pushing = False

    def _returned(self, waiting: set[str], away: dict[str, float], now: float) -> list[str]:
        """Those who were away and are there again; notes since when the others are not."""
        there = self.online() if waiting else set()
        back = [name for name in away if name in waiting and name in there]
        for name in back:
            del away[name]
        for name in waiting - there:
            away.setdefault(name, now)
        return back


def _why_no_answer(reply: Message) -> str | None:
    """Why a reply is none: an error of Flower's, or a refusal."""
    if reply.has_error():
        return TOO_LATE if reply.error.code in UNFINISHED else f"Flower's error {reply.error.code}"
    reason = messages.is_refusal(reply.content)
    return None if reason is None else f"refused: {messages.REFUSALS[reason]}"


def _bytes_in(content: RecordDict) -> int:
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


@dataclass
class Journal:
    """The answers of the round that is under way, so that a resumed round goes on from them.

    Without it, a round that runs again after a crash could meet other clients present, send other models, and
    have all of it charged once more.
    """

    folder: Path
    _round: int = field(default=0, init=False)
    _count: int = field(default=0, init=False)

    def next(self, round: int, request: str) -> tuple[Path, dict[str, NDArray[Any]] | None]:
        """Where the answers to the next request of the round belong, and what they were before a restart."""
        self._count = self._count + 1 if round == self._round else 1
        self._round = round
        # Updates in the clear may be among them, where the server is trusted.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        forget_rounds(self.folder, before=round)
        path = self.folder / f"{round:06d}-{self._count:02d}-{request[:32]}.safetensors"
        return path, read_arrays(path)
