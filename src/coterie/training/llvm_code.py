# mypy: ignore-errors
"""The processor's kernels themselves, as LLVM's code; `cpu_kernels.py` says what each is for and calls them.

Sizes that decide a kernel's inner loops are written into it, so that these loops are unrolled and their sums
stay in registers.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir

NOTHING, FLOAT, DOUBLE, INT = ir.VoidType(), ir.FloatType(), ir.DoubleType(), ir.IntType(64)
FLOATS, DOUBLES, INTS = FLOAT.as_pointer(), DOUBLE.as_pointer(), INT.as_pointer()


@cache
def machine() -> tuple[llvm.TargetMachine, int, int]:
    """This processor, the float32 numbers of one of its registers, and the registers that sums may fill.

    None of the wide registers: ImportError, as where LLVM itself is missing.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        lanes, registers = 16, 25
    elif features.get("avx2") and features.get("fma"):
        lanes, registers = 8, 10
    else:
        raise ImportError("no kernels for a processor without AVX2")
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3, jit=True
    )
    return target, lanes, registers


def compiled(module: ir.Module) -> Callable[[str, int, int], Callable[..., None]]:
    """From the name of a function, and its numbers of pointers and of integers, to the function."""
    target = machine()[0]
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

    def read_vector(self, base: ir.Value, *offsets: ir.Value) -> ir.Value:
        return self.load(self.bitcast(self.at(base, *offsets), self.vector.as_pointer()), align=4)

    def write_vector(self, values: ir.Value, base: ir.Value, *offsets: ir.Value) -> None:
        self.store(values, self.bitcast(self.at(base, *offsets), self.vector.as_pointer()), align=4)

    def spread(self, value: ir.Value) -> ir.Value:
        """A vector of one number."""
        undefined, first = ir.Constant(self.vector, ir.Undefined), ir.IntType(32)
        whole = self.insert_element(undefined, value, first(0))
        return self.shuffle_vector(
            whole, undefined, ir.Constant(ir.VectorType(first, self.vector.count), [0] * self.vector.count)
        )

    def multiply_add(self, left: ir.Value, right: ir.Value, total: ir.Value) -> ir.Value:
        return self.call(self._multiply_add, [left, right, total])


def function(module: ir.Module, name: str, *kinds: ir.Type) -> ir.Function:
    """A function whose pointers never point at the same memory."""
    made = ir.Function(module, ir.FunctionType(NOTHING, kinds), name)
    for argument in made.args:
        if isinstance(argument.type, ir.PointerType):
            argument.add_attribute("noalias")
    return made


def sparse_convolution(
    height: int, line: int, vectors: int, lanes: int, channels: int, columns: int, padded_columns: int
) -> ir.Module:
    """The way back through a convolution, from a gradient that is zero but at one place of every window.

    Args:
        height: lines of the convolution's kernel.
        line: numbers in a line of it: width times channels.
        vectors, lanes: vectors that cover a line, and numbers in each.
        columns, padded_columns: of the outputs, and of the padded inputs.
    """
    module = ir.Module()
    module.triple = llvm.get_default_triple()
    kinds = (FLOATS, FLOATS, INTS, FLOATS, INT, INT, INT, INT)

    def corner(b: Builder, place: ir.Value) -> ir.Value:
        """Where the patch of an output begins in the padded inputs."""
        down = b.udiv(place, INT(columns))
        return b.mul(b.add(place, b.mul(down, INT(padded_columns - columns))), INT(channels))

    def offset(row: int, vector: int) -> ir.Value:
        return INT(row * padded_columns * channels + vector * lanes)

    # Every record's weight gradient: for each output channel, the sum of patches at its places.
    rows = function(module, "rows", *kinds)
    padded, gradient, places, formed, records, windows, outer, stride = rows.args
    b = Builder(rows, lanes)
    at_once = max(1, machine()[2] // vectors)

    def one_row(record: ir.Value, output: ir.Value, first: int) -> None:
        """So many lines of the kernel as registers hold."""
        lines = range(first, min(first + at_once, height))
        image, start = b.mul(record, stride), b.add(b.mul(b.mul(record, windows), outer), output)

        def window(turn: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            where = b.add(start, b.mul(turn, outer))
            value = b.read(gradient, where)

            def add_patch() -> list[ir.Value]:
                patch, scale = corner(b, b.read(places, where)), b.spread(value)
                parts = [
                    b.read_vector(padded, image, patch, offset(i, j)) for i in lines for j in range(vectors)
                ]
                return [b.multiply_add(scale, part, total) for part, total in zip(parts, sums, strict=True)]

            return b.unless_zero(value, sums, add_patch)

        sums = b.carry(windows, [b.zero] * (len(lines) * vectors), window)
        row = b.mul(b.add(b.mul(record, outer), output), INT(height * vectors * lanes))
        for position, total in enumerate(sums):
            b.write_vector(total, formed, row, INT((first * vectors + position) * lanes))

    b.count(
        records,
        lambda record: b.count(
            outer,
            lambda output: [one_row(record, output, first) for first in range(0, height, at_once)] and None,
        ),
    )
    b.ret_void()

    # The gradient at the padded inputs: the weights of each output channel, added at its places.
    back = function(module, "back", *kinds)
    weights, gradient_, places_, inputs, records_, windows_, outer_, stride_ = back.args
    c = Builder(back, lanes)

    def one_weight(record: ir.Value, window: ir.Value, output: ir.Value) -> None:
        where = c.add(c.mul(c.add(c.mul(record, windows_), window), outer_), output)
        value = c.read(gradient_, where)

        def add_weights() -> list[ir.Value]:
            scale, own = c.spread(value), c.mul(output, INT(height * line))
            image = c.add(c.mul(record, stride_), corner(c, c.read(places_, where)))
            for i in range(height):
                for j in range(vectors):
                    weight = c.read_vector(weights, own, INT(i * line + j * lanes))
                    total = c.read_vector(inputs, image, offset(i, j))
                    c.write_vector(c.multiply_add(scale, weight, total), inputs, image, offset(i, j))
            return []

        c.unless_zero(value, [], add_weights)

    c.count(
        records_,
        lambda record: c.count(
            windows_, lambda window: c.count(outer_, lambda output: one_weight(record, window, output))
        ),
    )
    c.ret_void()
    return module
