"""Scores of models on records: for private selection (all of them) and for evaluation.

Records of several clients go through a model together; sums are taken client by client afterwards.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.training.learner import Batch, Learner

EVALUATION_BATCH = {"cpu": 256, "cuda": 8192}
"""Records at a time: what a processor's cache likes, or what fills a GPU."""
LOSSES_AT_ONCE = 2048
"""Records at a time where their number must be constant: few of them are filled up."""
MOSTLY = 0.9
"""Share of outputs that must differ from each other before they can show where a record stood."""
JOINED_BYTES = 2**28
"""Records of clients that are laid side by side on a processor; more of them stay where they are."""


@dataclass(frozen=True)
class Score:
    """How well a model does on a client's held-out records."""

    accuracy: float
    loss: float


def at_once(learner: Learner, table: Batch) -> int:
    """Rows of a table that go through a model together."""
    return max(1, EVALUATION_BATCH[learner.device.type] // table.places)


@torch.no_grad()
def score_sums(
    learner: Learner, parameters: Tensor, table: Batch, sizes: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums of scores and of losses under one model, for each of the sets of records that the table joins.

    A score is 1 for a record that the model gets right (for a regression, a bounded score); of a person it is
    the mean over its records, and so is the loss. No unit adds more than 1 to a sum of scores.
    """
    scores, losses = [], []
    parameters = parameters.clone()  # into aligned memory, as `on_device` explains
    for rows in table.split(at_once(learner, table)):
        part = rows.flat
        outputs = learner.predict(parameters, part.features)
        scores.append(rows.means(learner.scores(outputs, part.targets)))
        losses.append(rows.means(learner.output_losses(outputs, part.targets).double()))
    if not scores:
        return np.zeros(len(sizes)), np.zeros(len(sizes))
    by_record = torch.stack((torch.cat(scores), torch.cat(losses)))
    by_set = [part.sum(dim=1) for part in torch.split(by_record, list(sizes), dim=1)]
    totals = torch.stack(by_set, dim=1).cpu().numpy()
    return totals[0], totals[1]


@torch.no_grad()
def padded_loss_sums(
    learner: Learner, models: Tensor, batches: Sequence[Batch], size: int = LOSSES_AT_ONCE
) -> NDArray[np.float64]:
    """Sum of the losses of every model on each set of records: (sets, models), in constant shapes.

    The records of all sets stand one after the other, and `size` of them go through a model at a time, the
    last ones filled up, and sums are exact. So a set's sums have the same bits whichever others there are, if
    a record's outputs have the same bits wherever it stands (`same_bits_anywhere`).
    """
    if not batches:
        return np.zeros((0, len(models)))
    table = join(batches)
    places = torch.arange(math.ceil(len(table) / size) * size, device=learner.device)
    parts = [table.take(own) for own in torch.split(places.clamp(max=len(table) - 1), size)]
    by_model = [
        torch.cat(
            [learner.output_losses(learner.predict(model, part.features), part.targets) for part in parts]
        )
        for model in models
    ]
    losses = torch.stack(by_model, dim=1)[: len(table)].double().cpu().numpy()
    bounds = np.cumsum([len(own) for own in batches])[:-1]
    return np.array([[math.fsum(column) for column in own.T] for own in np.split(losses, bounds)])


@torch.no_grad()
def same_bits_anywhere(learner: Learner, size: int = LOSSES_AT_ONCE) -> bool:
    """Whether a record's outputs have the same bits wherever it stands among so many.

    Nothing promises that of a matrix product: a GPU's, whose programs are all alike, were seen to keep it, a
    processor's treat the last rows in another way. Records whose outputs are alike would tell nothing: the
    model is one that has begun to learn, so that its units differ, and features lie around zero.
    """
    probe = learner.random_batch(size).features
    if probe.is_floating_point():
        probe = 2.0 * probe - 1.0
    moved_by = torch.randn(learner.layout.size, generator=torch.Generator().manual_seed(size))
    parameters = learner.initial() + 0.02 * moved_by.to(learner.device)
    expected = learner.predict(parameters, probe)
    if len(torch.unique(expected, dim=0)) < MOSTLY * size or not bool(expected.isfinite().all()):
        return False
    shifts = (1, size // 3, size - 1)
    moved = (learner.predict(parameters, probe.roll(shift, dims=0)).roll(-shift, dims=0) for shift in shifts)
    return all(torch.equal(outputs, expected) for outputs in moved)


def total_score(learner: Learner, parameters: Tensor, records: Batch) -> float:
    """Number of records that the model gets right (for a regression, the sum of bounded scores)."""
    return float(score_sums(learner, parameters, records, [len(records)])[0][0])


def select_lowest(losses: NDArray[np.float64]) -> int:
    """Index of the lowest loss; one that is not a number is the highest."""
    return int(np.argmin(np.nan_to_num(losses, nan=np.inf)))


def evaluate(learner: Learner, parameters: Tensor, records: Batch) -> Score:
    """Mean score and mean loss over held-out records."""
    scores, losses = score_sums(learner, parameters, records, [len(records)])
    return Score(accuracy=float(scores[0]) / len(records), loss=float(losses[0]) / len(records))


def client_sums(
    learner: Learner, models: Tensor, model_of: Sequence[int], records: Sequence[Batch]
) -> NDArray[np.float64]:
    """Sums of scores and losses by client, (clients, 2); clients of one model go through it together."""
    found = np.zeros((len(records), 2))
    for model in sorted(set(model_of)):
        members = [client for client, own in enumerate(model_of) if own == model]
        taken = sum(records[client].features.nbytes for client in members)
        if learner.device.type == "cpu" and taken > JOINED_BYTES:
            for client in members:
                own = score_sums(learner, models[model], records[client], [len(records[client])])
                found[client] = np.concatenate(own)
            continue
        table = join([records[client] for client in members])
        sizes = [len(records[client]) for client in members]
        found[members] = np.stack(score_sums(learner, models[model], table, sizes), axis=1)
    return found


@torch.no_grad()
def client_outputs(
    learner: Learner, models: Tensor, model_of: Sequence[int], records: Sequence[Batch]
) -> list[NDArray[np.float32]]:
    """What each client's own model says of each of its records: (records, outputs), by client."""
    return [
        torch.cat(
            [
                learner.predict(models[own].clone(), part.features)
                for part in batch.only_present.split(EVALUATION_BATCH[learner.device.type])
            ]
        )
        .cpu()
        .numpy()
        for own, batch in zip(model_of, records, strict=True)
    ]


def join(batches: Sequence[Batch]) -> Batch:
    """Several sets of records as one table."""
    if len(batches) == 1:
        return batches[0]
    return Batch(*(torch.cat(parts) for parts in zip(*(batch.tensors for batch in batches), strict=True)))
