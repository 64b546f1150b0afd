"""The kernels of `formed_twice.py`, as LLVM's code: every record's gradient of a convolution, never kept.

Both kernels form a record's gradient by the same instructions in the same order, block by block in registers:
one takes its norm, the other adds it up. As in `llvm_code.py`, each has above it the loop that it computes.
"""

from dataclasses import dataclass

from llvmlite import ir

from coterie.training import llvm_builder
from coterie.training.llvm_builder import DOUBLE, DOUBLES, FLOATS, INT, Builder

OUTPUTS = 4
"""Output channels of a block."""
_HALF = 8
"""Numbers of a vector that become float64 together."""
_FUSED = ("contract",)


def channels_of_block() -> int:
    """Input channels of a block: with the outputs, as many sums as registers hold beside what they add."""
    lanes, registers = llvm_builder.machine()
    return lanes * (4 if registers > 16 else 2)


@dataclass(frozen=True)
class Taps:
    """A convolution on padded images, whose channels lie block by block (`FormedTwice`).

    Args:
        height, width: of the kernel.
        columns: of the outputs.
        pitch: pixels in a line of the padded images.
        stride, dilation: down and across, in pixels.
    """

    height: int
    width: int
    channels: int
    outer: int
    columns: int
    pitch: int
    stride: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def count(self) -> int:
        """Of the kernel's pixels."""
        return self.height * self.width

    def offset(self, b: Builder, tap: ir.Value) -> ir.Value:
        """Numbers of a block from a patch's first pixel to the one that this pixel of the kernel sees."""
        down, across = b.udiv(tap, INT(self.width)), b.urem(tap, INT(self.width))
        pixels = b.index((down, self.dilation[0] * self.pitch), (across, self.dilation[1]))
        return b.mul(pixels, INT(channels_of_block()))


