"""Kernels for a processor, where torch's operations do more than is needed, or write down what nobody reads.

Norms and sums of rows in float64; sums of gradients of large convolutions, which nobody keeps
(`formed_once.py`); the whole step of a narrow head (`narrow_head.py`); group norms with every record's
gradients; and convolutions before a max pool.
Behind a max pool, a convolution's gradient is zero but at one place of every window: of the work on the way
back of a two by two pool, three quarters multiply by zero. LLVM, which comes as a wheel with the extra
`fast`, compiles these kernels for the processor at hand when they are first needed, in a tenth of a second.
Where it is missing, or the processor has no wide registers, everything runs on torch's operations, which are
their twins in tests. Sums then differ in their last bits; which of both a run uses is part of what its noise
and charges are bound to (`Learner.shape`), so a run that is resumed with the other pays for what it repeats.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.training.kernels import Geometry

try:
    from coterie.training import llvm_builder, llvm_code, llvm_head, llvm_norms, llvm_rows

    llvm_builder.machine()
    _FOUND = True
except (ImportError, OSError, RuntimeError):  # no LLVM, none that loads, or none that knows this processor
    _FOUND = False

_GROUPS = (32, 16, 8)
_MOST_PLACES = 9
_LONGEST = 2**12
"""Operations in a kernel's innermost loop, which is unrolled: more would take long to compile."""
_SLACK = 16
"""Numbers after the last record that a vector may reach into."""
_BLOCK = 64
"""Numbers of a row that are added up together."""


def available() -> bool:
    """Whether these kernels can run here at all."""
    return _FOUND


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions that torch's convolutions of bfloat16 use."""
    return _FOUND and llvm_builder.multiplies_bfloat16() and bool(torch.backends.mkldnn.enabled)


