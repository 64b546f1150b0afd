"""How much of a group is inside a model so many hops away: formulas for the periodic schedule.

They equal the symbolic propagation, which needs no formula; the published ones, kept to compare with, count
finished blocks where every block that has begun must count (DP-OGL, Theorem 1; its own examples disagree).
"""

import numpy as np

from coterie.groups.schedule import GroupAlgorithm, Index, Schedule
from coterie.groups.structures import Floats, Ints


def contained_at(distance: Floats, schedule: Schedule, epoch: Index) -> Ints:
    """Releases of a group inside the model of this index of a group at this distance.

    A merge whose output is visible carries what was released before it, one hop further per merge.
    """
    released = schedule.releases(epoch)
    period = schedule.merge_period
    begun = -(-released // period) + schedule.shows_draft(epoch)
    far = period * np.maximum(0.0, begun - distance)
    return np.where(distance == 0, released, far).astype(np.int64)


def published_contained_at(distance: Floats, schedule: Schedule, epoch: int) -> Ints:
    """The same by the publication's Theorem 1: a floor in place of the ceiling, drafts ignored."""
    finished = (epoch - 1) // schedule.period
    far = schedule.merge_period * np.maximum(0.0, finished - distance)
    return np.where(distance == 0, float(schedule.releases(epoch)), far).astype(np.int64)


def first_epoch_at(distance: Floats, schedule: Schedule) -> Floats:
    """Index of the first model at this distance that contains anything; infinite where none ever does."""
    if schedule.algorithm is GroupAlgorithm.DP_OGL:
        return schedule.period * distance + 2.0
    if schedule.publishes_drafts:
        return np.where(distance == 0, schedule.period + 1.0, schedule.period * distance + 2.0)
    return schedule.period * (distance + 1.0) + 1.0
