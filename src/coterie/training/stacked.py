"""Private learning of many clients as one program, for a GPU.

All clients' weights are stacked, the records that each step drew lie in one flat batch cut into tiles of one
client each, and every step has the same shapes, so that it can be captured once and replayed without Python
in between. Coins and noise are drawn on the device, from keys that come from the secret streams. What is
computed is what `train_privately` computes for one client after the other, with other coins and noise of the
same distribution.
"""

import gc
import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import TypeVar

import torch
from torch import Tensor

from coterie.privacy import RecordSums
from coterie.privacy.ranges import CLIP, check_noise
from coterie.training import head, kernels, philox
from coterie.training.augmentation import Augmentation
from coterie.training.clipping import stacked_clipped_sum
from coterie.training.head import StackedHead
from coterie.training.kernel_trial import kernel_bytes, kernels_agree
from coterie.training.learner import Batch, Learner, precision
from coterie.training.tiles import tiles_of
from coterie.training.views import record_places, views_of

TILE = 4
"""Records per tile: small enough to pad little, large enough for weights to be gathered rarely."""
COINS_AT_ONCE = 2**25
ROWS_AT_ONCE = 1024
P = TypeVar("P", bound="Program")
K = TypeVar("K")


@dataclass(frozen=True)
class StackedJob:
    """One client's share of a round.

    Args:
        records: which of the trainer's record sets it learns from.
        start: parameters, (parameters,).
        lr: step size.
        noise_key, coin_key: 64 bits each, from the client's secret streams.
        anchor, anchor_weight: parameters towards which every step pulls, and how strongly.
        view_key: 63 bits that decide which views of its records are drawn, where there is an augmentation.
    """

    records: int
    start: Tensor
    mechanism: RecordSums
    lr: float
    noise_key: int
    coin_key: int
    anchor: Tensor | None = None
    anchor_weight: float = 0.0
    view_key: int = 0


class Program(SimpleNamespace):
    """Steps that read and write tensors which stay where they are, so that a GPU can replay them."""

    device: torch.device

    def load(self, **values: Tensor) -> None:
        """Put values where the steps find them."""
        for name, value in values.items():
            if name in vars(self):
                getattr(self, name).copy_(value)
            else:
                setattr(self, name, value.to(self.device, copy=True))

    def record(self, *pieces: Callable[[], None], changing: Sequence[str]) -> list[Callable[[], None]]:
        """What replays pieces of work without Python inside; everything is left as it was before.

        Args:
            changing: names of the tensors that the pieces change.
        """
        before = {name: getattr(self, name).clone() for name in changing}
        replays = [_captured(piece) for piece in pieces]
        self.load(**before)
        return replays


@contextmanager
def kept_unless_it_raises(programs: MutableMapping[K, P], program: P) -> Iterator[P]:
    """A program that raises leaves the memory at once: it may be what does not fit, and is half done."""
    try:
        yield program
    except BaseException:
        for shape in [shape for shape, kept in programs.items() if kept is program]:
            del programs[shape]
        vars(program).clear()  # what was raised still refers to it, and it may refer to itself
        raise


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    gc.collect()  # a graph that the collector gave back meanwhile would end the recording
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            work()
    finally:
        if collects:
            gc.enable()
    return graph.replay


