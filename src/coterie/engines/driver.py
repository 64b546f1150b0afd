"""Drive one round: hand its requests to an engine and send the answers back."""

from typing import Protocol, TypeVar

from coterie.algorithms.protocol import Asking, Reply, Request

T = TypeVar("T")


class Engine(Protocol):
    """Anything that can answer requests. It charges before it releases and refuses what was not planned."""

    def answer(self, request: Request, round: int) -> Reply:
        """Execute a request of the given round (numbered from 1)."""
        ...


def drive(asking: Asking[T], engine: Engine, round: int) -> T:
    """Run a round's generator to its end and return what it returns."""
    try:
        request = next(asking)
        while True:
            request = asking.send(engine.answer(request, round))
    except StopIteration as done:
        result: T = done.value
        return result
