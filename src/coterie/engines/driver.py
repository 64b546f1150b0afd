"""Drive rounds: hand their requests to engines and send the answers back, for one run or for many."""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from inspect import CO_GENERATOR
from itertools import accumulate
from traceback import walk_tb
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

from coterie.algorithms.protocol import Reply, Request, Rounds, Vector
from coterie.engines.computing import Found, PendingJobs, answered
from coterie.engines.local import LocalEngine, share_trainer
from coterie.errors import one_line

log = logging.getLogger(__name__)
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
        return answered(work, lambda asked: asked.engine.answer(asked.request, asked.round))


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
    too_much: list[Mapping[K, int]] = []
    runs = {key: _pausing(work) for key, work in works.items()}

    def end(key: K) -> None:
        """What goes wrong where a run ends is that run's own."""
        try:
            runs[key].close()
        except Exception as failure:
            first = failures.setdefault(key, _at_rest(failure))
            if first is not failure:
                first.add_note(f"and where it ended, {one_line(failure)}")

    def go_on(key: K, found: Found | Exception | None = None, computed: float = 0.0) -> None:
        if key in paused:
            before = paused.pop(key)
            before.engine.waited += time.perf_counter() - before.since - computed
        if isinstance(found, Exception):
            failures[key] = found
            return end(key)
        try:
            paused[key] = runs[key].send(found)
        except StopIteration as done:
            results[key] = done.value
        except Exception as failure:
            failures[key] = _at_rest(failure)

    with ExitStack() as open_runs:
        for key in runs:
            open_runs.callback(end, key)
            go_on(key)
        _share([first.engine for first in paused.values()])
        for key in list(paused):
            go_on(key)
        while paused:
            waiting = {key: one.wanted for key, one in paused.items() if one.wanted is not None}
            for key, found, seconds in _trained(waiting, too_much):
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


def _at_rest(failure: Exception) -> Exception:
    """The same failure, which keeps nothing in the memory while the others go on.

    Through its frames it would keep the tensors of a whole program. Their places stay, for who tells of them.
    Frames of generators stay, too: some may belong to runs that wait, which it would end to clear them.
    """
    chain: list[BaseException] = [failure]
    for one in chain:
        for frame, _ in walk_tb(one.__traceback__):
            if not frame.f_code.co_flags & CO_GENERATOR:
                with suppress(RuntimeError):  # whoever caught it goes on
                    frame.clear()
        before = (one.__cause__, one.__context__)
        chain += [other for other in before if other is not None and all(other is not had for had in chain)]
    return failure


def _trained(
    waiting: Mapping[K, PendingJobs], too_much: list[Mapping[K, int]]
) -> Iterator[tuple[K, Found | Exception, float]]:
    """Everyone waits: one program for each trainer. What it found, and the share of its seconds of each.

    Where a program fails, its halves are tried, and theirs: only whoever fails alone has failed.

    Args:
        too_much: what failed as one program before, by how many jobs each had, and is added to. As much, or
            more, is not tried as one again: it would fail in every round.
    """
    for trainer in {id(one.trainer): one.trainer for one in waiting.values()}.values():
        keys = [key for key, one in waiting.items() if one.trainer is trainer]
        portions = deque([place] for place in range(len(keys)))
        with _apart("who fits the memory together"):
            portions = deque(trainer.portions([waiting[key].jobs for key in keys]))
        while portions:
            portion = portions.popleft()
            asked = {keys[place]: waiting[keys[place]].jobs for place in portion}
            known = (all(len(asked.get(key, ())) >= most for key, most in each.items()) for each in too_much)
            if len(portion) > 1 and any(known):
                half = len(portion) // 2
                portions.extendleft((portion[half:], portion[:half]))
                continue
            began = time.perf_counter()
            try:
                found = trainer.train([job for jobs in asked.values() for job in jobs])
            except Exception as failure:
                if len(portion) > 1:
                    too_much.append({key: len(jobs) for key, jobs in asked.items()})
                    portions.appendleft(portion)
                else:
                    yield keys[portion[0]], _at_rest(failure), time.perf_counter() - began
                continue
            seconds = (time.perf_counter() - began) / len(found)
            places = accumulate(map(len, asked.values()), initial=0)
            for (key, jobs), first in zip(asked.items(), places, strict=False):
                yield key, found[first : first + len(jobs)], seconds * len(jobs)


def _share(engines: Sequence[Engine]) -> None:
    """Give those whose networks are alike one trainer; where that fails, each makes, or lacks, its own."""
    networks: defaultdict[str, list[LocalEngine]] = defaultdict(list)
    for engine in engines:
        if isinstance(engine, LocalEngine) and engine.stacks:
            with _apart("what its network is"):
                networks[engine.network].append(engine)
    for alike in networks.values():
        with _apart("a trainer for several"):
            share_trainer(alike)


@contextmanager
def _apart(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as failure:
        log.warning("runs train apart: %s could not be made out: %s", what, one_line(failure))
