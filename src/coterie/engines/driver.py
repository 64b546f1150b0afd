"""Drive rounds: hand their requests to engines and send the answers back, for one run or for many."""

import time
from collections import defaultdict, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

from coterie.algorithms.protocol import Reply, Request, Rounds, Vector
from coterie.engines.computing import Found, PendingJobs
from coterie.engines.local import LocalEngine, share_trainer

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

    def answer(self, request: Request, round: int) -> Reply:
        """Execute a request of the given round (numbered from 1)."""


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
        return cast(T, done.value)


def answer_all(work: Work[T]) -> T:
    """Have everything answered as it is requested; where that fails, the work is ended at once."""
    with closing(work):
        try:
            asked = next(work)
            while True:
                asked = work.send(asked.engine.answer(asked.request, asked.round))
        except StopIteration as done:
            return cast(T, done.value)


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
    results: dict[K, T] = {}
    failures: dict[K, Exception] = {}
    paused: dict[K, _Paused] = {}
    runs = {key: _pausing(work) for key, work in works.items()}

    def go_on(key: K, found: Found | Exception | None = None, computed: float = 0.0) -> None:
        if key in paused:
            before = paused.pop(key)
            before.engine.waited += time.perf_counter() - before.since - computed
        if isinstance(found, Exception):
            failures[key] = found
            return runs[key].close()
        try:
            paused[key] = runs[key].send(found)
        except StopIteration as done:
            results[key] = done.value
        except Exception as failure:
            failures[key] = failure

    with ExitStack() as open_runs:
        for key, run in runs.items():
            open_runs.enter_context(closing(run))
            go_on(key)
        _share([first.engine for first in paused.values()])
        for key in list(paused):
            go_on(key)
        while paused:
            waiting = {key: one.wanted for key, one in paused.items() if one.wanted is not None}
            for key, found, seconds in _trained(waiting):
                go_on(key, found, seconds)
    return Outcomes(results, failures)


@dataclass(frozen=True)
class _Paused:
    """A work that has made its first request, or waits for a trainer; and since when."""

    engine: Engine
    wanted: PendingJobs | None = None
    since: float = field(default_factory=time.perf_counter)


def _pausing(work: Work[T]) -> Generator[_Paused, Any, T]:
    """Let a work go on, with a pause after its first request and wherever it waits for a trainer."""
    with closing(work):
        try:
            asked = next(work)
            yield _Paused(asked.engine)
            while True:
                asked = work.send((yield from _answered(asked)))
        except StopIteration as done:
            return cast(T, done.value)


def _answered(asked: AddressedRequest) -> Generator[_Paused, Any, Reply]:
    """The answer to a request. A generator: no mistake of an engine passes through it as the work's end."""
    engine = asked.engine
    if not isinstance(engine, LocalEngine):
        return engine.answer(asked.request, asked.round)
    computing = engine.begin(asked.request, asked.round)
    try:
        wanted = next(computing)
        while True:
            wanted = computing.send((yield _Paused(engine, wanted)))
    except StopIteration as done:
        return cast(Reply, done.value)


def _trained(waiting: Mapping[K, PendingJobs]) -> Iterator[tuple[K, Found | Exception, float]]:
    """Everyone waits: one program for each trainer. What it found, and the share of its seconds of each.

    Where a program fails, everyone in it is tried alone: only whoever fails then has failed.
    """
    for trainer in {id(one.trainer): one.trainer for one in waiting.values()}.values():
        keys = [key for key, one in waiting.items() if one.trainer is trainer]
        portions = deque(trainer.portions([waiting[key].jobs for key in keys]))
        while portions:
            portion = portions.popleft()
            asked = {keys[place]: waiting[keys[place]].jobs for place in portion}
            began = time.perf_counter()
            try:
                found = trainer.train([job for jobs in asked.values() for job in jobs])
            except Exception as failure:
                if len(portion) > 1:
                    portions.extendleft([place] for place in reversed(portion))
                else:
                    yield keys[portion[0]], failure, time.perf_counter() - began
                continue
            seconds = (time.perf_counter() - began) / len(found)
            places = accumulate(map(len, asked.values()), initial=0)
            for (key, jobs), first in zip(asked.items(), places, strict=False):
                yield key, found[first : first + len(jobs)], seconds * len(jobs)


def _share(engines: Sequence[Engine]) -> None:
    networks: defaultdict[str, list[LocalEngine]] = defaultdict(list)
    for engine in engines:
        if isinstance(engine, LocalEngine) and engine.stacks:
            networks[engine.network].append(engine)
    for alike in networks.values():
        share_trainer(alike)
