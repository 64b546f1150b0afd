# mypy: ignore-errors
"""Group norms in Triton's language; `norm_kernels.py` says what each is for and calls them.

Images are in channels-last order: (records, height, width, channels). They may be bfloat16; what is computed
from them is float32.
"""

import triton
import triton.language as tl


@triton.jit
def by_group(values, groups: tl.constexpr, each: tl.constexpr):
    """For each channel, the sum over the channels of its group."""
    sums = tl.sum(tl.reshape(values, (groups, each)), axis=1)
    return tl.reshape(tl.broadcast_to(sums[:, None], (groups, each)), (groups * each,))


@triton.jit
def normalise(
    images, weight, bias, owner, present, outputs, means, rates, weight_each, bias_each, tile_size, eps,
    positions: tl.constexpr, groups: tl.constexpr, each: tl.constexpr, biased: tl.constexpr,
    some_absent: tl.constexpr, block_p: tl.constexpr,
):  # fmt: skip
    """One record: every group of channels at mean zero and variance one, scaled and shifted by its client."""
    channels: tl.constexpr = groups * each
    record = tl.program_id(0)
    if some_absent:  # noqa: SIM102
        if tl.load(present + record) == 0:
            return
    client = tl.load(owner + record // tile_size)
    c = tl.arange(0, channels)
    base = images + record.to(tl.int64) * (positions * channels)
    target = outputs + record.to(tl.int64) * (positions * channels)
    total = tl.zeros((channels,), dtype=tl.float32)
    for first in range(0, positions, block_p):
        p = first + tl.arange(0, block_p)
        value = tl.load(
            base + p[:, None] * channels + c[None, :], mask=(p < positions)[:, None], other=0.0
        ).to(tl.float32)
        total += tl.sum(value, axis=0)
    mean = by_group(total, groups, each) / (positions * each)
    total = tl.zeros((channels,), dtype=tl.float32)
    for first in range(0, positions, block_p):
        p = first + tl.arange(0, block_p)
        inside = (p < positions)[:, None]
        value = tl.load(base + p[:, None] * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
        centred = tl.where(inside, value - mean[None, :], 0.0)
        total += tl.sum(centred * centred, axis=0)
    rate = 1.0 / tl.sqrt(by_group(total, groups, each) / (positions * each) + eps)
    tl.store(means + record * channels + c, mean)
    tl.store(rates + record * channels + c, rate)
    scale = tl.load(weight + client * weight_each + c) * rate
    shift = tl.zeros((channels,), dtype=tl.float32)
    if biased:
        shift = tl.load(bias + client * bias_each + c)
    for first in range(0, positions, block_p):
        p = first + tl.arange(0, block_p)
        inside = (p < positions)[:, None]
        value = tl.load(base + p[:, None] * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
        value = (value - mean[None, :]) * scale[None, :] + shift[None, :]
        tl.store(target + p[:, None] * channels + c[None, :], value, mask=inside)


@triton.jit
def normalise_back(
    images, gradient, weight, owner, present, means, rates, outputs, weight_rows, bias_rows, squares,
    weight_each, tile_size,
    positions: tl.constexpr, groups: tl.constexpr, each: tl.constexpr, biased: tl.constexpr,
    some_absent: tl.constexpr, block_p: tl.constexpr,
):  # fmt: skip
    """One record: gradients at its images, its scale and its shift, and the square of the norm of both."""
    channels: tl.constexpr = groups * each
    record = tl.program_id(0)
    if some_absent:  # noqa: SIM102
        if tl.load(present + record) == 0:
            return
    client = tl.load(owner + record // tile_size)
    c = tl.arange(0, channels)
    whole = record.to(tl.int64) * (positions * channels)
    mean = tl.load(means + record * channels + c)
    rate = tl.load(rates + record * channels + c)
    shifted = tl.zeros((channels,), dtype=tl.float32)
    scaled = tl.zeros((channels,), dtype=tl.float32)
    for first in range(0, positions, block_p):
        p = first + tl.arange(0, block_p)
        inside = (p < positions)[:, None]
        place = whole + p[:, None] * channels + c[None, :]
        value = tl.load(images + place, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        shifted += tl.sum(slope, axis=0)
        scaled += tl.sum(slope * ((value - mean[None, :]) * rate[None, :]), axis=0)
    tl.store(weight_rows + record * channels + c, scaled)
    exact = scaled.to(tl.float64)
    square = tl.sum(exact * exact, axis=0)
    if biased:
        tl.store(bias_rows + record * channels + c, shifted)
        exact = shifted.to(tl.float64)
        square += tl.sum(exact * exact, axis=0)
    tl.store(squares + record, square)
    own = tl.load(weight + client * weight_each + c)
    level = by_group(own * shifted, groups, each) / (positions * each)
    tilt = by_group(own * scaled, groups, each) / (positions * each)
    for first in range(0, positions, block_p):
        p = first + tl.arange(0, block_p)
        inside = (p < positions)[:, None]
        place = whole + p[:, None] * channels + c[None, :]
        value = tl.load(images + place, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        normal = (value - mean[None, :]) * rate[None, :]
        back = rate[None, :] * (own[None, :] * slope - level[None, :] - normal * tilt[None, :])
        tl.store(outputs + place, back, mask=inside)
