"""Who can learn how much about whom: counts and epsilon for every target, observer and epoch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from coterie.errors import InputError
from coterie.groups.cuts import Charges, Observers, ObserverViews, Shift, cheaper, epsilons
from coterie.groups.pairs import MOST_WORKERS, checked, pair_guarantee
from coterie.groups.propagation import contained, first_epoch_at, published_contained_at
from coterie.groups.schedule import GroupSchedule, Threat
from coterie.groups.structures import Bools, Floats, Ints, Structure
from coterie.privacy import Adjacency, Guarantee, Mode
from coterie.privacy.units import round_up

_T = TypeVar("_T", bound=np.generic)

_MOST_CELLS = 2**24


@dataclass(frozen=True)
class Leakage:
    """What every worker's view tells about every other, at one epoch.

    Matrices go by [target, observer]; where nothing is defined (a worker about itself, and members of a
    common group under threat model 2) they hold -1 or nan.
    """

    structure: Structure
    schedule: GroupSchedule
    epoch: int
    delta: float
    threat: Threat
    class_counts: Ints
    class_epsilon_counts: Floats
    class_epsilon: Floats
    class_published_counts: Ints | None = None
    class_published_epsilon: Floats | None = None
    adjacency: Adjacency = Adjacency.ZERO_OUT

    def __repr__(self) -> str:
        largest = round_up(float(np.nanmax(self.per_worker, initial=0.0)))
        return (
            f"Leakage({self.structure.workers} workers at epoch {self.epoch}, "
            f"largest epsilon {largest} at delta {self.delta:g})"
        )

    @cached_property
    def defined(self) -> Bools:
        """[target, observer]: is the pair one of the threat model's."""
        others = ~np.eye(self.structure.workers, dtype=np.bool_)
        return self._spread(_class_defined(self.structure, self.threat)) & others

    @cached_property
    def counts(self) -> Ints:
        """Noisy releases of the target's groups that the observer's view contains."""
        return np.where(self.defined, self._spread(self.class_counts), -1)

    @cached_property
    def epsilon_counts(self) -> Floats:
        """Epsilon from these counts alone."""
        return self._where_defined(self.class_epsilon_counts)

    @cached_property
    def epsilon(self) -> Floats:
        """The best proven bound: from the counts, or behind a cut."""
        return self._where_defined(self.class_epsilon)

    @cached_property
    def published_counts(self) -> Ints | None:
        """Counts by the publication's theorem; paper mode only, too small wherever a block is unfinished."""
        table = self.class_published_counts
        return None if table is None else np.where(self.defined, self._spread(table), -1)

    @cached_property
    def published_epsilon(self) -> Floats | None:
        """Epsilon by the publication's theorem; paper mode only, not proven."""
        table = self.class_published_epsilon
        return None if table is None else self._where_defined(table)

    @cached_property
    def per_worker(self) -> Floats:
        """Each worker's epsilon against the observer that learns most; nan without any observer."""
        structure = self.structure
        # Nobody observes itself: a class of one has no observer in its own class.
        allowed = _class_defined(structure, self.threat) & ~np.diag(structure.class_sizes == 1)
        worst: Floats = np.where(allowed, self.class_epsilon, -np.inf).max(axis=1)
        worst[~allowed.any(axis=1)] = np.nan
        return worst[structure.class_of]

    @cached_property
    def first_epoch(self) -> Floats:
        """Index of the first model the observer sees that depends on the target; infinite if none does."""
        return self._where_defined(first_epoch_at(self.structure.class_hops[1], self.schedule))

    def most_exposed(self) -> tuple[int, int] | None:
        """The pair (target, observer) with the largest epsilon, by counts where bounds agree."""
        if not self.defined.any():
            return None
        order = np.where(self.defined, self.epsilon, -1.0) + 1e-9 * np.where(self.defined, self.counts, 0)
        target, observer = np.unravel_index(int(np.argmax(order)), order.shape)
        return int(target), int(observer)

    def sees_most(self) -> tuple[int, float] | None:
        """The observer with the largest mean epsilon over its targets, and that mean."""
        if not self.defined.any():
            return None
        seen = np.where(self.defined, self.epsilon, 0.0).sum(axis=0)
        means = np.divide(seen, np.maximum(self.defined.sum(axis=0), 1))
        observer = int(np.argmax(means))
        return observer, float(means[observer])

    def guarantee(self, target: int, *observers: int) -> Guarantee:
        """What holds for one worker against one other, or several that tell each other everything."""
        return pair_guarantee(
            self.structure,
            self.schedule,
            target,
            observers,
            self.epoch,
            self.delta,
            self.threat,
            self.adjacency,
        )

    def _where_defined(self, by_class: Floats) -> Floats:
        return np.where(self.defined, self._spread(by_class), np.nan)

    def _spread(self, by_class: npt.NDArray[_T]) -> npt.NDArray[_T]:
        if self.structure.workers > MOST_WORKERS:
            raise InputError(
                f"workers: {self.structure.workers} have too many pairs for a matrix, "
                f"at most {MOST_WORKERS} are allowed"
            )
        numbers = self.structure.class_of
        return by_class[np.ix_(numbers, numbers)]


