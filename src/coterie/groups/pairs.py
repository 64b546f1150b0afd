"""What one worker leaks to one other, or to a coalition: the best proven bound and its guarantee."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from coterie.errors import InputError
from coterie.groups.cuts import Charges, Cut, Observers, ObserverViews, cheaper, cut_at, epsilons
from coterie.groups.propagation import contained_at, published_contained_at
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


@dataclass(frozen=True)
class Exposure:
    """Workers in groups whose models have been seen up to an index: what each leaks to those it fears.

    Args:
        structure: who is in which group.
        schedule: releases, merges and noise; one noise for every group.
        epoch: index of the newest model; one group has then made epoch - 1 releases.
        delta: delta of every epsilon.
        threat: whom a worker fears.
        adjacency: whether the target falls silent in the other world or is replaced.
    """

    structure: Structure
    schedule: GroupSchedule
    epoch: int
    delta: float
    threat: Threat
    adjacency: Adjacency = Adjacency.ZERO_OUT

    def __post_init__(self) -> None:
        check_delta(self.delta)
        self.schedule.releases(self.epoch)
        groups, noises = len(self.structure.groups), len(self.schedule.noises)
        if groups > MOST_WORKERS:
            raise InputError(
                f"groups: {groups} have too many pairs for a matrix, at most {MOST_WORKERS} are allowed"
            )
        if noises != groups:
            raise InputError(f"schedule: it has noise for {noises} groups, the structure {groups}")
        if self.threat is Threat.ANYONE and self.schedule.publishes_drafts:
            raise InputError(
                "threat model: 1 is not allowed with the published dp-ogl-plus, which shows members models "
                "without noise; 2 is"
            )

    @property
    def caveats(self) -> tuple[str, ...]:
        """What every guarantee about this structure and schedule has to add."""
        if self.schedule.mode is not Mode.PAPER:
            return self.structure.caveats
        return (*self.structure.caveats, DRAFT_CAVEAT if self.schedule.publishes_drafts else PUBLISHED_CAVEAT)

    def pair_epsilon(self, target: int, *observers: int) -> float:
        """The best proven epsilon of one worker against one other, or a coalition."""
        return self._best(target, observers)[1]

    def guarantee(self, target: int, *observers: int) -> Guarantee:
        """What holds for one worker against one other, or several that tell each other everything."""
        structure, delta = self.structure, self.delta
        seen, name = structure.groups_of(*observers), structure.name(target)
        if self.threat is Threat.OUTSIDERS and structure.groups_of(target) & seen:
            raise InputError(
                f"pair: {name} shares a group with an observer, "
                "threat model 2 has only observers from other groups"
            )
        _, epsilon, cut, charges = self._best(target, observers)
        charged = {kind: int(times[0]) for kind, times in charges.items() if times[0]}
        event = composed([repeated(kind.event, times) for kind, times in charged.items()])
        published = None
        if self.schedule.mode is Mode.PAPER:
            own = cut_at(structure, structure.groups_of(target))
            claims = own.charges(self.schedule, self._views(observers), published_contained_at)
            published = float(epsilons(claims, delta)[0])
        names = " and ".join(structure.name(observer) for observer in sorted(observers))
        return Guarantee(
            unit=Unit.WORKER,
            subject=f"worker {name} of {structure.workers}",
            adjacency=self.adjacency,
            threat=ThreatModel(
                f"worker{'s' if len(observers) > 1 else ''} {names}",
                f"every model of {_listed(structure, seen)} up to index {self.epoch}",
                MASTERS,
                len(observers),
            ),
            epsilon=epsilon,
            delta=delta,
            epsilon_replace_one=replace(self, adjacency=Adjacency.REPLACE_ONE).pair_epsilon(
                target, *observers
            ),
            accountant=f"RDP, cut at {_listed(structure, cut.hidden)}" if cut.hidden else "RDP",
            mode=self.schedule.mode,
            event=event,
            meaning=sharpest(RdpAccountant(event, self.adjacency).meaning(), from_bound(epsilon, delta)),
            releases=tuple(
                ReleaseCost(
                    "sum",
                    f"a noisy sum of a group's sampled updates, rate {kind.noise.rate:g}, "
                    + (
                        "to which the target adds"
                        if kind.is_plain
                        else f"in which {kind.up} at the edge of a hidden group may change"
                    ),
                    times,
                    f"{kind.noise.multiplier:.4g} x clip",
                    float(epsilons({kind: np.array([times])}, delta, self.adjacency)[0]),
                )
                for kind, times in charged.items()
            ),
            per_client=(ClientCost(name, epsilon, delta),),
            caveats=self.caveats,
            published_epsilon=published,
        )

    def coalition(self, members: Collection[int]) -> tuple[Ints, Floats, Floats]:
        """Counts, epsilon from counts and best epsilon of every worker against observers that tell each other
        everything they see; -1, nan for these themselves and for whom the threat model leaves out.
        """
        structure, seen = self.structure, self._groups(members)
        nearest = structure.distances[sorted(seen)].min(axis=0)
        counts = np.full(structure.workers, -1, dtype=np.int64)
        from_counts, best = np.full((2, structure.workers), np.nan)
        for number, member in enumerate(structure.classes):
            workers = np.setdiff1d(np.flatnonzero(structure.class_of == number), list(members))
            trusted = self.threat is Threat.OUTSIDERS and member[sorted(seen)].any()
            if len(workers) and not trusted:
                counts[workers] = contained_at(nearest[member], self.schedule, self.epoch).sum()
                from_counts[workers], best[workers], _, _ = self._best(int(workers[0]), members)
        return counts, from_counts, best

    def _groups(self, coalition: Collection[int]) -> frozenset[int]:
        """The groups whose models a coalition sees."""
        if not coalition:
            raise InputError("coalition: nobody was named, at least 1 worker is needed")
        last = self.structure.workers - 1
        for member in coalition:
            if not 0 <= member <= last:
                raise InputError(f"coalition: worker {member} is unknown, 0 to {last} are allowed")
        return self.structure.groups_of(*coalition)

    def _views(self, coalition: Collection[int]) -> ObserverViews:
        """A coalition as one observer."""
        seen = np.isin(np.arange(len(self.structure.groups)), sorted(self._groups(coalition)))
        return ObserverViews(Observers(self.structure, seen[None]), np.array([0]), np.array([self.epoch]))

    def _best(self, target: int, observers: Collection[int]) -> tuple[float, float, Cut, Charges]:
        """Epsilon from counts, the best epsilon, and the cut and charges that prove it."""
        structure, schedule = self.structure, self.schedule
        views = self._views(observers)
        if target in observers or not 0 <= target < structure.workers:
            raise InputError(
                f"pair: target {target} is not allowed, a worker from 0 to {structure.workers - 1} "
                "that does not observe itself is"
            )
        own = structure.groups_of(target)
        if schedule.publishes_drafts and own & structure.groups_of(*observers):
            raise InputError(
                f"pair: {structure.name(target)} shares a group with an observer, and nothing is proven "
                "inside a group of the published dp-ogl-plus"
            )
        cut = cut_at(structure, own)
        charges = cut.charges(schedule.accounted(structure.groups), views)
        from_counts = best = float(epsilons(charges, self.delta, self.adjacency)[0])
        if not schedule.publishes_drafts:
            for other, _, cost in cheaper(own, views, schedule, self.delta, np.array([best])):
                found = float(epsilons(cost, self.delta, self.adjacency)[0])
                if found < best:
                    best, cut, charges = found, other, cost
        return from_counts, best, cut, charges


def _listed(structure: Structure, groups: Collection[int]) -> str:
    shown = ", ".join(structure.group_name(group) for group in sorted(groups)[:6])
    more = f", ... ({len(groups)} in all)" if len(groups) > 6 else ""
    return f"group{'s' if len(groups) > 1 else ''} {shown}{more}"
