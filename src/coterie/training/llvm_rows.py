"""The kernel of `formed_once.py`, as LLVM's code: every record's gradient of a convolution, never kept.

It forms a record's gradient block by block in registers and adds it up. As in `llvm_code.py`, it has above it
the loop that it computes.
"""

from dataclasses import dataclass

from llvmlite import ir

from coterie.training import llvm_builder
from coterie.training.llvm_builder import DOUBLE, DOUBLES, FLOAT, FLOATS, INT, Builder

OUTPUTS = 4
"""Output channels of a block."""
TOGETHER = 4
"""Records whose scaled gradients are summed in float32 before they are added up in float64."""
_HALF = 8
"""Numbers of a vector that become float64 together."""
_SMALLEST = 2.0**-126
"""Scale below which float32 would round by more than its last bit: such a record is left out."""


def channels_of_block() -> int:
    """Input channels of a block: with the outputs, as many sums as registers hold beside what they add."""
    lanes, registers = llvm_builder.machine()
    return lanes * (4 if registers > 16 else 2)


@dataclass(frozen=True)
class Taps:
    """A convolution on padded images, whose channels lie block by block (`FormedOnce`).

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
        """Channels of one block, output by output, as vectors of float32.

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
        return views.values


def row_sums(taps: Taps) -> ir.Function:
    """Adds the sum of the records' gradients, each times its scale, to a total in float64.

    images (records, views, blocks, lines, pitch, channels of a block), gradient (records, views, blocks,
    lines, columns, outputs of a block) with the lines and columns of the outputs, scales (records,), total
    (outer, channels, height, width); there is room for the kernel's pixels by a block, for some records and
    for all. Records whose scale is zero are left out::

        for record in range(records):
            formed = np.zeros((outer, channels, height, width), np.float32)
            for view, y, x in np.ndindex(gradient.shape[1], *gradient.shape[3:5]):
                slopes = gradient[record, view, :, y, x].reshape(outer, 1)
                for i, j in np.ndindex(height, width):
                    pixel = images[record, view, :, y * down + i * lower, x * across + j * further]
                    formed[:, :, i, j] += slopes * pixel.reshape(channels)
            total += scales[record] * formed.astype(np.float64)
    """
    b = _Former("row_sums", taps, DOUBLES, FLOATS, DOUBLES, DOUBLES)
    (scales, some, all_of_them, total), width, lanes = b.others, channels_of_block(), b.vector.count
    numbers, nothing = OUTPUTS * width, ir.Constant(ir.VectorType(DOUBLE, _HALF), [0.0] * _HALF)
    with b.count(INT(taps.channels // width)) as channels, b.count(INT(taps.outer // OUTPUTS)) as outputs:
        with b.count(INT(taps.count * numbers // _HALF)) as loop:
            b.write_vector(nothing, all_of_them, b.mul(loop.turn, INT(_HALF)))
        with b.count(b.udiv(b.add(b.records, INT(TOGETHER - 1)), INT(TOGETHER))) as groups:
            with b.count(INT(taps.count * numbers // lanes)) as loop:
                b.write_vector(b.zero, some, b.mul(loop.turn, INT(lanes)))
            start = b.mul(groups.turn, INT(TOGETHER))
            left = b.sub(b.records, start)
            few = b.select(b.icmp_unsigned("<", left, INT(TOGETHER)), left, INT(TOGETHER))
            with b.count(few) as records:
                record = b.add(start, records.turn)
                scale = b.fptrunc(b.read(scales, record), FLOAT)
                with b.if_then(b.fcmp_ordered(">=", scale, FLOAT(_SMALLEST))):
                    spread = b.spread(scale)
                    with b.count(INT(taps.count)) as pixels:
                        first = b.mul(pixels.turn, INT(numbers))
                        block = b.formed(record, outputs.turn, channels.turn, pixels.turn)
                        places = [INT(at * lanes) for at in range(len(block))]
                        before = [b.read_vector(some, first, place) for place in places]
                        after = b.multiply_add([spread] * len(block), block, before)
                        for place, value in zip(places, after, strict=True):
                            b.write_vector(value, some, first, place)
            with b.count(INT(taps.count * numbers // _HALF)) as loop:
                place = b.mul(loop.turn, INT(_HALF))
                added = b.fpext(b.read_vector(some, place, lanes=_HALF), nothing.type)
                b.write_vector(
                    b.fadd(b.read_vector(all_of_them, place, lanes=_HALF), added), all_of_them, place
                )
        for own in range(OUTPUTS):
            output = b.index((outputs.turn, OUTPUTS), own)
            row = b.index((output, taps.channels), (channels.turn, width))
            with b.count(INT(width)) as channel:
                where = b.mul(b.add(row, channel.turn), INT(taps.count))
                for tap in range(taps.count):
                    value = b.read(all_of_them, channel.turn, INT(tap * numbers + own * width))
                    place = b.at(total, where, INT(tap))
                    b.store(b.fadd(b.load(place), value), place)
    return b.finished()
