# mypy: ignore-errors
"""The processor's kernels themselves, as LLVM's code; `cpu_kernels.py` says what each is for and calls them.

Sizes that decide a kernel's inner loops are written into it, so that these loops are unrolled and their sums
stay in registers.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir

NOTHING, FLOAT, DOUBLE, INT = ir.VoidType(), ir.FloatType(), ir.DoubleType(), ir.IntType(64)
FLOATS, DOUBLES, INTS = FLOAT.as_pointer(), DOUBLE.as_pointer(), INT.as_pointer()
NEAR = 8192
"""Numbers that the nearest cache holds."""


@cache
def machine() -> tuple[int, int]:
    """The float32 numbers that a register of this processor holds, and the registers that sums may fill.

    Without wide registers: ImportError, as where LLVM itself is missing.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 16, 25
    if features.get("avx2") and features.get("fma"):
        return 8, 10
    raise ImportError("no kernels for a processor without AVX2")


def compiled(module: ir.Module) -> Callable[[str, int, int], Callable[..., None]]:
    """From the name of a function, and its numbers of pointers and of integers, to the function."""
    # An engine owns its target: each needs one of its own.
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        jit=True,
    )
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, target)
    engine.finalize_object()

    def find(name: str, pointers: int, integers: int) -> Callable[..., None]:
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * pointers, *[ctypes.c_int64] * integers)
        function = kind(engine.get_function_address(name))
        function.engine = engine  # its code lives as long as the engine
        return function

    return find


class Builder(ir.IRBuilder):
    """Adds what every kernel here needs: loops that count, and vectors anywhere in memory."""

    def __init__(self, function: ir.Function, lanes: int) -> None:
        super().__init__(function.append_basic_block("entry"))
        self.vector = ir.VectorType(FLOAT, lanes)
        self.zero = ir.Constant(self.vector, [0.0] * lanes)
        name, module = f"llvm.fma.v{lanes}f32", function.module
        if name not in module.globals:
            ir.Function(module, ir.FunctionType(self.vector, [self.vector] * 3), name)
        self._multiply_add = module.globals[name]

    def count(self, times: ir.Value, body: Callable[[ir.Value], None]) -> None:
        """Run the body for 0, 1, ...; at least once."""
        self.carry(times, [], lambda turn, _: body(turn) or [])

    def carry(
        self,
        times: ir.Value,
        start: list[ir.Value],
        body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
    ) -> list[ir.Value]:
        """The same with values that the body takes from the turn before, and its last ones."""
        before, head, after = self.block, self.append_basic_block(), self.append_basic_block()
        self.branch(head)
        self.position_at_end(head)
        turn = self._merged(INT, {before: INT(0)})
        carried = [self._merged(value.type, {before: value}) for value in start]
        results = body(turn, carried)
        following = self.add(turn, INT(1), flags=["nuw", "nsw"])
        turn.add_incoming(following, self.block)
        for value, result in zip(carried, results, strict=True):
            value.add_incoming(result, self.block)
        self.cbranch(self.icmp_unsigned("<", following, times), head, after)
        self.position_at_end(after)
        return results

    def until_zero(
        self, start: list[ir.Value], body: Callable[[list[ir.Value]], list[ir.Value]]
    ) -> list[ir.Value]:
        """Run the body on what it gave before, at least once, until its first value is zero."""
        before, head, after = self.block, self.append_basic_block(), self.append_basic_block()
        self.branch(head)
        self.position_at_end(head)
        carried = [self._merged(value.type, {before: value}) for value in start]
        results = body(carried)
        for value, result in zip(carried, results, strict=True):
            value.add_incoming(result, self.block)
        self.cbranch(self.icmp_unsigned("!=", results[0], results[0].type(0)), head, after)
        self.position_at_end(after)
        return results

    def unless_zero(
        self, value: ir.Value, given: list[ir.Value], body: Callable[[], list[ir.Value]]
    ) -> list[ir.Value]:
        """What the body gives where a number is not zero (or is no number at all), else what is given."""
        before, work, after = self.block, self.append_basic_block(), self.append_basic_block()
        self.cbranch(self.fcmp_unordered("!=", value, FLOAT(0.0)), work, after)
        self.position_at_end(work)
        results = body()
        end = self.block
        self.branch(after)
        self.position_at_end(after)
        return [
            self._merged(old.type, {before: old, end: new}) for old, new in zip(given, results, strict=True)
        ]

    def _merged(self, kind: ir.Type, incoming: dict[ir.Block, ir.Value]) -> ir.PhiInstr:
        merged = self.phi(kind)
        for block, value in incoming.items():
            merged.add_incoming(value, block)
        return merged

    def at(self, base: ir.Value, *offsets: ir.Value) -> ir.Value:
        for offset in offsets:
            base = self.gep(base, [offset])
        return base

    def read(self, base: ir.Value, *offsets: ir.Value) -> ir.Value:
        return self.load(self.at(base, *offsets))

    def read_vector(self, base: ir.Value, *offsets: ir.Value, lanes: int | None = None) -> ir.Value:
        kind = ir.VectorType(base.type.pointee, lanes or self.vector.count)
        return self.load(self.bitcast(self.at(base, *offsets), kind.as_pointer()), align=4)

    def write_vector(self, values: ir.Value, base: ir.Value, *offsets: ir.Value) -> None:
        self.store(values, self.bitcast(self.at(base, *offsets), values.type.as_pointer()), align=4)

    def spread(self, value: ir.Value, lanes: int | None = None) -> ir.Value:
        """A vector of one number."""
        lanes, place = lanes or self.vector.count, ir.IntType(32)
        undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
        whole = self.insert_element(undefined, value, place(0))
        return self.shuffle_vector(whole, undefined, ir.Constant(ir.VectorType(place, lanes), [0] * lanes))

    def multiply_add(self, left: ir.Value, right: ir.Value, total: ir.Value) -> ir.Value:
        return self.call(self._multiply_add, [left, right, total])


