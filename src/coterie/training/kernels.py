"""Kernels for a GPU, where the same thing made of torch's operations would move several times the bytes.

A convolution over patches that are never written down, with weights of each tile's client, and its way back;
every record's weight gradient with its norm, kept or formed twice; a wide head's outputs, from records where
they lie; sums by client; noise and the step in one pass; pooling without overlap (group norms have a file of
their own). Each has a twin made of torch's operations, in the file that uses it, and the trainer compares
both before it relies on these.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.training.tiles import Tiles

try:
    from coterie.training import triton_kernels as device_code
except ImportError:  # torch for processors comes without Triton
    device_code = None  # type: ignore[assignment]


SPANS, INPUTS_AT_ONCE, HEAD_STAGES = 8, 64, 3
"""Programs that share the inputs of a tile of a wide head (one alone would leave most of a GPU idle), inputs
that one of them takes at a time, and how often it is ahead of itself with reading them."""
WEIGHTS_AT_ONCE, RECORDS_AT_ONCE, SUM_WARPS, SUM_STAGES = 128, 16, 4, 3
"""Inputs whose weights one program sums up, records that it takes at a time, and how."""


def available(device: torch.device) -> bool:
    """Whether these kernels can run on the device at all."""
    return device_code is not None and device.type == "cuda"


def power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _blocks(count: int, size: int) -> int:
    return -(-count // size)


def present_of(tiles: Tiles) -> Tensor | None:
    return tiles.owner if tiles.present is None else tiles.present.view(torch.int8)


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@dataclass(frozen=True)
class Geometry:
    """What a convolution looks like, beside the number of its output channels."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    spread: tuple[int, int] = (1, 1)
    """How far apart the pixels of its inputs count, with zeros in between."""

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        sides = zip((height, width), self.kernel, self.stride, self.dilation, self.padding, strict=True)
        rows, columns = ((side + 2 * p - d * (k - 1) - 1) // s + 1 for side, k, s, d, p in sides)
        return rows, columns

    def turned_around(self) -> "Geometry":
        """The convolution, with kernels turned around, that takes gradients back to the inputs."""
        across = zip(self.dilation, self.kernel, self.padding, strict=True)
        high, wide = (d * (k - 1) - p for d, k, p in across)
        return Geometry(self.kernel, (1, 1), (high, wide), self.dilation, self.stride)

    def constants(self) -> dict[str, Any]:
        pairs = {"kernel": self.kernel, "stride": self.stride, "pad": self.padding, "dilation": self.dilation}
        return {f"{name}_{side}": pair[at] for name, pair in pairs.items() for at, side in enumerate("hw")}


POINTWISE = Geometry((1, 1), (1, 1), (0, 0), (1, 1))
"""A convolution that sees one pixel at a time: a dense layer at every position."""


def convolve(
    images: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    shape: Geometry,
    back_to: tuple[int, int] | None = None,
    rounded: torch.dtype = torch.float32,
) -> Tensor:
    """Convolve each tile's images with its client's weights.

    Args:
        images: (records, channels, height, width) in channels-last order.
        weights: (clients, outer, kernel height, kernel width, channels), each client's contiguous.
        bias: (clients, outer), each client's contiguous.
        back_to: height and width of the outputs, where a gradient goes back to them through a convolution
            that was turned around; the kernels themselves are not.
        rounded: what sums, which are float32, are rounded to when they are written.
    """
    assert tiles.owner is not None
    records, channels, height, width = images.shape
    outer = weights.shape[1]
    rows, columns = shape.output_size(height, width) if back_to is None else back_to
    outputs = torch.empty(
        (records, outer, rows, columns),
        dtype=rounded,
        device=images.device,
        memory_format=torch.channels_last,
    )
    count = tiles.size * rows * columns
    inner = channels * math.prod(shape.kernel)
    block_m = min(128, max(16, power_of_two(count)))
    narrow = images.dtype == torch.bfloat16  # of half the size: more fit
    block_n = min(256 if narrow else 64, max(16, power_of_two(outer)))
    block_k = 64 if narrow else 32 if inner > 16 else 16
    grid = (_blocks(count, block_m), _blocks(outer, block_n), tiles.count)
    device_code.convolve[grid](
        images, weights, images if bias is None else bias, tiles.owner, present_of(tiles), outputs,
        weights.stride(0), 0 if bias is None else bias.stride(0),
        height, width, rows, columns, count,
        channels=channels, outer=outer, **shape.constants(), biased=bias is not None,
        spread_h=shape.spread[0], spread_w=shape.spread[1], turned=back_to is not None,
        some_absent=tiles.present is not None, precision=_precision(),
        block_m=block_m, block_n=block_n, block_k=block_k, num_warps=8 if block_n == 256 else 4,
    )  # fmt: skip
    return outputs


def form_rows(
    images: Tensor, gradient: Tensor, shape: Geometry, tiles: Tiles, *, biased: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Every record's weight gradient, its bias gradient if there is one, and the square of the norm of all.

    Args:
        images: (records, channels, height, width) in channels-last order.
        gradient: (records, outer, rows, columns) in channels-last order.

    Returns:
        (records, outer, kernel height, kernel width, channels), (records, outer) and float64 (records,).
    """
    records, channels, height, width = images.shape
    outer, rows, columns = gradient.shape[1:]
    inner = channels * math.prod(shape.kernel)
    # Blocks of at most 32 outputs keep both factors readable 16 bytes at a time in float32: the wider
    # instructions of newer matrix units want the positions, over which images jump, to be contiguous there.
    widest, block_l = (128, 64) if images.dtype == torch.bfloat16 else (32, 32)
    block_o = min(widest, max(16, power_of_two(outer)))
    block_i = min(128, max(16, power_of_two(inner)))
    grid = (records, _blocks(inner, block_i), _blocks(outer, block_o))
    formed = torch.empty((records, outer, *shape.kernel, channels), device=images.device)
    bias_rows = torch.empty((records, outer), device=images.device) if biased else None
    squares = torch.empty((records, grid[1] * grid[2]), dtype=torch.float64, device=images.device)
    device_code.form_rows[grid](
        images, gradient, present_of(tiles), formed, formed if bias_rows is None else bias_rows, squares,
        height, width, rows, columns,
        channels=channels, outer=outer, **shape.constants(), biased=biased, precision=_precision(),
        some_absent=tiles.present is not None,
        block_i=block_i, block_o=block_o, block_l=block_l, num_warps=8 if block_o == 128 else 4,
    )  # fmt: skip
    return formed, bias_rows, squares.sum(dim=1)


TOGETHER = 4
"""Records whose scaled gradients one program sums in float32 before it adds them up in float64."""
REGISTERS = 168
"""Of a thread of that program: three programs of 128 threads then share a multiprocessor."""


class WeighedRows:
    """Every record's weight gradient, formed when its norm is asked for and again when it is summed.

    One program does both (only an argument that it reads when it runs tells them apart), from a record's own
    images and gradient alone: the numbers that are summed are those whose norm was taken.

    The squared norm of a line of k inputs of a block is a sum in float32, off by k 2^-24 of itself at most:
    2^-17 for the widest block, or 2^-18 of the norm. `TOGETHER` rows, t of them, are scaled and summed in
    float32, with and without a record: together that is off by 2 t^2 2^-24 clip at most, 2^-19 clip here.
    Both are less than half of the margin of 2^-16 by which the clip is shrunk; everything else is float64.

    Args:
        images: (records, channels, height, width) in channels-last order.
        gradient: (records, outer, rows, columns) in channels-last order.
    """

    def __init__(self, images: Tensor, gradient: Tensor, shape: Geometry, tiles: Tiles) -> None:
        self._images, self._gradient, self._shape, self._tiles = images, gradient, shape, tiles
        self._inner = images.shape[1] * math.prod(shape.kernel)
        positions = math.prod(gradient.shape[2:])
        narrow = images.dtype == torch.bfloat16
        widest = (64, 64) if narrow else (128, 32)  # as in `form_rows`
        self._blocks = {
            "block_i": min(widest[0], max(16, power_of_two(self._inner))),
            "block_o": min(widest[1], max(16, power_of_two(gradient.shape[1]))),
            "block_l": min(64, max(16, power_of_two(positions))),
            "together": TOGETHER,
        }
        self._stages = 1 if positions > self._blocks["block_l"] else 3 if narrow else 2  # as many as fit

    def squares(self) -> Tensor:
        """The square of each record's norm: float64 (records,)."""
        records, outer = self._gradient.shape[:2]
        blocks = _blocks(self._inner, self._blocks["block_i"]) * _blocks(outer, self._blocks["block_o"])
        found = torch.empty((records, blocks * self._blocks["block_o"]), device=self._images.device)
        none = torch.empty(0, dtype=torch.float64, device=self._images.device)
        self._run(none, none.view(torch.int8), found, none, summing=0)
        return found.sum(dim=1, dtype=torch.float64)

    def add(self, scales: Tensor, usable: Tensor, sums: Tensor) -> None:
        """Add the scaled sums over each client's records to (clients, parameters) in float64."""
        self._run(scales, usable.view(torch.int8), scales.new_empty(0, dtype=torch.float32), sums, summing=1)

    def _run(self, scales: Tensor, usable: Tensor, squares: Tensor, sums: Tensor, summing: int) -> None:
        bounds, outer = self._tiles.bounds, self._gradient.shape[1]
        assert bounds is not None
        grid = (
            _blocks(self._inner, self._blocks["block_i"]),
            _blocks(outer, self._blocks["block_o"]),
            len(bounds) - 1,
        )
        _, channels, height, width = self._images.shape
        device_code.weigh_rows[grid](
            self._images, self._gradient, scales, usable, bounds, squares, sums, sums.stride(0),
            self._tiles.size, summing, height, width, *self._gradient.shape[2:],
            channels=channels, outer=outer, **self._shape.constants(), precision=_precision(),
            **self._blocks, num_warps=4, num_stages=self._stages, maxnreg=REGISTERS,
        )  # fmt: skip


def add_by_client(
    rows: Tensor, scales: Tensor, usable: Tensor, tiles: Tiles, sums: Tensor, channels: int = 1, taps: int = 1
) -> None:
    """Add scaled sums of rows over each client's tiles to (clients, width), in float64.

    Args:
        rows: float32 (records, width), contiguous.
        scales, usable: float64 and bool (records,).
        channels, taps: the last two dimensions of a kernel's weights, which rows hold the other way round.
    """
    assert tiles.bounds is not None
    width, clients = rows.shape[1], len(tiles.bounds) - 1
    block = min(512, max(16, power_of_two(width)))
    device_code.sum_by_client[(clients, _blocks(width, block))](
        rows, scales, usable.view(torch.int8), tiles.bounds, sums, sums.stride(0), width, tiles.size,
        channels=channels, taps=taps, block_n=4, block_p=block, num_warps=4,
    )  # fmt: skip


def head_outputs(table: Tensor, places: Tensor, weights: Tensor, tiles: Tiles) -> Tensor:
    """Products of some rows of a table with their clients' weights: float32 (records, outer).

    Rows are read where they lie; several programs share a tile's inputs between them.

    Args:
        table: float32 (rows, inner), contiguous.
        places: int64 (records,), which row each record is.
        weights: float32 (clients, outer, inner), contiguous.
    """
    assert tiles.owner is not None
    inner, outer, records = table.shape[1], weights.shape[1], tiles.records
    block_k, block_o = INPUTS_AT_ONCE, min(64, max(16, power_of_two(outer)))
    parts = max(1, min(SPANS, inner // (4 * block_k)))
    span = block_k * _blocks(_blocks(inner, parts), block_k)
    outputs = torch.empty((parts, records, outer), device=table.device)
    device_code.head_outputs[(tiles.count, parts, _blocks(outer, block_o))](
        table, places, weights, tiles.owner, outputs, inner, outer, records, span, tiles.size,
        precision=_precision(), block_m=max(16, power_of_two(tiles.size)), block_o=block_o, block_k=block_k,
        num_warps=4, num_stages=HEAD_STAGES,
    )  # fmt: skip
    return outputs.sum(dim=0)


def add_products(
    left: Tensor,
    right: Tensor,
    scales: Tensor,
    usable: Tensor,
    tiles: Tiles,
    sums: Tensor,
    places: Tensor | None = None,
) -> None:
    """Add scaled sums of right (x) left over each client's records to (clients, outer x inner), in float64.

    Args:
        left, right: float32 (records, inner) and (records, outer), contiguous.
        scales, usable: float64 and bool (records,).
        places: int64 (records,), which row of `left` each record is; by default, one after the other.
    """
    assert tiles.bounds is not None
    inner, outer, clients = left.shape[1], right.shape[1], len(tiles.bounds) - 1
    # What was put in is read once for all outputs of a block; matrix units take sixteen at least.
    block_o, block_i = 16, min(WEIGHTS_AT_ONCE, max(16, power_of_two(inner)))
    device_code.sum_products[(clients, _blocks(outer, block_o), _blocks(inner, block_i))](
        left, tiles.bounds if places is None else places, right, scales, usable.view(torch.int8),
        tiles.bounds, sums, sums.stride(0), inner, outer, tiles.size,
        placed=places is not None, block_o=block_o, block_i=block_i, block_n=RECORDS_AT_ONCE,
        num_warps=SUM_WARPS, num_stages=SUM_STAGES,
    )  # fmt: skip


COARSE_FROM = 64
"""Channels from which factors and images may be bfloat16."""


def many(channels: int, outer: int) -> bool:
    """Whether a convolution has so many channels that its factors may be coarse."""
    return min(channels, outer) >= COARSE_FROM


def factors_of(channels: int, outer: int) -> torch.dtype:
    """What a convolution's factors are rounded to before its kernels read them.

    Where factors may be coarse and channels are many, bfloat16, with eight bits: the matrix units take it in
    any order of memory, of ten bits (TF32) only in one, for which weight gradients would have to be turned.
    """
    coarse = torch.backends.cuda.matmul.allow_tf32 and many(channels, outer)
    return torch.bfloat16 if coarse else torch.float32


def handed_on(channels: int, tiles: Tiles) -> torch.dtype:
    """What images of so many channels are rounded to before another layer reads them."""
    return torch.bfloat16 if tiles.coarse and channels >= COARSE_FROM else torch.float32


def aligned(stacked: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values stacked by client, each client's contiguous and from where it can be read 16 bytes at a time."""
    there = stacked[0].is_contiguous() and stacked.stride(0) % 16 == 0 and stacked.data_ptr() % 16 == 0
    if there and dtype == stacked.dtype:
        return stacked
    return stacked.to(dtype, copy=True, memory_format=torch.contiguous_format)


def clip_scales(
    squares: Sequence[Tensor], clips: Tensor, present: Tensor, margin: float
) -> tuple[Tensor, Tensor]:
    """Scales (float64) and usability (bool) of records whose gradients have these squared norms by part."""
    stacked = torch.stack(list(squares))
    parts, count = stacked.shape
    scales = torch.empty_like(clips)
    usable = torch.empty(count, dtype=torch.bool, device=clips.device)
    device_code.clip[(_blocks(count, 256),)](
        stacked, clips, present.view(torch.int8), scales, usable.view(torch.int8), count,
        margin=margin, parts=parts, block=256, num_warps=4,
    )  # fmt: skip
    return scales, usable


def move(
    parameters: Tensor,
    sums: Tensor,
    anchors: Tensor,
    keys: Tensor,
    step: Tensor,
    steps: Tensor,
    noise_stds: Tensor,
    step_sizes: Tensor,
    pulls: Tensor,
) -> None:
    """Take the noisy step in place and set the sums to zero; arguments as in `stacked.py`."""
    clients, size = parameters.shape
    block = 256
    device_code.move[(clients, _blocks(math.ceil(size / 2), block))](
        parameters, sums, anchors, keys, step, steps, noise_stds, step_sizes, pulls, size,
        block=block, num_warps=4,
    )  # fmt: skip


def coins(keys: Tensor, rates: Tensor, first_step: int, steps: int, records: int) -> Tensor:
    """The coins of `philox.coins` for consecutive steps: bool (steps, clients, 4 x counters)."""
    blocks = math.ceil(records / 4)
    thresholds = (rates * 2.0**32).floor().to(torch.int64)
    drawn = torch.empty((steps, len(keys), 4 * blocks), dtype=torch.int8, device=keys.device)
    device_code.flip[(steps, len(keys), _blocks(blocks, 256))](
        keys, thresholds, drawn, first_step, len(keys), blocks, block=256, num_warps=4
    )
    return drawn.view(torch.bool)


def _by_window(kernel: Any, pooled: Tensor, winners: Tensor, whole: Tensor, window: tuple[int, int]) -> None:
    """Start a kernel with one thread for every window."""
    _, channels, rows, columns = pooled.shape
    count, block = pooled.numel(), 512
    kernel[(_blocks(count, block),)](
        pooled, winners, whole, count, *whole.shape[2:], rows, columns, channels,
        kernel_h=window[0], kernel_w=window[1], block=block, num_warps=4,
    )  # fmt: skip


class MaxPool(torch.autograd.Function):
    """Largest value of windows that do not overlap, on images in channels-last order."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, kernel: tuple[int, int]) -> Tensor:
        records, channels, height, width = images.shape
        rows, columns = height // kernel[0], width // kernel[1]
        outputs = torch.empty(
            (records, channels, rows, columns),
            dtype=images.dtype,
            device=images.device,
            memory_format=torch.channels_last,
        )
        winners = torch.empty((records, rows, columns, channels), dtype=torch.int8, device=images.device)
        _by_window(device_code.pool, outputs, winners, images, kernel)
        ctx.save_for_backward(winners)
        ctx.size, ctx.kernel = (height, width), kernel
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (winners,) = ctx.saved_tensors
        (height, width), kernel = ctx.size, ctx.kernel
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        records, channels, rows, columns = gradient.shape
        # Where windows leave a rest at the edge, nobody writes there.
        whole = (height, width) == (rows * kernel[0], columns * kernel[1])
        outputs = (torch.empty if whole else torch.zeros)(
            (records, height, width, channels), dtype=gradient.dtype, device=gradient.device
        ).permute(0, 3, 1, 2)
        _by_window(device_code.unpool, gradient, winners, outputs, kernel)
        return outputs, None
