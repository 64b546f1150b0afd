"""What a target costs when some groups are hidden behind the workers that bridge the cut.

Hide any set of groups that the observer is not in. Of the rest, take the releases that reach the observer
along groups that are not hidden. Given the earlier ones of these, a release can differ between the two worlds

- by the target's own contribution, if the target is in that group (a sum that moves by one clip), and
- at merges, by the contributions of the group's bridges, the workers that are in a hidden group too: what
  they start from is unknown, so each may turn round (two clips). The target as a bridge costs nothing more.

Every hidden set gives a proven bound; hiding nothing charges each release of the target that the view
contains. docs/leakage.md derives it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting import DpEvent

from coterie.groups.propagation import contained_at
from coterie.groups.schedule import GroupSchedule, Noise
from coterie.groups.structures import Bools, Floats, Ints, Structure, hops
from coterie.privacy import Adjacency
from coterie.privacy.divergences import ORDERS
from coterie.privacy.events import BridgedSumDpEvent, poisson_gaussian
from coterie.privacy.rdp import epsilon_from_rdp
from coterie.privacy.shifts import shift_rdp

_THICKEST = 6
_FEW_CODES = 2**20
# The estimate that decides whether a cut is worked out is good to a few percent.
_MARGIN = 1.3


@dataclass(frozen=True)
class Shift:
    """A kind of release: whose noise it has, and how many workers may move its sum each way."""

    noise: Noise
    up: int
    down: int

    def rdp(self, adjacency: Adjacency) -> Floats:
        """Its divergence; under replacement the target, present only in the first world, turns round too."""
        down = self.up if adjacency is Adjacency.REPLACE_ONE else self.down
        return shift_rdp(self.noise.rate, self.noise.multiplier, self.up, down)

    @property
    def event(self) -> DpEvent:
        """It as an event, for the guarantee's record of what was charged."""
        rate, multiplier = self.noise.rate, self.noise.multiplier
        alone: DpEvent = poisson_gaussian(rate, multiplier)
        return alone if self.is_plain else BridgedSumDpEvent(rate, multiplier, self.up, self.down)

    @property
    def is_plain(self) -> bool:
        """Whether the target alone moves its sum."""
        return (self.up, self.down) == (1, 0)

    def rough_divergence(self) -> float:
        """About its divergence at order 1, as if the number of participants were Gaussian."""
        rate = self.noise.rate
        spread = self.noise.multiplier**2 + self.up * rate * (1 - rate)
        return float(((self.up + self.down) * rate) ** 2 / (2 * spread))


# For each kind of release, how many of them each view is charged with.
Charges = dict[Shift, Ints]


