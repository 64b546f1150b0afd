"""What a client tells of the sketch of its gradient, and how it finds its cluster by it.

A sketch is a public random projection of the gradient at a public start, at length 1; it never leaves its
client. What leaves, summed over all clients under noise, is one of three vectors of norm at most 1, whatever
the sketch is: so each sum moves by at most 1 when a client joins or leaves (`docs/rr-cluster.md`).
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from coterie.privacy.randomness import Floats

SQUARES = 0.75
"""Share of second moments in the squared norm of a contribution; the rest is the sketch itself."""


class SketchStatistic(StrEnum):
    """What a client adds.

    MOMENTS: its sketch and the products of its entries.
    FEATURES: cosines and sines of it at public frequencies, in the plane of the strongest directions.
    SIZES: a one in the place of the component that it is nearest to.
    """

    MOMENTS = "moments"
    FEATURES = "features"
    SIZES = "sizes"


@dataclass(frozen=True)
class Sketch:
    """Everything that a client needs to know beside its own records: public or released before.

    Args:
        start: the model at which gradients are taken.
        dimensions: of a sketch.
        statistic: what the client adds to the sum; None: nothing, it finds its cluster.
        mean: taken off a sketch before it is projected.
        basis: directions of which the coordinates of a sketch are taken, one per column.
        frequencies: one per row, of coordinates.
        centres: of components, one per row, in coordinates.
    """

    start: NDArray[np.float32]
    dimensions: int
    statistic: SketchStatistic | None = None
    mean: Floats | None = None
    basis: Floats | None = None
    frequencies: Floats | None = None
    centres: Floats | None = None

    @property
    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        """All that members are sent, in order; what is missing is empty."""
        parts = (self.start, self.mean, self.basis, self.frequencies, self.centres)
        return tuple(np.zeros(0) if part is None else part for part in parts)

    @property
    def numbers(self) -> int:
        """How many numbers a contribution has."""
        if self.statistic is SketchStatistic.MOMENTS:
            return moment_numbers(self.dimensions)
        if self.statistic is SketchStatistic.FEATURES:
            return 2 * len(_needed(self.frequencies))
        return len(_needed(self.centres))

    def contribution(self, point: Floats) -> Floats:
        """What the client with this sketch adds: a vector of norm at most 1, if the sketch has that."""
        if self.statistic is SketchStatistic.MOMENTS:
            rows, columns = np.triu_indices(self.dimensions)
            # Each product beside the diagonal stands for two equal ones.
            products = np.where(rows == columns, 1.0, np.sqrt(2.0)) * point[rows] * point[columns]
            return np.concatenate([np.sqrt(1.0 - SQUARES) * point, np.sqrt(SQUARES) * products])
        if self.statistic is SketchStatistic.FEATURES:
            frequencies = _needed(self.frequencies)
            angles = frequencies @ self.coordinates(point)
            return np.asarray(np.concatenate([np.cos(angles), np.sin(angles)]) / np.sqrt(len(frequencies)))
        return np.asarray(np.eye(self.numbers)[self.nearest(point)])

    def coordinates(self, point: Floats) -> Floats:
        """Of a sketch, along the released directions."""
        return np.asarray((point - _needed(self.mean)) @ _needed(self.basis))

    def nearest(self, point: Floats) -> int:
        """The component whose centre is nearest to a sketch."""
        apart = _needed(self.centres) - self.coordinates(point)
        return int(np.argmin((apart**2).sum(axis=1)))


def moment_numbers(dimensions: int) -> int:
    """First and second moments of so many dimensions, each product once."""
    return dimensions + dimensions * (dimensions + 1) // 2


def read_moments(released: Floats, dimensions: int) -> tuple[Floats, Floats]:
    """Sum of the sketches and of their outer products, from the released sum of contributions."""
    rows, columns = np.triu_indices(dimensions)
    products = released[dimensions:] / np.where(rows == columns, 1.0, np.sqrt(2.0)) / np.sqrt(SQUARES)
    squares = np.zeros((dimensions, dimensions))
    squares[rows, columns] = squares[columns, rows] = products
    return released[:dimensions] / np.sqrt(1.0 - SQUARES), squares


def _needed(part: Floats | None) -> Floats:
    if part is None:
        raise ValueError("sketch: a part that this statistic needs is missing")
    return part
