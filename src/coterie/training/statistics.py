"""Statistics of held-out records for a joint release of scores: a row for each record, as it is.

`privacy.joint_scores` says what each block is and how much one record may move the sum.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from coterie.data.records import Task
from coterie.privacy.joint_scores import BINS, LOG_ODDS, Statistic, curves
from coterie.training.learner import Batch, Learner

AT_ONCE = 256
"""Records whose rows are in memory together."""


@torch.no_grad()
def statistic_sums(
    learner: Learner, parameters: Tensor, records: Batch, statistics: Sequence[Statistic]
) -> NDArray[np.float64]:
    """Sums over records of every statistic under one model; over persons, of the means of theirs."""
    parameters, total = parameters.clone(), None
    for rows in records.split(max(1, AT_ONCE // records.places)):
        part = rows.flat
        outputs = learner.predict(parameters, part.features)
        sums = rows.means(statistic_rows(learner, outputs, part.targets, statistics)).sum(dim=0)
        total = sums if total is None else total + sums
    assert total is not None, "nobody holds out no record"
    found: NDArray[np.float64] = total.cpu().numpy()
    return found


def statistic_rows(
    learner: Learner, outputs: Tensor, targets: Tensor, statistics: Sequence[Statistic]
) -> Tensor:
    """What each record adds, block by block."""
    task, blocks = learner.task, []
    for statistic in statistics:
        if statistic in (Statistic.RIGHT, Statistic.SQUARED):
            blocks.append(learner.scores(outputs, targets)[:, None])
        elif statistic is Statistic.CLASSES:
            blocks.append(_counts(outputs, targets, task.classes))
        elif statistic is Statistic.RANKS:
            blocks.append(_histograms(outputs, targets, task.classes))
        elif statistic is Statistic.ABSOLUTE:
            blocks.append(_absolute_errors(outputs, targets, task)[:, None])
        elif statistic is Statistic.LABELS:
            label = targets.double().clamp(0.0, 1.0) - 0.5
            blocks.append(torch.stack((label, label.square()), dim=1))
    return torch.cat(blocks, dim=1)


def _counts(outputs: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Hits, misses and false alarms of each class."""
    predicted = outputs.argmax(dim=-1)
    true = functional.one_hot(targets, classes).double()
    said = functional.one_hot(predicted, classes).double()
    wrong = (predicted != targets).double()[:, None]
    return torch.cat((true * (1.0 - wrong), true * wrong, said * wrong), dim=1)


def _histograms(outputs: Tensor, targets: Tensor, classes: int) -> Tensor:
    """For each curve the cell of the class's log-odds: among those of its records, or of all others."""
    chances = torch.log_softmax(outputs.double(), dim=-1)
    # log p - log(1 - p); a model that says what is no number says nothing of any class.
    odds = torch.nan_to_num(chances - torch.log1p(-chances.exp()), nan=0.0)
    number = curves(classes)
    ranked = range(1, 2) if number == 1 else range(classes)
    found = []
    for label in ranked:
        place = ((odds[:, label].clamp(-LOG_ODDS, LOG_ODDS) / LOG_ODDS + 1.0) / 2.0 * BINS).long()
        cell = place.clamp(0, BINS - 1) + BINS * (targets != label).long()
        found.append(functional.one_hot(cell, 2 * BINS).double())
    return torch.cat(found, dim=1)


def _absolute_errors(outputs: Tensor, targets: Tensor, task: Task) -> Tensor:
    """Over their bound, the root of that of squared ones."""
    if task.error_cap is None:
        raise ValueError("a regression task needs an error cap to have bounded scores")
    most = math.sqrt(task.error_cap)
    errors = (outputs.squeeze(-1) - targets).double().abs()
    return torch.nan_to_num(errors, nan=most, posinf=most).clamp(max=most) / most
