"""What a line of the register says."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from dp_accounting import DpEvent

from coterie.errors import LedgerError
from coterie.privacy import Adjacency, Budget, Unit
from coterie.privacy.filters import RdpFilter
from coterie.privacy.plain import Plain

FORMAT = 1


def now() -> str:
    """The time of a line, for people; nothing follows from it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class RegisterLine(Plain):
    """One line's content, under the name of its kind."""

    called = "line"
    mistake = LedgerError


@dataclass(frozen=True)
class Header(RegisterLine):
    """The first line: which register it is, and which key its fingerprints are made with."""

    called = "header"
    format: int
    id: str
    key: str


@dataclass(frozen=True)
class ChargedGroup(RegisterLine):
    """Records to which the same was charged.

    Args:
        count: how many fingerprints, in the file of the line.
        events: what they pay. Of several, each record pays one, nobody says which: the largest counts.
    """

    called = "charge"
    count: int
    events: tuple[DpEvent, ...]


@dataclass(frozen=True)
class DataSource(RegisterLine):
    """A name of a data set.

    Args:
        data: the data set.
        key: a folder's path, or a function's name.
        elsewhere: other registers in which its folder says that it was entered.
    """

    called = "source"
    data: str
    key: str
    elsewhere: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reserved(RegisterLine):
    """A run, contract or choice before its first release, with all that it may ever release.

    Args:
        id: of the reservation; whoever goes on with the run names it again.
        kind: run, contract or choice.
        name: how people call it.
        delta: at which it states its own epsilon.
        weak: what voids or weakens its promise.
        records: the file of its fingerprints.
    """

    called = "reservation"
    id: str
    kind: Literal["run", "contract", "choice"]
    name: str
    data: str
    unit: Unit
    adjacency: Adjacency
    delta: float
    weak: tuple[str, ...]
    records: str
    groups: tuple[ChargedGroup, ...]
    time: str


@dataclass(frozen=True)
class Settled(RegisterLine):
    """The end of a run: what was executed. The rest is returned."""

    called = "settlement"
    id: str
    records: str
    groups: tuple[ChargedGroup, ...]
    time: str


@dataclass(frozen=True)
class Reopened(RegisterLine):
    """A settled run that goes on after all: its whole plan counts again."""

    called = "reopening"
    id: str
    time: str


@dataclass(frozen=True)
class Entered(RegisterLine):
    """Records that somebody says are new in a known data set: they have paid what they themselves paid."""

    called = "entry"
    data: str
    records: str
    count: int
    time: str


@dataclass(frozen=True)
class Lifetime(RegisterLine):
    """The most that a record of a data set may ever spend.

    Args:
        unit, adjacency: of whom it is promised, between which neighbours.
        reason: why it was set, or changed.
        despite: other registers, whose charges nobody counts here: somebody accepted that.
        order: the main order of its filter; None until the first plan under it is known.
    """

    called = "lifetime budget"
    data: str
    epsilon: float
    delta: float
    unit: Unit
    adjacency: Adjacency
    reason: str | None = None
    despite: tuple[str, ...] = ()
    order: int | None = None
    time: str = ""

    @property
    def budget(self) -> Budget:
        return Budget(self.epsilon, self.delta)

    @property
    def filter(self) -> RdpFilter:
        """What admits plans under it."""
        return RdpFilter(self.budget, self.order)


KINDS: dict[str, type[RegisterLine]] = {
    "register": Header,
    "source": DataSource,
    "reserve": Reserved,
    "settle": Settled,
    "reopen": Reopened,
    "enter": Entered,
    "limit": Lifetime,
}
"""The key of a line, and what is under it."""
NAMES = {kind: name for name, kind in KINDS.items()}
