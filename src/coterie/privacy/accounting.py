"""From what was released to what it costs, by the accountant that the plan names.

Accountants extend dp_accounting's (`rdp`, `pld`) and fold event trees into the one normal form of `events`.
"""

from abc import abstractmethod
from collections import Counter
from typing import ClassVar, Self

import dp_accounting as dp
from dp_accounting import DpEvent

from coterie.privacy.errors import PlanError, PrivacyInputError
from coterie.privacy.events import atoms
from coterie.privacy.meaning import Meaning
from coterie.privacy.units import Adjacency

ACCOUNTANTS: dict[str, type["Accountant"]] = {}
_RELATIONS = {
    Adjacency.ZERO_OUT: dp.NeighboringRelation.REPLACE_SPECIAL,
    Adjacency.ADD_REMOVE: dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    Adjacency.REPLACE_ONE: dp.NeighboringRelation.REPLACE_ONE,
}


class Accountant(dp.PrivacyAccountant):  # type: ignore[misc]
    """A way to bound the cost of event trees; all of them read the same trees.

    `text` is how a guarantee names it, `tolerance` how closely calibration with it searches the noise,
    relative, and `unbounded` what it proves nothing about among the releases of the normal form.
    """

    name: ClassVar[str]
    text: ClassVar[str]
    tolerance: ClassVar[float]
    unbounded: ClassVar[tuple[type[DpEvent], ...]] = ()

    def __init_subclass__(cls) -> None:
        ACCOUNTANTS[cls.name] = cls

    def __init__(self, adjacency: Adjacency) -> None:
        super().__init__(_RELATIONS[adjacency])
        self.adjacency = adjacency
        self._atoms: Counter[DpEvent] = Counter()

    @classmethod
    def of(cls, event: DpEvent, adjacency: Adjacency) -> Self:
        """The account of one tree; an error where there can be none."""
        account = cls(adjacency)
        problem = account._maybe_compose(event, 1, True)
        if problem is not None:
            raise PlanError(problem.error_message)
        return account

    @abstractmethod
    def meaning(self) -> Meaning:
        """What an attacker gains at best."""

    def _maybe_compose(
        self, event: DpEvent, count: int, do_compose: bool
    ) -> dp.PrivacyAccountant.CompositionErrorDetails | None:
        try:
            found = atoms(event)
        except PlanError as problem:
            return self.CompositionErrorDetails(event, str(problem))
        for atom in found:
            if isinstance(atom, self.unbounded):
                kind, name = type(atom).__name__, self.name.upper()
                said = f"{kind}: the {name} accountant cannot bound this event"
                return self.CompositionErrorDetails(atom, said)
        if do_compose:
            for atom, times in found.items():
                self._atoms[atom] += count * times
        return None


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
