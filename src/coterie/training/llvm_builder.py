"""What LLVM's code for a processor is built with: loops, vectors anywhere in memory, and a compiler."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

FLOAT, DOUBLE, INT = ir.FloatType(), ir.DoubleType(), ir.IntType(64)
FLOATS, DOUBLES, INTS = FLOAT.as_pointer(), DOUBLE.as_pointer(), INT.as_pointer()
HALVES, PAIRS = ir.IntType(16).as_pointer(), ir.IntType(32).as_pointer()
"""Of bfloat16 as it lies in memory, one by one and two at a time."""
_PASSED: dict[ir.Type, Any] = {INT: ctypes.c_int64, DOUBLE: ctypes.c_double}
Kernel = Callable[..., None]
"""Takes addresses, then numbers, in the order of its declaration."""


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


def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16, and adds products up in float32."""
    return bool(llvm.get_host_cpu_features().get("avx512bf16"))


def lanes_for(line: int) -> int:
    """Numbers in the vectors that cover a line of so many: exactly, where that is possible."""
    widest = machine()[0]
    for lanes in (widest, 8):
        if line % lanes == 0:
            return lanes
    return widest if line > 8 else 8


@cache
def compiled(make: Callable[..., ir.Function], *sizes: object) -> Kernel:
    """A kernel for these sizes and the processor at hand, compiled when it is first asked for."""
    function = make(*sizes)
    # An engine owns its target: each needs one of its own.
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
    )
    parsed = llvm.parse_assembly(str(function.module))
    parsed.verify()
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, target)
    engine.finalize_object()
    kinds = (_PASSED.get(argument.type, ctypes.c_void_p) for argument in function.args)
    kernel = ctypes.CFUNCTYPE(None, *kinds)(engine.get_function_address(function.name))
    kernel.engine = engine  # type: ignore[attr-defined]  # its code lives as long as the engine
    return kernel


class _Bfloat16(ir.Type):  # type: ignore[misc]  # llvmlite comes without types, and without this one
    def _to_string(self) -> str:
        return "bfloat"


@dataclass
class Loop:
    """A loop under construction.

    Args:
        values: in the body, those of the turn before; what the body leaves here is the next turn's, and after
            the loop, the last turn's.
        turn: 0, 1, ...
        again: at the end of the body, whether there is another turn.
    """

    values: list[ir.Value]
    turn: ir.Value = None
    again: ir.Value = None


