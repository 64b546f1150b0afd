"""When groups release, when models are merged, and how much noise there is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from coterie.errors import InputError
from coterie.privacy import Mode
from coterie.privacy.ranges import GROUP_EPOCHS, NOISE, RATE

# Of a model, or of many.
Index = TypeVar("Index", int, npt.NDArray[np.int64])

# Squares of noise and their inverses stay numbers, also of what searches and cuts derive from it.
_LEAST_NOISE, _MOST_NOISE = 1e-100, 1e100


class GroupAlgorithm(StrEnum):
    """How groups train.

    `DP_OGL` releases a noisy sum per group and epoch. `DP_OGL_PLUS` releases one per group and block of S
    epochs: in sound mode workers train alone inside a block; as published they exchange models without noise.
    """

    DP_OGL = "dp-ogl"
    DP_OGL_PLUS = "dp-ogl-plus"


class Threat(IntEnum):
    """Whom a worker fears: any other worker (1), or only those it shares no group with (2)."""

    ANYONE = 1
    OUTSIDERS = 2


@dataclass(frozen=True)
class Noise:
    """One group's release: workers take part with probability `rate`; noise std = multiplier x clip."""

    rate: float
    multiplier: float

    def __post_init__(self) -> None:
        if self.rate not in RATE:
            raise InputError(f"rate: {self.rate} is not allowed, {RATE} is")
        if not _LEAST_NOISE <= self.multiplier <= _MOST_NOISE:
            raise InputError(
                f"noise: {self.multiplier} is not allowed, a number from {_LEAST_NOISE:g} to "
                f"{_MOST_NOISE:g} is"
            )


@dataclass(frozen=True)
class GroupSchedule:
    """Overlapping grouped learning in public numbers.

    Epoch e turns the models of index e into those of index e + 1; workers start from the mean of their
    groups' models in epochs 1, S + 1, 2 S + 1, ... and from each group's own model in all others.
    Every group has a noise of its own.
    """

    algorithm: GroupAlgorithm
    period: int
    noises: tuple[Noise, ...]
    mode: Mode = Mode.SOUND

    def __post_init__(self) -> None:
        GROUP_EPOCHS.check("period", self.period)

    @classmethod
    def of(
        cls,
        groups: int,
        *,
        period: int,
        rate: float | Sequence[float],
        noise: float | Sequence[float],
        algorithm: GroupAlgorithm = GroupAlgorithm.DP_OGL,
        mode: Mode = Mode.SOUND,
    ) -> "GroupSchedule":
        """The schedule for so many groups, with one rate and noise for all or one for each."""
        rates, multipliers = one_each("rate", rate, groups), one_each("noise", noise, groups)
        for multiplier in multipliers:
            if multiplier not in NOISE:
                raise InputError(f"noise: {multiplier} is not allowed, {NOISE} is")
        noises = tuple(Noise(*both) for both in zip(rates, multipliers, strict=True))
        return cls(algorithm, period, noises, mode)

    @property
    def publishes_drafts(self) -> bool:
        """Do members see models inside a block that carry no noise?"""
        plus = self.algorithm is GroupAlgorithm.DP_OGL_PLUS
        return plus and self.mode is Mode.PAPER and self.period > 1

    @property
    def usual_threat(self) -> Threat:
        """The threat model each algorithm was designed for."""
        return Threat.ANYONE if self.algorithm is GroupAlgorithm.DP_OGL else Threat.OUTSIDERS

    def accounted(self, groups: Sequence[Sequence[int]]) -> "GroupSchedule":
        """The schedule with the noise that releases really have, in units of how far one worker moves them.

        The published DP-OGL+ lets members react to each other inside a block before anything is clipped: one
        worker's presence moves its own clipped term once and every other member's twice.
        """
        if not self.publishes_drafts:
            return self
        noises = tuple(
            Noise(noise.rate, noise.multiplier / (2 * len(members) - 1))
            for noise, members in zip(self.noises, groups, strict=True)
        )
        return replace(self, noises=noises)

    def louder(self, factor: float) -> "GroupSchedule":
        """The schedule with so many times the noise in every group."""
        return replace(self, noises=tuple(Noise(one.rate, factor * one.multiplier) for one in self.noises))

    @property
    def merge_period(self) -> int:
        """Releases of a group from one merge to the next."""
        return self.period if self.algorithm is GroupAlgorithm.DP_OGL else 1

    def releases(self, epoch: Index) -> Index:
        """How many noisy sums a group has released when its model of this index appears."""
        for end in (np.min(epoch), np.max(epoch)):
            GROUP_EPOCHS.check("epochs", int(end))
        return epoch - 1 if self.algorithm is GroupAlgorithm.DP_OGL else (epoch - 1) // self.period

    def epochs(self, releases: int) -> int:
        """How many epochs it takes until every group has released so many noisy sums."""
        return releases if self.algorithm is GroupAlgorithm.DP_OGL else releases * self.period

    def shows_draft(self, epoch: int | npt.NDArray[np.int64]) -> bool | npt.NDArray[np.bool_]:
        """Is the model of this index one without noise, made inside a block from merged models?"""
        inside: bool | npt.NDArray[np.bool_] = (epoch - 1) % self.period != 0
        return self.publishes_drafts & inside


def one_each(key: str, value: float | Sequence[float], groups: int) -> tuple[float, ...]:
    """One number for every group, where one stands for all of them or each has its own."""
    given = (float(value),) if isinstance(value, int | float) else tuple(value)
    if len(given) not in (1, groups):
        raise InputError(f"{key}: {len(given)} numbers; allowed: 1, or {groups}, one for each group")
    return given if len(given) == groups else given * groups
