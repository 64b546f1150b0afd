"""Slow and simple twins of what `coterie.groups` computes."""

import itertools
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.groups import GroupAlgorithm, GroupSchedule, Structure
from coterie.privacy import Mode
from coterie.privacy.divergences import ORDERS
from coterie.privacy.rdp import epsilon_from_rdp
from coterie.privacy.shifts import shift_rdp

Releases = set[tuple[int, int]]
"""Groups, and numbers of their releases."""


def random_structure(rng: np.random.Generator, most_workers: int = 9, most_groups: int = 5) -> Structure:
    """Any overlapping groups, each with a worker and every worker in one."""
    workers, groups = int(rng.integers(2, most_workers + 1)), int(rng.integers(1, most_groups + 1))
    members: list[set[int]] = [set() for _ in range(groups)]
    for worker in range(workers):
        for group in rng.choice(groups, size=rng.integers(1, min(3, groups) + 1), replace=False):
            members[group].add(worker)
    kept = [tuple(sorted(group)) for group in members if group]
    return Structure("random", tuple(kept), workers)


def tainted_views(structure: Structure, schedule: GroupSchedule, epochs: int) -> dict[int, list[Releases]]:
    """views[t][worker]: the set of (group, release) inside all models the worker has seen up to index t.

    Every model carries the set of releases it was computed from, worker by worker, as the algorithm is told.
    """
    groups = range(len(structure.groups))
    members = [set(group) for group in structure.groups]
    groups_of = [[m for m in groups if worker in members[m]] for worker in range(structure.workers)]
    plus = schedule.algorithm is GroupAlgorithm.DP_OGL_PLUS
    published = plus and schedule.mode is Mode.PAPER
    period = schedule.period

    def started(models: Sequence[Releases]) -> list[Releases]:
        merged = [
            Releases().union(*(models[m] for m in groups_of[worker])) for worker in range(structure.workers)
        ]
        return [Releases().union(*(merged[worker] for worker in members[m])) for m in groups]

    models: list[Releases] = [set() for _ in groups]  # what is inside the model of each group
    block_start = models
    seen: list[Releases] = [set() for _ in range(structure.workers)]
    views = {1: [set(view) for view in seen]}
    for epoch in range(1, epochs):
        inter = (epoch - 1) % period == 0
        if not plus:
            sources = started(models) if inter else models
            models = [models[m] | sources[m] | {(m, epoch)} for m in groups]
            visible = models
        else:
            if inter:
                block_start = models
                sources = started(models)
            ends = epoch % period == 0
            if ends:
                number = epoch // period
                models = [block_start[m] | sources[m] | {(m, number)} for m in groups]
                visible = models
            else:
                # A draft: no noise, hence no release of its own; only the published version shows it.
                visible = [block_start[m] | sources[m] for m in groups] if published else models
        for worker, view in enumerate(seen):
            for m in groups_of[worker]:
                view |= visible[m]
        views[epoch + 1] = [set(view) for view in seen]
    return views


def tainted_counts(structure: Structure, schedule: GroupSchedule, epochs: int) -> dict[int, NDArray[np.int_]]:
    """counts[t][target, observer], by looking into the sets."""
    views = tainted_views(structure, schedule, epochs)
    found = {}
    for epoch, seen in views.items():
        table = np.zeros((structure.workers, structure.workers), dtype=int)
        for target, observer in itertools.product(range(structure.workers), repeat=2):
            own = structure.groups_of(target)
            table[target, observer] = sum(group in own for group, _ in seen[observer])
        found[epoch] = table
    return found


def hidden_bound(
    structure: Structure,
    schedule: GroupSchedule,
    target: int,
    seen: Collection[int],
    hidden: Collection[int],
    epoch: int,
    delta: float,
) -> float:
    """Epsilon behind one cut, by its definition: sets of releases that travel along visible groups only."""
    visible = [m for m in range(len(structure.groups)) if m not in hidden]
    members = {m: set(structure.groups[m]) for m in visible}
    inside: dict[int, Releases] = {m: set() for m in visible}
    for release in range(1, schedule.releases(epoch) + 1):
        merge = (release - 1) % schedule.merge_period == 0
        sources = {m: [g for g in visible if members[m] & members[g]] if merge else [m] for m in visible}
        inside = {m: Releases().union(*(inside[g] for g in sources[m])) | {(m, release)} for m in visible}
    view = Releases().union(*(inside[m] for m in seen))
    total = np.zeros_like(ORDERS)
    for m, release in view:
        bridges = {
            worker for worker in members[m] - {target} if any(worker in structure.groups[h] for h in hidden)
        }
        late_merge = release > 1 and (release - 1) % schedule.merge_period == 0
        turning = len(bridges) if late_merge else 0
        noise = schedule.noises[m]
        total += shift_rdp(noise.rate, noise.multiplier, turning + (target in members[m]), turning)
    return epsilon_from_rdp(ORDERS, total, delta) if total.any() else 0.0


def contained(overlap: NDArray[np.bool_], schedule: GroupSchedule, epoch: int) -> NDArray[np.int64]:
    """[holder, source]: how many releases of `source` the model of `holder` contains, merge by merge.

    For the published DP-OGL+ a holder inside a block has merged its neighbours' block ends already.
    """
    known = np.zeros(overlap.shape, dtype=np.int64)
    released = schedule.releases(epoch)
    for release in range(1, released + 1, schedule.merge_period):
        np.fill_diagonal(known, release - 1)
        known = np.stack([known[neighbours].max(axis=0) for neighbours in overlap])
    np.fill_diagonal(known, released)
    if schedule.shows_draft(epoch):
        known = np.stack([known[neighbours].max(axis=0) for neighbours in overlap])
    return known
