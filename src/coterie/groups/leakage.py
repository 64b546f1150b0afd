"""Who can learn how much about whom: counts and epsilon for every target, observer and epoch."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from coterie.errors import InputError
from coterie.groups.closed_forms import first_epoch_at, published_contained_at
from coterie.groups.cuts import Charges, Cut, Observers, Shift, Views, cheaper, epsilons, no_cut
from coterie.groups.events import composed_shifts
from coterie.groups.propagation import contained
from coterie.groups.schedule import GroupAlgorithm, Noise, Schedule
from coterie.groups.structures import Bools, Floats, Ints, Structure
from coterie.privacy import Adjacency, ClientCost, Guarantee, Mode, ReleaseCost, ThreatModel, Unit, rdp
from coterie.privacy.meaning import from_bound, sharpest
from coterie.privacy.threats import MASTERS
from coterie.privacy.units import check_delta, round_up

_T = TypeVar("_T", bound=np.generic)

_MOST_CELLS = 2**24
MOST_WORKERS = 10_000
"""Workers of whom every pair has a place in a matrix: 800 megabytes for each. Of groups there is one, too."""
PUBLISHED_CAVEAT = "as published: counts blocks that have ended, though a merge shows those that have begun"
DRAFT_CAVEAT = (
    "as published: members exchange models without noise inside a block, so one worker moves what all send; "
    "what is proven charges two clips for every other member, and nothing is proven inside a group"
)


class Threat(IntEnum):
    """Whom a worker fears: any other worker (1), or only those it shares no group with (2)."""

    ANYONE = 1
    OUTSIDERS = 2


@dataclass(frozen=True)
class Leakage:
    """What every worker's view tells about every other, at one epoch.

    Matrices go by [target, observer]; where nothing is defined (a worker about itself, and members of a
    common group under threat model 2) they hold -1 or nan.
    """

    structure: Structure
    schedule: Schedule
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
        return self._spread(_class_defined(self.structure, self.threat)) & ~np.eye(
            self.structure.workers, dtype=np.bool_
        )

    @cached_property
    def counts(self) -> Ints:
        """Noisy releases of the target's groups that the observer's view contains."""
        return np.where(self.defined, self._spread(self.class_counts), -1)

    @cached_property
    def epsilon_counts(self) -> Floats:
        """Epsilon from these counts alone."""
        return np.where(self.defined, self._spread(self.class_epsilon_counts), np.nan)

    @cached_property
    def epsilon(self) -> Floats:
        """The best proven bound: from the counts, or behind a cut."""
        return np.where(self.defined, self._spread(self.class_epsilon), np.nan)

    @cached_property
    def published_counts(self) -> Ints | None:
        """Counts by the publication's theorem; paper mode only, too small wherever a block is unfinished."""
        if self.class_published_counts is None:
            return None
        return np.where(self.defined, self._spread(self.class_published_counts), -1)

    @cached_property
    def published_epsilon(self) -> Floats | None:
        """Epsilon by the publication's theorem; paper mode only, not proven."""
        if self.class_published_epsilon is None:
            return None
        return np.where(self.defined, self._spread(self.class_published_epsilon), np.nan)

    @cached_property
    def per_worker(self) -> Floats:
        """Each worker's epsilon against the observer that learns most; nan without any observer."""
        return _per_worker(self.structure, self.threat, self.class_epsilon)

    @cached_property
    def first_epoch(self) -> Floats:
        """Index of the first model the observer sees that depends on the target; infinite if none does."""
        nearest = _observer_min(self.structure, self.structure.distances)
        to_class = np.stack([nearest[:, groups].min(axis=1) for groups in self.structure.class_groups])
        spread = self._spread(first_epoch_at(to_class, self.schedule))
        return np.where(self.defined, spread, np.nan)

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
    schedule: Schedule,
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
        >>> leakage(ring(100, 4), Schedule.of(4, period=10, rate=0.7, noise=2.0), epoch=200, delta=1e-5)
        Leakage(100 workers at epoch 200, largest epsilon 43.43 at delta 1e-05)
    """
    return history(structure, schedule, [epoch], delta, threat, adjacency)[0]


def accounted(structure: Structure, schedule: Schedule) -> Schedule:
    """The schedule with the noise that its releases really have, in units of how far one worker moves them.

    The published DP-OGL+ lets members react to each other inside a block before anything is clipped: one
    worker's presence moves its own clipped term once and every other member's twice.
    """
    if not schedule.publishes_drafts:
        return schedule
    noises = tuple(
        Noise(noise.rate, noise.multiplier / (2 * len(members) - 1))
        for noise, members in zip(schedule.noises, structure.groups, strict=True)
    )
    return replace(schedule, noises=noises)


def pair_epsilon(
    structure: Structure,
    schedule: Schedule,
    target: int,
    observers: Collection[int],
    epoch: int,
    delta: float,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
) -> float:
    """The best proven epsilon of one worker against one other, or a coalition."""
    return _best(structure, schedule, target, observers, epoch, delta, adjacency)[1]


def pair_guarantee(
    structure: Structure,
    schedule: Schedule,
    target: int,
    observers: Collection[int],
    epoch: int,
    delta: float,
    threat: Threat | None = None,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
) -> Guarantee:
    """What holds for one worker against one other, or a coalition that tells each other everything."""
    threat = _checked(structure, schedule, delta, threat)
    shared = structure.groups_of(target) & structure.groups_of(*observers)
    if threat is Threat.OUTSIDERS and shared:
        raise InputError(
            f"pair: {structure.name(target)} shares a group with an observer, "
            "threat model 2 has only observers from other groups"
        )
    _, epsilon, cut, charges = _best(structure, schedule, target, observers, epoch, delta, adjacency)
    replaced = pair_epsilon(structure, schedule, target, observers, epoch, delta, Adjacency.REPLACE_ONE)
    published = None
    if schedule.mode is Mode.PAPER:
        published = published_pair_epsilon(structure, schedule, target, observers, epoch, delta)
    groups = sorted(structure.groups_of(*observers))
    sees = f"every model of group{'s' if groups[1:] else ''} {_listed(structure, groups)} up to index {epoch}"
    names = " and ".join(structure.name(observer) for observer in sorted(observers))
    hidden = f", cut at group{'s' if len(cut.hidden) > 1 else ''} {_listed(structure, sorted(cut.hidden))}"
    name = structure.name(target)
    event = composed_shifts({kind: int(times[0]) for kind, times in charges.items()})
    return Guarantee(
        unit=Unit.WORKER,
        subject=f"worker {name} of {structure.workers}",
        adjacency=adjacency,
        threat=ThreatModel(
            f"worker{'s' if len(observers) > 1 else ''} {names}", sees, MASTERS, len(observers)
        ),
        epsilon=epsilon,
        delta=delta,
        epsilon_replace_one=replaced,
        accountant=f"RDP{hidden if cut.hidden else ''}",
        mode=schedule.mode,
        event=event,
        meaning=sharpest(rdp.meaning(event, adjacency), from_bound(epsilon, delta)),
        releases=_releases(charges, delta, adjacency),
        per_client=(ClientCost(name, epsilon, delta),),
        caveats=caveats_of(structure, schedule),
        published_epsilon=published,
    )


def _releases(charges: Charges, delta: float, adjacency: Adjacency) -> tuple[ReleaseCost, ...]:
    """What is charged for one pair, a row for each kind of noisy sum that the observers' view contains."""
    rows = []
    for kind, times in charges.items():
        if not times[0]:
            continue
        moved = "to which the target adds"
        if (kind.up, kind.down) != (1, 0):
            moved = f"in which {kind.up} at the edge of a hidden group may change"
        what = f"a noisy sum of a group's sampled updates, rate {kind.noise.rate:g}, {moved}"
        alone = float(epsilons({kind: times[:1]}, delta, adjacency)[0])
        noise = f"{kind.noise.multiplier:.4g} x clip"
        rows.append(ReleaseCost("sum", what, int(times[0]), noise, alone))
    return tuple(rows)


