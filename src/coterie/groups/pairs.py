"""What one worker leaks to one other, or to a coalition: the best proven bound and its guarantee."""

from collections.abc import Collection, Sequence

import numpy as np

from coterie.errors import InputError
from coterie.groups.cuts import Charges, Cut, Observers, ObserverViews, Shift, cheaper, epsilons, no_cut
from coterie.groups.propagation import contained, published_contained_at
from coterie.groups.schedule import GroupSchedule, Threat
from coterie.groups.structures import Floats, Ints, Structure
from coterie.privacy import Adjacency, ClientCost, Guarantee, Mode, ReleaseCost, ThreatModel, Unit
from coterie.privacy.events import composed, repeated
from coterie.privacy.meaning import from_bound, sharpest
from coterie.privacy.rdp import RdpAccountant
from coterie.privacy.threats import MASTERS
from coterie.privacy.units import check_delta

# Workers of whom every pair has a place in a matrix: 800 megabytes for each. Of groups there is one, too.
MOST_WORKERS = 10_000
PUBLISHED_CAVEAT = "as published: counts blocks that have ended, though a merge shows those that have begun"
DRAFT_CAVEAT = (
    "as published: members exchange models without noise inside a block, so one worker moves what all send; "
    "what is proven charges two clips for every other member, and nothing is proven inside a group"
)


def pair_epsilon(
    structure: Structure,
    schedule: GroupSchedule,
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
    schedule: GroupSchedule,
    target: int,
    observers: Collection[int],
    epoch: int,
    delta: float,
    threat: Threat | None = None,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
) -> Guarantee:
    """What holds for one worker against one other, or a coalition that tells each other everything."""
    threat = checked(structure, schedule, delta, threat)
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
    event = composed([repeated(kind.event, int(times[0])) for kind, times in charges.items() if times[0]])
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
        meaning=sharpest(RdpAccountant.of(event, adjacency).meaning(), from_bound(epsilon, delta)),
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


def caveats_of(structure: Structure, schedule: GroupSchedule) -> tuple[str, ...]:
    """What every guarantee about this structure and schedule has to add."""
    if schedule.mode is not Mode.PAPER:
        return structure.caveats
    return (*structure.caveats, DRAFT_CAVEAT if schedule.publishes_drafts else PUBLISHED_CAVEAT)


def published_pair_epsilon(
    structure: Structure,
    schedule: GroupSchedule,
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
    schedule: GroupSchedule,
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
    threat = checked(structure, schedule, delta, threat)
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


def checked(structure: Structure, schedule: GroupSchedule, delta: float, threat: Threat | None) -> Threat:
    """The threat model that is meant, where structure and schedule fit each other and it."""
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
    threat = schedule.usual_threat if threat is None else threat
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
    schedule: GroupSchedule,
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
    observing = Observers(structure, [np.array(sorted(seen))])
    views = ObserverViews.of_all(observing, epoch)
    cut = no_cut(own)
    charges = cut.charges(schedule.accounted(structure.groups), views)
    from_counts = best = float(epsilons(charges, delta, adjacency)[0])
    if not schedule.publishes_drafts:
        for other, _, cost in cheaper(own, views, schedule, delta, np.array([best])):
            found = float(epsilons(cost, delta, adjacency)[0])
            if found < best:
                best, cut, charges = found, other, cost
    return from_counts, best, cut, charges