class _Former(Builder):
    """Forms blocks of a record's gradient: some outputs by some channels, at one pixel of the kernel.

    Arguments of its kernel: images, gradient, others; then how many records, images of a record, lines of
    outputs, and pixels of an image.
    """

    def __init__(self, name: str, taps: Taps, *others: ir.Type) -> None:
        super().__init__(name, llvm_builder.machine()[0], FLOATS, FLOATS, *others, *[INT] * 4)
        self.taps, self.vectors = taps, channels_of_block() // self.vector.count
        self.images, self.gradient, *self.others = self.function.args[:-4]
        self.records, self.views, self.lines, self.pixels = self.function.args[-4:]

    def formed(
        self, record: ir.Value, outputs: ir.Value, channels: ir.Value, tap: ir.Value
    ) -> list[ir.Value]:
        """Channels of one block, output by output, as vectors of float64.

        Each number is the sum over the places in their order, by fused products in float32.
        """
        taps, lanes, width = self.taps, self.vector.count, channels_of_block()
        parts = [(i, j) for i in range(OUTPUTS) for j in range(self.vectors)]
        with self.count(self.views, *[self.zero] * len(parts)) as views:
            view = self.index((record, self.views), views.turn)
            image = self.index((view, taps.channels // width), channels)
            start = self.index((image, self.mul(self.pixels, INT(width))), taps.offset(self, tap))
            slope = self.index((view, taps.outer // OUTPUTS), outputs)
            with self.count(self.lines, *views.values) as lines:
                line = self.index(start, (lines.turn, taps.stride[0] * taps.pitch * width))
                first = self.index((self.index((slope, self.lines), lines.turn), taps.columns * OUTPUTS))
                with self.count(INT(taps.columns), *lines.values) as loop:
                    pixel = self.index(line, (loop.turn, taps.stride[1] * width))
                    where = self.index(first, (loop.turn, OUTPUTS))
                    seen = [self.read_vector(self.images, pixel, INT(j * lanes)) for j in range(self.vectors)]
                    slopes = [self.spread(self.read(self.gradient, where, INT(i))) for i in range(OUTPUTS)]
                    loop.values = self.multiply_add(
                        [slopes[i] for i, _ in parts], [seen[j] for _, j in parts], loop.values
                    )
                lines.values = loop.values
            views.values = lines.values
        return [self._wide(vector, first) for vector in views.values for first in range(0, lanes, _HALF)]

    def _wide(self, vector: ir.Value, first: int) -> ir.Value:
        places = ir.Constant(ir.VectorType(ir.IntType(32), _HALF), list(range(first, first + _HALF)))
        return self.fpext(self.shuffle_vector(vector, vector, places), ir.VectorType(DOUBLE, _HALF))

    def add_product(self, left: ir.Value, right: ir.Value, total: ir.Value) -> ir.Value:
        return self.fadd(total, self.fmul(left, right, flags=_FUSED), flags=_FUSED)


def row_norms(taps: Taps) -> ir.Function:
    """Squared norm of each record's gradient, in float64.

    images (records, views, blocks, lines, pitch, channels of a block), gradient (records, views, blocks,
    lines, columns, outputs of a block) with the lines and columns of the outputs, squares (records,); the
    last line is that of `row_sums`::

        for record in range(records):
            formed = np.zeros((outer, height, width, channels), np.float32)
            for view, y, x in np.ndindex(gradient.shape[1], *gradient.shape[3:5]):
                slopes = gradient[record, view, :, y, x].reshape(outer, 1)
                for i, j in np.ndindex(height, width):
                    pixel = images[record, view, :, y * down + i * lower, x * across + j * further]
                    formed[:, i, j] += slopes * pixel.reshape(channels)
            squares[record] = (formed.astype(np.float64) ** 2).sum()
            total += scales[record] * formed.astype(np.float64)
    """
    b = _Former("row_norms", taps, DOUBLES)
    (squares,), width = b.others, channels_of_block()
    nothing = ir.Constant(ir.VectorType(DOUBLE, _HALF), [0.0] * _HALF)
    with b.count(b.records) as records:
        with b.count(INT(taps.channels // width), *[nothing] * _HALF) as channels:
            with b.count(INT(taps.outer // OUTPUTS), *channels.values) as outputs:
                with b.count(INT(taps.count), *outputs.values) as pixels:
                    block = b.formed(records.turn, outputs.turn, channels.turn, pixels.turn)
                    for at, value in enumerate(block):
                        before = pixels.values[at % _HALF]
                        pixels.values[at % _HALF] = b.add_product(value, value, before)
                outputs.values = pixels.values
            channels.values = outputs.values
        b.store(b.total(channels.values), b.at(squares, records.turn))
    return b.finished()


def row_sums(taps: Taps) -> ir.Function:
    """Sum of the records' gradients, each times its scale, in float64: what `row_norms` forms, formed again.

    scales (records,), total (outer, height, width, channels); scratch has room for the kernel's pixels by a
    block; the loop is that of `row_norms`. Records whose scale is zero are left out.
    """
    b = _Former("row_sums", taps, DOUBLES, DOUBLES, DOUBLES)
    (scales, scratch, total), width = b.others, channels_of_block()
    nothing = ir.Constant(ir.VectorType(DOUBLE, _HALF), [0.0] * _HALF)
    numbers = OUTPUTS * width
    with b.count(INT(taps.channels // width)) as channels, b.count(INT(taps.outer // OUTPUTS)) as outputs:
        output, channel = b.mul(outputs.turn, INT(OUTPUTS)), b.mul(channels.turn, INT(width))
        with b.count(INT(taps.count * numbers // _HALF)) as loop:
            b.write_vector(nothing, scratch, b.mul(loop.turn, INT(_HALF)))
        with b.count(b.records) as records:
            scale = b.read(scales, records.turn)
            with b.if_then(b.fcmp_unordered("!=", scale, DOUBLE(0.0))):
                spread = b.spread(scale, _HALF)
                with b.count(INT(taps.count)) as pixels:
                    first = b.mul(pixels.turn, INT(numbers))
                    block = b.formed(records.turn, outputs.turn, channels.turn, pixels.turn)
                    for at, value in enumerate(block):
                        place = INT(at * _HALF)
                        before = b.read_vector(scratch, first, place, lanes=_HALF)
                        b.write_vector(b.add_product(spread, value, before), scratch, first, place)
        with b.count(INT(taps.count)) as pixels:
            first = b.mul(pixels.turn, INT(numbers))
            for own in range(OUTPUTS):
                pixel = b.index((b.index(output, own), taps.count), pixels.turn)
                row = b.index((pixel, taps.channels), channel)
                for part in range(0, width, _HALF):
                    value = b.read_vector(scratch, first, INT(own * width + part), lanes=_HALF)
                    b.write_vector(value, total, row, INT(part))
    return b.finished()