def caveats_of(structure: Structure, schedule: Schedule) -> tuple[str, ...]:
    """What every guarantee about this structure and schedule has to add."""
    if schedule.mode is not Mode.PAPER:
        return structure.caveats
    return (*structure.caveats, DRAFT_CAVEAT if schedule.publishes_drafts else PUBLISHED_CAVEAT)


def published_pair_epsilon(
    structure: Structure,
    schedule: Schedule,
    target: int,
    observers: Collection[int],
    epoch: int,
    delta: float,
) -> float:
    """What the publication's theorem claims for one worker against one other."""
    own = sorted(structure.groups_of(target))
    seen = sorted(structure.groups_of(*observers))
    claimed = published_contained_at(structure.distances[np.ix_(own, seen)].min(axis=1), schedule, epoch)
    charges: Charges = {}
    for group, times in zip(own, claimed, strict=True):
        kind = Shift(schedule.noises[group], 1, 0)
        charges[kind] = charges.get(kind, 0) + times[None]
    return float(epsilons(charges, delta)[0])


def coalition_leakage(
    structure: Structure,
    schedule: Schedule,
    coalition: Collection[int],
    *,
    epoch: int,
    delta: float,
    threat: Threat | None = None,
) -> tuple[Ints, Floats, Floats]:
    """Counts, epsilon from counts and best epsilon of every worker against a coalition; -1, nan for members.

    Args:
        structure: who is in which group.
        schedule: releases, merges and noise.
        coalition: observers that tell each other everything they see.
        epoch: index of the newest model seen.
        delta: delta of every epsilon.
        threat: by default anyone for DP-OGL, outsiders for DP-OGL+.
    """
    threat = _checked(structure, schedule, delta, threat)
    members = _coalition(structure, coalition)
    seen = structure.groups_of(*members)
    known = contained(structure.overlap, schedule, epoch)
    counts = np.full(structure.workers, -1, dtype=np.int64)
    from_counts = np.full(structure.workers, np.nan)
    best = np.full(structure.workers, np.nan)
    for number, groups in enumerate(structure.class_groups):
        if threat is Threat.OUTSIDERS and seen & set(groups.tolist()):
            continue
        workers = [int(w) for w in np.flatnonzero(structure.class_of == number) if int(w) not in members]
        if not workers:
            continue
        counts[workers] = known[sorted(seen)][:, groups].max(axis=0).sum()
        from_counts[workers], best[workers], _, _ = _best(
            structure, schedule, workers[0], members, epoch, delta, Adjacency.ZERO_OUT
        )
    return counts, from_counts, best


