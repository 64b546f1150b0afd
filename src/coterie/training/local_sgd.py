"""Local learning without noise: what a sampled client does before its whole update is clipped.

Nothing here is released. Two rules keep what is released bounded all the same: a client's update depends on
its own start, records and order alone, to the last bit, whoever else was sampled; and it is clipped as one
vector afterwards.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.training.contributions import add_client_sums
from coterie.training.kernel_trial import kernels_agree
from coterie.training.learner import Batch, Learner, precision
from coterie.training.scoring import join
from coterie.training.stacked import BUFFERS, Program
from coterie.training.tiles import Tiles

MOST_CLIENTS = 1024
"""Clients in one program, however small they are."""
_GRAPHS = 8
"""Programs that fit the memory at one time where each is kept as a graph."""


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


class LocalTrainer:
    """Trains clients without noise as one program of a GPU, kept for the next round.

    Args:
        tf32: whether matrix units may round factors to ten bits there, as torch's convolutions do by default.
    """

    def __init__(self, learner: Learner, *, tf32: bool = True) -> None:
        self.learner, self._tf32 = learner, tf32
        self._programs: dict[tuple[LocalSGD, int], StackedLocalSGD] = {}

    def train(
        self,
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
            wave: clients that a GPU computes at a time. A public number: shapes, and with them rounding, must
                not tell how many were sampled. The last wave is filled up with copies whose result is thrown
                away.
        """
        updates = []
        wave = min(wave, MOST_CLIENTS, _room(self.learner, rule))
        for first in range(0, len(records), wave):
            mine = [min(first + slot, len(records) - 1) for slot in range(wave)]
            theirs = [records[k] for k in mine], [batches[k] for k in mine]
            # The whole update is clipped afterwards, whatever rounding went into it.
            with precision(tf32=self._tf32):
                learnt = self._program(rule, wave).train(starts[mine], *theirs)
            updates.append(learnt[: len(records) - first])
        return torch.cat(updates) if updates else torch.zeros_like(starts)

    def _program(self, rule: LocalSGD, clients: int) -> "StackedLocalSGD":
        """The step for so many clients; prepared once, used for every round."""
        if (rule, clients) not in self._programs:
            room = _room(self.learner, rule)
            if sum(others for _, others in self._programs) + clients > room:
                self._programs.clear()  # a program keeps its memory
            own = kernels_agree(self.learner, min(rule.batch, self.learner.micro_batch), tf32=self._tf32)
            # Several runs may share a GPU: a step that takes a large part of it must give it back.
            small = _GRAPHS * clients <= room
            self._programs[rule, clients] = StackedLocalSGD(
                self.learner, clients, rule, own_kernels=own, captured=small
            )
        return self._programs[rule, clients]


def train_one(
    learner: Learner, start: Tensor, records: Batch, batches: NDArray[np.int64], rule: LocalSGD
) -> Tensor:
    """One client, step by step."""
    parameters = start.clone()
    velocity = torch.zeros_like(parameters)
    for chosen in batches:
        batch = records.take(torch.from_numpy(chosen[chosen >= 0]).to(learner.device))
        gradient = mean_gradient(learner, parameters, batch)
        parameters, velocity = _moved(parameters, velocity, gradient, start, rule)
    return parameters - start


def mean_gradient(learner: Learner, parameters: Tensor, batch: Batch) -> Tensor:
    """Gradient of the mean loss of a batch."""
    if learner.book is not None and learner.book.chained and learner.device.type == "cpu":
        return learner.book.total_gradient(parameters, batch.features, batch.targets).div_(len(batch))
    moving = parameters.detach().requires_grad_(True)
    with torch.enable_grad():
        loss = learner.client_losses(moving, batch).mean()
    return torch.autograd.grad(loss, moving)[0]


def balanced_gradient(learner: Learner, parameters: Tensor, batch: Batch) -> Tensor:
    """Gradient of the mean loss where every class that is there counts alike, whatever its records' number.

    How many records of each class a client happens to hold moves a gradient more than what sets clusters
    apart does. Without classes it is the mean gradient.
    """
    if learner.task.kind != "classification" or batch.targets.ndim != 1:
        return mean_gradient(learner, parameters, batch)
    classes = torch.unique(batch.targets)
    parts = [mean_gradient(learner, parameters, batch.take(batch.targets == each)) for each in classes]
    return torch.stack(parts).mean(dim=0) if parts else torch.zeros_like(parameters)


