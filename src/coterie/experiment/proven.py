"""A plan with everything that its epsilon follows from, so that it can be computed again at any time.

Where an observer sees every release, each unit's own plan is all there is to account for. Where workers see
the models of their own groups only, what one leaks depends on who observes it, and epsilon is the largest
over all pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np

from coterie.errors import InputError
from coterie.files import Json
from coterie.groups import Leakage, Observer
from coterie.groups.answers import cells
from coterie.privacy import (
    Adjacency,
    Budget,
    Custody,
    Guarantee,
    Ledger,
    LedgerView,
    Mode,
    PrivacyPlan,
    guarantee,
)
from coterie.privacy.plain import Key, Plain
from coterie.privacy.units import BySubject

_MOST_EPOCHS, _FEWER_EPOCHS = 40, 8
_MANY_CLASSES = 250
"""Workers in so many different sets of groups take a second or two for each epoch of the history."""


@dataclass(frozen=True)
class ProvenPlan(Plain):
    """A plan, the budgets that it keeps, and how that is proven.

    Args:
        held_by: who holds the records and the noise key.
        observer: who sees what, where workers observe each other.
    """

    called = "proven plan"
    plan: PrivacyPlan
    budgets: BySubject
    accountant: str
    mode: Mode
    held_by: Custody
    observer: Annotated[Observer | None, Key("watched")]

    def prove(self, caveats: Sequence[str] = ()) -> Guarantee:
        """The guarantee as it follows from the plan; caveats of the run itself are taken as they are."""
        if self.observer is None:
            return guarantee(
                self.plan,
                budget=self.budgets,
                accountant=self.accountant,
                mode=self.mode,
                caveats=caveats,
                held_by=self.held_by,
            )
        return self.observer.guarantee(
            delta=one_delta(self.budgets),
            adjacency=self.plan.adjacency,
            caveats=(*self.plan.caveats, *caveats),
            held_by=self.held_by,
        )

    def spent(self, ledger: Ledger | LedgerView) -> float:
        """Epsilon of what was charged so far, of the unit that spent most."""
        if self.observer is None:
            return ledger.spent()
        executed = (ledger.executed(unit.subject) for unit in self.plan.units)
        releases = max(max(counts.values()) for counts in executed)
        found = self._leakage(self.observer.schedule.epochs(releases))
        return float(np.nanmax(found.per_worker))

    def per_worker(self) -> dict[str, float | None] | None:
        """Each worker's epsilon against the one that learns most about it; None where no worker observes."""
        return None if self.observer is None else _by_name(self._leakage(self.observer.epochs))

    def leakage_facts(self) -> Json | None:
        """Who learns how much about whom, and how that grows: for the run's folder and its report."""
        if self.observer is None:
            return None
        structure, found = self.observer.structure, self._leakage(self.observer.epochs)
        moments = _MOST_EPOCHS if len(structure.classes) <= _MANY_CLASSES else _FEWER_EPOCHS
        epochs = np.unique(np.linspace(0, self.observer.epochs, moments + 1).astype(int)).tolist()
        rows = ((epoch, self._leakage(epoch).per_worker) for epoch in epochs)
        seen = ((epoch, own[np.isfinite(own)]) for epoch, own in rows)
        return {
            "workers": [structure.name(worker) for worker in range(structure.workers)],
            "groups": {structure.group_name(g): list(members) for g, members in enumerate(structure.groups)},
            "structure": structure.summary,
            "threat_model": int(self.observer.threat),
            "delta": found.delta,
            "counts": cells(found.counts),
            "epsilon": cells(found.epsilon),
            "per_worker": _by_name(found),
            "history": [
                {
                    "epoch": epoch,
                    "mean": float(own.mean()),
                    "deviation": float(own.std()),
                    "largest": float(own.max()),
                }
                for epoch, own in seen
            ],
        }

    def _leakage(self, epochs: int) -> Leakage:
        assert self.observer is not None
        return _leakage_after(self.observer, epochs, one_delta(self.budgets), self.plan.adjacency)


@lru_cache(maxsize=8)
def _leakage_after(observer: Observer, epochs: int, delta: float, adjacency: Adjacency) -> Leakage:
    """The log and the progress bar ask the same after every epoch."""
    return observer.leakage(epochs, delta=delta, adjacency=adjacency)


def one_delta(budgets: Mapping[str, Budget]) -> float:
    """The delta of all workers, who must not differ in it."""
    deltas = {budget.delta for budget in budgets.values()}
    if len(deltas) > 1:
        raise InputError("privacy.budgets: workers may differ in epsilon, not in delta; allowed: one for all")
    return deltas.pop()


def _by_name(found: Leakage) -> dict[str, float | None]:
    return {found.structure.name(worker): own for worker, own in enumerate(cells(found.per_worker))}
