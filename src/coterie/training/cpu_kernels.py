"""Kernels for a processor, where torch has no operation that skips what is zero.

Behind a max pool, a convolution's gradient is zero but at one place of every window: of the work on the way
back of a two by two pool, three quarters multiply by zero. LLVM, which comes as a wheel, compiles these
kernels for the processor at hand when they are first needed, in a tenth of a second. Where it is missing, or
the processor has no wide registers, everything runs on torch's operations, which are their twins in tests.
"""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

try:
    from coterie.training import llvm_code as machine_code

    LANES = machine_code.machine()[0]
except (ImportError, OSError, RuntimeError):  # no LLVM, none that loads, or none that knows this processor
    machine_code = None  # type: ignore[assignment]
    LANES = 0

_GROUPS = (32, 16, 8)
_MOST_PLACES = 9
_LONGEST = 2**12
"""Operations in a kernel's innermost loop, which is unrolled: more would take long to compile."""
_SLACK = 16
"""Numbers after the last record that a vector may reach into."""


def available() -> bool:
    """Whether these kernels can run here at all."""
    return machine_code is not None


class SparseConvolution:
    """The way back through a convolution of stride 1 that a max pool follows, for one size of images.

    Args:
        kernel: height and width.
        columns: of the outputs.
        padding: lines and columns of zeros around the inputs.
        window: of the pool; windows do not overlap.
    """

    def __init__(
        self,
        kernel: tuple[int, int],
        channels: int,
        columns: int,
        padding: tuple[int, int],
        window: tuple[int, int],
    ) -> None:
        self._kernel = kernel
        self._channels = channels
        self._columns = columns
        self._padding = padding
        self._window = window

    def rows(self, images: Tensor, gradient: Tensor, places: Tensor) -> Tensor:
        """Every record's weight gradient: (records, outer, kernel height, kernel width, channels).

        Args:
            images: the inputs, (records, height, width, channels).
            gradient: at the pooled outputs, (records, rows, columns, outer).
            places: of the outputs that each pooled output came from, within their image; of the same shape.
        """
        line = self._kernel[1] * self._channels
        covered = -(-line // _lanes(line)) * _lanes(line)
        padded, buffer = padded_images(images, self._padding)
        formed = images.new_empty(len(images), gradient.shape[3], self._kernel[0], covered)
        kernel = _compiled_rows(self._kernel, self._channels, self._columns)
        _run(kernel, buffer, gradient, places, formed, padded)
        if covered != line:
            formed = formed[..., :line].contiguous()
        return formed.view(*formed.shape[:2], *self._kernel, self._channels)

    def goes_back(self, outer: int) -> bool:
        """Whether `back` can be had: where vectors cover a line of the kernel, and groups the outputs.

        Otherwise vectors would reach into what follows a record, and that is another's.
        """
        line = self._kernel[1] * self._channels
        few = self._window[0] * self._window[1] <= _MOST_PLACES
        return line % _lanes(line) == 0 and outer % _GROUPS[-1] == 0 and few

    def back(self, images: Tensor, gradient: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """The gradient at the inputs, of their shape; arguments as in `rows`.

        Args:
            weights: (outer, kernel height, kernel width, channels).
        """
        padded, buffer = zeros_around(images, self._padding)
        kernel = _compiled_back(
            self._kernel, self._channels, self._columns, self._window, gradient.shape[2], gradient.shape[3]
        )
        _run(kernel, weights.contiguous(), gradient, places, buffer, padded)
        (high, wide), (_, rows, columns, _) = self._padding, images.shape
        return padded[:, high : high + rows, wide : wide + columns]


def _run(
    kernel: Callable[..., None],
    first: Tensor,
    gradient: Tensor,
    places: Tensor,
    last: Tensor,
    padded: Tensor,
) -> None:
    gradient, places = gradient.contiguous(), places.contiguous()
    assert {part.dtype for part in (first, gradient, last)} == {torch.float32}
    assert places.dtype == torch.int64
    assert places.shape == gradient.shape
    records, rows, columns, outer = gradient.shape
    if gradient.numel() > 0:
        parts = (part.data_ptr() for part in (first, gradient, places, last))
        kernel(*parts, records, rows * columns, outer, padded[0].numel())


class PooledConvolution:
    """A convolution of stride 1 and few channels with the max pool after it, for one size of images.

    Args:
        kernel: height and width.
        outer: number of outputs, in whole vectors (`suits`).
        window: of the pool; windows do not overlap.
        relu: whether a ReLU follows.
        size: height and width of the images.
    """

    def __init__(
        self,
        kernel: tuple[int, int],
        channels: int,
        outer: int,
        padding: tuple[int, int],
        window: tuple[int, int],
        size: tuple[int, int],
        *,
        relu: bool,
    ) -> None:
        rows, columns = (side + 2 * p - k + 1 for side, p, k in zip(size, padding, kernel, strict=True))
        self._padding = padding
        self._pooled = (rows // window[0], columns // window[1])
        self._outer = outer
        self._run = _compiled_pool(kernel, channels, outer, window, self._pooled, columns, relu)

    @staticmethod
    def suits(kernel: tuple[int, int], channels: int, outer: int, window: tuple[int, int]) -> bool:
        """Whether vectors hold the outputs exactly, and a window's code is short, as are its sums."""
        places = math.prod(window)
        length = math.prod(kernel) * channels * places * outer // 8
        return outer % 8 == 0 and places <= _MOST_PLACES and length <= _LONGEST

    def run(self, images: Tensor, weights: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Pooled outputs, and the place of each within the outputs of its image.

        Args:
            images: (records, height, width, channels).
            weights: (outer, channels, kernel height, kernel width).

        Returns:
            both (records, rows, columns, outer).
        """
        padded, _ = padded_images(images, self._padding)
        taps = weights.permute(2, 3, 1, 0).contiguous()
        bias = weights.new_zeros(self._outer) if bias is None else bias.contiguous()
        assert {part.dtype for part in (padded, taps, bias)} == {torch.float32}
        outputs = images.new_empty(len(images), *self._pooled, self._outer)
        places = torch.empty(outputs.shape, dtype=torch.int64)
        if outputs.numel() > 0:
            parts = (part.data_ptr() for part in (padded, taps, bias, outputs, places))
            self._run(*parts, len(images), padded[0].numel())
        return outputs, places


# --- float64 sums of float32 rows ---------------------------------------------------------------------

_BLOCK = 64


def suits_rows(rows: Tensor) -> bool:
    """Whether the kernels for sums of rows take these: (records, numbers), in whole blocks."""
    whole = rows.numel() > 0 and rows.shape[1] % _BLOCK == 0
    return whole and rows.dtype == torch.float32 and rows.is_contiguous()


def squared_norms(rows: Tensor) -> Tensor:
    """Squared norm of each row, in float64."""
    found = torch.empty(len(rows), dtype=torch.float64)
    _compiled_sums()[0](rows.data_ptr(), found.data_ptr(), len(rows), rows.shape[1] // _BLOCK)
    return found


def scaled_sum(rows: Tensor, scales: Tensor) -> Tensor:
    """Sum of the rows, each times its scale, in float64."""
    scales = scales.contiguous()
    assert scales.dtype == torch.float64
    assert len(scales) == len(rows)
    total = torch.empty(rows.shape[1], dtype=torch.float64)
    parts = (part.data_ptr() for part in (rows, scales, total))
    _compiled_sums()[1](*parts, len(rows), rows.shape[1] // _BLOCK)
    return total


@cache
def _compiled_sums() -> tuple[Callable[..., None], Callable[..., None]]:
    find = machine_code.compiled(machine_code.row_sums(_BLOCK))
    return find("squares", 2, 2), find("scaled", 3, 2)


# --- convolutions and pools ---------------------------------------------------------------------------


def padded_images(images: Tensor, padding: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Images with zeros around them, and their memory, which goes on as far as a vector may reach."""
    zeros, buffer = zeros_around(images, padding)
    (high, wide), (_, rows, columns, _) = padding, images.shape
    zeros[:, high : high + rows, wide : wide + columns] = images
    return zeros, buffer


def zeros_around(images: Tensor, padding: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Zeros of the shape of padded images, and the memory in which they lie."""
    records, rows, columns, channels = images.shape
    shape = (records, rows + 2 * padding[0], columns + 2 * padding[1], channels)
    numbers = math.prod(shape)
    buffer = images.new_zeros(numbers + _SLACK)
    return buffer[:numbers].view(shape), buffer


@cache
def _compiled_pool(
    kernel: tuple[int, int],
    channels: int,
    outer: int,
    window: tuple[int, int],
    pooled: tuple[int, int],
    columns: int,
    relu: bool,
) -> Callable[..., None]:
    module = machine_code.pooled_convolution(
        kernel, channels, outer, window, pooled, columns, _lanes(outer), relu=relu
    )
    return machine_code.compiled(module)("pooled", 5, 2)


def _lanes(line: int) -> int:
    """Numbers in the vectors that cover a line of so many: exactly, where that is possible."""
    for lanes in (LANES, 8):
        if line % lanes == 0:
            return lanes
    return LANES if line > 8 else 8


def _lines(kernel: tuple[int, int], channels: int, columns: int) -> "machine_code.Lines":
    line = kernel[1] * channels
    lanes = _lanes(line)
    vectors = -(-line // lanes)
    return machine_code.Lines(
        kernel[0], line, vectors, lanes, channels, columns, padded_columns=columns + kernel[1] - 1
    )


@cache
def _compiled_rows(kernel: tuple[int, int], channels: int, columns: int) -> Callable[..., None]:
    module = machine_code.weight_rows(_lines(kernel, channels, columns))
    return machine_code.compiled(module)("rows", 4, 4)


@cache
def _compiled_back(
    kernel: tuple[int, int],
    channels: int,
    columns: int,
    window: tuple[int, int],
    pooled_columns: int,
    outer: int,
) -> Callable[..., None]:
    group = next(size for size in _GROUPS if outer % size == 0)
    lines = _lines(kernel, channels, columns)
    module = machine_code.input_gradient(lines, window, pooled_columns, outer, group)
    return machine_code.compiled(module)("back", 4, 4)
