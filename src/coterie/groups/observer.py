"""A training run as its workers see it: what each leaks to the others, as one guarantee for all of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from coterie.errors import InputError
from coterie.groups.leakage import Leakage
from coterie.groups.schedule import GroupAlgorithm, GroupSchedule, Noise, Threat
from coterie.groups.structures import Structure
from coterie.privacy import Adjacency, ClientCost, Custody, Guarantee, Mode, ThreatModel
from coterie.privacy.meaning import from_bound
from coterie.privacy.plain import Json, Plain
from coterie.privacy.threats import MASTERS
from coterie.privacy.units import round_up


@dataclass(frozen=True)
class Observer(Plain):
    """Who trains with whom, what is released when, and whom a worker fears.

    `epochs` is how many there are in all; the models that they leave behind have the index `epochs + 1`.
    """

    called = "watched"
    mistake = InputError
    structure: Structure
    schedule: GroupSchedule
    threat: Threat
    epochs: int

    def to_json(self) -> Json:
        structure, schedule = self.structure, self.schedule
        written = _WrittenObserver(
            structure.kind,
            tuple(structure.name(worker) for worker in range(structure.workers)),
            structure.groups,
            schedule.algorithm,
            schedule.period,
            tuple((noise.rate, noise.multiplier) for noise in schedule.noises),
            schedule.mode,
            self.threat,
            self.epochs,
        )
        return written.to_json()

    @classmethod
    def read(cls, data: object) -> Self:
        found = _WrittenObserver.read(data)
        noises = tuple(Noise(*noise) for noise in found.noises)
        return cls(
            Structure(found.kind, found.groups, len(found.workers), found.workers),
            GroupSchedule(found.algorithm, found.period, noises, found.mode),
            found.threat,
            found.epochs,
        )

    def leakage(
        self, epochs: int | None = None, *, delta: float, adjacency: Adjacency = Adjacency.ZERO_OUT
    ) -> Leakage:
        """What every worker's view tells about every other after so many epochs (by default after all)."""
        done = self.epochs if epochs is None else epochs
        return Leakage(self.structure, self.schedule, done + 1, delta, self.threat, adjacency)

    def excess(self, budgets: Mapping[str, float], *, delta: float, adjacency: Adjacency) -> float:
        """The largest ratio of a worker's epsilon to what it allows; above 1, somebody's budget is broken."""
        allowed = np.array([budgets[self.structure.name(worker)] for worker in range(self.structure.workers)])
        found = self.leakage(delta=delta, adjacency=adjacency)
        claimed = found.per_worker
        if found.published_epsilon is not None:
            # In paper mode noise is what the publication asks for; the guarantee says what holds.
            claimed = np.fmax.reduce(found.published_epsilon, axis=1)
        return float(np.nanmax(claimed / allowed, initial=0.0))

    def guarantee(
        self,
        *,
        delta: float,
        adjacency: Adjacency = Adjacency.ZERO_OUT,
        caveats: tuple[str, ...] = (),
        held_by: Custody = Custody.PLAN,
    ) -> Guarantee:
        """What the whole run promises to every worker against any one other worker.

        The proof and the releases named are those of the pair with the largest epsilon. What an attacker
        gains follows from epsilon and delta alone: they hold for every pair, the divergences of one do not.
        """
        found = self.leakage(delta=delta, adjacency=adjacency)
        worst = found.most_exposed()
        if worst is None:
            raise InputError(
                "threat model: 2 is not allowed where every worker shares a group with every other, 1 is"
            )
        target, observer = worst
        pair = found.guarantee(target, observer)
        replaced = self.leakage(delta=delta, adjacency=Adjacency.REPLACE_ONE)
        name = self.structure.name
        others = "any other worker" if self.threat is Threat.ANYONE else "any worker of other groups"
        published = found.published_epsilon
        pooled = round_up(self.pooled(delta, adjacency))
        together = f"all observers of a worker pooling what they see: eps={pooled}"
        # Both are proven; the search for one pair alone may stop at a cut that the other one improves on.
        epsilon = max(pair.epsilon, float(np.nanmax(found.per_worker)))
        return replace(
            pair,
            subject=f"any of {self.structure.workers} workers",
            most_exposed=f"{name(target)} to {name(observer)}",
            held_by=held_by,
            threat=ThreatModel(
                f"{others} on its own",
                f"every model of its groups up to index {found.epoch}",
                MASTERS,
            ),
            epsilon=epsilon,
            meaning=from_bound(epsilon, delta),
            per_client=tuple(
                ClientCost(name(worker), None if np.isnan(own) else float(own), delta)
                for worker, own in enumerate(found.per_worker)
            ),
            epsilon_replace_one=max(pair.epsilon_replace_one, float(np.nanmax(replaced.per_worker))),
            published_epsilon=None if published is None else float(np.nanmax(published)),
            caveats=tuple(dict.fromkeys((*found.caveats, together, *caveats))),
        )

    def pooled(self, delta: float, adjacency: Adjacency = Adjacency.ZERO_OUT) -> float:
        """The largest epsilon of a worker whose observers all tell each other what they have seen."""
        asked = self.leakage(delta=delta, adjacency=adjacency)
        of_each_class = np.unique(self.structure.class_of, return_index=True)[1].tolist()
        feared = {target: np.flatnonzero(asked.defined[target]).tolist() for target in of_each_class}
        found = (asked.pair_epsilon(target, *others) for target, others in feared.items() if others)
        return max(found, default=0.0)


@dataclass(frozen=True)
class _WrittenObserver(Plain):
    """An observer as a file has it."""

    called = "watched"
    kind: str
    workers: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    algorithm: GroupAlgorithm
    period: int
    noises: tuple[tuple[float, float], ...]
    mode: Mode
    threat: Threat
    epochs: int