@dataclass(frozen=True)
class PooledConvolution:
    """A convolution of stride 1 with the max pool after it, whose windows do not overlap.

    Images are (records, height, width, channels), what is pooled is (records, rows, columns, outer).

    Args:
        kernel: height and width.
        padding: lines and columns of zeros around the images.
        window: of the pool.
    """

    kernel: tuple[int, int]
    channels: int
    outer: int
    padding: tuple[int, int]
    window: tuple[int, int]

    @property
    def runs_forward(self) -> bool:
        """Whether `forward` can be had: vectors hold the outputs exactly, and a window's code is short."""
        places = math.prod(self.window)
        length = math.prod(self.kernel) * self.channels * places * self.outer // 8
        return self.outer % 8 == 0 and places <= _MOST_PLACES and length <= _LONGEST

    def forward(
        self, images: Tensor, weights: Tensor, bias: Tensor | None, *, relu: bool
    ) -> tuple[Tensor, Tensor]:
        """Pooled outputs, and the place of each within the outputs of its image.

        Args:
            weights: (outer, channels, kernel height, kernel width).
            relu: whether a ReLU follows.
        """
        padded, _ = self._padded(images, filled=True)
        lines, rows = self._lines(images), images.shape[1] + 2 * self.padding[0] - self.kernel[0] + 1
        pooled = (rows // self.window[0], lines.columns // self.window[1])
        bias = weights.new_zeros(self.outer) if bias is None else bias
        taps = _checked("weights", weights.permute(2, 3, 1, 0), (*self.kernel, self.channels, self.outer))
        bias = _checked("bias", bias, (self.outer,))
        outputs = images.new_empty(len(images), *pooled, self.outer)
        places = _empty(*outputs.shape, dtype=torch.int64)
        if outputs.numel() > 0:
            run = llvm_builder.compiled(
                llvm_code.pooled_convolution, lines, self.outer, self.window, pooled, relu
            )
            run(*_addresses(padded, taps, bias, outputs, places), len(images), padded[0].numel())
        return outputs, places

    def weight_rows(self, images: Tensor, gradient: Tensor, places: Tensor) -> Tensor:
        """Every record's weight gradient: (records, outer, kernel height, kernel width, channels).

        Args:
            gradient: at the pooled outputs.
            places: of the outputs that each pooled output came from, as `forward` gives them.
        """
        padded, buffer = self._padded(images, filled=True)
        lines = self._lines(images)
        covered = lines.vectors * lines.lanes
        formed = images.new_empty(len(images), self.outer, self.kernel[0], covered)
        self._run((llvm_code.weight_rows, lines), buffer, gradient, places, formed, padded)
        if covered != lines.line:
            formed = formed[..., : lines.line].contiguous()
        return formed.view(*formed.shape[:2], *self.kernel, self.channels)

    @property
    def runs_back(self) -> bool:
        """Whether `input_gradient` can be had: vectors cover a line of the kernel, and groups the outputs.

        Otherwise vectors would reach into what follows a record, and that is another's.
        """
        line = self.kernel[1] * self.channels
        few = math.prod(self.window) <= _MOST_PLACES
        return line % llvm_builder.lanes_for(line) == 0 and self.outer % _GROUPS[-1] == 0 and few

    def input_gradient(self, images: Tensor, gradient: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """The gradient at the images, of their shape; arguments as in `weight_rows`.

        Args:
            weights: (outer, kernel height, kernel width, channels).
        """
        padded, buffer = self._padded(images, filled=False)
        group = next(size for size in _GROUPS if self.outer % size == 0)
        sizes = (self._lines(images), self.window, gradient.shape[2], self.outer, group)
        weights = _checked("weights", weights, (self.outer, *self.kernel, self.channels))
        self._run((llvm_code.input_gradient, *sizes), weights, gradient, places, buffer, padded)
        (high, wide), (_, rows, columns, _) = self.padding, images.shape
        return padded[:, high : high + rows, wide : wide + columns]

    def _run(
        self,
        made: tuple[Any, ...],
        first: Tensor,
        gradient: Tensor,
        places: Tensor,
        last: Tensor,
        padded: Tensor,
    ) -> None:
        records, rows, columns, _ = shape = (len(padded), *gradient.shape[1:3], self.outer)
        gradient = _checked("gradient", gradient, shape)
        places = _checked("places", places, shape, torch.int64)
        if gradient.numel() > 0:
            numbers = records, rows * columns, self.outer, padded[0].numel()
            llvm_builder.compiled(*made)(*_addresses(first, gradient, places, last), *numbers)

    def _lines(self, images: Tensor) -> "llvm_code.Lines":
        columns = images.shape[2] + 2 * self.padding[1] - self.kernel[1] + 1
        return llvm_code.Lines(*self.kernel, self.channels, columns)

    def _padded(self, images: Tensor, *, filled: bool) -> tuple[Tensor, Tensor]:
        """Images with zeros around them, or zeros alone; and their memory, as far as vectors reach."""
        records, rows, columns, _ = images.shape
        images = _checked("images", images, (records, rows, columns, self.channels), copied=False)
        (high, wide), shape = self.padding, list(images.shape)
        shape[1], shape[2] = rows + 2 * high, columns + 2 * wide
        buffer = images.new_zeros(math.prod(shape) + _SLACK)
        padded = buffer[:-_SLACK].view(shape)
        if filled:
            padded[:, high : high + rows, wide : wide + columns] = images
        return padded, buffer


# --- float64 sums of float32 rows ---------------------------------------------------------------------


def suits_rows(rows: Tensor) -> bool:
    """Whether the kernels for sums of rows take these: (records, numbers), in whole blocks."""
    whole = rows.numel() > 0 and rows.shape[1] % _BLOCK == 0
    return whole and rows.dtype == torch.float32 and rows.is_contiguous()


def squared_norms(rows: Tensor) -> Tensor:
    """Squared norm of each row, in float64."""
    rows, blocks = _whole_blocks(rows)
    found = _empty(len(rows), dtype=torch.float64)
    llvm_builder.compiled(llvm_code.squared_norms, _BLOCK)(*_addresses(rows, found), len(rows), blocks)
    return found


def scaled_sum(rows: Tensor, scales: Tensor) -> Tensor:
    """Sum of the rows, each times its scale, in float64."""
    rows, blocks = _whole_blocks(rows)
    scales = _checked("scales", scales, (len(rows),), torch.float64)
    total = _empty(rows.shape[1], dtype=torch.float64)
    llvm_builder.compiled(llvm_code.scaled_sum, _BLOCK)(*_addresses(rows, scales, total), len(rows), blocks)
    return total


def _whole_blocks(rows: Tensor) -> tuple[Tensor, int]:
    if not suits_rows(rows):
        found = f"{rows.dtype} {tuple(rows.shape)} with strides {rows.stride()}"
        raise ValueError(f"rows: {found}; allowed: float32 (records, a multiple of {_BLOCK}), contiguous")
    return _checked("rows", rows, tuple(rows.shape)), rows.shape[1] // _BLOCK


# --- gradients of convolutions, formed and not kept ----------------------------------------------------


def suits_blocks(channels: int, outer: int) -> bool:
    """Whether the kernels that form gradients in blocks take a convolution of so many channels."""
    return _FOUND and channels % llvm_rows.channels_of_block() == 0 and outer % llvm_rows.OUTPUTS == 0


def image_blocks(images: Tensor, padding: tuple[int, int]) -> Tensor:
    """Images in the order in which the kernels read them, with zeros around.

    Args:
        images: (records, channels, lines, columns).

    Returns:
        (records, blocks, lines, columns, channels of a block): pixels of a block lie one after the other.
        Were all channels of a pixel together, those of one block would be so far apart, by powers of two,
        that few of them stay in the nearest cache at a time.
    """
    (records, channels, lines, columns), (high, wide) = images.shape, padding
    width = llvm_rows.channels_of_block()
    padded = images.new_zeros(records, channels // width, lines + 2 * high, columns + 2 * wide, width)
    padded[:, :, high : high + lines, wide : wide + columns] = _in_blocks(images, width)
    return padded


def slope_blocks(gradient: Tensor) -> Tensor:
    """Gradients, as images, in blocks of outputs: (records, blocks, lines, columns, outputs of a block)."""
    return _in_blocks(gradient, llvm_rows.OUTPUTS).contiguous()


def _in_blocks(images: Tensor, width: int) -> Tensor:
    records, channels, lines, columns = images.shape
    return images.reshape(records, channels // width, width, lines, columns).permute(0, 1, 3, 4, 2)


def add_row_sums(images: Tensor, gradient: Tensor, scales: Tensor, geometry: Geometry, total: Tensor) -> None:
    """Add the sum of the records' weight gradients, each times its scale, to float64 numbers.

    Args:
        images, gradient: as `image_blocks` and `slope_blocks` lay them out, by view: (records, views, ...);
            both float32, or both bfloat16.
        total: the weight's numbers in their own order, flat.
    """
    in_pairs = gradient.shape[4] % 2 == 0 and llvm_builder.multiplies_bfloat16()
    if images.dtype == torch.bfloat16 and not in_pairs:
        images, gradient = images.float(), gradient.float()  # the same numbers
    taps, given, numbers = _blocks(images, gradient, geometry)
    scales = _checked("scales", scales, (len(images),), torch.float64)
    total = _added_to(total, taps.outer * taps.channels * taps.count)
    room = taps.count * llvm_rows.OUTPUTS * llvm_rows.channels_of_block()
    few, every = _empty(room), _empty(room, dtype=torch.float64)
    if len(images) > 0:
        run = llvm_builder.compiled(llvm_rows.row_sums, taps)
        run(*_addresses(*given, scales, few, every, total), *numbers)


def _blocks(
    images: Tensor, gradient: Tensor, geometry: Geometry
) -> "tuple[llvm_rows.Taps, tuple[Tensor, Tensor], tuple[int, ...]]":
    records, views, blocks, height, width, of_block = images.shape
    own, outputs = llvm_rows.channels_of_block(), llvm_rows.OUTPUTS
    channels, outer = blocks * of_block, gradient.shape[2] * outputs
    lines, columns = replace(geometry, padding=(0, 0)).output_size(height, width)
    if min(views, channels, outer, lines, columns) < 1:  # loops of kernels run once, whatever there is
        found = f"{views} views of {lines} x {columns} places, {channels} channels and {outer} outputs"
        raise ValueError(f"images: {found}; allowed: some of each")
    rounded = images.dtype == torch.bfloat16
    kind = torch.bfloat16 if rounded else torch.float32
    images = _checked("images", images, (records, views, channels // own, height, width, own), kind)
    shape = (records, views, outer // outputs, lines, columns, outputs)
    gradient = _checked("gradient", gradient, shape, kind)
    if rounded:  # two places of an output beside each other
        gradient = gradient.view(*shape[:4], columns // 2, 2, outputs).transpose(5, 6).contiguous()
    high = geometry.padding[0]
    taps = llvm_rows.Taps(
        *geometry.kernel,
        channels,
        outer,
        lines,
        columns,
        pitch=width,
        inside=(high, height - high),
        stride=geometry.stride,
        dilation=geometry.dilation,
        rounded=rounded,
    )
    return taps, (images, gradient), (records, views, height * width)


# --- the whole step of a small dense layer ------------------------------------------------------------


def add_head_sum(
    inputs: Tensor,
    targets: Tensor,
    shape: tuple[int, int],
    weight: tuple[Tensor, Tensor],
    bias: tuple[Tensor, Tensor] | None,
    most: float,
    *,
    classes: bool,
) -> None:
    """Add each record's gradient, of at most this norm, to sums in float64.

    Args:
        shape: outputs and inputs of the layer.
        weight, bias: their values, flat, and the sums.
        classes: whether the gradient is that of a softmax's cross entropy; else of half an error's square.
    """
    (outer, inner), records = shape, len(inputs)
    inputs = _checked("inputs", inputs, (records, inner))
    targets = _checked("targets", targets, (records,), torch.int64 if classes else torch.float32)
    values, sums = [], []
    for part, size in ((weight, outer * inner), (bias, outer)):
        if part is not None:
            values.append(_checked("values", part[0], (size,)))
            sums.append(_added_to(part[1], size))
    if bias is None:  # whose addresses are not looked at
        values, sums = 2 * values, 2 * sums
    scratch = _empty(inner + outer, dtype=torch.float64)
    if records > 0:
        run = llvm_builder.compiled(llvm_head.head_sum, outer, inner, bias is not None, classes)
        run(*_addresses(inputs, targets, *values, scratch, *sums), records, most)


# --- group norms ----------------------------------------------------------------------------------------


def suits_norm(images: Tensor) -> bool:
    """Whether these are images that the kernels of group norms take: vectors hold their channels exactly."""
    some = images.dim() == 4 and images.numel() > 0 and images.shape[1] % 8 == 0
    return _FOUND and some and images.device.type == "cpu" and images.dtype in (torch.float32, torch.bfloat16)


def normalise(
    images: Tensor, weight: Tensor, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise groups of channels of each record, then scale and shift every channel.

    Args:
        images: (records, channels, lines, columns) in float32 or bfloat16.
        weight, bias: (channels,).

    Returns:
        what came out, in float32 and channels-last order; and by record and group, in float64, the mean and
        the inverse of the deviation.
    """
    normed, (records, pixels, channels), images = _normed(images, groups)
    weight = _checked("weight", weight, (channels,))
    bias = weight.new_zeros(channels) if bias is None else _checked("bias", bias, (channels,))
    outputs = _empty(*images.shape)
    means, rates = (_empty(records, groups, dtype=torch.float64) for _ in range(2))
    scratch, run = _scratch(channels), llvm_builder.compiled(llvm_norms.normalise, normed)
    given = _addresses(images, weight, bias, outputs, means, rates)
    run(*given, eps, *_addresses(*scratch), records, pixels)
    return outputs.permute(0, 3, 1, 2), means, rates


def normalise_back(
    images: Tensor, gradient: Tensor, weight: Tensor, means: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The way back: gradients at the images, in their type, and by record at weight and bias.

    Args:
        images, weight: of `normalise`.
        means, rates: as it returned them.
    """
    groups = means.shape[1]
    normed, (records, pixels, channels), images = _normed(images, groups)
    gradient = _checked("gradient", gradient.permute(0, 2, 3, 1), tuple(images.shape))
    weight = _checked("weight", weight, (channels,))
    means, rates = (_checked("means", part, (records, groups), torch.float64) for part in (means, rates))
    outputs = torch.empty_like(images)
    weight_rows, bias_rows = (_empty(records, channels) for _ in range(2))
    scratch, run = _scratch(channels), llvm_builder.compiled(llvm_norms.normalise_back, normed)
    given = _addresses(images, gradient, weight, means, rates, outputs, weight_rows, bias_rows)
    run(*given, *_addresses(*scratch), records, pixels)
    return outputs.permute(0, 3, 1, 2), weight_rows, bias_rows


def _normed(images: Tensor, groups: int) -> "tuple[llvm_norms.Normed, tuple[int, int, int], Tensor]":
    """What the kernels are made for, the numbers of records, pixels and channels, and images as they lie."""
    if not suits_norm(images) or images.shape[1] % groups:
        found = f"{images.dtype} {tuple(images.shape)} in {groups} groups"
        raise ValueError(f"images: {found}; allowed: some, of whole vectors and groups of channels, on cpu")
    records, channels, lines, columns = images.shape
    shape = (records, lines, columns, channels)
    images = _checked("images", images.permute(0, 2, 3, 1), shape, images.dtype)
    rounded = images.dtype == torch.bfloat16
    return llvm_norms.Normed(channels, groups, rounded), (records, lines * columns, channels), images


def _scratch(channels: int) -> tuple[Tensor, Tensor]:
    return _empty(2, channels, dtype=torch.float64), _empty(3, channels)


# --- what a kernel reads by address -------------------------------------------------------------------


def _checked(
    name: str,
    values: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    copied: bool = True,
) -> Tensor:
    """The values in one piece of memory; a kernel would read whatever lies there, so all is checked here."""
    if values.dtype != dtype or values.device.type != "cpu":
        raise TypeError(f"{name}: {values.dtype} on {values.device}; allowed: {dtype} on cpu")
    if values.shape != shape:
        raise ValueError(f"{name}: shape {tuple(values.shape)}; allowed: {shape}")
    return values.contiguous() if copied else values


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Room for what a kernel writes, whatever type and device somebody made torch's own choice."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _added_to(sums: Tensor, numbers: int) -> Tensor:
    """Sums in float64 that a kernel adds to where they are."""
    sums = _checked("sums", sums, (numbers,), torch.float64, copied=False)
    if not sums.is_contiguous():  # where numbers would be added between them
        raise ValueError(f"sums: strides {sums.stride()}; allowed: one piece of memory")
    return sums


def _addresses(*parts: Tensor) -> list[int]:
    return [part.data_ptr() for part in parts]