def history(
    structure: Structure,
    schedule: Schedule,
    epochs: Iterable[int],
    delta: float,
    threat: Threat | None = None,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
) -> list[Leakage]:
    """The leakage at each of several epochs, as `leakage` gives it at one."""
    threat = _checked(structure, schedule, delta, threat)
    wanted = list(epochs)
    at_once = max(1, _MOST_CELLS // len(structure.classes) ** 2)
    return [
        Leakage(structure, schedule, epoch, delta, threat, *tables, adjacency=adjacency)
        for first in range(0, len(wanted), at_once)
        for epoch, tables in _tables(structure, schedule, wanted[first : first + at_once], delta, adjacency)
    ]


Tables = tuple[Ints, Floats, Floats, Ints | None, Floats | None]
"""Counts, epsilon from them, the best epsilon; and what the publication claims for the first two."""


def _tables(
    structure: Structure, schedule: Schedule, epochs: Sequence[int], delta: float, adjacency: Adjacency
) -> Iterator[tuple[int, Tables]]:
    """For each epoch, all that a `Leakage` holds by [target class, observer class]; worked out together."""
    known = np.stack([contained(structure.overlap, schedule, epoch) for epoch in epochs])
    counts, by_noise = _counts(structure, accounted(structure, schedule), _observer_max(structure, known))
    epsilon_counts = epsilons(_count_charges(by_noise), delta, adjacency).reshape(counts.shape)
    epsilon = epsilon_counts
    if not schedule.publishes_drafts:
        epsilon = _with_cuts(structure, schedule, epochs, delta, epsilon_counts, adjacency)
    if schedule.mode is not Mode.PAPER:
        for place, epoch in enumerate(epochs):
            yield epoch, (counts[place], epsilon_counts[place], epsilon[place], None, None)
        return
    nearest = _observer_min(structure, structure.distances)
    claimed = np.stack([published_contained_at(nearest, schedule, epoch) for epoch in epochs])
    claims, by_noise = _counts(structure, schedule, claimed)
    priced = epsilons(_count_charges(by_noise), delta).reshape(counts.shape)
    for place, epoch in enumerate(epochs):
        yield epoch, (counts[place], epsilon_counts[place], epsilon[place], claims[place], priced[place])


def default_threat(schedule: Schedule) -> Threat:
    """The threat model each algorithm was designed for."""
    return Threat.ANYONE if schedule.algorithm is GroupAlgorithm.DP_OGL else Threat.OUTSIDERS


def _checked(structure: Structure, schedule: Schedule, delta: float, threat: Threat | None) -> Threat:
    check_delta(delta)
    if len(structure.groups) > MOST_WORKERS:
        raise InputError(
            f"groups: {len(structure.groups)} have too many pairs for a matrix, "
            f"at most {MOST_WORKERS} are allowed"
        )
    if len(schedule.noises) != len(structure.groups):
        raise InputError(
            f"schedule: it has noise for {len(schedule.noises)} groups, the structure {len(structure.groups)}"
        )
    threat = default_threat(schedule) if threat is None else threat
    if threat is Threat.ANYONE and schedule.publishes_drafts:
        raise InputError(
            "threat model: 1 is not allowed with the published dp-ogl-plus, which shows members models "
            "without noise; 2 is"
        )
    return threat


def _coalition(structure: Structure, coalition: Collection[int]) -> frozenset[int]:
    members = frozenset(coalition)
    if not members:
        raise InputError("coalition: nobody was named, at least 1 worker is needed")
    for member in members:
        if not 0 <= member < structure.workers:
            raise InputError(
                f"coalition: worker {member} is unknown, 0 to {structure.workers - 1} are allowed"
            )
    return members


def _listed(structure: Structure, groups: Sequence[int]) -> str:
    shown = ", ".join(structure.group_name(group) for group in groups[:6])
    return f"{shown}, ... ({len(groups)} in all)" if groups[6:] else shown


def _best(
    structure: Structure,
    schedule: Schedule,
    target: int,
    observers: Collection[int],
    epoch: int,
    delta: float,
    adjacency: Adjacency,
) -> tuple[float, float, Cut, Charges]:
    """Epsilon from counts, the best epsilon, and the cut and charges that prove it."""
    members = _coalition(structure, observers)
    if target in members or not 0 <= target < structure.workers:
        raise InputError(
            f"pair: target {target} is not allowed, a worker from 0 to {structure.workers - 1} "
            "that does not observe itself is"
        )
    own, seen = structure.groups_of(target), structure.groups_of(*members)
    if schedule.publishes_drafts and own & seen:
        raise InputError(
            f"pair: {structure.name(target)} shares a group with an observer, and nothing is proven inside a "
            "group of the published dp-ogl-plus"
        )
    watching = Observers(structure, [np.array(sorted(seen))])
    views = Views.of_all(watching, epoch)
    cut = no_cut(own)
    charges = cut.charges(accounted(structure, schedule), views)
    from_counts = best = float(epsilons(charges, delta, adjacency)[0])
    if not schedule.publishes_drafts:
        for other, _, cost in cheaper(own, views, schedule, delta, np.array([best])):
            found = float(epsilons(cost, delta, adjacency)[0])
            if found < best:
                best, cut, charges = found, other, cost
    return from_counts, best, cut, charges


def _class_defined(structure: Structure, threat: Threat) -> Bools:
    if threat is Threat.ANYONE:
        return np.ones((len(structure.classes),) * 2, dtype=np.bool_)
    table = structure.classes.astype(np.float32)
    apart: Bools = table @ table.T == 0
    return apart


def _per_worker(structure: Structure, threat: Threat, by_class: Floats) -> Floats:
    allowed = _class_defined(structure, threat)
    # Nobody observes itself: a class of one has no observer in its own class.
    alone = structure.class_sizes == 1
    allowed = allowed & ~np.diag(alone)
    worst: Floats = np.where(allowed, by_class, -np.inf).max(axis=1)
    worst[~allowed.any(axis=1)] = np.nan
    return worst[structure.class_of]


def _observer_max(structure: Structure, table: Ints) -> Ints:
    """[..., class, group]: the most that any group of the class holds."""
    sizes = [len(groups) for groups in structure.class_groups]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    held = table[..., np.concatenate(structure.class_groups), :]
    most: Ints = np.maximum.reduceat(held, starts, axis=-2)
    return most


def _observer_min(structure: Structure, table: Floats) -> Floats:
    """[class, group]: the least over the class's groups."""
    return np.stack([table[groups].min(axis=0) for groups in structure.class_groups])


def _counts(structure: Structure, schedule: Schedule, seen: Ints) -> tuple[Ints, dict[Noise, Ints]]:
    """[..., target class, observer class]: releases seen, in all and of each kind of noise."""
    member = structure.classes.astype(np.float64)
    by_noise: dict[Noise, Ints] = {}
    for noise in dict.fromkeys(schedule.noises):
        same = np.array([other == noise for other in schedule.noises])
        # One product for all epochs, [..., observer class, target class].
        held = (seen[..., same].reshape(-1, same.sum()).astype(np.float64) @ member[:, same].T).astype(
            np.int64
        )
        by_noise[noise] = held.reshape(*seen.shape[:-1], len(member)).swapaxes(-1, -2)
    total: Ints = np.sum(list(by_noise.values()), axis=0)
    return total, by_noise


def _count_charges(by_noise: dict[Noise, Ints]) -> Charges:
    return {Shift(noise, 1, 0): table.ravel() for noise, table in by_noise.items()}


def _with_cuts(
    structure: Structure,
    schedule: Schedule,
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
        views, known = Views(observers, who, indices[when]), epsilon[when, number, who]
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
