"""From what was released to what it costs, by the accountant that the plan names."""

from collections.abc import Callable
from dataclasses import dataclass

from dp_accounting import DpEvent

from coterie.privacy import pld, rdp
from coterie.privacy.errors import PrivacyInputError
from coterie.privacy.meaning import Meaning
from coterie.privacy.units import Adjacency, short_number


@dataclass(frozen=True)
class Accountant:
    """A way to bound the cost of an event tree; all of them read the same trees."""

    name: str
    text: str
    """How a guarantee names it."""
    epsilon: Callable[..., float]
    delta: Callable[..., float]
    meaning: Callable[[DpEvent, Adjacency], Meaning]
    tolerance: float
    """How closely calibration with it searches the noise, relative."""


ACCOUNTANTS = {
    "rdp": Accountant("rdp", "RDP", rdp.epsilon, rdp.delta, rdp.meaning, tolerance=1e-7),
    "pld": Accountant(
        "pld", f"PLD vdi={short_number(pld.STEP)}", pld.epsilon, pld.delta, pld.meaning, tolerance=2e-5
    ),
}


def accountant_named(name: str) -> Accountant:
    """The accountant of that name."""
    if name not in ACCOUNTANTS:
        raise PrivacyInputError(f"accountant: {name!r} is not allowed, one of {', '.join(ACCOUNTANTS)} is")
    return ACCOUNTANTS[name]


def epsilon_of(event: DpEvent, delta: float, accountant: str, adjacency: Adjacency) -> float:
    """The epsilon of an event tree at this delta."""
    return accountant_named(accountant).epsilon(event, delta=delta, adjacency=adjacency)


def delta_of(event: DpEvent, epsilon: float, accountant: str, adjacency: Adjacency) -> float:
    """The delta of an event tree at this epsilon."""
    return accountant_named(accountant).delta(event, epsilon=epsilon, adjacency=adjacency)
