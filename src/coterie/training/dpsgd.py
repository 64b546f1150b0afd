"""One client's private learning in one round: execution of what the plan's mechanism describes."""

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.privacy import FullBatchSketch, FullBatchSteps, PoissonSteps, RandomStream
from coterie.training.clipping import clipped_sum
from coterie.training.learner import Batch, Learner
from coterie.training.sketch import Projection


def noisy_mean(
    learner: Learner,
    parameters: Tensor,
    batch: Batch,
    mechanism: PoissonSteps | FullBatchSteps | FullBatchSketch,
    noise: RandomStream,
    project: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Clipped sum over the batch, plus noise, divided by the mechanism's public denominator.

    The size of the batch that was drawn is never used: it depends on the coins and, under other
    adjacencies, on the data. An empty batch releases noise like any other.
    """
    total = clipped_sum(learner, parameters, batch, mechanism.clip, project)
    if mechanism.noise_std > 0:
        total += torch.from_numpy(noise.normal(total.shape, mechanism.noise_std)).to(total.device)
    return total / mechanism.denominator


def train_privately(
    learner: Learner,
    start: Tensor,
    records: Batch,
    mechanism: PoissonSteps | FullBatchSteps,
    lr: float,
    noise: RandomStream,
    coins: RandomStream,
    anchor: Tensor | None = None,
    anchor_weight: float = 0.0,
) -> Tensor:
    """Noisy gradient descent from `start`; returns the update to release, in float64.

    The pull towards an anchor involves no record: it joins each step after clipping and noise.
    """
    parameters = start.double()
    for _ in range(mechanism.steps):
        batch = records
        if isinstance(mechanism, PoissonSteps):
            drawn = torch.from_numpy(coins.bernoulli(mechanism.rate, (len(records),)))
            batch = records.take(drawn.to(records.targets.device))
        gradient = noisy_mean(learner, parameters.float(), batch, mechanism, noise)
        if anchor is not None:
            gradient += anchor_weight * (parameters - anchor.double())
        parameters = parameters - lr * gradient
    return parameters - start.double()


def sketch_privately(
    learner: Learner,
    start: Tensor,
    records: Batch,
    mechanism: FullBatchSketch,
    projection: Projection,
    noise: RandomStream,
) -> Tensor:
    """Noisy mean over all records of their projected, then clipped, gradients at `start`, in float64."""
    return noisy_mean(learner, start, records, mechanism, noise, projection)
