"""The kernel of `narrow_head.py`, as LLVM's code: a whole step's clipped sum of one small dense layer.

Like the kernels of `llvm_code.py`, below the loop that it computes, which the tests run beside it.
"""

from llvmlite import ir

from coterie.training.llvm_builder import DOUBLE, DOUBLES, FLOAT, FLOATS, INT, INTS, Builder

_LANES = 8
_ANY_ORDER = ("reassoc", "contract")
"""In which a sum may be taken: in vectors, and with fused products. What is not finite stays so."""


def head_sum(outer: int, inner: int, biased: bool, classes: bool) -> ir.Function:
    """Sum over records of the gradient of one dense layer, clipped, in float64.

    inputs (records, inner), targets (records,), weight (outer, inner), bias (outer,), float32 but for whole
    numbers as targets of classes; total (outer, inner) and total_bias (outer,), to which the sums are added;
    scratch has room for inner + outer numbers::

        for record in range(records):
            exact = inputs[record].astype(np.float64)
            longer = (exact * exact).sum() + (1.0 if biased else 0.0)
            outputs = (weight.astype(np.float64) @ exact + bias).astype(np.float32).astype(np.float64)
            if classes:
                gradient = np.exp(outputs - outputs.max())
                gradient /= gradient.sum()
                if not 0 <= targets[record] < outer:
                    continue
                gradient[targets[record]] -= 1.0
            else:
                gradient = outputs - targets[record]
            norm = np.sqrt(longer * (gradient * gradient).sum())
            if norm < np.inf:
                gradient *= min(clip / norm, 1.0) if norm > 0.0 else 1.0
                total += gradient[:, None] * exact
                total_bias += gradient
    """
    kinds = (FLOATS, INTS if classes else FLOATS, FLOATS, FLOATS, DOUBLES, DOUBLES, DOUBLES, INT, DOUBLE)
    b = Builder("head_sum", _LANES, *kinds, kind=DOUBLE)
    inputs, targets, weight, bias, scratch, total, total_bias, records, clip = b.function.args
    exponential, root = (
        ir.Function(b.module, ir.FunctionType(DOUBLE, [DOUBLE]), name)
        for name in ("llvm.exp.f64", "llvm.sqrt.f64")
    )
    gradient = b.at(scratch, INT(inner))
    nothing, one = DOUBLE(0.0), DOUBLE(1.0)

    def squared(value: ir.Value, sum_before: ir.Value) -> ir.Value:
        return b.fadd(sum_before, b.fmul(value, value, flags=_ANY_ORDER), flags=_ANY_ORDER)

    with b.count(records) as per_record:
        row = b.mul(per_record.turn, INT(inner))
        with b.count(INT(inner), one if biased else nothing) as loop:
            value = b.fpext(b.read(inputs, row, loop.turn), DOUBLE)
            b.store(value, b.at(scratch, loop.turn))
            loop.values = [squared(value, loop.values[0])]
        (longer,) = loop.values
        with b.count(INT(outer), DOUBLE(float("-inf"))) as outputs:
            own = b.mul(outputs.turn, INT(inner))
            first = b.fpext(b.read(bias, outputs.turn), DOUBLE) if biased else nothing
            with b.count(INT(inner), first) as loop:
                factor = b.fpext(b.read(weight, own, loop.turn), DOUBLE)
                product = b.fmul(factor, b.read(scratch, loop.turn), flags=_ANY_ORDER)
                loop.values = [b.fadd(loop.values[0], product, flags=_ANY_ORDER)]
            output = b.fpext(b.fptrunc(loop.values[0], FLOAT), DOUBLE)
            b.store(output, b.at(gradient, outputs.turn))
            larger = b.fcmp_ordered(">", output, outputs.values[0])
            outputs.values = [b.select(larger, output, outputs.values[0])]
        if classes:
            with b.count(INT(outer), nothing) as loop:
                place = b.at(gradient, loop.turn)
                power = b.call(exponential, [b.fsub(b.load(place), outputs.values[0])])
                b.store(power, place)
                loop.values = [b.fadd(loop.values[0], power)]
            share = b.fdiv(one, loop.values[0])
            with b.count(INT(outer)) as loop:
                place = b.at(gradient, loop.turn)
                b.store(b.fmul(b.load(place), share), place)
            target = b.read(targets, per_record.turn)
            known = b.icmp_unsigned("<", target, INT(outer))
            place = b.at(gradient, b.select(known, target, INT(0)))
            b.store(b.select(known, b.fsub(b.load(place), one), DOUBLE(float("nan"))), place)
        else:
            target = b.fpext(b.read(targets, per_record.turn), DOUBLE)
            with b.count(INT(outer)) as loop:
                place = b.at(gradient, loop.turn)
                b.store(b.fsub(b.load(place), target), place)
        with b.count(INT(outer), nothing) as loop:
            loop.values = [squared(b.read(gradient, loop.turn), loop.values[0])]
        norm = b.call(root, [b.fmul(longer, loop.values[0])])
        scale = b.fdiv(clip, norm)
        scale = b.select(b.fcmp_ordered("<", scale, one), scale, one)
        finite = b.fcmp_ordered("<", norm, DOUBLE(float("inf")))  # not so of what is not a number
        with b.if_then(finite), b.count(INT(outer)) as loop:
            scaled = b.fmul(b.read(gradient, loop.turn), scale)
            own = b.mul(loop.turn, INT(inner))
            if biased:
                place = b.at(total_bias, loop.turn)
                b.store(b.fadd(b.load(place), scaled), place)
            with b.count(INT(inner)) as added:
                place = b.at(total, own, added.turn)
                product = b.fmul(scaled, b.read(scratch, added.turn), flags=_ANY_ORDER)
                b.store(b.fadd(b.load(place), product, flags=_ANY_ORDER), place)
    return b.finished()
