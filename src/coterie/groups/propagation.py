"""Which noisy releases are inside which model, followed symbolically through the schedule.

A group's model contains what its predecessor contained and the release that made it; where workers start
from merged models it also contains what the models of all overlapping groups contained. Seen from any model,
the releases of one group are therefore always the first so many of that group (a union of beginnings is a
beginning), so one number per pair of groups says everything.
"""

import numpy as np

from coterie.groups.schedule import Schedule
from coterie.groups.structures import Bools, Ints


def contained(overlap: Bools, schedule: Schedule, epoch: int) -> Ints:
    """[holder, source]: how many releases of group `source` the model of group `holder` contains.

    For the published DP-OGL+ a holder inside a block has merged its neighbours' block ends already.
    """
    groups = len(overlap)
    neighbours = np.flatnonzero(overlap) % groups
    starts = np.concatenate([[0], np.cumsum(overlap.sum(axis=1))[:-1]])
    own = np.arange(groups)
    released = schedule.releases(epoch)
    known: Ints = np.zeros((groups, groups), dtype=np.int64)

    def merged(before: Ints) -> Ints:
        result: Ints = np.maximum.reduceat(before[neighbours], starts, axis=0)
        return result

    for release in schedule.merges(released):
        known[own, own] = release - 1
        known = merged(known)
    known[own, own] = released
    return merged(known) if schedule.shows_draft(epoch) else known
