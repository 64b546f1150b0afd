"""Group norms of images whose channels lie last, forwards and back, as LLVM's code.

Like the kernels of `llvm_code.py`, each below the loop that it computes, which the tests run beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from coterie.training import llvm_builder
from coterie.training.llvm_builder import DOUBLE, DOUBLES, FLOATS, HALVES, INT, Builder, lanes_for

_FUSED = ("contract",)
"""Products are added without being rounded."""


@dataclass(frozen=True)
class Normed:
    """What is normalised.

    Args:
        rounded: whether images are bfloat16, and so are gradients at them.
    """

    channels: int
    groups: int
    rounded: bool

    @property
    def lanes(self) -> int:
        return min(lanes_for(self.channels), self.channels)

    @property
    def vectors(self) -> int:
        """Of channels that are added up at a time: each has two sums, in float64."""
        most = 4 if llvm_builder.machine()[1] > 16 else 1
        return next(count for count in range(most, 0, -1) if self.channels // self.lanes % count == 0)


class _Norms(Builder):
    """What both ways have in common: sums by channel, coefficients by channel, and what they make of pixels.

    Arguments of its kernel: images, others; sums (2, channels) and factors (3, channels), which are scratch;
    then how many records, and pixels of an image.
    """

    def __init__(self, name: str, normed: Normed, *others: ir.Type) -> None:
        images = HALVES if normed.rounded else FLOATS
        super().__init__(name, normed.lanes, images, *others, DOUBLES, FLOATS, INT, INT)
        self.normed, self.channels = normed, normed.channels
        self.images, *self.others, self.sums, self.factors, self.records, self.pixels = self.function.args
        self.width = normed.lanes * normed.vectors
        self.each = normed.channels // normed.groups
        wide = ir.VectorType(DOUBLE, normed.lanes)
        self.wide, self.nothing = wide, ir.Constant(wide, [0.0] * normed.lanes)
        self.numbers = self.fmul(self.uitofp(self.pixels, DOUBLE), DOUBLE(self.each))
        """In a group."""

    def image(self, record: ir.Value) -> ir.Value:
        return self.mul(self.mul(record, self.pixels), INT(self.channels))

    def fused(self, left: ir.Value, right: ir.Value, added: ir.Value) -> ir.Value:
        """A product added to something, in float64."""
        return self.fadd(self.fmul(left, right, flags=_FUSED), added, flags=_FUSED)

    def add_up(self, image: ir.Value, summed: ir.Value) -> None:
        """By channel: the sum of an array's numbers, and of their products with the images'."""
        lanes, vectors = self.normed.lanes, self.normed.vectors
        with self.count(INT(self.channels // self.width)) as blocks:
            first = self.mul(blocks.turn, INT(self.width))
            with self.count(self.pixels, *[self.nothing] * (2 * vectors)) as loop:
                at = self.index(image, first, (loop.turn, self.channels))
                sums, products = loop.values[:vectors], loop.values[vectors:]
                for j in range(vectors):
                    own, seen = (
                        self.fpext(self.read_numbers(part, at, INT(j * lanes)), self.wide)
                        for part in (summed, self.images)
                    )
                    sums[j], products[j] = self.fadd(sums[j], own), self.fused(own, seen, products[j])
                loop.values = [*sums, *products]
            for j in range(vectors):
                self.write_vector(loop.values[j], self.sums, first, INT(j * lanes))
                place = INT(self.channels + j * lanes)
                self.write_vector(loop.values[vectors + j], self.sums, first, place)

    def sums_of(self, channel: ir.Value) -> tuple[ir.Value, ir.Value]:
        return self.read(self.sums, channel), self.read(self.sums, channel, INT(self.channels))

    def factor(self, number: int, *place: ir.Value) -> list[ir.Value]:
        """One of the coefficients, of the channels that are computed at a time."""
        return [
            self.read_vector(self.factors, *place, INT(number * self.channels + j * self.normed.lanes))
            for j in range(self.normed.vectors)
        ]

    def keep_factors(self, channel: ir.Value, values: Sequence[ir.Value]) -> None:
        for number, value in enumerate(values):
            single = self.fptrunc(value, FLOATS.pointee)
            self.store(single, self.at(self.factors, channel, INT(number * self.channels)))


def normalise(normed: Normed) -> ir.Function:
    """Normalise groups of channels of each record, then scale and shift every channel.

    images and outputs (records, pixels, channels), weight and bias (channels,), means and rates (records,
    groups), in float64::

        for record in range(records):
            grouped = images[record].astype(np.float64).reshape(len(images[record]), groups, -1)
            means[record] = grouped.mean(axis=(0, 2))
            spread = (grouped**2).mean(axis=(0, 2)) - means[record] ** 2
            rates[record] = 1.0 / np.sqrt(np.maximum(spread, 0.0) + eps)
            normal = (grouped - means[record][:, None]) * rates[record][:, None]
            outputs[record] = normal.reshape(images[record].shape) * weight + bias
    """
    b = _Norms("normalise", normed, FLOATS, FLOATS, FLOATS, DOUBLES, DOUBLES, DOUBLE)
    weight, bias, outputs, means, rates, eps = b.others
    root = ir.Function(b.module, ir.FunctionType(DOUBLE, [DOUBLE]), "llvm.sqrt.f64")
    with b.count(b.records) as per_record:
        image = b.image(per_record.turn)
        b.add_up(image, b.images)
        with b.count(INT(normed.groups)) as per_group:
            start = b.mul(per_group.turn, INT(b.each))
            with b.count(INT(b.each), DOUBLE(0.0), DOUBLE(0.0)) as loop:
                found = b.sums_of(b.add(start, loop.turn))
                loop.values = [b.fadd(before, own) for before, own in zip(loop.values, found, strict=True)]
            mean, square = (b.fdiv(value, b.numbers) for value in loop.values)
            spread = b.fsub(square, b.fmul(mean, mean))
            spread = b.select(b.fcmp_ordered("<", spread, DOUBLE(0.0)), DOUBLE(0.0), spread)
            rate = b.fdiv(DOUBLE(1.0), b.call(root, [b.fadd(spread, eps)]))
            for value, kept in ((mean, means), (rate, rates)):
                b.store(value, b.at(kept, b.mul(per_record.turn, INT(normed.groups)), per_group.turn))
            with b.count(INT(b.each)) as loop:
                channel = b.add(start, loop.turn)
                own, shift = (b.fpext(b.read(part, channel), DOUBLE) for part in (weight, bias))
                slope = b.fmul(own, rate)
                b.keep_factors(channel, [slope, b.fsub(shift, b.fmul(mean, slope))])
        with b.count(INT(b.channels // b.width)) as blocks:
            first = b.mul(blocks.turn, INT(b.width))
            slopes, shifts = b.factor(0, first), b.factor(1, first)
            with b.count(b.pixels) as loop:
                at = b.index(image, first, (loop.turn, b.channels))
                places = [INT(j * normed.lanes) for j in range(normed.vectors)]
                seen = [b.read_numbers(b.images, at, place) for place in places]
                for place, value in zip(places, b.multiply_add(seen, slopes, shifts), strict=True):
                    b.write_numbers(value, outputs, at, place)
    return b.finished()


def normalise_back(normed: Normed) -> ir.Function:
    """Gradients at the images, and every record's at weight and bias.

    images, gradient and outputs (records, pixels, channels), weight (channels,), weight_rows and bias_rows
    (records, channels); means and rates as `normalise` leaves them::

        for record in range(records):
            seen, slopes = images[record].astype(np.float64), gradient[record].astype(np.float64)
            each = lambda by_group: np.repeat(by_group, seen.shape[1] // groups)
            mean, rate = each(means[record]), each(rates[record])
            bias_rows[record] = slopes.sum(axis=0)
            weight_rows[record] = ((slopes * seen).sum(axis=0) - mean * bias_rows[record]) * rate
            by_group = lambda rows: each((weight * rows).reshape(groups, -1).mean(axis=1) / len(seen))
            along, level = by_group(weight_rows[record]), by_group(bias_rows[record])
            outputs[record] = rate * (slopes * weight - level - (seen - mean) * rate * along)
    """
    at_images = HALVES if normed.rounded else FLOATS
    b = _Norms("normalise_back", normed, FLOATS, FLOATS, DOUBLES, DOUBLES, at_images, FLOATS, FLOATS)
    gradient, weight, means, rates, outputs, weight_rows, bias_rows = b.others
    with b.count(b.records) as per_record:
        image, row = b.image(per_record.turn), b.mul(per_record.turn, INT(b.channels))
        b.add_up(image, gradient)
        with b.count(INT(normed.groups)) as per_group:
            start, own_group = b.mul(per_group.turn, INT(b.each)), b.mul(per_record.turn, INT(normed.groups))
            mean, rate = (b.read(part, own_group, per_group.turn) for part in (means, rates))
            with b.count(INT(b.each), DOUBLE(0.0), DOUBLE(0.0)) as loop:
                channel = b.add(start, loop.turn)
                level, product = b.sums_of(channel)
                along = b.fmul(b.fsub(product, b.fmul(mean, level)), rate)
                for value, rows in ((level, bias_rows), (along, weight_rows)):
                    b.store(b.fptrunc(value, FLOATS.pointee), b.at(rows, row, channel))
                own = b.fpext(b.read(weight, channel), DOUBLE)
                loop.values = [
                    b.fadd(before, b.fmul(own, value))
                    for before, value in zip(loop.values, (level, along), strict=True)
                ]
            level, along = (b.fdiv(value, b.numbers) for value in loop.values)
            # rate (slope weight - level - (seen - mean) rate along), gathered by what differs in a pixel
            turned = b.fneg(b.fmul(b.fmul(rate, rate), along))
            rest = b.fsub(b.fneg(b.fmul(rate, level)), b.fmul(turned, mean))
            with b.count(INT(b.each)) as loop:
                channel = b.add(start, loop.turn)
                own = b.fmul(rate, b.fpext(b.read(weight, channel), DOUBLE))
                b.keep_factors(channel, [own, turned, rest])
        with b.count(INT(b.channels // b.width)) as blocks:
            first = b.mul(blocks.turn, INT(b.width))
            owns, turns, rests = (b.factor(number, first) for number in range(3))
            with b.count(b.pixels) as loop:
                at = b.index(image, first, (loop.turn, b.channels))
                places = [INT(j * normed.lanes) for j in range(normed.vectors)]
                seen, slopes = (
                    [b.read_numbers(part, at, place) for place in places] for part in (b.images, gradient)
                )
                inner = b.multiply_add(seen, turns, rests)
                for place, value in zip(places, b.multiply_add(slopes, owns, inner), strict=True):
                    b.write_numbers(value, outputs, at, place)
    return b.finished()
