"""The processor's kernels themselves, as LLVM's code; `cpu_kernels.py` says what each is for and calls them.

Above each kernel stands the loop that it computes, in Python on arrays of the named shapes; the tests run
that very text beside the kernel. The sizes that a kernel is made for are written into it, so that its inner
loops are unrolled and their sums stay in registers.
"""

from dataclasses import dataclass
from functools import cached_property

from llvmlite import ir

from coterie.training import llvm_builder
from coterie.training.llvm_builder import (
    DOUBLE,
    DOUBLES,
    FLOAT,
    FLOATS,
    INT,
    INTS,
    Builder,
    lanes_for,
)

NEAR = 8192
"""Numbers that the nearest cache holds."""


@dataclass(frozen=True)
class Lines:
    """How a convolution's kernel, and the padded images it runs over, lie in memory.

    Args:
        height, width: of the kernel.
        columns: of the outputs.
    """

    height: int
    width: int
    channels: int
    columns: int

    @cached_property
    def line(self) -> int:
        """Numbers in a line of the kernel."""
        return self.width * self.channels

    @cached_property
    def lanes(self) -> int:
        """Numbers in each of the vectors that cover a line."""
        return lanes_for(self.line)

    @cached_property
    def vectors(self) -> int:
        """That cover a line."""
        return -(-self.line // self.lanes)

    @cached_property
    def pitch(self) -> int:
        """Numbers from a pixel of a padded image to the one below."""
        return (self.columns + self.width - 1) * self.channels

    def corner(self, b: Builder, place: ir.Value) -> ir.Value:
        """Where the patch of an output begins in the padded image."""
        down = b.udiv(place, INT(self.columns))
        return b.mul(b.index(place, (down, self.width - 1)), INT(self.channels))

    def offset(self, row: int, vector: int) -> ir.Value:
        """Of a vector of the kernel's line from the patch's beginning."""
        return INT(row * self.pitch + vector * self.lanes)

    def parts(self, most: int | None = None) -> list[list[tuple[int, int]]]:
        """All vectors of the kernel (row, place in the line), in parts that registers hold, of few lines."""
        at_once = max(
            1, min(llvm_builder.machine()[1] // self.vectors, self.height if most is None else most)
        )
        return [
            [(i, j) for i in range(first, min(first + at_once, self.height)) for j in range(self.vectors)]
            for first in range(0, self.height, at_once)
        ]


def weight_rows(lines: Lines) -> ir.Function:
    """Every record's weight gradient: for each output channel, the sum of the patches at its places.

    padded (records, height, width, channels), gradient and places (records, windows, outer),
    formed (records, outer, kernel height, line rounded up to whole vectors)::

        for record in range(records):
            for output in range(outer):
                for window in range(windows):
                    value = gradient[record, window, output]
                    if value != 0:
                        y, x = divmod(places[record, window, output], columns)
                        patch = padded[record, y : y + height, x : x + width]
                        formed[record, output] += value * patch
    """
    b = Builder("weight_rows", lines.lanes, FLOATS, FLOATS, INTS, FLOATS, INT, INT, INT, INT)
    padded, gradient, places, formed, records, windows, outer, stride = b.function.args
    with b.count(records) as per_record, b.count(outer) as per_output:
        record, output = per_record.turn, per_output.turn
        image = b.mul(record, stride)
        start = b.index((b.mul(record, windows), outer), output)
        row = b.mul(b.index((record, outer), output), INT(lines.height * lines.vectors * lines.lanes))
        for part in lines.parts():
            with b.count(windows, *[b.zero] * len(part)) as loop:
                where = b.index(start, (loop.turn, outer))
                value = b.read(gradient, where)
                with b.unless_zero(value, loop.values) as body:
                    patch = lines.corner(b, b.read(places, where))
                    seen = [b.read_vector(padded, image, patch, lines.offset(*at)) for at in part]
                    body.values = b.multiply_add([b.spread(value)] * len(part), seen, body.values)
                loop.values = body.values
            for (i, j), total in zip(part, loop.values, strict=True):
                b.write_vector(total, formed, row, INT((i * lines.vectors + j) * lines.lanes))
    return b.finished()


def input_gradient(
    lines: Lines, window: tuple[int, int], pooled_columns: int, outer: int, group: int
) -> ir.Function:
    """The gradient at the padded inputs: each output channel's weights, times its gradient, at its places.

    weights (outer, kernel height, kernel width, channels), gradient and places (records, windows, outer),
    inputs (records, height, width, channels), zero before::

        for record in range(records):
            for window in range(windows):
                for output in range(outer):
                    y, x = divmod(places[record, window, output], columns)
                    patch = inputs[record, y : y + height, x : x + width]
                    patch += gradient[record, window, output] * weights[output]

    The channels that chose the same place of a window are added up in registers before memory is touched.

    Args:
        group: channels that are looked at together; at most 64, and the outputs are whole groups.
    """
    b = Builder("input_gradient", lines.lanes, FLOATS, FLOATS, INTS, FLOATS, INT, INT, INT, INT)
    weights, gradient, places, inputs, records, windows, _, stride = b.function.args
    bits = ir.IntType(group)
    trailing_zeros = ir.Function(
        b.module, ir.FunctionType(bits, [bits, ir.IntType(1)]), f"llvm.cttz.i{group}"
    )

    def one_place(where: ir.Value, image: ir.Value, place: ir.Value, part: list[tuple[int, int]]) -> None:
        """Add what the channels of one group that chose this place send there."""
        chosen = b.icmp_unsigned("==", b.read_vector(places, where, lanes=group), b.spread(place, group))
        live = b.fcmp_unordered(
            "!=", b.read_vector(gradient, where, lanes=group), b.spread(FLOAT(0.0), group)
        )
        mask = b.bitcast(b.and_(chosen, live), bits)
        with b.if_then(b.icmp_unsigned("!=", mask, bits(0))):
            with b.until_zero(mask, *[b.zero] * len(part)) as loop:
                left, *sums = loop.values
                channel = b.zext(b.call(trailing_zeros, [left, ir.IntType(1)(1)]), INT)
                scale = b.spread(b.read(gradient, where, channel))
                own = b.mul(b.add(b.urem(where, INT(outer)), channel), INT(lines.height * lines.line))
                taps = [b.read_vector(weights, own, INT(i * lines.line + j * lines.lanes)) for i, j in part]
                added = b.multiply_add([scale] * len(part), taps, sums)
                loop.values = [b.and_(left, b.sub(left, bits(1))), *added]
            patch = b.add(image, lines.corner(b, place))
            for at, total in zip(part, loop.values[1:], strict=True):
                before = b.read_vector(inputs, patch, lines.offset(*at))
                b.write_vector(b.fadd(before, total), inputs, patch, lines.offset(*at))

    with b.count(records) as per_record:
        # Part by part of the weights, so that they stay in the nearest cache.
        for part in lines.parts(NEAR // (outer * lines.line)):
            with b.count(windows) as per_window:
                turn = per_window.turn
                start = b.mul(b.index((per_record.turn, windows), turn), INT(outer))
                row, column = b.udiv(turn, INT(pooled_columns)), b.urem(turn, INT(pooled_columns))
                corner = b.index((row, window[0] * lines.columns), (column, window[1]))
                image = b.mul(per_record.turn, stride)
                for first in range(0, outer, group):
                    for down in range(window[0]):
                        for across in range(window[1]):
                            place = b.index(corner, down * lines.columns + across)
                            one_place(b.index(start, first), image, place, part)
    return b.finished()


def pooled_convolution(
    lines: Lines, outer: int, window: tuple[int, int], pooled: tuple[int, int], relu: bool
) -> ir.Function:
    """A convolution of few channels, the largest of every window of its outputs, and which that was.

    padded (records, height, width, channels), weights (kernel height, kernel width, channels, outer),
    bias (outer,), outputs and places (records, pooled rows, pooled columns, outer)::

        for record, row, column, output in np.ndindex(outputs.shape):
            best, place = None, None
            for y in range(row * window_height, (row + 1) * window_height):
                for x in range(column * window_width, (column + 1) * window_width):
                    patch = padded[record, y : y + height, x : x + width]
                    value = (patch * weights[..., output]).sum()
                    if best is None or value > best or np.isnan(value):  # the first of equals, as in torch
                        best, place = value, y * columns + x
            best += bias[output]
            outputs[record, row, column, output] = 0 if relu and best <= 0 else best
            places[record, row, column, output] = place

    Args:
        pooled: rows and columns of the pooled outputs.
    """
    lanes, (height, width, channels) = lanes_for(outer), (lines.height, lines.width, lines.channels)
    b = Builder("pooled_convolution", lanes, FLOATS, FLOATS, FLOATS, FLOATS, INTS, INT, INT)
    padded, weights, bias, outputs, places, records, stride = b.function.args
    integers = ir.VectorType(INT, lanes)
    positions = [(down, across) for down in range(window[0]) for across in range(window[1])]

    def one_window(image: ir.Value, corner: ir.Value, where: ir.Value, first: int) -> None:
        """So many outputs as a vector holds, from the first on."""
        sums = dict.fromkeys(positions, b.zero)
        # Pixel by pixel: each is read once and serves all positions of the window that see it.
        for y in range(height + window[0] - 1):
            for x in range(width + window[1] - 1):
                for channel in range(channels):
                    pixel = b.spread(b.read(padded, image, INT(y * lines.pitch + x * channels + channel)))
                    for down, across in positions:
                        i, j = y - down, x - across
                        if 0 <= i < height and 0 <= j < width:
                            tap = ((i * width + j) * channels + channel) * outer + first
                            weight = b.read_vector(weights, INT(tap))
                            (sums[down, across],) = b.multiply_add([pixel], [weight], [sums[down, across]])
        best, chosen = sums[positions[0]], ir.Constant(integers, [0] * lanes)
        for down, across in positions[1:]:
            value = sums[down, across]
            wins = b.or_(b.fcmp_ordered(">", value, best), b.fcmp_unordered("uno", value, value))
            best = b.select(wins, value, best)
            place = ir.Constant(integers, [down * lines.columns + across] * lanes)
            chosen = b.select(wins, place, chosen)
        best = b.fadd(best, b.read_vector(bias, INT(first)))
        if relu:
            passes = b.or_(b.fcmp_ordered(">", best, b.zero), b.fcmp_unordered("uno", best, best))
            best = b.select(passes, best, b.zero)
        b.write_vector(best, outputs, where, INT(first))
        b.write_vector(b.add(chosen, b.spread(corner)), places, where, INT(first))

    with b.count(records) as per_record, b.count(INT(pooled[0])) as rows, b.count(INT(pooled[1])) as columns:
        record, row, column = per_record.turn, rows.turn, columns.turn
        image = b.index((record, stride), (row, window[0] * lines.pitch), (column, window[1] * channels))
        corner = b.index((row, window[0] * lines.columns), (column, window[1]))
        where = b.mul(b.index((b.index((record, pooled[0]), row), pooled[1]), column), INT(outer))
        for first in range(0, outer, lanes):
            one_window(image, corner, where, first)
    return b.finished()


DOUBLE_LANES = 8


def squared_norms(block: int) -> ir.Function:
    """Squared norm of each row, in float64.

    rows (records, numbers), in whole blocks; squares (records,)::

        for record in range(records):
            for value in rows[record]:
                squares[record] += float(value) * float(value)
    """
    b = Builder("squared_norms", DOUBLE_LANES, FLOATS, DOUBLES, INT, INT, kind=DOUBLE)
    rows, squares, records, blocks = b.function.args
    parts = range(0, block, DOUBLE_LANES)
    with b.count(records) as per_record:
        row = b.mul(b.mul(per_record.turn, blocks), INT(block))
        with b.count(blocks, *[b.zero] * len(parts)) as loop:
            at = b.index(row, (loop.turn, block))
            values = [b.fpext(b.read_vector(rows, at, INT(part)), b.vector) for part in parts]
            loop.values = b.multiply_add(values, values, loop.values)
        b.store(b.total(loop.values), b.at(squares, per_record.turn))
    return b.finished()


def scaled_sum(block: int) -> ir.Function:
    """Sum of the rows, each times its scale, in float64.

    rows (records, numbers), in whole blocks; scales (records,); total (numbers,)::

        for record in range(records):
            for place in range(numbers):
                total[place] += scales[record] * float(rows[record, place])
    """
    b = Builder("scaled_sum", DOUBLE_LANES, FLOATS, DOUBLES, DOUBLES, INT, INT, kind=DOUBLE)
    rows, scales, total, records, blocks = b.function.args
    parts = range(0, block, DOUBLE_LANES)
    with b.count(blocks) as per_block:
        first = b.mul(per_block.turn, INT(block))
        width = b.mul(blocks, INT(block))
        with b.count(records, *[b.zero] * len(parts)) as loop:
            scale = b.spread(b.read(scales, loop.turn))
            at = b.index((loop.turn, width), first)
            values = [b.fpext(b.read_vector(rows, at, INT(part)), b.vector) for part in parts]
            loop.values = b.multiply_add([scale] * len(parts), values, loop.values)
        for part, value in zip(parts, loop.values, strict=True):
            b.write_vector(value, total, first, INT(part))
    return b.finished()
