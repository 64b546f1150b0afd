"""Public random projections of gradients, for releases that only serve to tell clients apart.

Distances survive a random projection, and the noise added for privacy then has as many dimensions as the
sketch instead of as many as the model. The projection is drawn from a public seed: it hides nothing.
Clipping comes after projecting, so the sensitivity is the clip, exactly.
"""

import torch
from torch import Tensor

DENSE_ENTRIES = 20_000_000
"""Largest dense projection matrix; beyond it, signed sums that need memory for one row only."""
NUMBERS_AT_ONCE = 2**26


class Projection:
    """A linear map from `parameters` to `dimensions` coordinates that preserves norms on average.

    A large model's coordinates are dealt to the sketch's in turn, each with a random sign, and added up (a
    count-sketch whose buckets are balanced). Dealing in order instead of at random keeps memory in sequence
    and the sum in a fixed order; signs alone make the expected squared norm right.
    """

    def __init__(self, parameters: int, dimensions: int, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.dimensions = dimensions
        self._matrix: Tensor | None = None
        if parameters * dimensions <= DENSE_ENTRIES:
            matrix = torch.randn(parameters, dimensions, generator=generator) / dimensions**0.5
            self._matrix = matrix.to(device)
        else:
            self._signs = (torch.randint(2, (parameters,), generator=generator) * 2.0 - 1.0).to(device)

    def __call__(self, rows: Tensor) -> Tensor:
        if self._matrix is not None:
            return rows @ self._matrix
        sketch = torch.zeros(len(rows), self.dimensions, dtype=rows.dtype, device=rows.device)
        whole = rows.shape[1] - rows.shape[1] % self.dimensions
        turns = max(1, NUMBERS_AT_ONCE // (self.dimensions * max(1, len(rows))))
        for first in range(0, whole, turns * self.dimensions):
            last = min(whole, first + turns * self.dimensions)
            signed = (rows[:, first:last] * self._signs[first:last]).view(len(rows), -1, self.dimensions)
            sketch += signed.sum(dim=1)
        sketch[:, : rows.shape[1] - whole] += rows[:, whole:] * self._signs[whole:]
        return sketch
