"""Private learning of many clients as one program, for a GPU.

All clients' weights are stacked, the records that each step drew lie in one flat batch cut into tiles of one
client each, and every step has the same shapes, so that it can be compiled and captured once and replayed
without Python in between. Coins and noise are drawn on the device, from keys that come from the secret
streams. What is computed is what `train_privately` computes for one client after the other, with other coins
and other noise of the same distribution.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from coterie.privacy import FullBatchSteps, PoissonSteps
from coterie.training import philox
from coterie.training.clipping import stacked_clipped_sum
from coterie.training.learner import Batch, Learner
from coterie.training.tiles import Tiles

log = logging.getLogger(__name__)

TILE = 8
"""Records per tile: small enough to pad little, large enough for weights to be gathered rarely."""
COINS_AT_ONCE = 2**25
ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class StackedJob:
    """One client's share of a round.

    Args:
        records: which of the trainer's record sets it learns from.
        start: parameters, (parameters,).
        noise_key, coin_key: 64 bits each, from the client's secret streams.
    """

    records: int
    start: Tensor
    mechanism: PoissonSteps | FullBatchSteps
    noise_key: int
    coin_key: int


def sampling_rate(mechanism: PoissonSteps | FullBatchSteps) -> float:
    return mechanism.rate if isinstance(mechanism, PoissonSteps) else 1.0


class StackedTrainer:
    """Trains any number of clients at once, in waves that fit the memory."""

    def __init__(
        self,
        learner: Learner,
        records: Sequence[Batch],
        lr: float,
        *,
        tile: int = TILE,
        compiled: bool = True,
        captured: bool = True,
        max_memory: int | None = None,
    ) -> None:
        """Args:
        tile: records per tile.
        compiled: whether torch.compile fuses the step.
        captured: whether the step is replayed as a CUDA graph (on a GPU).
        max_memory: bytes that a wave may use; by default, most of what is free.
        """
        if learner.book is None:
            raise ValueError("clients can only be stacked where every layer has a rule")
        self.learner = learner
        self.book = learner.book
        self.lr = lr
        self.tile = tile
        self.compiled = compiled
        self.captured = captured and learner.device.type == "cuda"
        self.max_memory = max_memory
        self._sizes = [len(batch) for batch in records]
        self._table = Batch(
            torch.cat([batch.features for batch in records]), torch.cat([batch.targets for batch in records])
        )
        self._programs: dict[tuple[int, int], _Program] = {}

    def train(self, jobs: Sequence[StackedJob]) -> Tensor:
        """The update of each job, in float64: (jobs, parameters)."""
        wave = min(len(jobs), self._clients_at_once(jobs))
        parts = [self._train_wave(jobs[first : first + wave]) for first in range(0, len(jobs), wave)]
        return torch.cat(parts)

    def _train_wave(self, jobs: Sequence[StackedJob]) -> Tensor:
        program = self._program(jobs)
        program.begin(jobs, [self._base(job.records) for job in jobs])
        steps = max(job.mechanism.steps for job in jobs)
        longest = max(self._sizes[job.records] for job in jobs)
        at_once = max(1, COINS_AT_ONCE // (len(jobs) * longest))
        for first in range(0, steps, at_once):
            program.run(first, min(at_once, steps - first))
        return program.updates()

    def _program(self, jobs: Sequence[StackedJob]) -> "_Program":
        """The captured step for this many clients and tiles; made once, used for every round."""
        expected = [self._sizes[job.records] * sampling_rate(job.mechanism) for job in jobs]
        mean = sum(batch / self.tile + 0.5 for batch in expected)
        deviation = math.sqrt(sum(batch / self.tile**2 + 1 / 12 for batch in expected))
        # A step that drew more, one in some hundred, runs as two rows.
        tiles = min(math.ceil(mean + 2.5 * deviation), self._tiles_at_once())
        shape = (len(jobs), tiles)
        if shape not in self._programs:
            self._programs[shape] = _Program(self, len(jobs), tiles)
        return self._programs[shape]

    def _base(self, records: int) -> tuple[int, int]:
        """Where a set of records begins in the table, and how many there are."""
        return sum(self._sizes[:records]), self._sizes[records]

    # --- memory ---------------------------------------------------------------------------------------

    def _budget(self) -> int:
        if self.max_memory is not None:
            return self.max_memory
        if self.learner.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.learner.device)
            return int(0.8 * free)
        return 4 * 2**30

    def _tiles_at_once(self) -> int:
        return max(1, self._budget() // 2 // (self.tile * self.learner.bytes_per_record))

    def _clients_at_once(self, jobs: Sequence[StackedJob]) -> int:
        expected = max(self._sizes[job.records] * sampling_rate(job.mechanism) for job in jobs)
        tiles = min(expected / self.tile + 1, self._tiles_at_once())
        weights = 4 * 8 * self.learner.layout.size
        return max(1, int(self._budget() // (weights + tiles * self.tile * self.learner.bytes_per_record)))


class _Program:
    """Static buffers, and the two pieces of a step that work on them: add up gradients, then move."""

    def __init__(self, trainer: StackedTrainer, clients: int, tiles: int) -> None:
        self.trainer = trainer
        self.clients, self.tiles = clients, tiles
        device, size = trainer.learner.device, trainer.learner.layout.size
        slots = tiles * trainer.tile

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.start = zeros(clients, size, dtype=torch.float64)
        self.parameters = zeros(clients, size, dtype=torch.float64)
        self.sums = zeros(clients, size, dtype=torch.float64)
        self.noise_keys = zeros(clients, 2, dtype=torch.int64)
        self.coin_keys = zeros(clients, 2, dtype=torch.int64)
        self.rates = zeros(clients, dtype=torch.float64)
        self.clips = zeros(clients, dtype=torch.float64)
        self.noise_stds = zeros(clients, dtype=torch.float64)
        self.step_sizes = zeros(clients, dtype=torch.float64)
        self.steps = zeros(clients, dtype=torch.int64)
        self.bases = zeros(clients, dtype=torch.int64)
        self.sizes = zeros(clients, dtype=torch.int64)
        self.index = zeros(ROWS_AT_ONCE, slots, dtype=torch.int64)
        self.present = zeros(ROWS_AT_ONCE, slots, dtype=torch.bool)
        self.owner = zeros(ROWS_AT_ONCE, tiles, dtype=torch.int64)
        self.row = zeros(1, dtype=torch.int64)
        self.step = zeros(1, dtype=torch.int64)
        self.pairs = philox.pair_places(size, device)
        self._add_up = self._prepared(self._gradient_sums, (self.parameters, *self._drawn()))
        self._move = self._prepared(self._moved, self._motion())
        self._graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None

    def begin(self, jobs: Sequence[StackedJob], places: Sequence[tuple[int, int]]) -> None:
        """Load what the jobs start from."""
        mechanisms = [job.mechanism for job in jobs]
        device = self.parameters.device

        def load(into: Tensor, values: Sequence[float]) -> None:
            into.copy_(torch.tensor(values, dtype=into.dtype))

        self.start.copy_(torch.stack([job.start for job in jobs]))
        self.parameters.copy_(self.start)
        self.noise_keys.copy_(philox.split_keys([job.noise_key for job in jobs], device))
        self.coin_keys.copy_(philox.split_keys([job.coin_key for job in jobs], device))
        load(self.rates, [sampling_rate(mechanism) for mechanism in mechanisms])
        load(self.clips, [mechanism.clip for mechanism in mechanisms])
        load(self.noise_stds, [mechanism.noise_std for mechanism in mechanisms])
        load(self.step_sizes, [self.trainer.lr / mechanism.denominator for mechanism in mechanisms])
        load(self.steps, [mechanism.steps for mechanism in mechanisms])
        load(self.bases, [base for base, _ in places])
        load(self.sizes, [size for _, size in places])
        self.longest = max(size for _, size in places)
        self.sums.zero_()
        self.step.zero_()

    def run(self, first: int, steps: int) -> None:
        """Steps `first` to `first + steps` of the round: coins for all of them, then one after the other."""
        rows_per_step, places = self._draw(first, steps)
        if self.trainer.captured and self._graphs is None:
            self._graphs = self._capture()
        done = 0
        for rows in rows_per_step:
            for _ in range(rows):
                if done % ROWS_AT_ONCE == 0:
                    self._load_rows(places, done)
                self._graphs[0].replay() if self._graphs else self._sum_row()
                done += 1
            self._graphs[1].replay() if self._graphs else self._finish_step()

    def updates(self) -> Tensor:
        return self.parameters - self.start

    # --- which records --------------------------------------------------------------------------------

    def _draw(self, first: int, steps: int) -> "tuple[list[int], _Places]":
        """Flip all coins of these steps and give every record drawn a place: row, tile and lane."""
        size = self.trainer.tile
        drawn = philox.coins(self.coin_keys, self.rates, first, steps, self.longest)
        record = torch.arange(self.longest, device=drawn.device)
        step = torch.arange(first, first + steps, device=drawn.device)
        drawn &= record < self.sizes[:, None]
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
        places = _Places(row, slot, self.bases[at[1]] + at[2], at[1], size)
        return rows.tolist(), places

    def _load_rows(self, places: "_Places", first: int) -> None:
        """Write the rows from `first` on into the buffers that the captured step reads."""
        mine = (places.row >= first) & (places.row < first + ROWS_AT_ONCE)
        row, slot = places.row[mine] - first, places.slot[mine]
        for values in (self.index, self.present, self.owner):
            values.zero_()
        self.index[row, slot] = places.record[mine]
        self.present[row, slot] = True
        self.owner[row, slot // places.tile] = places.client[mine]
        self.row.zero_()

    def _drawn(self) -> tuple[Tensor, ...]:
        """The records of the current row."""
        index, present, owner = (
            values.index_select(0, self.row)[0] for values in (self.index, self.present, self.owner)
        )
        return index, present, owner, self.clips, self.trainer._table.features, self.trainer._table.targets

    def _motion(self) -> tuple[Tensor, ...]:
        """What decides how the parameters move."""
        state = (self.parameters, self.sums, self.noise_keys, self.step, self.pairs)
        return *state, self.noise_stds, self.step_sizes, self.steps

    # --- one step -------------------------------------------------------------------------------------

    def _gradient_sums(
        self,
        parameters: Tensor,
        index: Tensor,
        present: Tensor,
        owner: Tensor,
        clips: Tensor,
        features: Tensor,
        targets: Tensor,
    ) -> Tensor:
        tiles = Tiles(self.tiles, self.trainer.tile, owner, dynamic=False)
        batch = Batch(features.index_select(0, index), targets.index_select(0, index))
        clip = clips.index_select(0, owner).repeat_interleave(self.trainer.tile, output_size=tiles.records)
        return stacked_clipped_sum(
            self.trainer.book, parameters.to(torch.float32), batch, tiles, clip, present
        )

    def _moved(
        self,
        parameters: Tensor,
        sums: Tensor,
        keys: Tensor,
        step: Tensor,
        pairs: Tensor,
        noise_stds: Tensor,
        step_sizes: Tensor,
        steps: Tensor,
    ) -> Tensor:
        noise = philox.normals(keys, step, parameters.shape[1], pairs)
        moving = torch.where(step < steps, step_sizes, 0.0)
        return parameters - moving[:, None] * (sums + noise_stds[:, None] * noise)

    def _sum_row(self) -> None:
        self.sums += self._add_up(self.parameters, *self._drawn())
        self.row += 1

    def _finish_step(self) -> None:
        self.parameters.copy_(self._move(*self._motion()))
        self.sums.zero_()
        self.step += 1

    def _prepared(
        self, function: Callable[..., Tensor], example: tuple[Tensor, ...]
    ) -> Callable[..., Tensor]:
        """The function as one flat graph of tensor operations, compiled where that is wanted."""
        if not self.trainer.compiled:
            return function
        traced = make_fx(lambda *values: function(*values))(*example)
        compiled: Callable[..., Tensor] = torch.compile(traced, dynamic=False)
        return compiled

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
        """Run both pieces a few times, capture them, and put everything back as it was."""
        kept = [value.clone() for value in (self.parameters, self.sums, self.row, self.step)]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._sum_row()
                self._finish_step()
        torch.cuda.current_stream().wait_stream(side)
        graphs = (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
        for graph, piece in zip(graphs, (self._sum_row, self._finish_step), strict=True):
            with torch.cuda.graph(graph):
                piece()
        for value, before in zip((self.parameters, self.sums, self.row, self.step), kept, strict=True):
            value.copy_(before)
        return graphs


@dataclass(frozen=True)
class _Places:
    """Where each record that was drawn goes."""

    row: Tensor
    slot: Tensor
    record: Tensor
    client: Tensor
    tile: int
