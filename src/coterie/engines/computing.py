"""Answers that wait for a trainer: what several runs wait for at one time is trained as one program."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from torch import Tensor

T = TypeVar("T")
Q = TypeVar("Q")
Found: TypeAlias = Tensor | Sequence[Tensor]
"""What came of each job, in their order."""


class Trainer(Protocol):
    """Trains whatever jobs it is given, whoever they are from."""

    def portions(self, asked: Sequence[Sequence[Any]]) -> list[list[int]]:
        """Which of those who ask are trained at one time, by their places; one portion after the other."""

    def train(self, jobs: Sequence[Any]) -> Found:
        """What came of each job."""


@dataclass(frozen=True)
class PendingJobs:
    """Jobs for a trainer. Whoever computes waits until it is sent what came of each."""

    trainer: Trainer
    jobs: Sequence[Any]


Computing: TypeAlias = Generator[PendingJobs, Found, T]
"""Something that goes on whenever its jobs were trained, and returns what it found in the end."""


def answered(asking: Generator[Q, Any, T], answer: Callable[[Q], Any]) -> T:
    """What it returns in the end, when all that it asks is answered."""
    found: Any = None
    while True:
        try:
            asked = asking.send(found)
        except StopIteration as done:
            return cast(T, done.value)
        found = answer(asked)  # out here, where a StopIteration of its own ends nothing


def at_once(computing: Computing[T]) -> T:
    """What it finds, where nobody else waits: its jobs are trained as soon as they are wanted."""
    return answered(computing, lambda wanted: wanted.trainer.train(wanted.jobs))


def at_hand(value: T) -> Computing[T]:
    """Something that waits for no trainer."""
    yield from ()
    return value
