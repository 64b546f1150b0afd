"""What the publication's Theorem 2 says noise on the way takes away; an illustration, not a bound.

On a string, with convex smooth losses and everybody taking part, the publication multiplies each release by
one factor for every noisy sum it passes. Its proof adds dependent terms as if they were independent, mixes
constants of conditioned and unconditioned laws and takes noise on sums for noise on models; exact divergences
of quadratic losses exceed its value. Nothing else here uses it.
"""

from dataclasses import dataclass

import numpy as np

from coterie.errors import InputError
from coterie.groups.propagation import contained_at
from coterie.groups.schedule import GroupAlgorithm, GroupSchedule
from coterie.groups.structures import Floats, Structure

CAVEAT = "an illustration for convex losses on a string: not proven, and exceeded by exact divergences"


@dataclass(frozen=True)
class ConvexTraining:
    """What the published factors depend on besides the noise."""

    clip: float
    smoothness: float
    learning_rate: float
    iterations: int


def degradation_factors(
    structure: Structure, schedule: GroupSchedule, training: ConvexTraining, epochs: int, order: float
) -> Floats:
    """[epoch - 1, group]: the published factor of a noisy sum, between 0 (nothing passes) and 1."""
    _check(structure, schedule)
    sizes = structure.membership.sum(axis=0).astype(np.float64)
    groups_of = structure.membership.sum(axis=1).astype(np.float64)
    member = structure.membership.astype(np.float64)
    noise = np.array([(training.clip * one.multiplier) ** 2 for one in schedule.noises])
    stretch = (1 + (1 + training.learning_rate * training.smoothness) ** training.iterations) ** 2
    # Inverses of the published constants: of a group's model, and of what each worker sends.
    model = np.zeros(len(sizes))
    factors = np.zeros((epochs, len(sizes)))
    for epoch in range(epochs):
        if epoch % schedule.period == 0:
            start = member * ((member @ model) / groups_of**2)[:, None]
        else:
            start = member * model
        sent = stretch * start.sum(axis=0)
        before = model + sent / sizes**2
        passing = np.divide(noise, before, out=np.full_like(noise, np.inf), where=before > 0)
        factors[epoch] = order / (order + passing)
        model = model + (noise + sent) / sizes**2
    return factors


def illustrated_share(
    structure: Structure,
    schedule: GroupSchedule,
    training: ConvexTraining,
    target: int,
    observer: int,
    epoch: int,
    order: float,
) -> float:
    """The share of the counted divergence that Theorem 2 leaves when each release is followed on its way."""
    factors = degradation_factors(structure, schedule, training, max(1, epoch - 1), order)
    own, seen = structure.groups_of(target), structure.groups_of(observer)
    distances = structure.distances
    period = schedule.period
    counted = left = 0.0
    for source in own:
        end = min(seen, key=lambda group: distances[source, group])
        hops = int(distances[source, end])
        price = schedule.noises[source].multiplier ** -2
        releases = int(contained_at(np.array([float(hops)]), schedule, epoch)[0])
        counted += price * releases
        if hops == 0:
            left += price * releases
            continue
        between = distances[source] + distances[:, end] == hops
        path = sorted(np.flatnonzero(between).tolist(), key=lambda group: distances[source, group])[1:]
        for block in range(1, releases // period + 1):
            share = 1.0
            for hop, group in enumerate(path):
                first = (block + hop) * period
                # A whole block of noisy sums in every group on the way, one in the observer's.
                stay = 1 if hop == hops - 1 else period
                share *= 1.0 if group in own else float(np.prod(factors[first : first + stay, group]))
            left += price * period * share
    return left / counted if counted else 0.0


def _check(structure: Structure, schedule: GroupSchedule) -> None:
    overlap = structure.overlap
    links = (int(overlap.sum()) - len(overlap)) // 2
    is_string = np.isfinite(structure.distances).all() and links == len(overlap) - 1
    if not is_string or (overlap.sum(axis=1) > 3).any():
        raise InputError(f"structure: {structure.kind} is not allowed, a string of groups is")
    if schedule.algorithm is not GroupAlgorithm.DP_OGL or any(one.rate != 1 for one in schedule.noises):
        raise InputError("schedule: Theorem 2 is about dp-ogl with rate 1 only")
