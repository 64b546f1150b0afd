"""One client's private learning in one round: execution of what the plan's mechanism describes."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.privacy import RandomStream, RecordSums
from coterie.privacy.ranges import gaussian
from coterie.training.augmentation import Augmentation
from coterie.training.clipping import clipped_sum
from coterie.training.learner import Batch, Learner
from coterie.training.sketch import Projection
from coterie.training.views import DrawnViews

_COINS_AT_ONCE = 2**14
_NOISE_AT_ONCE = 2**16
"""Numbers that get their noise, and take a step with it, while it is in the nearest caches."""


def noisy_mean(
    learner: Learner,
    parameters: Tensor,
    batch: Batch,
    mechanism: RecordSums,
    noise: RandomStream,
    project: Callable[[Tensor], Tensor] | None = None,
    views: DrawnViews | None = None,
    done: Callable[[slice, Tensor], None] | None = None,
) -> Tensor:
    """Clipped sum over the batch, plus noise, divided by the mechanism's public denominator.

    The size of the batch that was drawn is never used: it depends on the coins and, under other
    adjacencies, on the data. An empty batch releases noise like any other.

    Args:
        done: is given each piece of the mean, and its place, as soon as it has its noise.
    """
    total = clipped_sum(learner, parameters, batch, mechanism.clip, project, views)
    planned = {"multiplier": mechanism.multiplier, "clip": mechanism.clip}
    for first in range(0, len(total), _NOISE_AT_ONCE):
        place = slice(first, first + _NOISE_AT_ONCE)
        piece = total[place]
        drawn = gaussian(noise, len(piece), mechanism.noise_std, **planned)
        piece.add_(torch.from_numpy(drawn).to(total.device)).div_(mechanism.denominator)
        if done is not None:
            done(place, piece)
    return total


def _samples(coins: RandomStream, mechanism: RecordSums, records: int) -> Iterator[NDArray[np.intp]]:
    """Which records each step draws: one coin for each, flipped for several steps at a time."""
    at_once = max(1, _COINS_AT_ONCE // max(1, records))
    for first in range(0, mechanism.steps, at_once):
        shape = (min(at_once, mechanism.steps - first), records)
        yield from map(np.flatnonzero, coins.bernoulli(mechanism.rate, shape))


def train_privately(
    learner: Learner,
    start: Tensor,
    records: Batch,
    mechanism: RecordSums,
    lr: float,
    noise: RandomStream,
    coins: RandomStream,
    anchor: Tensor | None = None,
    anchor_weight: float = 0.0,
    augmentation: Augmentation | None = None,
    view_key: int = 0,
) -> Tensor:
    """Noisy gradient descent from `start`; returns the update to release, in float64.

    The pull towards an anchor involves no record: it joins each step after clipping and noise.
    """
    parameters = start.to(torch.float64, copy=True)
    rounded = parameters.float()

    def step_by(own: slice, gradient: Tensor) -> None:
        if anchor is not None:
            gradient = gradient + anchor_weight * (parameters[own] - anchor[own].double())
        rounded[own] = parameters[own].sub_(gradient, alpha=lr)

    everyone = torch.arange(len(records), device=records.targets.device)
    samples = _samples(coins, mechanism, len(records)) if mechanism.sampled else None
    for step in range(mechanism.steps):
        batch, places = records, everyone
        if samples is not None:
            places = torch.from_numpy(next(samples)).to(records.targets.device)
            batch = records.take(places)
        views = DrawnViews(augmentation, places, step, view_key) if augmentation else None
        gradient = noisy_mean(learner, rounded, batch, mechanism, noise, views=views, done=step_by)
        if learner.listener is not None:
            learner.listener(gradient)
    return parameters.sub_(start)


def sketch_privately(
    learner: Learner,
    start: Tensor,
    records: Batch,
    mechanism: RecordSums,
    projection: Projection,
    noise: RandomStream,
    augmentation: Augmentation | None = None,
    view_key: int = 0,
) -> Tensor:
    """Noisy mean over all records of their projected, then clipped, gradients at `start`, in float64."""
    everyone = torch.arange(len(records), device=records.targets.device)
    views = DrawnViews(augmentation, everyone, 0, view_key) if augmentation else None
    return noisy_mean(learner, start, records, mechanism, noise, projection, views)
