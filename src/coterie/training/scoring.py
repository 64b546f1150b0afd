"""Scores of a model on records: for private selection (all of them) and for evaluation."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.privacy import PrivateSelection, RandomStream
from coterie.training.learner import Batch, Learner

EVALUATION_BATCH = 1024


@torch.no_grad()
def total_score(learner: Learner, parameters: Tensor, records: Batch) -> float:
    """Number of records that the model gets right (for a regression, the sum of bounded scores)."""
    parts = records.split(EVALUATION_BATCH)
    return float(sum(learner.correct(parameters, part).sum().item() for part in parts))


def select_privately(
    learner: Learner, models: Tensor, records: Batch, mechanism: PrivateSelection, noise: RandomStream
) -> int:
    """Index of a model that scores well on the records: the exponential mechanism on counts.

    Scores are counts over the full set of records, each in it exactly once, so one record moves every
    score by at most one, and all in the same direction.
    """
    scores: NDArray[np.float64] = np.array([total_score(learner, model, records) for model in models])
    return int(np.argmax(scores + mechanism.gumbel_scale * noise.gumbel(scores.shape)))


@torch.no_grad()
def lowest_loss(learner: Learner, models: Tensor, records: Batch) -> int:
    """Index of the model with the lowest loss on the records: not private."""
    totals = [
        sum(learner.losses(model, part).double().sum().item() for part in records.split(EVALUATION_BATCH))
        for model in models
    ]
    return int(np.argmin(np.nan_to_num(totals, nan=np.inf)))


@dataclass(frozen=True)
class Score:
    """How well a model does on a client's held-out records."""

    accuracy: float
    loss: float


@torch.no_grad()
def evaluate(learner: Learner, parameters: Tensor, records: Batch) -> Score:
    """Mean score and mean loss over held-out records."""
    losses = sum(
        learner.losses(parameters, part).double().sum().item() for part in records.split(EVALUATION_BATCH)
    )
    return Score(
        accuracy=total_score(learner, parameters, records) / len(records), loss=float(losses) / len(records)
    )
