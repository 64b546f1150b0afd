"""The accountant of Renyi differential privacy: divergences of the events add up, and give an epsilon."""

import math
from collections.abc import Sequence
from functools import lru_cache

import dp_accounting as dp
import numpy as np
from dp_accounting import DpEvent

from coterie.privacy.accounting import Accountant
from coterie.privacy.divergences import (
    INTEGER_ORDERS,
    ORDERS,
    Floats,
    gaussian_rdp,
    poisson_rdp,
    replace_one_fixed_size_rdp,
    replace_one_poisson_rdp,
    selection_rdp,
)
from coterie.privacy.events import BridgedSumDpEvent, SelectionDpEvent, atoms
from coterie.privacy.meaning import Meaning, from_divergences, from_profile, sharpest
from coterie.privacy.shifts import shift_rdp
from coterie.privacy.units import Adjacency, check_delta


class RdpAccountant(Accountant):
    """Adds up divergences at `ORDERS`: those of adaptive releases do add up."""

    name, text, tolerance = "rdp", "RDP", 1e-7

    @property
    def divergences(self) -> Floats:
        """Of everything composed so far."""
        total = np.zeros_like(ORDERS)
        for atom, times in self.atoms.items():
            total += times * _atom_rdp(atom, self.adjacency)
        return total

    def epsilon(self, delta: float) -> float:
        return epsilon_from_rdp(ORDERS, self.divergences, delta)

    def delta(self, epsilon: float) -> float:
        """The same conversion, solved for delta."""
        return 0.0 if math.isinf(epsilon) else min(1.0, float(self.deltas(np.array([epsilon]))[0]))

    def meaning(self) -> Meaning:
        """By the divergences themselves, and by the profile that follows."""
        return sharpest(from_divergences(ORDERS, self.divergences), from_profile(self.deltas))

    def deltas(self, epsilons: Floats) -> Floats:
        exponents = self.divergences - epsilons[:, None] + np.log1p(-1.0 / ORDERS)
        logs: Floats = np.min((ORDERS - 1.0) * exponents - np.log(ORDERS), axis=1)
        return np.exp(np.minimum(logs, 0.0))


def divergences_of(event: DpEvent, adjacency: Adjacency) -> Floats:
    """Divergences of an event tree at `INTEGER_ORDERS`, which accounts that never end are kept at."""
    total = np.zeros_like(INTEGER_ORDERS)
    for atom, times in atoms(event).items():
        total += times * _atom_rdp(atom, adjacency, integers=True)
    return total


def shares(events: Sequence[DpEvent], *, delta: float, adjacency: Adjacency) -> list[float]:
    """Each part's share of the divergence of all, at the order that decides epsilon."""
    parts = [RdpAccountant(event, adjacency).divergences for event in events]
    total = np.sum(parts, axis=0)
    if not np.isfinite(total).any():
        return [1.0 if np.isinf(part).all() else 0.0 for part in parts]
    best = int(np.argmin(_candidates(ORDERS, total, delta)))
    return [float(part[best] / total[best]) for part in parts]


def epsilon_from_rdp(orders: Floats, divergences: Floats, delta: float) -> float:
    """The conversion of Canonne, Kamath, Steinke 2020, Prop. 12 at the best order.

    An order whose divergence is no number proves nothing.
    """
    check_delta(delta)
    candidates = _candidates(orders, divergences, delta)
    return max(0.0, float(np.min(candidates, where=~np.isnan(candidates), initial=np.inf)))


def _candidates(orders: Floats, divergences: Floats, delta: float) -> Floats:
    tail = (math.log(delta) + np.log(orders)) / (orders - 1.0)
    return divergences + np.log1p(-1.0 / orders) - tail


@lru_cache(maxsize=4096)
def _atom_rdp(atom: DpEvent, adjacency: Adjacency, *, integers: bool = False) -> Floats:
    result = _bound_atom(atom, adjacency, INTEGER_ORDERS if integers else ORDERS)
    result.flags.writeable = False
    return result


def _bound_atom(atom: DpEvent, adjacency: Adjacency, orders: Floats) -> Floats:
    replace_one = adjacency is Adjacency.REPLACE_ONE
    match atom:
        case dp.GaussianDpEvent(noise_multiplier=noise):
            return gaussian_rdp(noise / adjacency.reach, orders)
        case SelectionDpEvent():
            return selection_rdp(atom.bounded_range(replace_one), orders)
        case BridgedSumDpEvent():
            found = shift_rdp(atom.rate, atom.noise_multiplier, *atom.moved(replace_one))
            # Divergences grow with the order: that of the next one above is never less.
            return found[np.searchsorted(ORDERS, orders)]
        case dp.PoissonSampledDpEvent(sampling_probability=rate, event=inner):
            bound = replace_one_poisson_rdp if replace_one else poisson_rdp
            return bound(rate, inner.noise_multiplier, orders)
        case dp.SampledWithoutReplacementDpEvent(sample_size=size, source_dataset_size=source, event=inner):
            # Cohorts of fixed size never gain or lose a member, they swap one: the inner shift is doubled. A
            # unit that stays in the population with a zero contribution still takes its slot, as a replaced
            # one does.
            bound = poisson_rdp if adjacency is Adjacency.ADD_REMOVE else replace_one_fixed_size_rdp
            return bound(size / source, inner.noise_multiplier / 2, orders)
    return np.full_like(orders, math.inf)  # not private
