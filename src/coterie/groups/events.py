"""Releases of groups as events, for the guarantee's record of what was charged."""

from collections.abc import Mapping

import attr
import dp_accounting as dp
from dp_accounting import DpEvent

from coterie.groups.cuts import Shift
from coterie.privacy.events import composed, poisson_gaussian, repeated


@attr.s(frozen=True, slots=True, auto_attribs=True)
class BridgedSumDpEvent(DpEvent):  # type: ignore[misc]
    """A noisy sum over Poisson participants of which several may turn round between the two worlds."""

    rate: float
    noise_multiplier: float
    up: int
    down: int


def composed_shifts(charges: Mapping[Shift, int]) -> DpEvent:
    """All that is charged for one pair."""
    return composed([repeated(_event(kind), times) for kind, times in charges.items() if times])


def _event(shift: Shift) -> DpEvent:
    noise = shift.noise
    if (shift.up, shift.down) == (1, 0):
        event: DpEvent = poisson_gaussian(noise.rate, noise.multiplier)
        return event
    if noise.rate == 1:
        # Where all take part only the distance between the two sums matters.
        return dp.GaussianDpEvent(noise.multiplier / (shift.up + shift.down))
    return BridgedSumDpEvent(noise.rate, noise.multiplier, shift.up, shift.down)
