"""Who can learn how much about whom: counts and epsilon for every target, observer and epoch."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from coterie.errors import InputError
from coterie.groups.cuts import Charges, Observers, ObserverViews, Shift, cheaper, epsilons
from coterie.groups.pairs import MOST_WORKERS, Exposure
from coterie.groups.propagation import contained_at, first_epoch_at, published_contained_at
from coterie.groups.schedule import GroupSchedule, Threat
from coterie.groups.structures import Bools, Floats, Ints, Structure
from coterie.privacy import Adjacency, Mode
from coterie.privacy.units import round_up

_T = TypeVar("_T", bound=np.generic)

_MOST_CELLS = 2**24


class _Tables(NamedTuple):
    """By [target class, observer class]: the same as the matrices of `Leakage`."""

    counts: Ints
    epsilon_counts: Floats
    epsilon: Floats
    published_counts: Ints | None
    published_epsilon: Floats | None


class Leakage(Exposure):
    """What every worker's view tells about every other, at one epoch.

    Matrices go by [target, observer]; where nothing is defined (a worker about itself, and members of a
    common group under threat model 2) they hold -1 or nan.
    """

    def __repr__(self) -> str:
        largest = round_up(float(np.nanmax(self.per_worker, initial=0.0)))
        return (
            f"Leakage({self.structure.workers} workers at epoch {self.epoch}, "
            f"largest epsilon {largest} at delta {self.delta:g})"
        )

    @cached_property
    def _tables(self) -> _Tables:
        return _worked_out(self, [self.epoch])[0]

    @cached_property
    def _class_defined(self) -> Bools:
        return (self.structure.class_hops[1] > 0) | (self.threat is Threat.ANYONE)

    @cached_property
    def defined(self) -> Bools:
        """[target, observer]: is the pair one of the threat model's."""
        return self._spread(self._class_defined) & ~np.eye(self.structure.workers, dtype=np.bool_)

    @cached_property
    def counts(self) -> Ints:
        """Noisy releases of the target's groups that the observer's view contains."""
        return self._where_defined(self._tables.counts, -1)

    @cached_property
    def epsilon_counts(self) -> Floats:
        """Epsilon from these counts alone."""
        return self._where_defined(self._tables.epsilon_counts, np.nan)

    @cached_property
    def epsilon(self) -> Floats:
        """The best proven bound: from the counts, or behind a cut."""
        return self._where_defined(self._tables.epsilon, np.nan)

    @cached_property
    def published_counts(self) -> Ints | None:
        """Counts by the publication's theorem; paper mode only, too small wherever a block is unfinished."""
        table = self._tables.published_counts
        return None if table is None else self._where_defined(table, -1)

    @cached_property
    def published_epsilon(self) -> Floats | None:
        """Epsilon by the publication's theorem; paper mode only, not proven."""
        table = self._tables.published_epsilon
        return None if table is None else self._where_defined(table, np.nan)

    @cached_property
    def per_worker(self) -> Floats:
        """Each worker's epsilon against the observer that learns most; nan without any observer."""
        # Nobody observes itself: a class of one has no observer in its own class.
        allowed = self._class_defined & ~np.diag(self.structure.class_sizes == 1)
        worst: Floats = np.where(allowed, self._tables.epsilon, -np.inf).max(axis=1)
        worst[~allowed.any(axis=1)] = np.nan
        return worst[self.structure.class_of]

    @cached_property
    def first_epoch(self) -> Floats:
        """Index of the first model the observer sees that depends on the target; infinite if none does."""
        return self._where_defined(first_epoch_at(self.structure.class_hops[1], self.schedule), np.nan)

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

    def _where_defined(self, by_class: npt.NDArray[_T], missing: float) -> npt.NDArray[_T]:
        return np.where(self.defined, self._spread(by_class), missing)

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

    By default workers fear anyone in DP-OGL and outsiders in DP-OGL+.

    Example:
        >>> from coterie.groups import ring
        >>> leakage(ring(100, 4), GroupSchedule.of(4, period=10, rate=0.7, noise=2.0), epoch=200, delta=1e-5)
        Leakage(100 workers at epoch 200, largest epsilon 43.43 at delta 1e-05)
    """
    return Leakage(structure, schedule, epoch, delta, threat or schedule.usual_threat, adjacency)


def history(found: Leakage, epochs: Iterable[int]) -> list[Leakage]:
    """The same leakage at each of several epochs, worked out together."""
    past = [replace(found, epoch=epoch) for epoch in epochs]
    at_once = max(1, _MOST_CELLS // len(found.structure.classes) ** 2)
    for first in range(0, len(past), at_once):
        some = past[first : first + at_once]
        for one, tables in zip(some, _worked_out(found, [one.epoch for one in some]), strict=True):
            vars(one)["_tables"] = tables  # as if it had been asked for
    return past


def _worked_out(found: Leakage, epochs: Sequence[int]) -> list[_Tables]:
    """The tables at each epoch."""
    structure, schedule = found.structure, found.schedule
    # [class, group]: the nearest group of the class holds the most.
    nearest = structure.class_hops[0]
    seen = np.stack([contained_at(nearest, schedule, epoch) for epoch in epochs])
    counts, from_counts = _counted(found, schedule.accounted(structure.groups), seen, found.adjacency)
    best = from_counts if schedule.publishes_drafts else _with_cuts(found, epochs, from_counts)
    claims: Sequence[Ints | None] = [None] * len(epochs)
    priced: Sequence[Floats | None] = [None] * len(epochs)
    if schedule.mode is Mode.PAPER:
        claimed = np.stack([published_contained_at(nearest, schedule, epoch) for epoch in epochs])
        claims, priced = map(list, _counted(found, schedule, claimed, Adjacency.ZERO_OUT))
    return [_Tables(*own) for own in zip(counts, from_counts, best, claims, priced, strict=True)]


def _counted(
    found: Leakage, schedule: GroupSchedule, seen: Ints, adjacency: Adjacency
) -> tuple[Ints, Floats]:
    """[..., target class, observer class]: releases seen, and what they cost."""
    member = found.structure.classes.astype(np.float64)
    charges: Charges = {}
    for noise in dict.fromkeys(schedule.noises):
        same = np.array([other == noise for other in schedule.noises])
        # One product for all epochs, [..., observer class, target class].
        held = seen[..., same].reshape(-1, same.sum()).astype(np.float64) @ member[:, same].T
        table = held.astype(np.int64).reshape(*seen.shape[:-1], len(member)).swapaxes(-1, -2)
        charges[Shift(noise, 1, 0)] = table.ravel()
        shape = table.shape
    total: Ints = np.sum(list(charges.values()), axis=0).reshape(shape)
    return total, epsilons(charges, found.delta, adjacency).reshape(shape)


def _with_cuts(found: Leakage, epochs: Sequence[int], epsilon: Floats) -> Floats:
    """The least of the count bound and of every promising cut, for all epochs and classes."""
    best, structure, indices = epsilon.copy(), found.structure, np.array(epochs, dtype=np.int64)
    observers = Observers(structure, structure.classes)
    # Equal kinds of charges from all targets are converted together.
    pending: dict[frozenset[Shift], list[tuple[tuple[Ints, int, Ints], Charges]]] = {}
    for number, member in enumerate(structure.classes):
        # Where nothing has arrived there is nothing to improve on.
        when, who = np.nonzero(epsilon[:, number] > 0)
        if not len(when):
            continue
        views, known = ObserverViews(observers, who, indices[when]), epsilon[when, number, who]
        for _, concerned, charges in cheaper(
            frozenset(np.flatnonzero(member).tolist()), views, found.schedule, found.delta, known
        ):
            cells = when[concerned], number, who[concerned]
            pending.setdefault(frozenset(charges), []).append((cells, charges))
    for kinds, entries in pending.items():
        joint = {kind: np.concatenate([charges[kind] for _, charges in entries]) for kind in kinds}
        ends = np.cumsum([len(when) for (when, _, _), _ in entries])
        priced = np.split(epsilons(joint, found.delta, found.adjacency), ends[:-1])
        for (cells, _), own in zip(entries, priced, strict=True):
            best[cells] = np.minimum(best[cells], own)
    return best
