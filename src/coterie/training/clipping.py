"""Sums of clipped per-record contributions: the only door from records to anything released.

One record moves the sum by at most the clip, whatever its values. Contributions are computed in float32,
their norms and the sum in float64, and the clip is shrunk by a margin that covers the rounding of float32.
A record that produces anything non-finite contributes zero (and noise is added all the same).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.training.learner import Batch, Learner

MARGIN = 1.0 - 2.0**-16


def clip_rows(rows: Tensor, clip: float) -> Tensor:
    """Each row scaled to norm at most `clip`, in float64; rows with a non-finite entry become zero."""
    exact = rows.double()
    norms = torch.linalg.vector_norm(exact, dim=1)
    usable = torch.isfinite(norms)
    scales = (clip * MARGIN / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
    return torch.where(usable[:, None], exact * scales[:, None], 0.0)


def clipped_sum(
    learner: Learner,
    parameters: Tensor,
    batch: Batch,
    clip: float,
    project: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Sum over records of the clipped gradient (or of its clipped projection), in float64.

    Micro-batches bound the memory; their boundaries depend on the number of records alone, so a record
    whose contribution is replaced by zero leaves the arithmetic of all others untouched.
    """
    total: Tensor | None = None
    for part in batch.split(learner.micro_batch):
        rows = learner.gradients(parameters, part)
        if project is not None:
            rows = project(rows)
        partial = clip_rows(rows, clip).sum(dim=0)
        total = partial if total is None else total + partial
    if total is None:
        width = parameters[None] if project is None else project(parameters[None])
        return torch.zeros(width.shape[1], dtype=torch.float64, device=parameters.device)
    return total