class StackedTrainer:
    """Trains any number of clients at once, in waves that fit the memory."""

    def __init__(
        self,
        learner: Learner,
        table: Batch,
        sizes: Sequence[int],
        *,
        tile: int | None = None,
        own_kernels: bool = True,
        tf32: bool = True,
        max_memory: int | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        """Args:
        table: all records on the device, one set after the other; or all persons.
        sizes: number of records, or persons, in each set.
        tile: records per tile; by default what suits the model.
        own_kernels: whether to use the kernels of `kernels.py` where they work.
        tf32: whether matrix units may round factors to ten bits, as torch's convolutions do by default, and
            those of convolutions of many channels to eight (bfloat16), and whether layers may hand images of
            many channels on in bfloat16. Norms and sums are of the gradients that come of it, not rounded.
        max_memory: bytes that a wave may use; by default, most of what is free.
        augmentation: views of each record whose gradients are averaged before the clip; they, and persons,
            go through torch's own kernels.
        """
        if learner.book is None:
            raise ValueError("clients can only be stacked where every layer has a rule")
        self.learner, self.book, self.table = learner, learner.book, table
        self.tf32, self.augmentation = tf32, augmentation
        self._sizes = list(sizes)
        self._bases = list(accumulate(sizes, initial=0))
        self._max_memory = max_memory if max_memory is not None else _most_of_free(learner.device)
        self._programs: dict[tuple[int, int], _Program] = {}
        wanted = own_kernels and augmentation is None and table.present is None
        possible = wanted and kernels.available(learner.device)
        wide_head = StackedHead.of(learner, table) if possible else None
        self.tile = tile or (TILE if wide_head is None else head.TILE)
        if wide_head is not None and not kernels_agree(learner, self.tile, tf32=tf32, wide_head=True):
            wide_head = None
        self.wide_head = wide_head
        images = possible and wide_head is None and tf32 and learner.book.many_channels
        self.coarse = images and kernels_agree(learner, self.tile, coarse=True)
        self.own_kernels = (
            wide_head is not None or self.coarse or (wanted and kernels_agree(learner, self.tile, tf32=tf32))
        )
        copies = augmentation.copies if augmentation else 1
        self._bytes_per_record = learner.bytes_per_record * copies * table.places
        if self.own_kernels and wide_head is None and learner.device.type == "cuda":
            self._bytes_per_record = kernel_bytes(learner, self.tile, tf32=tf32, coarse=self.coarse)

    def portions(self, asked: Sequence[Sequence[StackedJob]]) -> list[list[int]]:
        """All at one time."""
        return [list(range(len(asked)))]

    def train(self, jobs: Sequence[StackedJob]) -> Tensor:
        """The update of each job, in float64: (jobs, parameters)."""
        # A full batch is one step of thousands of records, a round of Poisson batches hundreds of steps of a
        # few: in one program, either would be padded to the other's size.
        kinds = [
            [at for at, job in enumerate(jobs) if job.mechanism.sampled is sampled]
            for sampled in (False, True)
        ]
        if all(kinds):
            apart = torch.cat([self.train([jobs[at] for at in kind]) for kind in kinds])
            return apart[torch.tensor(kinds[0] + kinds[1], device=apart.device).argsort()]
        wave = self._clients_at_once(jobs)
        # Coarser factors change no promise: norms are taken of the very gradients that are summed, or of the
        # same factors, and what float32 rounds in norms and sums is within the margin of the clip.
        with precision(tf32=self.tf32):
            waves = [jobs[first : first + wave] for first in range(0, len(jobs), wave)]
            return torch.cat([self._run(part) for part in waves])

    def records(self, job: StackedJob) -> tuple[int, int]:
        """Where a job's records begin in the table, and how many they are."""
        return self._bases[job.records], self._sizes[job.records]

    def _run(self, jobs: Sequence[StackedJob]) -> Tensor:
        with kept_unless_it_raises(self._programs, self._program(jobs)) as program:
            return program.run(jobs)

    def _program(self, jobs: Sequence[StackedJob]) -> "_Program":
        """The step for this many clients and tiles; prepared once, used for every round."""
        expected = [self._sizes[job.records] * job.mechanism.rate for job in jobs]
        mean = sum(batch / self.tile + 0.5 for batch in expected)
        deviation = math.sqrt(sum(batch / self.tile**2 + 1 / 12 for batch in expected))
        # A step that drew more tiles than that, one in some seventy, runs as two rows.
        shape = (len(jobs), min(math.ceil(mean + 2.2 * deviation), self._tiles_at_once()))
        if shape not in self._programs:
            self._programs[shape] = _Program(self, *shape)
        return self._programs[shape]

    # --- memory ---------------------------------------------------------------------------------------

    def _tiles_at_once(self) -> int:
        return max(1, int(0.6 * self._max_memory) // (self.tile * self._bytes_per_record))

    def _clients_at_once(self, jobs: Sequence[StackedJob]) -> int:
        expected = max(self._sizes[job.records] * job.mechanism.rate for job in jobs)
        tiles = min(expected / self.tile + 1, self._tiles_at_once())
        each = BUFFERS * 8 * self.learner.layout.size + tiles * self.tile * self._bytes_per_record
        return max(1, min(len(jobs), int(self._max_memory // each)))


BUFFERS = 8
"""Arrays of the size of a client's parameters that a step holds at one time."""


def _most_of_free(device: torch.device) -> int:
    return int(0.8 * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 4 * 2**30


class _Program(Program):
    """What many clients hold, a row each, and the two pieces of a step: add up gradients, then move."""

    def __init__(self, trainer: StackedTrainer, clients: int, tiles: int) -> None:
        self.trainer, self.clients, self.tiles = trainer, clients, tiles
        device, slots = trainer.learner.device, tiles * trainer.tile
        self.device = device
        self.pairs = philox.places(trainer.learner.layout.size, 2, device)
        self.index = torch.zeros(ROWS_AT_ONCE, slots, dtype=torch.int64, device=device)
        self.present = torch.zeros(ROWS_AT_ONCE, slots, dtype=torch.bool, device=device)
        self.owner = torch.zeros(ROWS_AT_ONCE, tiles, dtype=torch.int64, device=device)
        self.row = torch.zeros(1, dtype=torch.int64, device=device)
        self._pieces: list[Callable[[], None]] = []

    def begin(self, jobs: Sequence[StackedJob]) -> None:
        """Load what the jobs start from."""

        def each(value: Callable[[StackedJob], float], dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor([value(job) for job in jobs], dtype=dtype)

        start = self._stacked([job.start for job in jobs])
        anchors = self._stacked([job.start if job.anchor is None else job.anchor for job in jobs])
        self.load(
            start=start,
            parameters=start,
            anchors=anchors,
            sums=torch.zeros_like(start),
            step=torch.zeros_like(self.row),
            noise_keys=philox.split_keys([job.noise_key for job in jobs]),
            coin_keys=philox.split_keys([job.coin_key for job in jobs]),
            rates=each(lambda job: job.mechanism.rate),
            clips=each(lambda job: job.mechanism.clip),
            noise_stds=each(lambda job: job.mechanism.noise_std),
            step_sizes=each(lambda job: job.lr / job.mechanism.denominator),
            pulls=each(lambda job: job.lr * job.anchor_weight),
            steps=each(lambda job: job.mechanism.steps, torch.int64),
            bases=each(lambda job: self.trainer.records(job)[0], torch.int64),
            sizes=each(lambda job: self.trainer.records(job)[1], torch.int64),
            view_keys=each(lambda job: job.view_key, torch.int64),
        )
        # What was loaded, not what it was loaded from: buffers of another precision would round it.
        for std, clip, job in zip(self.noise_stds.tolist(), self.clips.tolist(), jobs, strict=True):
            check_noise(std, job.mechanism.multiplier, clip)
            CLIP.check("clip", clip)

    def _stacked(self, vectors: Sequence[Tensor]) -> Tensor:
        """In float64 on the device, to which a vector that many clients share goes once.

        Stacked there: on a processor, every vector would be copied by all cores, and wait for the last.
        """
        there = {vector.data_ptr(): vector for vector in vectors}
        there = {at: vector.to(self.device) for at, vector in there.items()}
        return torch.stack([there[vector.data_ptr()] for vector in vectors]).double()

    def run(self, jobs: Sequence[StackedJob]) -> Tensor:
        """The updates of all jobs, from all steps of the round, in groups whose coins fit the memory."""
        self.begin(jobs)
        if not self._pieces:
            self._pieces = [self._sum_row, self._finish_step]
            if self.device.type == "cuda":
                self._pieces = self.record(*self._pieces, changing=("parameters", "sums", "row", "step"))
        sum_row, finish_step = self._pieces
        steps = max(job.mechanism.steps for job in jobs)
        longest = max(self.trainer.records(job)[1] for job in jobs)
        at_once = min(steps, max(1, COINS_AT_ONCE // (self.clients * longest)))
        for first in range(0, steps, at_once):
            rows_per_step, places = self.draw(first, at_once, longest)
            done = 0
            for rows in rows_per_step[: steps - first]:
                for _ in range(rows):
                    if done % ROWS_AT_ONCE == 0:
                        self._load_rows(places, done)
                    sum_row()
                    done += 1
                finish_step()
        return torch.sub(self.parameters, self.start)

    # --- which records --------------------------------------------------------------------------------

    def draw(self, first: int, steps: int, longest: int) -> tuple[list[int], Tensor]:
        """Flip all coins of these steps and give every record drawn a place.

        Returns:
            rows of each step; and by record drawn, its row, its slot there, which one of the table it is, and
            whose: (4, records drawn).
        """
        size = self.trainer.tile
        step = torch.arange(first, first + steps, device=self.steps.device)
        if self.trainer.own_kernels:
            drawn = kernels.coins(self.coin_keys, self.rates, first, steps, longest)
        else:
            drawn = philox.coins(self.coin_keys, self.rates, step, philox.places(longest, 4, step.device))
        drawn = drawn & (torch.arange(drawn.shape[2], device=drawn.device) < self.sizes[:, None])
        drawn &= (step[:, None] < self.steps)[:, :, None]
        counts = drawn.sum(dim=2)
        tiles = (counts + size - 1) // size
        # At least one row a step: noise is due even when nobody drew anything.
        rows = ((tiles.sum(dim=1) + self.tiles - 1) // self.tiles).clamp(min=1)
        first_row = rows.cumsum(0) - rows
        first_tile = tiles.cumsum(1) - tiles
        at = drawn.nonzero(as_tuple=True)
        before = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
        rank = torch.arange(len(at[0]), device=drawn.device) - before[at[0], at[1]]
        tile = first_tile[at[0], at[1]] + rank // size
        row = first_row[at[0]] + tile // self.tiles
        slot = (tile % self.tiles) * size + rank % size
        return rows.tolist(), torch.stack((row, slot, self.bases[at[1]] + at[2], at[1]))

    def _load_rows(self, places: Tensor, first: int) -> None:
        """Write the rows from `first` on into the buffers that the step reads."""
        row, slot, record, client = places[:, (places[0] >= first) & (places[0] < first + ROWS_AT_ONCE)]
        row = row - first
        self.index.zero_()
        self.present.zero_()
        self.owner.fill_(self.clients - 1)  # tiles that stay empty come last, and clients in their order
        self.index[row, slot] = record
        self.present[row, slot] = True
        self.owner[row, slot // self.trainer.tile] = client
        self.row.zero_()

    # --- one step -------------------------------------------------------------------------------------

    def _sum_row(self) -> None:
        """Add the clipped gradients of the records in the current row."""
        trainer, augmentation = self.trainer, self.trainer.augmentation
        index, present, owner = (
            values.index_select(0, self.row)[0] for values in (self.index, self.present, self.owner)
        )
        shown = present if trainer.own_kernels else None
        tiles = tiles_of(owner, trainer.tile, self.clients, shown, coarse=trainer.coarse)
        parameters, clip = self.parameters.to(torch.float32), tiles.by_record(self.clips)
        self.row += 1
        if trainer.wide_head is not None:
            trainer.wide_head.clipped_sum(parameters, index, tiles, clip, present, into=self.sums)
            return
        rows, copies = trainer.table.take(index), 1
        batch = rows.flat
        if augmentation is not None:
            copies, keys = augmentation.copies, tiles.by_record(self.view_keys)
            places = record_places(index - tiles.by_record(self.bases), rows.places)
            keys = keys.repeat_interleave(rows.places)
            batch = views_of(augmentation, batch, places, self.step, keys)
        stacked_clipped_sum(
            trainer.book, parameters, batch, tiles, clip, present, copies, rows.present, into=self.sums
        )

    def _finish_step(self) -> None:
        """Move by the noisy sums, and towards the anchors."""
        if self.trainer.own_kernels:
            state = (self.parameters, self.sums, self.anchors, self.noise_keys, self.step, self.steps)
            kernels.move(*state, self.noise_stds, self.step_sizes, self.pulls)
        else:
            noise = philox.normals(self.noise_keys, self.step, self.pairs)[:, : self.parameters.shape[1]]
            move = self.step_sizes[:, None] * (self.sums + self.noise_stds[:, None] * noise)
            move = move + self.pulls[:, None] * (self.parameters - self.anchors)
            due = (self.step < self.steps)[:, None]
            self.parameters.copy_(torch.where(due, self.parameters - move, self.parameters))
            self.sums.zero_()
        self.step += 1
