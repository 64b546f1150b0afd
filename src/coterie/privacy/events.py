"""What was released, as trees of dp_accounting events, and their normal form.

An event says what was done, not what it costs. `GaussianDpEvent(z)` is a sum of contributions of norm at
most C with noise of standard deviation z C; an accountant adds the adjacency, under which that sum moves by
C (zero-out, add-remove) or 2 C (replace-one). One tree therefore gives both values of a guarantee.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

import attr
import dp_accounting as dp
from dp_accounting import DpEvent

from coterie.privacy.errors import PlanError
from coterie.privacy.plain import Json, record, register


@attr.s(frozen=True, slots=True, auto_attribs=True)
class SelectionDpEvent(DpEvent):  # type: ignore[misc]
    """The argmax of scores of sensitivity 1 plus Gumbel noise of this scale (the exponential mechanism).

    Monotone scores are counts: each unit adds between 0 and 1 to every one, so taking it away moves all of
    them the same way and the log-probabilities of any two outcomes drift apart by at most 1/scale. When
    some scores may rise while others fall, as under replacement, it is 2/scale.
    """

    gumbel_scale: float
    monotone: bool = True

    def bounded_range(self, replace_one: bool) -> float:
        """The longest interval that the log-ratios of outcome probabilities can span between neighbours."""
        return (1.0 if self.monotone and not replace_one else 2.0) / self.gumbel_scale


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ShuffledEpochDpEvent(DpEvent):  # type: ignore[misc]
    """One pass over the data in disjoint batches of a shuffled order, each released with Gaussian noise.

    Each unit is in exactly one batch. Given the order, only that batch's sum differs between neighbours,
    so an epoch costs one Gaussian; no amplification is claimed for the secret order.
    """

    noise_multiplier: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class BridgedSumDpEvent(DpEvent):  # type: ignore[misc]
    """A noisy sum over Poisson participants of whom several may send something else in the other world.

    `up` of them contribute in the first world and `down` in the second, anything within the clip: the bridges
    of a cut, who may turn round, and the unit itself, which the second world lacks. A unit that is replaced
    contributes there too.
    """

    rate: float
    noise_multiplier: float
    up: int
    down: int

    def moved(self, replace_one: bool) -> tuple[int, int]:
        """How many contribute in each of the two worlds."""
        return self.up, self.up if replace_one else self.down


def gaussian(noise_multiplier: float) -> DpEvent:
    """A Gaussian release; without noise it is not private."""
    return dp.GaussianDpEvent(noise_multiplier) if noise_multiplier > 0 else dp.NonPrivateDpEvent()


def poisson_gaussian(rate: float, noise_multiplier: float) -> DpEvent:
    """A Gaussian release on a Poisson sample; without noise it is not private."""
    if not noise_multiplier > 0:
        return dp.NonPrivateDpEvent()
    return dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise_multiplier))


def selection(gumbel_scale: float, monotone: bool = True) -> DpEvent:
    """A noisy argmax; without noise it is not private."""
    return SelectionDpEvent(gumbel_scale, monotone) if gumbel_scale > 0 else dp.NonPrivateDpEvent()


def repeated(event: DpEvent, times: int) -> DpEvent:
    """The same release several times, adaptively."""
    if times == 0:
        return dp.NoOpDpEvent()
    return event if times == 1 else dp.SelfComposedDpEvent(event, times)


def composed(events: Sequence[DpEvent]) -> DpEvent:
    """Several releases, adaptively."""
    if not events:
        return dp.NoOpDpEvent()
    return events[0] if len(events) == 1 else dp.ComposedDpEvent(list(events))


def atoms(event: DpEvent) -> Counter[DpEvent]:
    """The tree as a multiset of releases that an accountant knows how to bound.

    A composition under one sample becomes one sampled Gaussian with the joint multiplier: sampling once and
    releasing twice is dominated by one Gaussian of combined shift, amplified once. Amplifying its parts
    separately would claim less than is spent.
    """
    found: Counter[DpEvent] = Counter()
    _collect(event, 1, found)
    return found


def _collect(event: DpEvent, times: int, found: Counter[DpEvent]) -> None:
    if times == 0:
        return
    match event:
        case dp.NoOpDpEvent():
            pass
        case dp.SelfComposedDpEvent(event=part, count=count):
            _check_count(count)
            _collect(part, times * count, found)
        case dp.ComposedDpEvent(events=parts):
            for part in parts:
                _collect(part, times, found)
        case dp.NonPrivateDpEvent():
            found[event] += times
        case dp.GaussianDpEvent(noise_multiplier=noise) | ShuffledEpochDpEvent(noise_multiplier=noise):
            found[gaussian(noise)] += times
        case SelectionDpEvent(gumbel_scale=scale, monotone=monotone):
            found[selection(scale, monotone)] += times
        case BridgedSumDpEvent(rate=rate, noise_multiplier=noise, up=up, down=down):
            _check_rate(rate)
            if not 0 <= down <= up:
                raise PlanError(f"bridged sum: {up} against {down} is not allowed, at least as many are")
            if not noise > 0:
                found[dp.NonPrivateDpEvent()] += times
            elif up > 0 and rate > 0:
                found[event] += times
        case dp.PoissonSampledDpEvent(sampling_probability=rate, event=part):
            joint = joint_multiplier(part)
            _check_rate(rate)
            if rate == 1:
                found[gaussian(joint)] += times
            elif rate > 0 and not math.isinf(joint):
                found[poisson_gaussian(rate, joint)] += times
        case dp.SampledWithoutReplacementDpEvent(source_dataset_size=source, sample_size=size, event=part):
            joint = joint_multiplier(part)
            if not 1 <= size <= source:
                raise PlanError(f"sample size: {size} is not allowed, an integer from 1 to {source} is")
            if joint == 0:
                found[dp.NonPrivateDpEvent()] += times
            elif not math.isinf(joint):
                atom = dp.SampledWithoutReplacementDpEvent(source, size, dp.GaussianDpEvent(joint))
                found[atom] += times
        case _:
            raise PlanError(f"{type(event).__name__}: no accountant here can bound this event")


def _check_count(count: int) -> None:
    if count < 0:  # it would give back what others spent
        raise PlanError(f"repetitions: {count} is not allowed, an integer from 0 is")


def _check_rate(rate: float) -> None:
    if not 0 <= rate <= 1:
        raise PlanError(f"sampling probability: {rate} is not allowed, a number from 0 to 1 is")


def joint_multiplier(event: DpEvent) -> float:
    """The multiplier of the one Gaussian that dominates an adaptive composition of Gaussians.

    Shifts over standard deviations add in squares (Dong, Roth, Su 2019), so inverse squares of multipliers
    add; 0 means not private and infinity means nothing is released.
    """
    precision = _precision(event)
    if math.isinf(precision):
        return 0.0
    return math.inf if precision == 0 else 1.0 / math.sqrt(precision)


def _precision(event: DpEvent) -> float:
    match event:
        case dp.NoOpDpEvent():
            return 0.0
        case dp.NonPrivateDpEvent():
            return math.inf
        case dp.GaussianDpEvent(noise_multiplier=noise):
            return (1.0 / float(noise)) * (1.0 / float(noise)) if noise > 0 else math.inf
        case dp.SelfComposedDpEvent(event=part, count=count):
            _check_count(count)
            return float(count * _precision(part)) if count else 0.0
        case dp.ComposedDpEvent(events=parts):
            return math.fsum(_precision(part) for part in parts)
    raise PlanError(f"{type(event).__name__} inside a sample: only Gaussian releases can be amplified here")


def event_to_json(event: DpEvent) -> Json:
    """The tree as plain data."""
    name = _NAMES.get(type(event))
    if name is None:
        raise PlanError(f"{type(event).__name__}: this event cannot be written to a file")
    _, keys = _KINDS[name]
    return {"event": name, **cast(Json, record(type(event), keys).write(event))}


def event_from_json(data: object) -> DpEvent:
    """The tree that `event_to_json` wrote."""
    name = data.get("event") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(name, str) or name not in _KINDS:
        raise PlanError(f"event: {name!r} is not known; allowed are {', '.join(_KINDS)}")
    kind, keys = _KINDS[name]
    return record(kind, keys).read({key: value for key, value in data.items() if key != "event"})


_NOISE = (("noise_multiplier", "noise_multiplier"),)
_KINDS: dict[str, tuple[type, tuple[tuple[str, str], ...]]] = {
    "nothing": (dp.NoOpDpEvent, ()),
    "non-private": (dp.NonPrivateDpEvent, ()),
    "gaussian": (dp.GaussianDpEvent, _NOISE),
    "shuffled-epoch": (ShuffledEpochDpEvent, _NOISE),
    "selection": (SelectionDpEvent, (("gumbel_scale", "gumbel_scale"), ("monotone", "monotone"))),
    "bridged-sum": (BridgedSumDpEvent, (("rate", "rate"), *_NOISE, ("up", "up"), ("down", "down"))),
    "poisson": (dp.PoissonSampledDpEvent, (("sampling_probability", "rate"), ("event", "of"))),
    "fixed-size": (
        dp.SampledWithoutReplacementDpEvent,
        (("source_dataset_size", "population"), ("sample_size", "size"), ("event", "of")),
    ),
    "repeated": (dp.SelfComposedDpEvent, (("count", "times"), ("event", "of"))),
    "composed": (dp.ComposedDpEvent, (("events", "events"),)),
}
"""How events are called in files, and the keys of their fields."""
_NAMES = {kind: name for name, (kind, _) in _KINDS.items()}
register(DpEvent, event_to_json, event_from_json)
