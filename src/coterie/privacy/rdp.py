"""The accountant of Renyi differential privacy: divergences of the events add up, and give an epsilon."""

import math
from collections.abc import Sequence
from functools import lru_cache

import dp_accounting as dp
import numpy as np
from dp_accounting import DpEvent

from coterie.privacy.divergences import (
    ORDERS,
    Floats,
    gaussian_rdp,
    poisson_rdp,
    replace_one_fixed_size_rdp,
    replace_one_poisson_rdp,
    selection_rdp,
)
from coterie.privacy.errors import PlanError
from coterie.privacy.events import BridgedSumDpEvent, SelectionDpEvent, atoms
from coterie.privacy.meaning import Meaning, from_divergences, from_profile, sharpest
from coterie.privacy.shifts import shift_rdp
from coterie.privacy.units import Adjacency, check_delta


def rdp(event: DpEvent, adjacency: Adjacency) -> Floats:
    """The divergence of the whole tree at `ORDERS`: Renyi divergences of adaptive releases add up."""
    total = np.zeros_like(ORDERS)
    for atom, times in atoms(event).items():
        total += times * _atom_rdp(atom, adjacency)
    return total


def epsilon(event: DpEvent, *, delta: float, adjacency: Adjacency) -> float:
    """The smallest epsilon that the divergences prove at this delta."""
    return epsilon_from_rdp(ORDERS, rdp(event, adjacency), delta)


def delta(event: DpEvent, *, epsilon: float, adjacency: Adjacency) -> float:
    """The smallest delta that the divergences prove at this epsilon."""
    return delta_from_rdp(ORDERS, rdp(event, adjacency), epsilon)


def meaning(event: DpEvent, adjacency: Adjacency) -> Meaning:
    """What an attacker gains at best: by the divergences themselves, and by the profile that follows."""
    curve = rdp(event, adjacency)

    def delta_at(epsilons: Floats) -> Floats:
        logs: Floats = _log_deltas(ORDERS, curve, epsilons[:, None]).min(axis=1)
        return np.exp(np.minimum(logs, 0.0))

    return sharpest(from_divergences(ORDERS, curve), from_profile(delta_at))


def shares(events: Sequence[DpEvent], *, delta: float, adjacency: Adjacency) -> list[float]:
    """Each part's share of the divergence of all, at the order that decides epsilon."""
    parts = [rdp(event, adjacency) for event in events]
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
    candidates: Floats = divergences + np.log1p(-1.0 / orders) - tail
    return candidates


def delta_from_rdp(orders: Floats, divergences: Floats, epsilon: float) -> float:
    """The same conversion solved for delta."""
    if math.isinf(epsilon):
        return 0.0
    return min(1.0, math.exp(min(0.0, float(np.min(_log_deltas(orders, divergences, epsilon))))))


def _log_deltas(orders: Floats, divergences: Floats, epsilon: float | Floats) -> Floats:
    found: Floats = (orders - 1.0) * (divergences - epsilon + np.log1p(-1.0 / orders)) - np.log(orders)
    return found


@lru_cache(maxsize=4096)
def _atom_rdp(atom: DpEvent, adjacency: Adjacency) -> Floats:
    result = _bound_atom(atom, adjacency)
    result.flags.writeable = False
    return result


def _bound_atom(atom: DpEvent, adjacency: Adjacency) -> Floats:
    replace_one = adjacency is Adjacency.REPLACE_ONE
    if isinstance(atom, dp.NonPrivateDpEvent):
        return np.full_like(ORDERS, math.inf)
    if isinstance(atom, dp.GaussianDpEvent):
        return gaussian_rdp(atom.noise_multiplier / adjacency.reach, ORDERS)
    if isinstance(atom, SelectionDpEvent):
        return selection_rdp(atom.bounded_range(replace_one), ORDERS)
    if isinstance(atom, BridgedSumDpEvent):
        return shift_rdp(atom.rate, atom.noise_multiplier, *atom.moved(replace_one))
    if isinstance(atom, dp.PoissonSampledDpEvent):
        bound = replace_one_poisson_rdp if replace_one else poisson_rdp
        return bound(atom.sampling_probability, atom.event.noise_multiplier, ORDERS)
    if isinstance(atom, dp.SampledWithoutReplacementDpEvent):
        # Cohorts of fixed size never gain or lose a member, they swap one: the inner shift is doubled. A unit
        # that stays in the population with a zero contribution still takes its slot, as a replaced one does.
        bound = poisson_rdp if adjacency is Adjacency.ADD_REMOVE else replace_one_fixed_size_rdp
        return bound(atom.sample_size / atom.source_dataset_size, atom.event.noise_multiplier / 2, ORDERS)
    raise PlanError(f"{type(atom).__name__}: the RDP accountant cannot bound this event")
