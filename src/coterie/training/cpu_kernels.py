"""Kernels for a processor, where torch has no operation that skips what is zero.

Behind a max pool, a convolution's gradient is zero but at one place of every window: of the work on the way
back of a two by two pool, three quarters multiply by zero. LLVM, which comes as a wheel, compiles these
kernels for the processor at hand when they are first needed, in a tenth of a second. Where it is missing, or
the processor has no wide registers, everything runs on torch's operations, which are their twins in tests.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

try:
    from coterie.training import llvm_code as machine_code

    LANES = machine_code.machine()[1]
except ImportError:
    machine_code = None  # type: ignore[assignment]
    LANES = 0

_SLACK = 16
"""Numbers after the last record that a vector may reach into."""


def available() -> bool:
    """Whether these kernels can run here at all."""
    return machine_code is not None


class SparseConvolution:
    """The way back through a convolution of stride 1 that a max pool follows, for one kernel and image size.

    Args:
        kernel: height and width.
        columns: of the outputs.
        padding: lines and columns of zeros around the inputs.
    """

    def __init__(
        self, kernel: tuple[int, int], channels: int, columns: int, padding: tuple[int, int]
    ) -> None:
        self._height, self._width = kernel
        self._channels = channels
        self._padding = padding
        self._line = kernel[1] * channels
        self._lanes = _lanes(self._line)
        self._vectors = -(-self._line // self._lanes)
        padded_columns = columns + kernel[1] - 1
        self._rows, self._back = _compiled(
            kernel[0], self._line, self._vectors, self._lanes, channels, columns, padded_columns
        )

    @staticmethod
    def goes_back(kernel: tuple[int, int], channels: int) -> bool:
        """Whether the gradient at the inputs can be had: where vectors cover a line of the kernel exactly.

        Otherwise they would reach into what follows a record, and that is another's.
        """
        line = kernel[1] * channels
        return line % _lanes(line) == 0

    def rows(self, images: Tensor, gradient: Tensor, places: Tensor) -> Tensor:
        """Every record's weight gradient: (records, outer, kernel height, kernel width, channels).

        Args:
            images: the inputs, (records, height, width, channels).
            gradient: at the pooled outputs, (records, rows, columns, outer).
            places: of the outputs that each pooled output came from, within their image; of the same shape.
        """
        gradient, places = gradient.contiguous(), places.contiguous()
        records, outer = len(gradient), gradient.shape[3]
        padded, buffer = self._empty(images)
        high, wide = self._padding
        _, rows, columns, _ = images.shape
        padded[:, high : high + rows, wide : wide + columns] = images
        covered = self._vectors * self._lanes
        formed = images.new_empty(records, outer, self._height, covered)
        self._run(self._rows, buffer, gradient, places, formed, padded)
        if covered != self._line:
            formed = formed[..., : self._line].contiguous()
        return formed.view(records, outer, self._height, self._width, self._channels)

    def back(self, images: Tensor, gradient: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """The gradient at the inputs, of their shape; arguments as in `rows`.

        Args:
            weights: (outer, kernel height, kernel width, channels).
        """
        weights, gradient, places = weights.contiguous(), gradient.contiguous(), places.contiguous()
        padded, buffer = self._empty(images)
        self._run(self._back, weights, gradient, places, buffer, padded)
        (high, wide), (_, rows, columns, _) = self._padding, images.shape
        return padded[:, high : high + rows, wide : wide + columns]

    def _empty(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Zeros of the shape of the padded images, and the memory in which they lie."""
        records, rows, columns, channels = images.shape
        shape = (records, rows + 2 * self._padding[0], columns + 2 * self._padding[1], channels)
        numbers = shape[0] * shape[1] * shape[2] * shape[3]
        buffer = images.new_zeros(numbers + _SLACK)
        return buffer[:numbers].view(shape), buffer

    def _run(
        self,
        kernel: Callable[..., None],
        first: Tensor,
        gradient: Tensor,
        places: Tensor,
        last: Tensor,
        padded: Tensor,
    ) -> None:
        kinds = {part.dtype for part in (first, gradient, last)}
        assert kinds == {torch.float32}
        assert places.dtype == torch.int64
        assert places.shape == gradient.shape
        records, rows, columns, outer = gradient.shape
        if gradient.numel() > 0:
            parts = (part.data_ptr() for part in (first, gradient, places, last))
            kernel(*parts, records, rows * columns, outer, padded[0].numel())


def _lanes(line: int) -> int:
    """Numbers in the vectors that cover a line of so many: exactly, where that is possible."""
    for lanes in (LANES, 8):
        if line % lanes == 0:
            return lanes
    return LANES if line > 8 else 8


@cache
def _compiled(
    height: int, line: int, vectors: int, lanes: int, channels: int, columns: int, padded_columns: int
) -> tuple[Callable[..., None], Callable[..., None]]:
    module = machine_code.sparse_convolution(height, line, vectors, lanes, channels, columns, padded_columns)
    find = machine_code.compiled(module)
    return find("rows", 4, 4), find("back", 4, 4)
