"""Densities and divergences by their definitions, for the tests of several rooms."""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def normal(x: Floats, mean: float, std: float) -> Floats:
    return np.asarray(np.exp(-0.5 * ((x - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi)))


def binomial(n: int, p: float) -> list[float]:
    return [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]


def renyi(order: float, p: Floats, q: Floats, cell: float) -> float:
    """Of two densities given on one grid."""
    return math.log(float((p**order * q ** (1 - order)).sum() * cell)) / (order - 1)
