"""Whose privacy is meant, against whom, and how much of it: the words of a guarantee."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from coterie.privacy.errors import PrivacyInputError, RangeError
from coterie.privacy.plain import Plain, codec, register
from coterie.privacy.ranges import CLIENTS, DELTA, EPSILON, RECORDS_PER_PERSON


class Unit(StrEnum):
    """What one person contributes: the thing that is changed between two neighbouring datasets."""

    RECORD = "record"
    PERSON = "person"
    CLIENT = "client"
    WORKER = "worker"

    @property
    def within_client(self) -> bool:
        """Whether it is a part of one client's data, which that client hides by noise of its own.

        A record is; so are a person's records at that client. What is clipped, sampled and counted is one
        unit's contribution, and the same mechanisms serve both.
        """
        return self in (Unit.RECORD, Unit.PERSON)


class Adjacency(StrEnum):
    """How two neighbouring datasets differ.

    `ZERO_OUT` turns one unit's contribution into zero and keeps every public count; `ADD_REMOVE` takes the
    unit away; `REPLACE_ONE` puts another unit in its place, so a clipped sum moves twice as far.
    """

    ZERO_OUT = "zero-out"
    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"

    @property
    def reach(self) -> float:
        """How far a sum of contributions bounded by one can move between neighbours."""
        return 2.0 if self is Adjacency.REPLACE_ONE else 1.0


class Mode(StrEnum):
    """`SOUND` proves what it prints; `PAPER` repeats a publication's arithmetic, labelled as such."""

    SOUND = "sound"
    PAPER = "paper"


class Custody(StrEnum):
    """Who held the records and the key of the noise: what is promised against others leaves them out."""

    PLAN = "plan"
    """Nobody yet: nothing has been run."""
    ONE_PROCESS = "one-process"
    """A simulation, or a run on a folder: one process read all records and drew all noise."""
    EACH_SITE = "each-site"
    """A deployment: each site keeps its records and its own noise key."""
    TRUSTED_SERVER = "trusted-server"
    """A deployment in which sites send clipped updates to one that adds the noise."""


@dataclass(frozen=True)
class PersonBounds(Plain):
    """How much of the data may be one person's: public numbers, decided before any record is read.

    Args:
        records: of one person that count at a client; all others are dropped, whatever they say.
        clients: at which one person may have records.
    """

    called = "bounds of a person"
    records: int
    clients: int = 1

    def __post_init__(self) -> None:
        RECORDS_PER_PERSON.check("records_per_person", self.records)
        CLIENTS.check("clients_per_person", self.clients)


@dataclass(frozen=True)
class ThreatModel(Plain):
    """Who watches, what they see, and whom the promise has to trust."""

    called = "threat model"
    observers: str
    sees: str
    trusted: str = "nobody"
    collusion: int = 1

    def __post_init__(self) -> None:
        if self.collusion < 1:
            raise PrivacyInputError(f"collusion: {self.collusion} is not allowed, at least 1 observer is")

    @property
    def watchers(self) -> str:
        """Who watches, and how many of them together."""
        return f"{self.observers} ({self.collusion} colluding)" if self.collusion > 1 else self.observers

    def __str__(self) -> str:
        return f"{self.watchers} seeing {self.sees}"


@dataclass(frozen=True)
class Budget:
    """The most that may be spent; an infinite epsilon asks for no privacy at all."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not self.epsilon >= EPSILON.least:
            raise RangeError(f"epsilon: {self.epsilon} is not allowed, {EPSILON} is")
        check_delta(self.delta)

    @property
    def is_private(self) -> bool:
        return not math.isinf(self.epsilon)


@dataclass(frozen=True)
class _SameBudget:
    subjects: tuple[str, ...]
    epsilon: float
    delta: float


BySubject = Annotated[Mapping[str, Budget], "subjects with the same budget share one entry"]
"""Everyone's own budget."""


def _write_budgets(budgets: Mapping[str, Budget]) -> list[object]:
    alike: dict[Budget, list[str]] = {}
    for subject, budget in budgets.items():
        alike.setdefault(budget, []).append(subject)
    same = (_SameBudget(tuple(names), each.epsilon, each.delta) for each, names in alike.items())
    return [codec(_SameBudget).write(each) for each in same]


def _read_budgets(data: object) -> dict[str, Budget]:
    found = codec(tuple[_SameBudget, ...]).read(data)
    return {subject: Budget(each.epsilon, each.delta) for each in found for subject in each.subjects}


register(BySubject, _write_budgets, _read_budgets)


def check_delta(delta: float) -> None:
    """Refuse a delta that is not a probability strictly between 0 and 1, or smaller than makes sense."""
    if delta not in DELTA or delta == 1:
        raise RangeError(f"delta: {delta} is not allowed, {DELTA} (but not 1) is")


def short_number(value: float) -> str:
    """A small number the way people write it: 1e-4, not 0.0001; rounded up where six digits are too few."""
    digits, exponent = f"{value:.5e}".split("e")
    if float(f"{digits}e{exponent}") < value * (1 - 1e-9):  # what binary fractions miss is no digit
        above = float(f"{float(digits) + 1e-5:.5f}e{exponent}")
        digits, exponent = f"{above:.5e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def round_up(epsilon: float) -> str:
    """Two decimals, or three digits when it is small; never less than the value."""
    if epsilon == 0 or math.isinf(epsilon):
        return f"{epsilon:g}"
    return decimals_up(epsilon, 2 if epsilon >= 1 else 2 - math.floor(math.log10(epsilon)))


def round_down(epsilon: float) -> str:
    """What is left of a budget, with two digits, never more than that; of none that was set, any."""
    return f"{math.floor(100 * max(0.0, epsilon)) / 100:.2f}" if math.isfinite(epsilon) else "any"


def decimals_up(value: float, digits: int) -> str:
    """So many decimals; never less than the value."""
    text, scale = f"{value:.{digits}f}", 10.0**digits
    return text if float(text) >= value else f"{math.ceil(value * scale) / scale:.{digits}f}"


def number_to_json(value: float) -> float | str:
    """JSON knows no infinity; write it as a word."""
    return "inf" if math.isinf(value) else value


def number_from_json(value: object) -> float:
    """The number that `number_to_json` wrote."""
    return float(str(value))
