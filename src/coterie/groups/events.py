"""Releases of groups as events, for the guarantee's record of what was charged."""

from collections.abc import Mapping

from dp_accounting import DpEvent

from coterie.groups.cuts import Shift
from coterie.privacy.events import BridgedSumDpEvent, composed, poisson_gaussian, repeated


def composed_shifts(charges: Mapping[Shift, int]) -> DpEvent:
    """All that is charged for one pair."""
    return composed([repeated(_event(kind), times) for kind, times in charges.items() if times])


def _event(shift: Shift) -> DpEvent:
    noise = shift.noise
    if (shift.up, shift.down) == (1, 0):
        event: DpEvent = poisson_gaussian(noise.rate, noise.multiplier)
        return event
    return BridgedSumDpEvent(noise.rate, noise.multiplier, shift.up, shift.down)
