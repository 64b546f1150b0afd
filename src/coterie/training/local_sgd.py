"""Local learning without noise: what a sampled client does before its whole update is clipped.

Nothing here is released. Two rules keep what is released bounded all the same: a client's update depends on
its own start, records and order alone, to the last bit, whoever else was sampled; and it is clipped as one
vector afterwards.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.training.learner import Batch, Learner
from coterie.training.tiles import Tiles

MOST_CLIENTS = 1024
"""Clients in one program, however small they are."""
_BUFFERS = 8
"""Arrays of the size of a client's parameters that a step holds at one time."""


@dataclass(frozen=True)
class LocalSGD:
    """Plain SGD over shuffled batches; a step descends the mean loss of its batch.

    Args:
        epochs: passes over the client's records.
        batch: records in a step; the last step of a pass takes what is left.
        momentum: of the heavy ball, starting at rest in every round.
        proximal: weight of half the squared distance to the start, added to every step's loss (FedProx).
        iterations: steps in all, whatever the number of passes; None: as many as the passes have.
    """

    epochs: int
    batch: int
    lr: float
    momentum: float = 0.0
    proximal: float = 0.0
    iterations: int | None = None

    def steps(self, records: int) -> int:
        """Steps of a client with so many records."""
        return self.iterations or self.epochs * math.ceil(records / self.batch)

    def batches(self, records: int, seed: int) -> NDArray[np.int64]:
        """Which records each step takes, (steps, batch): every pass shuffled, -1 where a step is short."""
        per_pass = math.ceil(records / self.batch)
        steps = self.steps(records)
        passes = math.ceil(steps / per_pass)
        order = np.full((passes, per_pass * self.batch), -1, dtype=np.int64)
        rng = np.random.default_rng(seed)
        for each in order:
            each[:records] = rng.permutation(records)
        return order.reshape(passes * per_pass, self.batch)[:steps]


def stacks(learner: Learner) -> bool:
    """Does this learner train many clients as one program?"""
    return learner.device.type == "cuda" and learner.book is not None


def train_locally(
    learner: Learner,
    starts: Tensor,
    records: Sequence[Batch],
    batches: Sequence[NDArray[np.int64]],
    rule: LocalSGD,
    *,
    wave: int,
) -> Tensor:
    """Every client's update, (clients, parameters) in float32, on the learner's device.

    Args:
        starts: parameters from which each client starts, (clients, parameters).
        records: each client's own.
        batches: which of them every step takes, as `LocalSGD.batches` gives it.
        wave: clients that a GPU computes at a time. A public number: shapes, and with them rounding, must not
            tell how many were sampled.
    """
    if stacks(learner):
        return _train_stacked(learner, starts, records, batches, rule, wave)
    updates = [
        train_one(learner, start, own, order, rule)
        for start, own, order in zip(starts, records, batches, strict=True)
    ]
    return torch.stack(updates) if updates else torch.zeros_like(starts)


def train_one(
    learner: Learner, start: Tensor, records: Batch, batches: NDArray[np.int64], rule: LocalSGD
) -> Tensor:
    """One client, step by step."""
    parameters = start.clone()
    velocity = torch.zeros_like(parameters)
    for chosen in batches:
        taken = torch.from_numpy(chosen[chosen >= 0]).to(learner.device)
        gradient = mean_gradient(learner, parameters, records.take(taken))
        parameters, velocity = _moved(parameters, velocity, gradient, start, rule)
    return parameters - start


def mean_gradient(learner: Learner, parameters: Tensor, batch: Batch) -> Tensor:
    """Gradient of the mean loss of a batch."""
    if learner.book is not None and learner.book.chained and learner.device.type == "cpu":
        return learner.book.total_gradient(parameters, batch.features, batch.targets).div_(len(batch))
    moving = parameters.detach().requires_grad_(True)
    with torch.enable_grad():
        loss = learner.losses(moving, batch).mean()
    return torch.autograd.grad(loss, moving)[0]


def _moved(
    parameters: Tensor, velocity: Tensor, gradient: Tensor, start: Tensor, rule: LocalSGD
) -> tuple[Tensor, Tensor]:
    if rule.proximal:
        gradient = gradient + rule.proximal * (parameters - start)
    velocity = rule.momentum * velocity + gradient if rule.momentum else gradient
    return parameters - rule.lr * velocity, velocity


