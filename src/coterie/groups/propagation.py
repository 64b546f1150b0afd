"""Which noisy releases are inside which model, for groups so many hops apart.

A group's model contains what its predecessor contained and the release that made it; where workers start
from merged models it also contains what the models of all overlapping groups contained. Seen from any model,
the releases of one group are therefore always the first so many of that group (a union of beginnings is a
beginning), so one number per pair of groups says everything.

The published formula, kept to compare with, counts finished blocks where every block that has begun must
count (DP-OGL, Theorem 1; its own examples disagree).
"""

import numpy as np

from coterie.groups.schedule import GroupAlgorithm, GroupSchedule, Index
from coterie.groups.structures import Floats, Ints


def contained_at(distance: Floats, schedule: GroupSchedule, epoch: Index) -> Ints:
    """Releases of a group inside the model of this index of a group at this distance.

    A merge whose output is visible carries what was released before it, one hop further per merge.
    """
    released = schedule.releases(epoch)
    period = schedule.merge_period
    begun = -(-released // period) + schedule.shows_draft(epoch)
    far = period * np.maximum(0.0, begun - distance)
    return np.where(distance == 0, released, far).astype(np.int64)


def published_contained_at(distance: Floats, schedule: GroupSchedule, epoch: Index) -> Ints:
    """The same by the publication's Theorem 1: a floor in place of the ceiling, drafts ignored."""
    finished = (epoch - 1) // schedule.period
    far = schedule.merge_period * np.maximum(0.0, finished - distance)
    return np.where(distance == 0, schedule.releases(epoch), far).astype(np.int64)


def first_epoch_at(distance: Floats, schedule: GroupSchedule) -> Floats:
    """Index of the first model at this distance that contains anything; infinite where none ever does."""
    if schedule.algorithm is GroupAlgorithm.DP_OGL:
        return schedule.period * distance + 2.0
    if schedule.publishes_drafts:
        return np.where(distance == 0, schedule.period + 1.0, schedule.period * distance + 2.0)
    return schedule.period * (distance + 1.0) + 1.0