def function(module: ir.Module, name: str, *kinds: ir.Type) -> ir.Function:
    """A function whose pointers never point at the same memory."""
    made = ir.Function(module, ir.FunctionType(NOTHING, kinds), name)
    for argument in made.args:
        if isinstance(argument.type, ir.PointerType):
            argument.add_attribute("noalias")
    return made


@dataclass(frozen=True)
class Lines:
    """How a convolution's kernel, and the images it runs over, lie in memory.

    Args:
        height: lines of the kernel.
        line: numbers in a line of it: width times channels.
        vectors, lanes: vectors that cover a line, and numbers in each.
        columns, padded_columns: of the outputs, and of the padded inputs.
    """

    height: int
    line: int
    vectors: int
    lanes: int
    channels: int
    columns: int
    padded_columns: int

    def corner(self, b: Builder, place: ir.Value) -> ir.Value:
        """Where the patch of an output begins in the padded inputs."""
        down = b.udiv(place, INT(self.columns))
        across = b.add(place, b.mul(down, INT(self.padded_columns - self.columns)))
        return b.mul(across, INT(self.channels))

    def offset(self, row: int, vector: int) -> ir.Value:
        """Of a vector of the kernel's line from the patch's beginning."""
        return INT(row * self.padded_columns * self.channels + vector * self.lanes)

    def parts(self, most: int | None = None) -> list[list[tuple[int, int]]]:
        """All vectors of the kernel (row, place in the line), in parts that registers hold, of few lines."""
        at_once = max(1, min(machine()[1] // self.vectors, self.height if most is None else most))
        return [
            [(i, j) for i in range(first, min(first + at_once, self.height)) for j in range(self.vectors)]
            for first in range(0, self.height, at_once)
        ]


def weight_rows(lines: Lines) -> ir.Module:
    """Every record's weight gradient: for each output channel, the sum of the patches at its places."""
    module = ir.Module()
    module.triple = llvm.get_default_triple()
    made = function(module, "rows", FLOATS, FLOATS, INTS, FLOATS, INT, INT, INT, INT)
    padded, gradient, places, formed, records, windows, outer, stride = made.args
    b = Builder(made, lines.lanes)

    def one_part(record: ir.Value, output: ir.Value, part: list[tuple[int, int]]) -> None:
        image, start = b.mul(record, stride), b.add(b.mul(b.mul(record, windows), outer), output)

        def one_window(turn: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            where = b.add(start, b.mul(turn, outer))
            value = b.read(gradient, where)

            def add_patch() -> list[ir.Value]:
                patch, scale = lines.corner(b, b.read(places, where)), b.spread(value)
                seen = [b.read_vector(padded, image, patch, lines.offset(*at)) for at in part]
                return [
                    b.multiply_add(scale, values, total) for values, total in zip(seen, sums, strict=True)
                ]

            return b.unless_zero(value, sums, add_patch)

        row = b.mul(b.add(b.mul(record, outer), output), INT(lines.height * lines.vectors * lines.lanes))
        sums = b.carry(windows, [b.zero] * len(part), one_window)
        for (i, j), total in zip(part, sums, strict=True):
            b.write_vector(total, formed, row, INT((i * lines.vectors + j) * lines.lanes))

    def all_parts(record: ir.Value, output: ir.Value) -> None:
        for part in lines.parts():
            one_part(record, output, part)

    b.count(records, lambda record: b.count(outer, lambda output: all_parts(record, output)))
    b.ret_void()
    return module


def input_gradient(
    lines: Lines, window: tuple[int, int], pooled_columns: int, outer: int, group: int
) -> ir.Module:
    """The gradient at the padded inputs: each output channel's weights, times its gradient, at its places.

    The channels that chose the same place of a window are added up in registers before memory is touched.

    Args:
        group: channels that are looked at together; at most 64, and the outputs are whole groups.
    """
    module = ir.Module()
    module.triple = llvm.get_default_triple()
    made = function(module, "back", FLOATS, FLOATS, INTS, FLOATS, INT, INT, INT, INT)
    weights, gradient, places, inputs, records, windows, _, stride = made.args
    b = Builder(made, lines.lanes)
    bits = ir.IntType(group)
    trailing_zeros = ir.Function(module, ir.FunctionType(bits, [bits, ir.IntType(1)]), f"llvm.cttz.i{group}")

    def one_place(where: ir.Value, image: ir.Value, place: ir.Value, part: list[tuple[int, int]]) -> None:
        """Add what the channels of one group that chose this place send there."""
        chosen = b.icmp_unsigned("==", b.read_vector(places, where, lanes=group), b.spread(place, group))
        live = b.fcmp_unordered(
            "!=", b.read_vector(gradient, where, lanes=group), b.spread(FLOAT(0.0), group)
        )
        mask = b.bitcast(b.and_(chosen, live), bits)
        with b.if_then(b.icmp_unsigned("!=", mask, bits(0))):

            def add_channel(left: list[ir.Value]) -> list[ir.Value]:
                mask, *sums = left
                channel = b.zext(b.call(trailing_zeros, [mask, ir.IntType(1)(1)]), INT)
                scale = b.spread(b.read(gradient, where, channel))
                own = b.mul(b.add(b.urem(where, INT(outer)), channel), INT(lines.height * lines.line))
                taps = [b.read_vector(weights, own, INT(i * lines.line + j * lines.lanes)) for i, j in part]
                added = [b.multiply_add(scale, tap, total) for tap, total in zip(taps, sums, strict=True)]
                return [b.and_(mask, b.sub(mask, bits(1))), *added]

            _, *sums = b.until_zero([mask, *[b.zero] * len(part)], add_channel)
            patch = b.add(image, lines.corner(b, place))
            for at, total in zip(part, sums, strict=True):
                before = b.read_vector(inputs, patch, lines.offset(*at))
                b.write_vector(b.fadd(before, total), inputs, patch, lines.offset(*at))

    def one_window(record: ir.Value, turn: ir.Value, part: list[tuple[int, int]]) -> None:
        start = b.mul(b.add(b.mul(record, windows), turn), INT(outer))
        row, column = b.udiv(turn, INT(pooled_columns)), b.urem(turn, INT(pooled_columns))
        corner = b.add(b.mul(row, INT(window[0] * lines.columns)), b.mul(column, INT(window[1])))
        for first in range(0, outer, group):
            for down in range(window[0]):
                for across in range(window[1]):
                    place = b.add(corner, INT(down * lines.columns + across))
                    one_place(b.add(start, INT(first)), b.mul(record, stride), place, part)

    def one_record(record: ir.Value) -> None:
        """Part by part of the weights, so that they stay in the nearest cache."""
        for part in lines.parts(NEAR // (outer * lines.line)):
            b.count(windows, lambda turn, part=part: one_window(record, turn, part))

    b.count(records, one_record)
    b.ret_void()
    return module


def pooled_convolution(
    kernel: tuple[int, int],
    channels: int,
    outer: int,
    window: tuple[int, int],
    pooled: tuple[int, int],
    columns: int,
    lanes: int,
    *,
    relu: bool,
) -> ir.Module:
    """A convolution of few channels, the largest of every window of its outputs, and which that was.

    Args:
        pooled: rows and columns of the pooled outputs.
        columns: of the outputs.
    """
    module = ir.Module()
    module.triple = llvm.get_default_triple()
    made = function(module, "pooled", FLOATS, FLOATS, FLOATS, FLOATS, INTS, INT, INT)
    padded, weights, bias, outputs, places, records, stride = made.args
    b = Builder(made, lanes)
    integers = ir.VectorType(INT, lanes)
    padded_columns = columns + kernel[1] - 1
    positions = [(down, across) for down in range(window[0]) for across in range(window[1])]

    def one_window(record: ir.Value, row: ir.Value, column: ir.Value, first: int) -> None:
        """So many outputs as a vector holds, from the first on."""
        corner = b.add(b.mul(row, INT(window[0] * padded_columns)), b.mul(column, INT(window[1])))
        image = b.add(b.mul(record, stride), b.mul(corner, INT(channels)))
        sums = dict.fromkeys(positions, b.zero)
        # Pixel by pixel: each is read once and serves all positions of the window that see it.
        for y in range(kernel[0] + window[0] - 1):
            for x in range(kernel[1] + window[1] - 1):
                for channel in range(channels):
                    at = INT((y * padded_columns + x) * channels + channel)
                    pixel = b.spread(b.read(padded, image, at))
                    for down, across in positions:
                        i, j = y - down, x - across
                        if 0 <= i < kernel[0] and 0 <= j < kernel[1]:
                            tap = ((i * kernel[1] + j) * channels + channel) * outer + first
                            weight = b.read_vector(weights, INT(tap))
                            sums[down, across] = b.multiply_add(pixel, weight, sums[down, across])
        best, chosen = sums[positions[0]], ir.Constant(integers, [0] * lanes)
        for down, across in positions[1:]:
            value = sums[down, across]
            # As in torch: the first of equals, and what is no number wins.
            wins = b.or_(b.fcmp_ordered(">", value, best), b.fcmp_unordered("uno", value, value))
            best = b.select(wins, value, best)
            chosen = b.select(wins, ir.Constant(integers, [down * columns + across] * lanes), chosen)
        best = b.fadd(best, b.read_vector(bias, INT(first)))
        if relu:
            passes = b.or_(b.fcmp_ordered(">", best, b.zero), b.fcmp_unordered("uno", best, best))
            best = b.select(passes, best, b.zero)
        corner = b.add(b.mul(row, INT(window[0] * columns)), b.mul(column, INT(window[1])))
        chosen = b.add(chosen, b.spread(corner))
        line = b.add(b.mul(record, INT(pooled[0])), row)
        where = b.add(b.mul(b.add(b.mul(line, INT(pooled[1])), column), INT(outer)), INT(first))
        b.write_vector(best, outputs, where)
        b.write_vector(chosen, places, where)

    def all_outputs(record: ir.Value, row: ir.Value, column: ir.Value) -> None:
        for first in range(0, outer, lanes):
            one_window(record, row, column, first)

    b.count(
        records,
        lambda record: b.count(
            INT(pooled[0]),
            lambda row: b.count(INT(pooled[1]), lambda column: all_outputs(record, row, column)),
        ),
    )
    b.ret_void()
    return module


def row_sums(block: int) -> ir.Module:
    """Squared norms of float32 rows, and their scaled sum, both in float64; rows are so many whole blocks."""
    module = ir.Module()
    module.triple = llvm.get_default_triple()
    lanes = 8
    wide = ir.VectorType(DOUBLE, lanes)
    zero = ir.Constant(wide, [0.0] * lanes)
    parts = range(0, block, lanes)
    multiply_add = ir.Function(module, ir.FunctionType(wide, [wide] * 3), f"llvm.fma.v{lanes}f64")

    squares = function(module, "squares", FLOATS, DOUBLES, INT, INT)
    rows, found, records, blocks = squares.args
    b = Builder(squares, lanes)

    def one_norm(record: ir.Value) -> None:
        row = b.mul(b.mul(record, blocks), INT(block))

        def add_block(turn: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            at = b.add(row, b.mul(turn, INT(block)))
            values = [b.fpext(b.read_vector(rows, at, INT(part)), wide) for part in parts]
            return [
                b.call(multiply_add, [value, value, total]) for value, total in zip(values, sums, strict=True)
            ]

        sums = b.carry(blocks, [zero] * len(parts), add_block)
        while len(sums) > 1:
            sums = [b.fadd(left, right) for left, right in zip(sums[::2], sums[1::2], strict=True)]
        lane_sums = [b.extract_element(sums[0], ir.IntType(32)(lane)) for lane in range(lanes)]
        total = lane_sums[0]
        for value in lane_sums[1:]:
            total = b.fadd(total, value)
        b.store(total, b.at(found, record))

    b.count(records, one_norm)
    b.ret_void()

    scaled = function(module, "scaled", FLOATS, DOUBLES, DOUBLES, INT, INT)
    rows_, scales, sums_, records_, blocks_ = scaled.args
    c = Builder(scaled, lanes)

    def one_block(place: ir.Value) -> None:
        first = c.mul(place, INT(block))
        width = c.mul(blocks_, INT(block))

        def add_record(record: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            scale = c.spread(c.read(scales, record))
            at = c.add(c.mul(record, width), first)
            values = [c.fpext(c.read_vector(rows_, at, INT(part)), wide) for part in parts]
            return [
                c.call(multiply_add, [scale, value, total])
                for value, total in zip(values, totals, strict=True)
            ]

        for part, total in zip(parts, c.carry(records_, [zero] * len(parts), add_record), strict=True):
            c.write_vector(total, sums_, first, INT(part))

    c.count(blocks_, one_block)
    c.ret_void()
    return module
