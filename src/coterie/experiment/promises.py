"""From an algorithm's draft of a plan to the noise that keeps the promise, and the guarantee that states it.

Where an observer sees every release, each unit's own plan is all there is to account for. Where workers see
the models of their own groups only, what one leaks depends on who watches, and epsilon is the largest over
all pairs; then noise is searched for all workers at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from coterie.algorithms import AnyAlgorithm
from coterie.algorithms.protocol import PublicFacts
from coterie.algorithms.settings import PrivacySettings
from coterie.errors import BudgetError, InputError
from coterie.experiment.folder import Json
from coterie.groups import Leakage, Observer
from coterie.privacy import (
    Adjacency,
    Budget,
    Custody,
    Guarantee,
    Ledger,
    LedgerView,
    Mode,
    PrivacyPlan,
    calibrate,
    guarantee,
)
from coterie.privacy.calibration import has_free_noise, smallest_noise, with_shared_noise
from coterie.privacy.units import short_number

_TOLERANCE = 1e-4
_MOST_EPOCHS, _FEWER_EPOCHS = 40, 8
_MANY_CLASSES = 250
"""Workers in so many different sets of groups take a second or two for each epoch of the history."""


@dataclass(frozen=True)
class Promise:
    """A calibrated plan, what it promises, and how to tell what has been spent of it."""

    plan: PrivacyPlan
    budgets: Mapping[str, Budget]
    guarantee: Guarantee
    watched: Observer | None = None
    """Who sees what, where workers watch each other."""

    def spent(self, ledger: Ledger | LedgerView) -> float:
        """Epsilon of what was charged so far, of the unit that spent most."""
        if self.watched is None:
            return ledger.spent()
        executed = (ledger.executed(unit.subject) for unit in self.plan.units)
        releases = max(max(counts.values()) for counts in executed)
        found = self._leakage(self.watched.schedule.epochs(releases))
        return float(np.nanmax(found.per_worker))

    def per_worker(self) -> dict[str, float | None] | None:
        """Each worker's epsilon against the one that learns most about it; None where nobody watches it."""
        if self.watched is None:
            return None
        return _by_name(self._leakage())

    def leakage_facts(self) -> Json | None:
        """Who learns how much about whom, and how that grows: for the run's folder and its report."""
        if self.watched is None:
            return None
        structure, found = self.watched.structure, self._leakage()
        moments = _MOST_EPOCHS if len(structure.classes) <= _MANY_CLASSES else _FEWER_EPOCHS
        epochs = np.unique(np.linspace(0, self.watched.epochs, moments + 1).astype(int)).tolist()
        history = []
        for epoch in epochs:
            rows = self._leakage(epoch).per_worker
            seen = rows[np.isfinite(rows)]
            history.append(
                {
                    "epoch": epoch,
                    "mean": float(seen.mean()),
                    "deviation": float(seen.std()),
                    "largest": float(seen.max()),
                }
            )
        return {
            "workers": [structure.name(worker) for worker in range(structure.workers)],
            "groups": {structure.group_name(g): list(members) for g, members in enumerate(structure.groups)},
            "structure": structure.summary,
            "threat_model": int(self.watched.threat),
            "delta": found.delta,
            "counts": [[None if cell < 0 else int(cell) for cell in row] for row in found.counts],
            "epsilon": [[None if np.isnan(cell) else float(cell) for cell in row] for row in found.epsilon],
            "per_worker": _by_name(found),
            "history": history,
        }

    def _leakage(self, epochs: int | None = None) -> Leakage:
        assert self.watched is not None
        done = self.watched.epochs if epochs is None else epochs
        return _leakage_after(self.watched, done, _one_delta(self.budgets), self.guarantee.adjacency)


@lru_cache(maxsize=8)
def _leakage_after(watched: Observer, epochs: int, delta: float, adjacency: Adjacency) -> Leakage:
    """The log and the progress bar ask the same after every epoch."""
    return watched.leakage(epochs, delta=delta, adjacency=adjacency)


def make_promise(
    algorithm: AnyAlgorithm,
    facts: PublicFacts,
    draft: PrivacyPlan,
    budgets: Mapping[str, Budget],
    privacy: PrivacySettings,
    caveats: Sequence[str],
    held_by: Custody,
) -> Promise:
    """Find the noise that keeps every unit within its budget.

    Raises:
        BudgetError: no noise does, or the given noise does not.
    """
    free = has_free_noise(draft)
    private = all(budget.is_private for budget in budgets.values())
    alone = algorithm.watched(facts, with_shared_noise(draft, 1.0)) is None
    if alone or (free and not private):
        # Without noise nothing is promised to anyone, and no publication claims it.
        mode = privacy.mode if alone else Mode.SOUND
        plan = calibrate(draft, budgets, accountant=privacy.accountant, mode=mode)
        alike = guarantee(
            plan,
            budget=budgets,
            caveats=caveats,
            accountant=privacy.accountant,
            mode=mode,
            held_by=held_by,
        )
        return Promise(plan, budgets, alike)
    plan = _quiet_enough(algorithm, facts, draft, budgets)
    watched = algorithm.watched(facts, plan)
    assert watched is not None
    between = watched.guarantee(
        delta=_one_delta(budgets),
        adjacency=plan.adjacency,
        caveats=(*plan.caveats, *caveats),
        held_by=held_by,
    )
    return Promise(plan, budgets, between, watched)


def _quiet_enough(
    algorithm: AnyAlgorithm, facts: PublicFacts, draft: PrivacyPlan, budgets: Mapping[str, Budget]
) -> PrivacyPlan:
    """The plan with the least common noise under which no worker leaks more to anyone than it allows."""
    allowed, delta = {name: budget.epsilon for name, budget in budgets.items()}, _one_delta(budgets)

    def excess(noise: float) -> float:
        watched = algorithm.watched(facts, with_shared_noise(draft, noise))
        assert watched is not None
        return watched.excess(allowed, delta=delta, adjacency=draft.adjacency)

    strictest = min(allowed.values())
    asked = f"privacy.epsilon: {strictest:g} at delta {short_number(delta)}"
    if not has_free_noise(draft):
        if (worst := excess(1.0)) > 1:
            raise BudgetError(
                f"{asked} is not kept with the noise given, which costs {worst:.4g} times as much; "
                "algorithm.noise: null finds what keeps it"
            )
        return draft
    noise = smallest_noise(excess, 1.0, _TOLERANCE)
    if noise is None:
        raise BudgetError(f"{asked} is not kept between workers by any noise")
    return with_shared_noise(draft, noise)


def _one_delta(budgets: Mapping[str, Budget]) -> float:
    deltas = {budget.delta for budget in budgets.values()}
    if len(deltas) > 1:
        raise InputError("privacy.budgets: workers may differ in epsilon, not in delta; allowed: one for all")
    return deltas.pop()


def _by_name(found: Leakage) -> dict[str, float | None]:
    return {
        found.structure.name(worker): None if np.isnan(value) else float(value)
        for worker, value in enumerate(found.per_worker)
    }
