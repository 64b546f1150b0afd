"""From what was released to what it costs, by the accountant that the plan names."""

from dp_accounting import DpEvent

from coterie.privacy.accountant import Accountant
from coterie.privacy.errors import PrivacyInputError
from coterie.privacy.pld import PldAccountant
from coterie.privacy.rdp import RdpAccountant
from coterie.privacy.units import Adjacency

ACCOUNTANTS: dict[str, type[Accountant]] = {kind.name: kind for kind in (RdpAccountant, PldAccountant)}


def accountant_named(name: str) -> type[Accountant]:
    """The accountant of that name."""
    if name not in ACCOUNTANTS:
        raise PrivacyInputError(f"accountant: {name!r} is not allowed, one of {', '.join(ACCOUNTANTS)} is")
    return ACCOUNTANTS[name]


def epsilon_of(event: DpEvent, delta: float, accountant: str, adjacency: Adjacency) -> float:
    """The epsilon of an event tree at this delta."""
    return float(accountant_named(accountant).of(event, adjacency).get_epsilon(delta))


def delta_of(event: DpEvent, epsilon: float, accountant: str, adjacency: Adjacency) -> float:
    """The delta of an event tree at this epsilon."""
    return float(accountant_named(accountant).of(event, adjacency).get_delta(epsilon))
