"""From what was released to what it costs, by the accountant that the plan names (`rdp`, `pld`)."""

from abc import ABC, abstractmethod
from typing import ClassVar

from dp_accounting import DpEvent

from coterie.privacy.divergences import Floats
from coterie.privacy.errors import PrivacyInputError
from coterie.privacy.events import atoms
from coterie.privacy.meaning import Meaning
from coterie.privacy.units import Adjacency

ACCOUNTANTS: dict[str, type["Accountant"]] = {}


class Accountant(ABC):
    """The account of one event tree, in the normal form of `events`; an error where there can be none.

    `text` is how a guarantee names it, and `tolerance` how closely calibration with it searches the noise,
    relative.
    """

    name: ClassVar[str]
    text: ClassVar[str]
    tolerance: ClassVar[float]

    def __init_subclass__(cls) -> None:
        ACCOUNTANTS[cls.name] = cls

    def __init__(self, event: DpEvent, adjacency: Adjacency) -> None:
        self.atoms, self.adjacency = atoms(event), adjacency

    @abstractmethod
    def epsilon(self, delta: float) -> float:
        """The smallest epsilon that is proven at this delta."""

    @abstractmethod
    def delta(self, epsilon: float) -> float:
        """The smallest delta that is proven at this epsilon."""

    @abstractmethod
    def deltas(self, epsilons: Floats) -> Floats:
        """The smallest deltas that are proven at many epsilons from 0."""

    @abstractmethod
    def meaning(self) -> Meaning:
        """What an attacker gains at best."""


def accountant_named(name: str) -> type[Accountant]:
    """The accountant of that name."""
    if name not in ACCOUNTANTS:
        raise PrivacyInputError(f"accountant: {name!r} is not allowed, one of {', '.join(ACCOUNTANTS)} is")
    return ACCOUNTANTS[name]


def epsilon_of(event: DpEvent, delta: float, accountant: str, adjacency: Adjacency) -> float:
    """The epsilon of an event tree at this delta."""
    return accountant_named(accountant)(event, adjacency).epsilon(delta)


def delta_of(event: DpEvent, epsilon: float, accountant: str, adjacency: Adjacency) -> float:
    """The delta of an event tree at this epsilon."""
    return accountant_named(accountant)(event, adjacency).delta(epsilon)
