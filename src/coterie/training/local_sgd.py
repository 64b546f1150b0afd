"""Local learning without noise: what a sampled client does before its whole update is clipped.

Nothing here is released. Two rules keep what is released bounded all the same: a client's update depends on
its own start, records and order alone, to the last bit, whoever else was sampled; and it is clipped as one
vector afterwards.
"""

import heapq
import math
import sys
from collections import defaultdict
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
from coterie.training.stacked import BUFFERS, Program, kept_unless_it_raises
from coterie.training.tiles import Tiles, tiles_of

MOST_CLIENTS = 1024
"""Clients in one program, however small they are."""
_GRAPHS = 2
"""Programs that fit half of a GPU's memory at one time where each is kept as a graph."""
_FILLING = 2**27
"""Parameters of all clients in a program that are taken to fill a GPU; nobody measured it."""


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


@dataclass(frozen=True)
class LocalJob:
    """What the sampled clients of one cohort are to learn.

    Args:
        starts: makes the parameters from which each client starts, (clients, parameters), when their turn
            comes: of many cohorts they would not fit the memory.
        records: each client's own.
        batches: which of them every step takes, as `LocalSGD.batches` gives it.
        wave: clients for which such a cohort has room. A public number: shapes, and with them rounding, must
            not tell how many were sampled.
    """

    starts: Callable[[], Tensor]
    records: Sequence[Batch]
    batches: Sequence[NDArray[np.int64]]
    rule: LocalSGD
    wave: int