def _train_stacked(
    learner: Learner,
    starts: Tensor,
    records: Sequence[Batch],
    batches: Sequence[NDArray[np.int64]],
    rule: LocalSGD,
    wave: int,
) -> Tensor:
    """Waves of a constant number of clients, the last filled up with copies whose result is thrown away."""
    updates = []
    wave = min(wave, _most_at_once(learner, rule))
    for first in range(0, len(records), wave):
        mine = [min(first + slot, len(records) - 1) for slot in range(wave)]
        stacked = StackedLocalSGD(learner, [records[k] for k in mine], [batches[k] for k in mine], rule)
        updates.append(stacked.train(starts[mine])[: len(records) - first])
    return torch.cat(updates) if updates else torch.zeros_like(starts)


def _most_at_once(learner: Learner, rule: LocalSGD) -> int:
    """Clients whose step fits half of a GPU's memory; not of what is free, which changes from run to run."""
    if learner.device.type != "cuda":
        return MOST_CLIENTS
    memory = torch.cuda.get_device_properties(learner.device).total_memory // 2
    each = rule.batch * learner.bytes_per_record + _BUFFERS * 8 * learner.layout.size
    return max(1, min(MOST_CLIENTS, memory // each))


class StackedLocalSGD:
    """Many clients as one program: weights stacked, tiles of the flat batch of one client each.

    The layer rules give what every record adds to its client's gradient; their sum over the client's tiles,
    weighted by one over the number of records in the step, is the gradient of the mean loss.
    """

    def __init__(
        self,
        learner: Learner,
        records: Sequence[Batch],
        batches: Sequence[NDArray[np.int64]],
        rule: LocalSGD,
    ) -> None:
        assert learner.book is not None, "clients can only be stacked where every layer has a rule"
        self.learner, self.book, self.rule = learner, learner.book, rule
        device, clients = learner.device, len(records)
        self.steps = max(len(order) for order in batches)
        # As many records to a tile as the layer rules take, and as many tiles as a batch needs.
        size = min(rule.batch, learner.micro_batch)
        each = math.ceil(rule.batch / size)
        chosen = np.full((self.steps, clients, each * size), -1, dtype=np.int64)
        bases = np.cumsum([0, *(len(own) for own in records)])
        for client, order in enumerate(batches):
            chosen[: len(order), client, : rule.batch] = np.where(order >= 0, order + bases[client], -1)
        present = chosen >= 0
        counts = present.sum(axis=2)
        self.table = Batch(
            torch.cat([own.features for own in records]), torch.cat([own.targets for own in records])
        )
        self.index = torch.from_numpy(np.where(present, chosen, 0).reshape(self.steps, -1)).to(device)
        weights = np.where(present, 1.0 / np.maximum(counts, 1)[:, :, None], 0.0)
        self.weights = torch.from_numpy(weights.reshape(self.steps, -1)).to(device)
        self.active = torch.from_numpy(counts > 0).to(device)
        owner = None if each == 1 else torch.arange(clients, device=device).repeat_interleave(each)
        self.tiles = Tiles(clients * each, size, owner, dynamic=False)

    @torch.no_grad()
    def train(self, starts: Tensor) -> Tensor:
        """The update of every client, (clients, parameters)."""
        parameters, velocity = starts.clone(), torch.zeros_like(starts)
        for step in range(self.steps):
            gradient = self._gradients(parameters, step)
            moved, faster = _moved(parameters, velocity, gradient, starts, self.rule)
            active = self.active[step][:, None]  # a client with fewer records is done sooner
            parameters = torch.where(active, moved, parameters)
            velocity = torch.where(active, faster, velocity)
        return parameters - starts

    def _gradients(self, parameters: Tensor, step: int) -> Tensor:
        batch = self.table.take(self.index[step])
        found = self.book.contributions(parameters, batch.features, batch.targets, self.tiles)
        weights = self.weights[step]
        usable = weights > 0
        clients = len(parameters)
        sums = [
            found[name].client_sums(weights, usable, self.tiles, clients)
            if name in found
            else parameters.new_zeros(clients, shape.numel())
            for name, shape in self.learner.layout.shapes.items()
        ]
        return torch.cat([part.to(parameters.dtype) for part in sums], dim=1)