@dataclass(frozen=True)
class Cut:
    """One target's charged groups when some are hidden, whatever the schedule.

    Args:
        groups: groups whose releases are charged: the target's visible ones and those with bridges.
        own: is the target in the charged group.
        bridges: how many others in the charged group are in a hidden group too.
    """

    hidden: frozenset[int]
    groups: tuple[int, ...]
    own: tuple[bool, ...]
    bridges: tuple[int, ...]

    def least_price(self, schedule: GroupSchedule) -> float:
        """Roughly what a single merge adds at the cheapest charged group."""
        groups = zip(self.groups, self.own, self.bridges, strict=True)
        shifts = (Shift(schedule.noises[group], bridges + own, bridges) for group, own, bridges in groups)
        return min((shift.rough_divergence() for shift in shifts), default=0.0)

    def charges(
        self,
        schedule: GroupSchedule,
        views: "ObserverViews",
        counted: Callable[[Floats, GroupSchedule, Ints], Ints] = contained_at,
    ) -> Charges:
        """What is charged to each view, by this count of the releases that it contains."""
        found: Charges = {}
        seen = counted(views.observers.distance(self)[:, views.observer], schedule, views.epoch)
        # The first merge starts from the model that everybody knows.
        merges = np.maximum(0, (seen - 1) // schedule.merge_period)
        for group, own, bridges, all_seen, merged in zip(
            self.groups, self.own, self.bridges, seen, merges, strict=True
        ):
            noise = schedule.noises[group]
            if bridges:
                bridged = Shift(noise, bridges + own, bridges)
                found[bridged] = found.get(bridged, 0) + merged
            if own:
                plain = Shift(noise, 1, 0)
                found[plain] = found.get(plain, 0) + (all_seen - merged if bridges else all_seen)
        return found


class Observers:
    """Who watches: the groups of each ([observer, group]), and how far these are from every group."""

    def __init__(self, structure: Structure, member: Bools) -> None:
        self.structure, self.member = structure, member
        observer, self._flat = np.nonzero(member)
        self._starts = np.searchsorted(observer, np.arange(len(member)))
        self._around: dict[frozenset[int], tuple[Ints, Floats]] = {}

    def distance(self, cut: Cut) -> Floats:
        """[charged group, observer]: hops to the nearest group of the observer that avoid hidden groups."""
        if not cut.hidden:
            return self._nearest(self.structure.distances[list(cut.groups)])
        # Most cuts hide one group, and the same one for many targets.
        around = self._around.get(cut.hidden)
        if around is None:
            beside, between = _detours(self.structure, cut.hidden)
            around = beside, self._nearest(between)
            if len(cut.hidden) == 1:
                self._around[cut.hidden] = around
        beside, nearest = around
        return nearest[np.searchsorted(beside, cut.groups)]

    def _nearest(self, between: Floats) -> Floats:
        """From hops between groups to hops to the nearest group of each observer."""
        return np.asarray(np.minimum.reduceat(between[:, self._flat], self._starts, axis=1))


@dataclass(frozen=True)
class ObserverViews:
    """What is asked about: some observers (by their places), each at the index of the newest model it saw."""

    observers: Observers
    observer: Ints
    epoch: Ints


def epsilons(charges: Charges, delta: float, adjacency: Adjacency = Adjacency.ZERO_OUT) -> Floats:
    """The epsilon of each view, by the conversion at the best order; no release costs nothing."""
    counts = np.stack(list(charges.values()), axis=-1)
    rows, where = _distinct(counts)
    table = np.stack([kind.rdp(adjacency) for kind in charges])
    # What is not charged must not meet its price: none of an infinitely dear release is no number.
    prices = [
        epsilon_from_rdp(ORDERS, row[row > 0] @ table[row > 0], delta) if row.any() else 0.0 for row in rows
    ]
    return np.array(prices, dtype=np.float64)[where]


def _distinct(counts: Ints) -> tuple[Ints, Ints]:
    """The different rows, and for each row which of them it is."""
    sizes = counts.max(axis=0) + 1
    codes = math.prod(sizes.tolist())
    if codes < 2**62:
        # One number for a row sorts much faster than the row, and few numbers need no sorting.
        code = np.ravel_multi_index(tuple(counts.T), tuple(sizes.tolist()))
        if codes < _FEW_CODES:
            place = np.zeros(codes, dtype=np.int64)
            place[code] = 1
            known = np.flatnonzero(place)
            place[known] = np.arange(len(known))
            return np.stack(np.unravel_index(known, tuple(sizes.tolist())), axis=1), place[code]
        _, first, where = np.unique(code, return_index=True, return_inverse=True)
        return counts[first], where
    rows, where = np.unique(counts, axis=0, return_inverse=True)
    return rows, where.reshape(-1)


def cheaper(
    target: frozenset[int], views: ObserverViews, schedule: GroupSchedule, delta: float, known: Floats
) -> list[tuple[Cut, Ints, Charges]]:
    """Cuts that promise less than the epsilon known for each view: which they concern, what they charge.

    Which cuts are offered is a matter of economy, decided by an estimate; what is charged is exact.
    """
    observers = views.observers
    structure = observers.structure
    nobody: Ints = np.zeros(0, dtype=np.int64)
    dearest = float(known.max())

    def tried(hidden: frozenset[int]) -> tuple[Cut, Ints, Charges]:
        cut = cut_at(structure, target, hidden)
        least = cut.least_price(schedule)
        if least > dearest:
            return cut, nobody, {}
        charges = cut.charges(schedule, views)
        outside: Bools = ~np.any(observers.member[:, sorted(hidden)], axis=1)
        promising = outside[views.observer] & (known > 0) & (known >= least)
        concerned = np.flatnonzero(promising & (_estimate(charges, delta) < _MARGIN * known))
        return cut, concerned, {kind: times[concerned] for kind, times in charges.items()}

    # All groups of the target at once are the natural cut for whoever is in none of them. Sets between one
    # and all are for observers in some of them, and hardly promise anything where no other cut does.
    alone = [frozenset([group]) for group in sorted(target)]
    found = [tried(hidden) for hidden in (*alone, *([target] if len(target) > 1 else []))]
    if any(len(concerned) for _, concerned, _ in found):
        found += [tried(hidden) for hidden in _unseen(target, observers) if hidden != target]
    found += [tried(layer) for layer in _layers(structure, target)]
    return [(cut, concerned, charges) for cut, concerned, charges in found if len(concerned) and charges]


def _unseen(target: frozenset[int], observers: Observers) -> list[frozenset[int]]:
    """The sets of two and more groups of the target that some observer is not in."""
    numbers = np.array(sorted(target))
    rows = np.unique(~observers.member[:, numbers], axis=0)
    return [frozenset(numbers[row].tolist()) for row in rows if row.sum() > 1]


def _estimate(charges: Charges, delta: float) -> Floats:
    """Epsilon as if every sum were Gaussian with the spread of its participants added."""
    total: Floats = np.sum([times * shift.rough_divergence() for shift, times in charges.items()], axis=0)
    return np.asarray(total + 2 * np.sqrt(total * math.log(1 / delta)))


@lru_cache(maxsize=4096)
def _layers(structure: Structure, target: frozenset[int]) -> tuple[frozenset[int], ...]:
    """The target's groups and those around them, wherever the passage gets narrower further out."""
    found: list[frozenset[int]] = []
    fewest = _bridges(structure, target).sum()
    nearest = structure.distances[sorted(target)].min(axis=0)
    for thickness in range(1, _THICKEST):
        layer = frozenset(np.flatnonzero(nearest <= thickness).tolist())
        if len(layer) == len(structure.groups):
            break
        bridges = _bridges(structure, layer).sum()
        if bridges < fewest:
            found.append(layer)
            fewest = bridges
    return tuple(found)


def _bridges(structure: Structure, hidden: frozenset[int]) -> Ints:
    """How many workers of each visible group are in a hidden group too."""
    if len(hidden) == 1:
        bridges: Ints = structure.shared[next(iter(hidden))].copy()
    else:
        touched = np.any(structure.classes[:, sorted(hidden)], axis=1)
        weights = np.where(touched, structure.class_sizes, 0).astype(np.float64)
        bridges = (weights @ structure.classes.astype(np.float64)).astype(np.int64)
    bridges[sorted(hidden)] = 0
    return bridges


@lru_cache(maxsize=16384)
def cut_at(structure: Structure, target: frozenset[int], hidden: frozenset[int] = frozenset()) -> Cut:
    """What is charged behind hidden groups; with none, every release of the target's that a view contains."""
    bridges = _bridges(structure, hidden)
    own = np.zeros(len(bridges), dtype=np.bool_)
    own[sorted(target - hidden)] = True
    # A target whose groups are hidden was counted among the bridges of its visible ones.
    bridges = bridges - (own if hidden else 0)
    charged = np.flatnonzero(own | (bridges > 0))
    return Cut(
        hidden, tuple(charged.tolist()), tuple(own[charged].tolist()), tuple(bridges[charged].tolist())
    )


@lru_cache(maxsize=4096)
def _detours(structure: Structure, hidden: frozenset[int]) -> tuple[Ints, Floats]:
    """The groups beside hidden ones, and hops from each of them to every group that avoid hidden ones."""
    visible = structure.overlap.copy()
    visible[sorted(hidden)] = False
    visible[:, sorted(hidden)] = False
    beside = np.flatnonzero(structure.overlap[sorted(hidden)].any(axis=0))
    return beside, hops(visible, beside.tolist())