class Builder(ir.IRBuilder):  # type: ignore[misc]  # llvmlite comes without types
    """Builds a kernel: a function in a module of its own, whose pointers never point at the same memory.

    Adds what every kernel here needs: loops that count, and vectors anywhere in memory.
    """

    def __init__(self, name: str, lanes: int, *arguments: ir.Type, kind: ir.Type = FLOAT) -> None:
        function = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), arguments), name)
        function.module.triple = llvm.get_default_triple()
        for argument in function.args:
            if argument.type.is_pointer:
                argument.add_attribute("noalias")
        super().__init__(function.append_basic_block("entry"))
        self.vector = ir.VectorType(kind, lanes)
        self.zero = ir.Constant(self.vector, [0.0] * lanes)
        fused = ir.FunctionType(self.vector, [self.vector] * 3)
        name = f"llvm.fma.v{lanes}{'f32' if kind is FLOAT else 'f64'}"
        self._multiply_add = ir.Function(function.module, fused, name)

    def finished(self) -> ir.Function:
        """The kernel, which returns here."""
        self.ret_void()
        return self.function

    @contextmanager
    def count(self, times: ir.Value, *start: ir.Value) -> Iterator[Loop]:
        """Run the body for each turn, at least once."""
        with self._repeated(INT(0), *start) as loop:
            loop.turn = loop.values.pop(0)
            yield loop
            loop.values.insert(0, self.add(loop.turn, INT(1), flags=["nuw", "nsw"]))
            loop.again = self.icmp_unsigned("<", loop.values[0], times)
        loop.values.pop(0)

    @contextmanager
    def until_zero(self, *start: ir.Value) -> Iterator[Loop]:
        """Run the body at least once, until its first value is zero."""
        with self._repeated(*start) as loop:
            yield loop
            loop.again = self.icmp_unsigned("!=", loop.values[0], loop.values[0].type(0))

    @contextmanager
    def _repeated(self, *start: ir.Value) -> Iterator[Loop]:
        before, head, after = self.block, self.append_basic_block(), self.append_basic_block()
        self.branch(head)
        self.position_at_end(head)
        merged = [self._merged({before: value}) for value in start]
        loop = Loop(list(merged))
        yield loop
        for value, result in zip(merged, loop.values, strict=True):
            value.add_incoming(result, self.block)
        self.cbranch(loop.again, head, after)
        self.position_at_end(after)

    @contextmanager
    def unless_zero(self, value: ir.Value, given: list[ir.Value]) -> Iterator[Loop]:
        """Run the body where a number is not zero (or is no number at all); else values stay as given."""
        before, work, after = self.block, self.append_basic_block(), self.append_basic_block()
        self.cbranch(self.fcmp_unordered("!=", value, FLOAT(0.0)), work, after)
        self.position_at_end(work)
        body = Loop(list(given))
        yield body
        end = self.block
        self.branch(after)
        self.position_at_end(after)
        body.values = [
            self._merged({before: old, end: new}) for old, new in zip(given, body.values, strict=True)
        ]

    def _merged(self, incoming: dict[ir.Block, ir.Value]) -> ir.PhiInstr:
        merged = self.phi(next(iter(incoming.values())).type)
        for block, value in incoming.items():
            merged.add_incoming(value, block)
        return merged

    def index(self, *terms: ir.Value | int | tuple[ir.Value, ir.Value | int]) -> ir.Value:
        """The sum of whole numbers and of products of two: where something lies."""

        def whole(value: ir.Value | int) -> ir.Value:
            return INT(value) if isinstance(value, int) else value

        values = (self.mul(*map(whole, term)) if isinstance(term, tuple) else whole(term) for term in terms)
        return reduce(self.add, values)

    def at(self, base: ir.Value, *offsets: ir.Value) -> ir.Value:
        return reduce(lambda place, offset: self.gep(place, [offset]), offsets, base)

    def read(self, base: ir.Value, *offsets: ir.Value) -> ir.Value:
        return self.load(self.at(base, *offsets))

    def read_vector(self, base: ir.Value, *offsets: ir.Value, lanes: int | None = None) -> ir.Value:
        kind = ir.VectorType(base.type.pointee, lanes or self.vector.count)
        return self.load(self.bitcast(self.at(base, *offsets), kind.as_pointer()), align=4)

    def write_vector(self, values: ir.Value, base: ir.Value, *offsets: ir.Value) -> None:
        self.store(values, self.bitcast(self.at(base, *offsets), values.type.as_pointer()), align=4)

    def read_numbers(self, base: ir.Value, *offsets: ir.Value) -> ir.Value:
        """A vector of float32, which may lie in memory as bfloat16."""
        found = self.read_vector(base, *offsets)
        if base.type != HALVES:
            return found
        bits = self.zext(found, ir.VectorType(ir.IntType(32), found.type.count))
        return self.bitcast(self.shl(bits, ir.Constant(bits.type, [16] * found.type.count)), self.vector)

    def write_numbers(self, values: ir.Value, base: ir.Value, *offsets: ir.Value) -> None:
        """A vector of float32, to memory that may hold bfloat16: rounded as torch does, ties to even."""
        if base.type == HALVES:
            lanes = values.type.count
            whole = ir.VectorType(ir.IntType(32), lanes)
            bits, high = self.bitcast(values, whole), ir.Constant(whole, [16] * lanes)
            odd = self.and_(self.lshr(bits, high), ir.Constant(whole, [1] * lanes))
            nearest = self.add(bits, self.add(odd, ir.Constant(whole, [0x7FFF] * lanes)))
            unknown = self.fcmp_unordered("uno", values, values)
            kept = self.select(unknown, ir.Constant(whole, [0x7FC0] * lanes), self.lshr(nearest, high))
            values = self.trunc(kept, ir.VectorType(HALVES.pointee, lanes))
        self.write_vector(values, base, *offsets)

    def spread(self, value: ir.Value, lanes: int | None = None) -> ir.Value:
        """A vector of one number."""
        lanes, place = lanes or self.vector.count, ir.IntType(32)
        undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
        whole = self.insert_element(undefined, value, place(0))
        return self.shuffle_vector(whole, undefined, ir.Constant(ir.VectorType(place, lanes), [0] * lanes))

    def beside(self, left: ir.Value, right: ir.Value) -> list[ir.Value]:
        """Two vectors as one of twice the length in two halves: the first of both, the second of both, ..."""
        lanes = left.type.count
        order = [at + half for at in range(lanes) for half in (0, lanes)]
        masks = (
            ir.Constant(ir.VectorType(ir.IntType(32), lanes), part) for part in (order[:lanes], order[lanes:])
        )
        return [self.shuffle_vector(left, right, mask) for mask in masks]

    def table(self, name: str, values: Sequence[int]) -> ir.Value:
        """Whole numbers that are known before the kernel runs."""
        kind = ir.ArrayType(INT, len(values))
        found = ir.GlobalVariable(self.module, kind, name)
        found.initializer, found.global_constant, found.linkage = ir.Constant(kind, values), True, "internal"
        return self.gep(found, [INT(0), INT(0)])

    def total(self, vectors: list[ir.Value]) -> ir.Value:
        """The sum of all numbers of some vectors (a power of two), in one order."""
        while len(vectors) > 1:
            vectors = [
                self.fadd(left, right) for left, right in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        lanes = range(vectors[0].type.count)
        return reduce(self.fadd, [self.extract_element(vectors[0], ir.IntType(32)(lane)) for lane in lanes])

    def multiply_add(
        self, left: list[ir.Value], right: list[ir.Value], totals: list[ir.Value]
    ) -> list[ir.Value]:
        """Products added to totals, vector by vector."""
        return [self.call(self._multiply_add, each) for each in zip(left, right, totals, strict=True)]

    def add_pairs(
        self, left: list[ir.Value], right: list[ir.Value], totals: list[ir.Value]
    ) -> list[ir.Value]:
        """Both products of each two pairs of bfloat16 added to totals of float32, vector by vector."""
        halves = ir.VectorType(_Bfloat16(), 2 * self.vector.count)
        takes = ir.FunctionType(self.vector, [self.vector, halves, halves])
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.vector.count}"
        known = self.module.globals.get(name)
        add = known if known is not None else ir.Function(self.module, takes, name)
        return [
            self.call(add, [total, *(self.bitcast(each, halves) for each in both)])
            for *both, total in zip(left, right, totals, strict=True)
        ]
