"""Drive rounds: hand their requests to engines and send the answers back, for one run or for many."""

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from coterie.algorithms.protocol import Reply, Request, Rounds, Vector
from coterie.engines.local import Begun, LocalEngine, share_trainer
from coterie.privacy import Unit

T = TypeVar("T")
K = TypeVar("K")


class Engine(Protocol):
    """Anything that can answer requests. It charges before it releases and refuses what was not planned.

    Args:
        waited: seconds in which other runs were computed while this one waited.
    """

    waited: float

    @property
    def personal(self) -> Mapping[str, Vector]:
        """What clients keep to themselves between rounds, as far as it lies on this machine."""
        ...

    def answer(self, request: Request, round: int) -> Reply:
        """Execute a request of the given round (numbered from 1)."""
        ...


@dataclass(frozen=True)
class AddressedRequest:
    """A request on its way: who is to answer it, and in which round."""

    engine: Engine
    request: Request
    round: int


Work: TypeAlias = Generator[AddressedRequest, Reply, T]
"""Something that goes on (a round, a whole run) whenever what it requested is answered."""


def addressed(requests: Rounds[T], engine: Engine, round: int) -> Work[T]:
    """A round's requests with their address; returns what the round returns."""
    try:
        request = next(requests)
        while True:
            request = requests.send((yield AddressedRequest(engine, request, round)))
    except StopIteration as done:
        result: T = done.value
        return result


def answer_all(work: Work[T]) -> T:
    """Have everything answered as it is requested."""
    try:
        asked = next(work)
        while True:
            asked = work.send(asked.engine.answer(asked.request, asked.round))
    except StopIteration as done:
        result: T = done.value
        return result


def drive(requests: Rounds[T], engine: Engine, round: int) -> T:
    """Run a round's generator to its end and return what it returns."""
    return answer_all(addressed(requests, engine, round))


@dataclass(frozen=True)
class Outcomes(Generic[K, T]):
    """How several works ended."""

    results: Mapping[K, T]
    failures: Mapping[K, Exception]


def answer_together(works: Mapping[K, Work[T]]) -> Outcomes[K, T]:
    """Advance many works side by side; engines that train the same network train as one program.

    A work that fails takes no other with it.
    """
    return _Together(works).finish()


@dataclass(frozen=True)
class _Waiting:
    """A work that waits for a trainer, and since when."""

    engine: LocalEngine
    begun: Begun
    since: float


class _Together(Generic[K, T]):
    def __init__(self, works: Mapping[K, Work[T]]) -> None:
        self._works = dict(works)
        self._waiting: dict[K, _Waiting] = {}
        self._results: dict[K, T] = {}
        self._failures: dict[K, Exception] = {}

    def finish(self) -> Outcomes[K, T]:
        try:
            first, since = {}, {}
            for key in self._works:
                if (asked := self._resume(key, None)) is not None:
                    first[key], since[key] = asked, time.perf_counter()
            _share([asked.engine for asked in first.values()])
            for key, asked in first.items():
                if isinstance(asked.engine, LocalEngine):
                    asked.engine.waited += time.perf_counter() - since[key]
                self._advance(key, asked)
            while self._waiting:
                self._train()
        finally:
            for work in self._works.values():
                work.close()
        return Outcomes(self._results, self._failures)

    def _resume(self, key: K, reply: Reply | None) -> AddressedRequest | None:
        """What a work requests next; None when it has ended or failed."""
        work = self._works[key]
        try:
            return next(work) if reply is None else work.send(reply)
        except StopIteration as done:
            self._results[key] = done.value
        except Exception as failure:
            self._failures[key] = failure
        return None

    def _advance(self, key: K, asked: AddressedRequest | None) -> None:
        """Let one work go on until it waits for a trainer, ends or fails."""
        while asked is not None:
            try:
                if not isinstance(asked.engine, LocalEngine):
                    reply = asked.engine.answer(asked.request, asked.round)
                else:
                    begun = asked.engine.begin(asked.request, asked.round)
                    if isinstance(begun, Begun):
                        self._waiting[key] = _Waiting(asked.engine, begun, time.perf_counter())
                        return
                    reply = begun
            except Exception as failure:
                self._works[key].close()
                self._failures[key] = failure
                return
            asked = self._resume(key, reply)

    def _train(self) -> None:
        """Everyone waits: one program for each trainer, then all go on."""
        waiting, self._waiting = self._waiting, {}
        for trainer in {id(one.begun.trainer): one.begun.trainer for one in waiting.values()}.values():
            members = {key: one for key, one in waiting.items() if one.begun.trainer is trainer}
            began = time.perf_counter()
            updates = trainer.train([job for one in members.values() for job in one.begun.jobs])
            replies, done = {}, 0
            for key, one in members.items():
                replies[key] = one.begun.finish(updates[done : done + len(one.begun.jobs)])
                done += len(one.begun.jobs)
            seconds = time.perf_counter() - began
            for key, one in members.items():
                share = seconds * len(one.begun.jobs) / done
                one.engine.waited += time.perf_counter() - one.since - share
                self._advance(key, self._resume(key, replies[key]))


def _share(engines: Sequence[Engine]) -> None:
    networks: dict[str, list[LocalEngine]] = {}
    for engine in engines:
        # Where units are clients or workers, cohorts train in programs of their own.
        if isinstance(engine, LocalEngine) and engine.stacks and engine.plan.unit is Unit.RECORD:
            networks.setdefault(engine.network, []).append(engine)
    for alike in networks.values():
        share_trainer(alike)