def _moved(
    parameters: Tensor, velocity: Tensor, gradient: Tensor, start: Tensor, rule: LocalSGD
) -> tuple[Tensor, Tensor]:
    if rule.proximal:
        gradient = gradient + rule.proximal * (parameters - start)
    velocity = rule.momentum * velocity + gradient if rule.momentum else gradient
    return parameters - rule.lr * velocity, velocity


def _room(learner: Learner, rule: LocalSGD) -> int:
    """Clients whose step fits half of a GPU's memory; not of what is free, which changes from run to run."""
    if learner.device.type != "cuda":
        return MOST_CLIENTS
    memory = torch.cuda.get_device_properties(learner.device).total_memory // 2
    each = rule.batch * learner.bytes_per_record + BUFFERS * 8 * learner.layout.size
    return max(1, memory // each)


class StackedLocalSGD(Program):
    """Many clients as one program: weights stacked, tiles of the flat batch of one client each.

    The layer rules give what every record adds to its client's gradient; their sum over the client's tiles,
    weighted by one over the number of records in the step, is the gradient of the mean loss.
    """

    def __init__(
        self,
        learner: Learner,
        clients: int,
        rule: LocalSGD,
        *,
        own_kernels: bool = False,
        captured: bool = False,
    ) -> None:
        assert learner.book is not None, "clients can only be stacked where every layer has a rule"
        self.book, self.rule, self.clients = learner.book, rule, clients
        # As many records to a tile as the layer rules take, and as many tiles as a batch needs.
        size = min(rule.batch, learner.micro_batch)
        each = math.ceil(rule.batch / size)
        self.device = device = learner.device
        owner = bounds = None
        if own_kernels or each > 1:
            owner = torch.arange(clients, device=device).repeat_interleave(each)
        if own_kernels:
            bounds = each * torch.arange(clients + 1, device=device)
        self.tiles = Tiles(clients * each, size, owner, dynamic=False, bounds=bounds)
        self.captured = captured and device.type == "cuda"
        self._step: Callable[[], None] | None = None

    @torch.no_grad()
    def train(self, starts: Tensor, records: Sequence[Batch], batches: Sequence[NDArray[np.int64]]) -> Tensor:
        """The update of every client, (clients, parameters); arguments as in `LocalTrainer.train`."""
        table = join(records)
        self.load(starts=starts, parameters=starts, velocity=torch.zeros_like(starts))
        for index, weights, active in self._steps(records, batches):
            batch = table.take(index)
            self.load(features=batch.features, targets=batch.targets, weights=weights, active=active)
            if self._step is None:
                self._step = self._take_step
                if self.captured:
                    (self._step,) = self.record(self._take_step, changing=("parameters", "velocity"))
            self._step()
        return torch.sub(self.parameters, starts)

    def _steps(
        self, records: Sequence[Batch], batches: Sequence[NDArray[np.int64]]
    ) -> Iterator[tuple[Tensor, ...]]:
        """What every step takes.

        Returns:
            each slot's place in the table of all records, (slots,), anything where its weight is zero; its
            weight, one over the number of records in its client's step, in float64; and which clients still
            learn, (clients,).
        """
        steps = max(len(order) for order in batches)
        chosen = np.full((steps, self.clients, self.tiles.records // self.clients), -1, dtype=np.int64)
        bases = np.cumsum([0, *(len(own) for own in records)])
        for client, order in enumerate(batches):
            chosen[: len(order), client, : order.shape[1]] = np.where(order >= 0, order + bases[client], -1)
        present = chosen >= 0
        counts = present.sum(axis=2)
        weights = np.where(present, 1.0 / np.maximum(counts, 1)[:, :, None], 0.0)
        found = np.where(present, chosen, 0).reshape(steps, -1), weights.reshape(steps, -1), counts > 0
        return zip(*(torch.from_numpy(part).to(records[0].targets.device) for part in found), strict=True)

    def _take_step(self) -> None:
        parameters, velocity = self.parameters, self.velocity
        moved, faster = _moved(parameters, velocity, self._gradients(), self.starts, self.rule)
        active = self.active[:, None]
        torch.where(active, moved, parameters, out=parameters)
        torch.where(active, faster, velocity, out=velocity)

    def _gradients(self) -> Tensor:
        parameters, weights = self.parameters, self.weights
        found = self.book.contributions(parameters, self.features, self.targets, self.tiles)
        sums = torch.zeros_like(parameters, dtype=torch.float64)
        add_client_sums(found, self.book.layout, weights, weights > 0, self.tiles, sums)
        return sums.to(parameters.dtype)
