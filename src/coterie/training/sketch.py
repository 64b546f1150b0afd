"""Public random projections of gradients, for releases that only serve to tell clients apart.

Distances survive a random projection, and the noise added for privacy then has as many dimensions as the
sketch instead of as many as the model. The projection is drawn from a public seed: it hides nothing.
Clipping comes after projecting, so the sensitivity is the clip, exactly.
"""

import torch
from torch import Tensor

DENSE_ENTRIES = 20_000_000
"""Largest dense projection matrix; beyond it, a count-sketch that needs memory for one row only."""


class Projection:
    """A linear map from `parameters` to `dimensions` coordinates that preserves norms on average."""

    def __init__(self, parameters: int, dimensions: int, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.dimensions = dimensions
        self._matrix: Tensor | None = None
        if parameters * dimensions <= DENSE_ENTRIES:
            matrix = torch.randn(parameters, dimensions, generator=generator) / dimensions**0.5
            self._matrix = matrix.to(device)
        else:
            self._bucket = torch.randint(dimensions, (parameters,), generator=generator).to(device)
            self._sign = (torch.randint(2, (parameters,), generator=generator) * 2 - 1).float().to(device)

    def __call__(self, rows: Tensor) -> Tensor:
        if self._matrix is not None:
            return rows @ self._matrix
        sketch = torch.zeros(len(rows), self.dimensions, dtype=rows.dtype, device=rows.device)
        return sketch.index_add_(1, self._bucket, rows * self._sign)
