"""The kernel of `formed_once.py`, as LLVM's code: every record's gradient of a convolution, never kept.

It forms a record's gradient block by block in registers and adds it up. As in `llvm_code.py`, it has above it
the loop that it computes. Of bfloat16, a processor that multiplies it takes two places of a line at a time.
"""

from dataclasses import dataclass

from llvmlite import ir

from coterie.training import llvm_builder
from coterie.training.llvm_builder import DOUBLE, DOUBLES, FLOAT, FLOATS, HALVES, INT, PAIRS, Builder

OUTPUTS = 4
"""Output channels of a block."""
TOGETHER = 4
"""Records whose scaled gradients are summed in float32 before they are added up in float64."""
_EIGHT = 8
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
        lines, columns: of the outputs.
        pitch: pixels in a line of the padded images.
        inside: lines of the padded images before those of the images themselves, and where these end.
        stride, dilation: down and across, in pixels.
        rounded: whether images and gradients are bfloat16, and the gradients' columns go by two.
    """

    height: int
    width: int
    channels: int
    outer: int
    lines: int
    columns: int
    pitch: int
    inside: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    rounded: bool

    @property
    def count(self) -> int:
        """Of the kernel's pixels."""
        return self.height * self.width

    def seen(self, tap: int) -> tuple[int, int]:
        """The first line of outputs that sees no zeros put around an image, at this pixel of the kernel, and
        how many lines there are from it to the last; all lines, where there is none."""
        further = tap // self.width * self.dilation[0]
        lines = [
            line
            for line in range(self.lines)
            if self.inside[0] <= line * self.stride[0] + further < self.inside[1]
        ]
        return (lines[0], len(lines)) if lines else (0, self.lines)

    def offset(self, b: Builder, tap: ir.Value) -> ir.Value:
        """Numbers of a block from a patch's first pixel to the one that this pixel of the kernel sees."""
        down, across = b.udiv(tap, INT(self.width)), b.urem(tap, INT(self.width))
        pixels = b.index((down, self.dilation[0] * self.pitch), (across, self.dilation[1]))
        return b.mul(pixels, INT(channels_of_block()))


class _Former(Builder):
    """Forms blocks of a record's gradient: some outputs by some channels, at one pixel of the kernel.

    Arguments of its kernel: images, gradient, others; then how many records, images of a record, and pixels
    of an image.
    """

    def __init__(self, name: str, taps: Taps, *others: ir.Type) -> None:
        given = (HALVES, PAIRS) if taps.rounded else (FLOATS, FLOATS)
        super().__init__(name, llvm_builder.machine()[0], *given, *others, *[INT] * 3)
        self.taps, self.vectors = taps, channels_of_block() // self.vector.count
        self.images, self.gradient, *self.others = self.function.args[:-3]
        self.records, self.views, self.pixels = self.function.args[-3:]
        first, count = zip(*map(taps.seen, range(taps.count)), strict=True)
        self.first_line, self.count_of_lines = self.table("first_line", first), self.table("lines", count)

    def formed(
        self, record: ir.Value, outputs: ir.Value, channels: ir.Value, tap: ir.Value
    ) -> list[ir.Value]:
        """Channels of one block, output by output, as vectors of float32.

        Each number is the sum over the places in their order, in float32: by fused products of one place at a
        time, or of two.
        """
        taps, width = self.taps, channels_of_block()
        parts = [(i, j) for i in range(OUTPUTS) for j in range(self.vectors)]
        apart, at_once = taps.stride[1] * width, 2 if taps.rounded else 1
        first_line, count = self.read(self.first_line, tap), self.read(self.count_of_lines, tap)
        with self.count(self.views, *[self.zero] * len(parts)) as views:
            view = self.index((record, self.views), views.turn)
            image = self.index((view, taps.channels // width), channels)
            start = self.index((image, self.mul(self.pixels, INT(width))), taps.offset(self, tap))
            slope = self.index((view, taps.outer // OUTPUTS), outputs)
            with self.count(count, *views.values) as lines:
                at = self.add(first_line, lines.turn)
                line = self.index(start, (at, taps.stride[0] * taps.pitch * width))
                first = self.index((self.index((slope, taps.lines), at), taps.columns // at_once * OUTPUTS))
                with self.count(INT(taps.columns // at_once), *lines.values) as loop:
                    pixel = self.index(line, (loop.turn, at_once * apart))
                    where = self.index(first, (loop.turn, OUTPUTS))
                    slopes = [self.spread(self.read(self.gradient, where, INT(i))) for i in range(OUTPUTS)]
                    left, right = [slopes[i] for i, _ in parts], self._pixels(pixel, apart)
                    add = self.add_pairs if taps.rounded else self.multiply_add
                    loop.values = add(left, [right[j] for _, j in parts], loop.values)
                lines.values = loop.values
            views.values = lines.values
        return views.values

    def _pixels(self, pixel: ir.Value, apart: int) -> list[ir.Value]:
        """Channels of a pixel, or of this one and the next, number by number beside each other."""
        lanes = self.vector.count
        if not self.taps.rounded:
            return [self.read_vector(self.images, pixel, INT(j * lanes)) for j in range(self.vectors)]
        found = []
        for j in range(0, self.vectors * lanes, 2 * lanes):
            both = [
                self.read_vector(self.images, pixel, INT(j + next_one), lanes=2 * lanes)
                for next_one in (0, apart)
            ]
            found += self.beside(*both)
        return found


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
    numbers, nothing = OUTPUTS * width, ir.Constant(ir.VectorType(DOUBLE, _EIGHT), [0.0] * _EIGHT)
    with b.count(INT(taps.channels // width)) as channels, b.count(INT(taps.outer // OUTPUTS)) as outputs:
        with b.count(INT(taps.count * numbers // _EIGHT)) as loop:
            b.write_vector(nothing, all_of_them, b.mul(loop.turn, INT(_EIGHT)))
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
            with b.count(INT(taps.count * numbers // _EIGHT)) as loop:
                place = b.mul(loop.turn, INT(_EIGHT))
                added = b.fpext(b.read_vector(some, place, lanes=_EIGHT), nothing.type)
                b.write_vector(
                    b.fadd(b.read_vector(all_of_them, place, lanes=_EIGHT), added), all_of_them, place
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
