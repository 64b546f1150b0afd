"""What a run tells while it goes on: functions that are called, and what they are told.

Nothing here holds a value of a record, and nobody is told who was sampled where that is a secret. A function
that raises stops the run after what was charged and saved by then: with `resume` it goes on from there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import InputError
from coterie.experiment.schema import Experiment
from coterie.privacy import Unit
from coterie.privacy.units import round_up

if TYPE_CHECKING:
    from coterie.experiment.result import RunResult


@dataclass(frozen=True)
class RunStart:
    """What is about to run, or goes on, once it is proven possible; between sites, once all have agreed.

    Args:
        guarantee: its line.
        done: rounds that were done before.
    """

    folder: Path
    experiment: Experiment
    guarantee: str
    done: int = 0

    def __str__(self) -> str:
        return f"{self.folder}: {self.experiment.schedule.rounds - self.done} rounds to do; {self.guarantee}"


@dataclass(frozen=True)
class ReleaseReport:
    """A release that is charged and about to happen, for everyone that one request asks.

    Args:
        unit: what is protected: a record, a client or a worker.
        subjects: who is charged; where that is a secret, the population as one.
        epsilon: spent so far, this release counted, by the one that spent most.
    """

    round: int
    release: str
    unit: Unit
    subjects: tuple[str, ...]
    epsilon: float

    def __str__(self) -> str:
        whom = self.subjects[0] if len(self.subjects) == 1 else f"{len(self.subjects)} clients"
        return f"round {self.round}, {self.release} of {whom}: epsilon spent {round_up(self.epsilon)}"


@dataclass(frozen=True)
class RoundReport:
    """What a run tells after each round.

    Args:
        epsilon: spent so far, by the unit that spent most.
        is_exact: whether the accuracy is outside the guarantee.
        answered, missing: between sites, who answered and why others did not; nobody where that is a secret.
        spent: between sites, what each was asked for so far; a client that was missing may have spent less.
        budget: of each of those.
    """

    round: int
    rounds: int
    accuracy: float | None
    epsilon: float
    seconds: float
    is_exact: bool = False
    answered: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    spent: Mapping[str, float] = field(default_factory=dict)
    budget: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        reached = f"accuracy {self.accuracy:.1%}, " if self.accuracy is not None else ""
        return f"round {self.round} of {self.rounds}: {reached}epsilon spent {round_up(self.epsilon)}"


@dataclass(frozen=True)
class Callbacks:
    """Functions to call while a run goes on; each may be left out.

    Args:
        on_joined: between sites, when all have come: how many records, or persons, each has.
        on_start: when the run begins or goes on.
        on_release: when something was charged and is about to be released.
        on_round: after each round, when its checkpoint is saved.
        on_end: at the end: the result, or None where the run stopped before.

    Example:
        >>> import coterie as ct
        >>> ct.run("experiment.yaml", callbacks=ct.Callbacks(on_round=print))  # doctest: +SKIP
        round 1 of 30: accuracy 41.2%, epsilon spent 3.52
    """

    on_joined: Callable[[Mapping[str, int]], None] | None = None
    on_start: Callable[[RunStart], None] | None = None
    on_release: Callable[[ReleaseReport], None] | None = None
    on_round: Callable[[RoundReport], None] | None = None
    on_end: Callable[["RunResult | None"], None] | None = None

    def tell(self, name: str, told: Any) -> None:
        """Call one of them, if it is there."""
        if (function := getattr(self, name)) is not None:
            function(told)

    @contextmanager
    def ending(self) -> Iterator[Callable[["RunResult"], None]]:
        """Tell of the end, however it comes; the function that is given takes the result."""
        results: list[RunResult] = []
        try:
            yield results.append
        finally:
            self.tell("on_end", results[0] if results else None)


def together(callbacks: "Callbacks | Sequence[Callbacks] | None") -> Callbacks:
    """All of them as one: each function calls those of its name in their order."""
    if callbacks is None or isinstance(callbacks, Callbacks):
        return callbacks or Callbacks()
    InputError.unless_a(Sequence, "callbacks", callbacks, "Callbacks, a tracker, or a list of them")
    for each in callbacks:
        InputError.unless_a(Callbacks, "callbacks", each, "Callbacks, a tracker, or a list of them")

    def tell_all(name: str, told: Any) -> None:
        for each in callbacks:
            each.tell(name, told)

    given = [f.name for f in fields(Callbacks) if any(getattr(each, f.name) for each in callbacks)]
    return Callbacks(**{name: partial(tell_all, name) for name in given})
