"""Values that left a mechanism: the only ones that clustering, routing and averaging may touch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Released(Generic[T]):
    """A noisy value together with the public level of the noise in it.

    Anything computed from released values alone is post-processing and free; functions that take
    `Released` arguments say by their type that they cannot touch data.
    """

    value: T
    noise_std: float
    """Standard deviation of the Gaussian noise in each coordinate (0 where the noise is not Gaussian)."""
    norm_bound: float = math.inf
    """Public: the norm that an honest release of this kind stays within, but for one in a million."""

    def map(self, function: Callable[[T], U]) -> "Released[U]":
        """Post-process the value; the stated noise level is the caller's to keep meaningful."""
        return Released(function(self.value), self.noise_std)  # which may be longer