def leakage(
    structure: Structure,
    schedule: GroupSchedule,
    *,
    epoch: int,
    delta: float,
    threat: Threat | None = None,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
) -> Leakage:
    """Counts and epsilon for every pair of workers when the models up to index `epoch` have been seen.

    Args:
        structure: who is in which group.
        schedule: releases, merges and noise; one noise for every group.
        epoch: index of the newest model; one group has then made epoch - 1 releases.
        delta: delta of every epsilon.
        threat: by default anyone for DP-OGL, outsiders for DP-OGL+.
        adjacency: whether the target falls silent in the other world or is replaced.

    Example:
        >>> from coterie.groups import ring
        >>> leakage(ring(100, 4), GroupSchedule.of(4, period=10, rate=0.7, noise=2.0), epoch=200, delta=1e-5)
        Leakage(100 workers at epoch 200, largest epsilon 43.43 at delta 1e-05)
    """
    return history(structure, schedule, [epoch], delta, threat, adjacency)[0]


def history(
    structure: Structure,
    schedule: GroupSchedule,
    epochs: Iterable[int],
    delta: float,
    threat: Threat | None = None,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
) -> list[Leakage]:
    """The leakage at each of several epochs, as `leakage` gives it at one."""
    threat = checked(structure, schedule, delta, threat)
    wanted, found = list(epochs), []
    at_once = max(1, _MOST_CELLS // len(structure.classes) ** 2)
    for first in range(0, len(wanted), at_once):
        some = wanted[first : first + at_once]
        tables = zip(*_tables(structure, schedule, some, delta, adjacency), strict=True)
        found += [
            Leakage(structure, schedule, epoch, delta, threat, *own, adjacency=adjacency)
            for epoch, own in zip(some, tables, strict=True)
        ]
    return found


def _tables(
    structure: Structure, schedule: GroupSchedule, epochs: Sequence[int], delta: float, adjacency: Adjacency
) -> tuple[Ints, Floats, Floats, Sequence[Ints | None], Sequence[Floats | None]]:
    """By [epoch, target class, observer class]: counts, epsilon from them, the best epsilon, and what the
    publication claims for the first two; all epochs are worked out together.
    """
    known = np.stack([contained(structure.overlap, schedule, epoch) for epoch in epochs])
    starts = np.concatenate([[0], np.cumsum([len(groups) for groups in structure.class_groups])[:-1]])
    # [..., class, group]: the most that any group of the class holds.
    seen = np.maximum.reduceat(known[..., np.concatenate(structure.class_groups), :], starts, axis=-2)
    counts, from_counts = _counted(structure, schedule.accounted(structure.groups), seen, delta, adjacency)
    best = from_counts
    if not schedule.publishes_drafts:
        best = _with_cuts(structure, schedule, epochs, delta, from_counts, adjacency)
    if schedule.mode is not Mode.PAPER:
        return counts, from_counts, best, [None] * len(epochs), [None] * len(epochs)
    nearest = structure.class_hops[0]
    claimed = np.stack([published_contained_at(nearest, schedule, epoch) for epoch in epochs])
    claims, priced = _counted(structure, schedule, claimed, delta, Adjacency.ZERO_OUT)
    return counts, from_counts, best, list(claims), list(priced)


def _class_defined(structure: Structure, threat: Threat) -> Bools:
    if threat is Threat.ANYONE:
        return np.ones((len(structure.classes),) * 2, dtype=np.bool_)
    table = structure.classes.astype(np.float32)
    apart: Bools = table @ table.T == 0
    return apart


def _counted(
    structure: Structure, schedule: GroupSchedule, seen: Ints, delta: float, adjacency: Adjacency
) -> tuple[Ints, Floats]:
    """[..., target class, observer class]: releases seen, and what they cost."""
    member = structure.classes.astype(np.float64)
    charges: Charges = {}
    for noise in dict.fromkeys(schedule.noises):
        same = np.array([other == noise for other in schedule.noises])
        # One product for all epochs, [..., observer class, target class].
        held = seen[..., same].reshape(-1, same.sum()).astype(np.float64) @ member[:, same].T
        table = held.astype(np.int64).reshape(*seen.shape[:-1], len(member)).swapaxes(-1, -2)
        charges[Shift(noise, 1, 0)] = table.ravel()
        shape = table.shape
    total: Ints = np.sum(list(charges.values()), axis=0).reshape(shape)
    return total, epsilons(charges, delta, adjacency).reshape(shape)


def _with_cuts(
    structure: Structure,
    schedule: GroupSchedule,
    epochs: Sequence[int],
    delta: float,
    epsilon: Floats,
    adjacency: Adjacency,
) -> Floats:
    """The least of the count bound and of every promising cut, for all epochs and classes."""
    best = epsilon.copy()
    observers, indices = Observers(structure, structure.class_groups), np.array(epochs, dtype=np.int64)
    # Equal kinds of charges from all targets are converted together.
    pending: dict[frozenset[Shift], list[tuple[tuple[Ints, int, Ints], Charges]]] = {}
    for number, groups in enumerate(structure.class_groups):
        # Where nothing has arrived there is nothing to improve on.
        when, who = np.nonzero(epsilon[:, number] > 0)
        if not len(when):
            continue
        views, known = ObserverViews(observers, who, indices[when]), epsilon[when, number, who]
        for _, concerned, charges in cheaper(frozenset(groups.tolist()), views, schedule, delta, known):
            cells = when[concerned], number, who[concerned]
            pending.setdefault(frozenset(charges), []).append((cells, charges))
    for kinds, entries in pending.items():
        joint = {kind: np.concatenate([charges[kind] for _, charges in entries]) for kind in kinds}
        ends = np.cumsum([len(when) for (when, _, _), _ in entries])
        for (cells, _), found in zip(
            entries, np.split(epsilons(joint, delta, adjacency), ends), strict=False
        ):
            best[cells] = np.minimum(best[cells], found)
    return best