class LocalTrainer:
    """Trains clients of many cohorts without noise as one program of a GPU, kept for the next round.

    Args:
        tf32: whether matrix units may round factors to ten bits there, as torch's convolutions do by default.
    """

    def __init__(self, learner: Learner, *, tf32: bool = True) -> None:
        self.learner, self._tf32 = learner, tf32
        self._programs: dict[tuple[LocalSGD, int], StackedLocalSGD] = {}

    def portions(self, asked: Sequence[Sequence[LocalJob]]) -> list[list[int]]:
        """Who learns by one rule learns together, as many as fit the memory."""
        portions: list[list[int]] = []
        taken: dict[LocalSGD, tuple[list[int], int]] = {}
        most = _kept_at_once(self.learner)
        for place, jobs in enumerate(asked):
            rule, clients = jobs[0].rule, sum(job.wave for job in jobs)
            portion, before = taken.get(rule, ([], 0))
            if not portion or before + clients > most:
                portion, before = [], 0
                portions.append(portion)
            portion.append(place)
            taken[rule] = portion, before + clients
        return portions

    def train(self, jobs: Sequence[LocalJob]) -> list[Tensor]:
        """By job, every client's update, (clients, parameters) in float32, on the learner's device.

        All jobs have one rule.
        """
        (rule,) = {job.rule for job in jobs}
        starts = torch.cat([job.starts() for job in jobs])
        records = [own for job in jobs for own in job.records]
        batches = [order for job in jobs for order in job.batches]
        program = self._program(rule, self._slots(rule, [job.wave for job in jobs]))
        # The whole update is clipped afterwards, whatever rounding went into it.
        with precision(tf32=self._tf32), kept_unless_it_raises(self._programs, program):
            updates = program.train(starts, records, batches)
        return list(torch.split(updates, [len(job.records) for job in jobs]))

    def _slots(self, rule: LocalSGD, waves: Sequence[int]) -> int:
        """How many clients are computed at a time, by public numbers alone.

        The largest cohort has room as a whole; beyond that, as many as it takes to fill a GPU.
        """
        room = _room(self.learner, rule)
        enough = min(_FILLING // self.learner.layout.size, room // _GRAPHS)
        return max(1, min(sum(waves), max(enough, *waves), MOST_CLIENTS, room))

    def _program(self, rule: LocalSGD, slots: int) -> "StackedLocalSGD":
        """The step for so many clients; prepared once, used for every round."""
        if (rule, slots) not in self._programs:
            room = _room(self.learner, rule)
            if sum(others for _, others in self._programs) + slots > room:
                self._programs.clear()  # a program keeps its memory
            own = kernels_agree(self.learner, min(rule.batch, self.learner.micro_batch), tf32=self._tf32)
            # Several processes may share a GPU: a step that takes a large part of it must give it back.
            small = _GRAPHS * slots <= room
            self._programs[rule, slots] = StackedLocalSGD(
                self.learner, slots, rule, own_kernels=own, captured=small
            )
        return self._programs[rule, slots]


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


def _memory(learner: Learner) -> int | None:
    """Of the GPU; not what is free, which changes from run to run."""
    if learner.device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(learner.device).total_memory


def _room(learner: Learner, rule: LocalSGD) -> int:
    """Clients whose step fits half of a GPU's memory."""
    memory = _memory(learner)
    each = rule.batch * learner.bytes_per_record + BUFFERS * 8 * learner.layout.size
    return MOST_CLIENTS if memory is None else max(1, memory // 2 // each)


def _kept_at_once(learner: Learner) -> int:
    """Clients whose starts and updates fit an eighth of it."""
    memory = _memory(learner)
    return sys.maxsize if memory is None else memory // 8 // (2 * 4 * learner.layout.size)


def queues(steps: Sequence[int], slots: int) -> list[list[int]]:
    """Which clients each slot trains one after the other: the longest first, where it can begin first."""
    found: list[list[int]] = [[] for _ in range(slots)]
    free = [(0, slot) for slot in range(slots)]
    for client in sorted(range(len(steps)), key=lambda one: -steps[one]):
        busy, slot = heapq.heappop(free)
        found[slot].append(client)
        heapq.heappush(free, (busy + steps[client], slot))
    return found


@dataclass(frozen=True)
class Changes:
    """Which slots end a client, and which begin one, before a step: (changes,) each."""

    ended: tuple[Tensor, Tensor]
    begun: tuple[Tensor, Tensor]


class StackedLocalSGD(Program):
    """Many clients as one program: weights stacked, tiles of the flat batch of one client each.

    The layer rules give what every record adds to its client's gradient; their sum over the client's tiles,
    weighted by one over the number of records in the step, is the gradient of the mean loss.

    A client that is done leaves its slot to another. What a client computes depends neither on its slot nor
    on who is in the others. How many steps there are in all depends on who was sampled, as the time does.
    """

    def __init__(
        self,
        learner: Learner,
        slots: int,
        rule: LocalSGD,
        *,
        own_kernels: bool = False,
        captured: bool = False,
    ) -> None:
        assert learner.book is not None, "clients can only be stacked where every layer has a rule"
        self.book, self.rule, self.slots = learner.book, rule, slots
        # As many records to a tile as the layer rules take, and as many tiles as a batch needs.
        size = min(rule.batch, learner.micro_batch)
        each = math.ceil(rule.batch / size)
        self.device = device = learner.device
        self.own_kernels = own_kernels
        self.owners = torch.arange(slots, device=device).repeat_interleave(each)
        owners = self.owners if each > 1 else None
        self.tiles = Tiles(slots * each, size, owners, dynamic=False, most=each)
        self.captured = captured and device.type == "cuda"
        self._step: Callable[[], None] | None = None

    @torch.no_grad()
    def train(self, starts: Tensor, records: Sequence[Batch], batches: Sequence[NDArray[np.int64]]) -> Tensor:
        """The update of every client, (clients, parameters)."""
        updates = torch.zeros_like(starts)
        if not records:
            return updates
        table, turns = join(records), queues([len(order) for order in batches], self.slots)
        nothing = starts.new_zeros(self.slots, starts.shape[1])
        self.load(starts=nothing, parameters=nothing, velocity=nothing)
        changes = self._changes(turns, batches)
        for number, (index, weights, owner) in enumerate(self._steps(turns, records, batches)):
            if number in changes:
                self._change(changes[number], starts, updates)
            batch, present = table.take(index), weights > 0
            self.load(weights=weights, present=present, owner=owner)
            self.load(features=batch.features, targets=batch.targets)
            if self._step is None:
                self._step = self._take_step
                if self.captured:
                    (self._step,) = self.record(self._take_step, changing=("parameters", "velocity"))
            self._step()
        self._change(changes[max(changes)], starts, updates)
        return updates

    def _changes(
        self, turns: Sequence[Sequence[int]], batches: Sequence[NDArray[np.int64]]
    ) -> dict[int, Changes]:
        """By the step before which they happen; the last ones happen after all steps."""
        ended: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        begun: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for slot, clients in enumerate(turns):
            step = 0
            for client in clients:
                begun[step].append((slot, client))
                step += len(batches[client])
                ended[step].append((slot, client))

        def pairs(found: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
            both = torch.tensor(found, dtype=torch.int64, device=self.device).reshape(-1, 2)
            return both[:, 0], both[:, 1]

        return {step: Changes(pairs(ended[step]), pairs(begun[step])) for step in {*ended, *begun}}

    def _change(self, change: Changes, starts: Tensor, updates: Tensor) -> None:
        """Take away what clients learnt whose turn is over, and put the next ones in their slots."""
        slots, clients = change.ended
        if len(slots):
            updates[clients] = self.parameters[slots] - self.starts[slots]
        slots, clients = change.begun
        if len(slots):
            self.starts[slots] = self.parameters[slots] = starts[clients]
            self.velocity[slots] = 0.0

    def _steps(
        self,
        turns: Sequence[Sequence[int]],
        records: Sequence[Batch],
        batches: Sequence[NDArray[np.int64]],
    ) -> Iterator[tuple[Tensor, ...]]:
        """What every step takes.

        Returns:
            each record's place in the table of all, anything where its weight is zero; its weight, one over
            the number of records in its client's step, in float64; and each tile's slot.
        """
        steps = max(sum(len(batches[client]) for client in clients) for clients in turns)
        chosen = np.full((steps, self.slots, self.tiles.records // self.slots), -1, dtype=np.int64)
        bases = np.cumsum([0, *(len(own) for own in records)])
        for slot, clients in enumerate(turns):
            first = 0
            for client in clients:
                order = batches[client]
                rows = chosen[first : first + len(order), slot, : order.shape[1]]
                rows[:] = np.where(order >= 0, order + bases[client], -1)
                first += len(order)
        present = chosen >= 0
        counts = present.sum(axis=2)
        weights = np.where(present, 1.0 / np.maximum(counts, 1)[:, :, None], 0.0)
        shape = (steps, -1, self.tiles.size)
        index, weights = np.maximum(chosen, 0).reshape(shape), weights.reshape(shape)
        owner = np.broadcast_to(self.owners.cpu().numpy(), index.shape[:2])
        if self.own_kernels:
            # Tiles that are there come first, in the order of their slots: the others cost nothing.
            places = np.argsort(weights[:, :, 0] == 0, axis=1, kind="stable")
            owner = np.take_along_axis(owner, places, axis=1)
            index, weights = (
                np.take_along_axis(each, places[:, :, None], axis=1) for each in (index, weights)
            )
        found = index.reshape(steps, -1), weights.reshape(steps, -1), owner.copy()
        return zip(*(torch.from_numpy(part).to(self.device) for part in found), strict=True)

    def _take_step(self) -> None:
        """In place. What is in a slot whose client is done is never looked at."""
        gradient, rule = self._gradients(), self.rule
        if rule.proximal:
            gradient.add_(self.parameters - self.starts, alpha=rule.proximal)
        if rule.momentum:
            gradient = self.velocity.mul_(rule.momentum).add_(gradient)
        self.parameters.sub_(gradient, alpha=rule.lr)

    def _gradients(self) -> Tensor:
        parameters, present, tiles = self.parameters, self.present, self.tiles
        if self.own_kernels:
            tiles = tiles_of(self.owner, tiles.size, self.slots, present, most=tiles.most)
        found = self.book.contributions(parameters, self.features, self.targets, tiles)
        sums = torch.zeros_like(parameters, dtype=torch.float64)
        add_client_sums(found, self.book.layout, self.weights, present, tiles, sums)
        return sums.to(parameters.dtype)
