# mypy: ignore-errors
"""The kernels themselves, in Triton's language; `kernels.py` says what each is for and calls them.

Images are in channels-last order: (records, height, width, channels).
"""

import triton
import triton.language as tl

from coterie.training import philox

COINS = tl.constexpr(philox.COINS)
NOISE = tl.constexpr(philox.NOISE)
NORMAL = tl.constexpr(2.0**-126)
"""The least float32 that keeps all its digits: a scale below it would round by more, and counts as zero."""


@triton.jit
def convolve(
    images, weights, bias, owner, present, outputs, weights_each, bias_each,
    height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    rows: tl.constexpr, channels: tl.constexpr, outer: tl.constexpr,
    kernel_h: tl.constexpr, kernel_w: tl.constexpr,
    stride_h: tl.constexpr, stride_w: tl.constexpr, pad_h: tl.constexpr, pad_w: tl.constexpr,
    dilation_h: tl.constexpr, dilation_w: tl.constexpr, spread_h: tl.constexpr, spread_w: tl.constexpr,
    turned: tl.constexpr, biased: tl.constexpr, some_absent: tl.constexpr, precision: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """One block of positions of one tile: the product of its patches with its client's weights.

    Spread: images count as if so many pixels less one, all zero, lay between any two of theirs.
    """
    inner: tl.constexpr = channels * kernel_h * kernel_w
    tile = tl.program_id(2)
    if some_absent:  # noqa: SIM102  one is known to the compiler, the other at run time
        if tl.load(present + tile * (rows // (out_height * out_width))) == 0:
            return
    client = tl.load(owner + tile)
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    o = tl.program_id(1) * block_n + tl.arange(0, block_n)
    inside = m < rows
    positions = out_height * out_width
    position = m % positions
    record = tile * (rows // positions) + m // positions
    top = (position // out_width) * stride_h - pad_h
    left = (position % out_width) * stride_w - pad_w
    base = images + record.to(tl.int64) * (height * width * channels)
    own = weights + client * weights_each
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for first in range(0, inner, block_k):
        k = first + tl.arange(0, block_k)
        y = top[:, None] + ((k // (channels * kernel_w)) * dilation_h)[None, :]
        x = left[:, None] + (((k // channels) % kernel_w) * dilation_w)[None, :]
        seen = (y >= 0) & (x >= 0) & inside[:, None] & (k < inner)[None, :]
        if spread_h * spread_w > 1:
            seen = seen & (y % spread_h == 0) & (x % spread_w == 0)
            y, x = y // spread_h, x // spread_w
        seen = seen & (y < height) & (x < width)
        a = tl.load(
            base[:, None] + (y * width + x) * channels + (k % channels)[None, :], mask=seen, other=0.0
        )
        known = (o < outer)[:, None] & (k < inner)[None, :]
        if turned:  # noqa: SIM108  what is not compiled must not be computed
            place = (kernel_h * kernel_w - 1 - k // channels) * channels + k % channels
        else:
            place = k
        b = tl.load(own + o[:, None] * inner + place[None, :], mask=known, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=precision)
    if biased:
        total += tl.load(bias + client * bias_each + o, mask=o < outer, other=0.0)[None, :]
    place = (tile.to(tl.int64) * rows + m)[:, None] * outer + o[None, :]
    tl.store(outputs + place, total, mask=inside[:, None] & (o < outer)[None, :])


@triton.jit
def form_rows(
    images, gradient, present, rows, bias_rows, squares,
    height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    channels: tl.constexpr, outer: tl.constexpr, kernel_h: tl.constexpr, kernel_w: tl.constexpr,
    stride_h: tl.constexpr, stride_w: tl.constexpr, pad_h: tl.constexpr, pad_w: tl.constexpr,
    dilation_h: tl.constexpr, dilation_w: tl.constexpr, biased: tl.constexpr, some_absent: tl.constexpr,
    precision: tl.constexpr, block_i: tl.constexpr, block_o: tl.constexpr, block_l: tl.constexpr,
):  # fmt: skip
    """One block of one record's weight gradient, and the square of its norm; the first adds a bias."""
    inner: tl.constexpr = channels * kernel_h * kernel_w
    record = tl.program_id(0).to(tl.int64)
    if some_absent:  # noqa: SIM102
        if tl.load(present + record) == 0:
            return
    i = tl.program_id(1) * block_i + tl.arange(0, block_i)
    o = tl.program_id(2) * block_o + tl.arange(0, block_o)
    positions = out_height * out_width
    down = (i // (channels * kernel_w)) * dilation_h - pad_h
    across = ((i // channels) % kernel_w) * dilation_w - pad_w
    base = images + record * (height * width * channels)
    grads = gradient + record * (positions * outer)
    total = tl.zeros((block_o, block_i), dtype=tl.float32)
    sums = tl.zeros((block_o,), dtype=tl.float32)
    for first in range(0, positions, block_l):
        position = first + tl.arange(0, block_l)
        y = ((position // out_width) * stride_h)[:, None] + down[None, :]
        x = ((position % out_width) * stride_w)[:, None] + across[None, :]
        seen = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        seen = seen & (position < positions)[:, None] & (i < inner)[None, :]
        a = tl.load(base + (y * width + x) * channels + (i % channels)[None, :], mask=seen, other=0.0)
        known = (position < positions)[:, None] & (o < outer)[None, :]
        b = tl.load(grads + position[:, None] * outer + o[None, :], mask=known, other=0.0)
        total = tl.dot(tl.trans(b), a, total, input_precision=precision)
        sums += tl.sum(b.to(tl.float32), axis=0)
    place = record * (inner * outer) + o[:, None] * inner + i[None, :]
    tl.store(rows + place, total, mask=(o < outer)[:, None] & (i < inner)[None, :])
    square = tl.sum(tl.sum(total * total, axis=1).to(tl.float64), axis=0)
    if biased:  # noqa: SIM102  one is known to the compiler, the other at run time
        if tl.program_id(1) == 0:
            tl.store(bias_rows + record * outer + o, sums, mask=o < outer)
            exact_sums = sums.to(tl.float64)
            square += tl.sum(exact_sums * exact_sums, axis=0)
    blocks = tl.num_programs(1) * tl.num_programs(2)
    block = tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
    tl.store(squares + record * blocks + block, square)


@triton.jit
def scale_of(scales, counted, n, end, summing):
    """What to multiply a record's row by, and whether it counts at all; for a norm, the row itself."""
    known = (summing != 0) & (n < end)
    scale = tl.load(scales + n, mask=known, other=1.0).to(tl.float32)
    counts = (tl.load(counted + n, mask=known, other=0) != 0) & (scale >= NORMAL)
    return scale, counts


@triton.jit(do_not_specialize=[
    "scales", "counted", "first_tile", "squares", "sums", "sums_each", "tile_size", "summing",
])  # fmt: skip
def weigh_rows(
    images, gradient, scales, counted, first_tile, squares, sums, sums_each, tile_size, summing,
    height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    channels: tl.constexpr, outer: tl.constexpr, kernel_h: tl.constexpr, kernel_w: tl.constexpr,
    stride_h: tl.constexpr, stride_w: tl.constexpr, pad_h: tl.constexpr, pad_w: tl.constexpr,
    dilation_h: tl.constexpr, dilation_w: tl.constexpr, precision: tl.constexpr,
    block_i: tl.constexpr, block_o: tl.constexpr, block_l: tl.constexpr, together: tl.constexpr,
):  # fmt: skip
    """One block of weights of one client: every record's gradient there, which is kept nowhere.

    Either the squares of its norm are stored, or its scaled sum over records is added to the sums. It is one
    program that does both, never specialised to either, so that the second time finds the very numbers of
    the first. Squares are summed by line of a block, in float32, and so are a few scaled records; groups of
    these, in float64. `WeighedRows` says why that is exact enough.

    (Triton 3.6 compiles no branch that reads a product of matrices first: `value` is read before.)
    """
    inner: tl.constexpr = channels * kernel_h * kernel_w
    taps: tl.constexpr = kernel_h * kernel_w
    positions: tl.constexpr = out_height * out_width
    i = tl.program_id(0) * block_i + tl.arange(0, block_i)
    o = tl.program_id(1) * block_o + tl.arange(0, block_o)
    client = tl.program_id(2).to(tl.int64)
    blocks = tl.num_programs(0) * tl.num_programs(1)
    block = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    down = (i // (channels * kernel_w)) * dilation_h - pad_h
    across = ((i // channels) % kernel_w) * dilation_w - pad_w
    begin = tl.load(first_tile + client) * tile_size
    end = tl.load(first_tile + client + 1) * tile_size
    total = tl.zeros((block_o, block_i), dtype=tl.float64)
    few = tl.zeros((block_o, block_i), dtype=tl.float32)
    next_scale, next_counts = scale_of(scales, counted, begin, end, summing)
    for n in range(begin, end):
        # Read a record ahead, so that nobody waits for them.
        scale, counts = next_scale, next_counts
        next_scale, next_counts = scale_of(scales, counted, n + 1, end, summing)
        base = images + n * (height * width * channels)
        grads = gradient + n * (positions * outer)
        row = tl.zeros((block_o, block_i), dtype=tl.float32)
        for start in tl.static_range(0, positions, block_l):
            position = start + tl.arange(0, block_l)
            y = ((position // out_width) * stride_h)[:, None] + down[None, :]
            x = ((position % out_width) * stride_w)[:, None] + across[None, :]
            seen = (y >= 0) & (y < height) & (x >= 0) & (x < width)
            seen = seen & (position < positions)[:, None] & (i < inner)[None, :]
            a = tl.load(base + (y * width + x) * channels + (i % channels)[None, :], mask=seen, other=0.0)
            known = (position < positions)[:, None] & (o < outer)[None, :]
            b = tl.load(grads + position[:, None] * outer + o[None, :], mask=known, other=0.0)
            row = tl.dot(tl.trans(b), a, row, input_precision=precision)
        value = row * scale
        if counts:
            few += value
        else:
            line = squares + (n * blocks + block) * block_o + tl.arange(0, block_o)
            tl.store(line, tl.sum(value * value, axis=1), mask=summing == 0)
        # Counted from the client's own first record: where that lies depends on who else is there.
        if (n - begin) % together == together - 1:
            total += few.to(tl.float64)
            few = tl.zeros((block_o, block_i), dtype=tl.float32)
    total += few.to(tl.float64)
    if summing:
        # Weights are ordered by output, then channel, then place in the kernel.
        place = o[:, None] * inner + ((i % channels) * taps + i // channels)[None, :]
        known = (o < outer)[:, None] & (i < inner)[None, :]
        place = sums + client * sums_each + place
        tl.store(place, tl.load(place, mask=known, other=0.0) + total, mask=known)


@triton.jit
def sum_by_client(
    rows, scales, usable, first_tile, sums, sums_each, width, tile_size,
    channels: tl.constexpr, taps: tl.constexpr, block_n: tl.constexpr, block_p: tl.constexpr,
):  # fmt: skip
    """One block of parameters of one client: the scaled sum over its records, in float64, is added.

    Rows are ordered by output, place in the kernel and channel, sums by output, channel and place.
    """
    client = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * block_p + tl.arange(0, block_p)
    begin = tl.load(first_tile + client) * tile_size
    end = tl.load(first_tile + client + 1) * tile_size
    total = tl.zeros((block_p,), dtype=tl.float64)
    for first in range(begin, end, block_n):
        n = first + tl.arange(0, block_n)
        scale = tl.load(scales + n, mask=n < end, other=0.0)
        counts = tl.load(usable + n, mask=n < end, other=0) != 0
        inside = (n < end)[:, None] & (p < width)[None, :]
        value = tl.load(rows + n[:, None] * width + p[None, :], mask=inside, other=0.0).to(tl.float64)
        total += tl.sum(tl.where(counts[:, None], value * scale[:, None], 0.0), axis=0)
    place = p
    if taps > 1:
        inner: tl.constexpr = channels * taps
        place = p // inner * inner + (p % channels) * taps + p % inner // channels
    place = sums + client * sums_each + place
    tl.store(place, tl.load(place, mask=p < width, other=0.0) + total, mask=p < width)


@triton.jit
def head_outputs(
    table, places, weights, owner, outputs, inner, outer, records, span, tile_size,
    precision: tl.constexpr, block_m: tl.constexpr, block_o: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """A tile's products with its client's weights over a span of the inputs."""
    tile, part = tl.program_id(0), tl.program_id(1)
    client = tl.load(owner + tile)
    m = tl.arange(0, block_m)
    n = tile * tile_size + m
    o = tl.program_id(2) * block_o + tl.arange(0, block_o)
    place = tl.load(places + n, mask=m < tile_size, other=0).to(tl.int64)
    own = weights + client.to(tl.int64) * inner * outer
    total = tl.zeros((block_m, block_o), dtype=tl.float32)
    end = tl.minimum((part + 1) * span, inner)
    for first in range(part * span, end, block_k):
        k = first + tl.arange(0, block_k)
        seen = (m < tile_size)[:, None] & (k < end)[None, :]
        a = tl.load(table + place[:, None] * inner + k[None, :], mask=seen, other=0.0)
        known = (o < outer)[:, None] & (k < end)[None, :]
        b = tl.load(own + o[:, None] * inner + k[None, :], mask=known, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=precision)
    row = part.to(tl.int64) * records + n
    kept = (m < tile_size)[:, None] & (o < outer)[None, :]
    tl.store(outputs + row[:, None] * outer + o[None, :], total, mask=kept)


@triton.jit
def factors(
    left, places, right, scales, usable, first, end, o, i, inner, outer,
    placed: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """What some records' scaled gradients at the outputs and what was put in are, in float64."""
    n = first + tl.arange(0, block_n)
    inside = n < end
    counts = inside & (tl.load(usable + n, mask=inside, other=0) != 0)
    place = tl.load(places + n, mask=inside, other=0).to(tl.int64) if placed else n.to(tl.int64)
    mine = (o < outer)[:, None] & counts[None, :]
    own = tl.load(right + n[None, :] * outer + o[:, None], mask=mine, other=0.0).to(tl.float64)
    scale = tl.load(scales + n, mask=inside, other=0.0)
    put_in = counts[:, None] & (i < inner)[None, :]
    value = tl.load(left + place[:, None] * inner + i[None, :], mask=put_in, other=0.0).to(tl.float64)
    return own * scale[None, :], value


@triton.jit
def sum_products(
    left, places, right, scales, usable, first_tile, sums, sums_each, inner, outer, tile_size,
    placed: tl.constexpr, block_o: tl.constexpr, block_i: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """A block of one client's weights: the scaled sum of its records' products, in float64, is added."""
    client = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * block_o + tl.arange(0, block_o)
    i = tl.program_id(2) * block_i + tl.arange(0, block_i)
    begin = tl.load(first_tile + client) * tile_size
    end = tl.load(first_tile + client + 1) * tile_size
    total = tl.zeros((block_o, block_i), dtype=tl.float64)
    # The next records are read before these are multiplied. (Triton 3.6 multiplies no float64 that it
    # sees come from narrower numbers; what comes from the turn before, it does not look into.)
    weight, value = factors(
        left, places, right, scales, usable, begin, end, o, i, inner, outer, placed, block_n
    )
    for first in range(begin, end, block_n):
        now, put_in = weight, value
        weight, value = factors(
            left, places, right, scales, usable, first + block_n, end, o, i, inner, outer, placed, block_n
        )
        total = tl.dot(now, put_in, total, out_dtype=tl.float64)
    target = sums + client * sums_each + o[:, None] * inner + i[None, :]
    known = (o < outer)[:, None] & (i < inner)[None, :]
    tl.store(target, tl.load(target, mask=known, other=0.0) + total, mask=known)


@triton.jit
def clip(squares, clips, present, scales, usable, count, margin: tl.constexpr, parts: tl.constexpr,
         block: tl.constexpr):  # fmt: skip
    """What to scale each record's gradient by, from the squared norms of its parts."""
    n = tl.program_id(0) * block + tl.arange(0, block)
    inside = n < count
    total = tl.zeros((block,), dtype=tl.float64)
    for part in tl.static_range(parts):
        total += tl.load(squares + part * count + n, mask=inside, other=0.0)
    counts = tl.load(present + n, mask=inside, other=0) != 0
    counts = counts & (total < float("inf"))  # also false for what is not a number
    limit = tl.load(clips + n, mask=inside, other=0.0) * margin
    scale = tl.minimum(limit / tl.maximum(tl.sqrt(total), 1e-300), 1.0)
    tl.store(scales + n, tl.where(counts, scale, 0.0), mask=inside)
    tl.store(usable + n, counts.to(tl.int8), mask=inside)


@triton.jit
def unit(low, high):
    """Uniform in (0, 1), from 64 bits."""
    value = (low.to(tl.float64) + 0.5) * 5.421010862427522e-20 + high.to(tl.float64) * 2.3283064365386963e-10
    return tl.minimum(value, 0.9999999999999999)


@triton.jit
def words(keys, client, place, step, stream: tl.constexpr):
    """The four words of each place, at one step of one of a client's streams."""
    seed = tl.load(keys + 2 * client) | (tl.load(keys + 2 * client + 1) << 32)
    zero = place * 0
    at = (zero + step).to(tl.uint32)
    return tl.philox(seed, place.to(tl.uint32), at, zero.to(tl.uint32), (zero + stream).to(tl.uint32))


@triton.jit
def move(
    parameters, sums, anchors, keys, step, steps, noise_stds, step_sizes, pulls, size,
    block: tl.constexpr,
):  # fmt: skip
    """Noise, the step and the pull for a block of pairs of one client's parameters; sums become zero."""
    client = tl.program_id(0)
    pair = tl.program_id(1) * block + tl.arange(0, block)
    now = tl.load(step)
    a, b, c, d = words(keys, client, pair, now, NOISE)
    radius = tl.sqrt(-2.0 * tl.log(unit(a, b)))
    angle = 6.283185307179586 * unit(c, d)
    std = tl.load(noise_stds + client)
    step_size = tl.load(step_sizes + client)
    pull = tl.load(pulls + client)
    due = now < tl.load(steps + client)
    base = client.to(tl.int64) * size
    for half in tl.static_range(2):
        noise = radius * (tl.cos(angle) if half == 0 else tl.sin(angle))
        p = 2 * pair + half
        inside = p < size
        value = tl.load(parameters + base + p, mask=inside, other=0.0)
        total = tl.load(sums + base + p, mask=inside, other=0.0)
        anchor = tl.load(anchors + base + p, mask=inside, other=0.0)
        moved = value - (step_size * (total + std * noise) + pull * (value - anchor))
        tl.store(parameters + base + p, tl.where(due, moved, value), mask=inside)
        tl.store(sums + base + p, tl.zeros((block,), dtype=tl.float64), mask=inside)


@triton.jit
def flip(keys, thresholds, outputs, first_step, clients, blocks, block: tl.constexpr):
    """Four coins from each counter, for a block of counters of one step and client."""
    step, client = tl.program_id(0), tl.program_id(1)
    place = tl.program_id(2) * block + tl.arange(0, block)
    threshold = tl.load(thresholds + client)
    a, b, c, d = words(keys, client, place, first_step + step, COINS)
    row = (step * clients + client).to(tl.int64) * blocks
    out = outputs + (row + place) * 4
    tl.store(out, (a.to(tl.int64) < threshold).to(tl.int8), mask=place < blocks)
    tl.store(out + 1, (b.to(tl.int64) < threshold).to(tl.int8), mask=place < blocks)
    tl.store(out + 2, (c.to(tl.int64) < threshold).to(tl.int8), mask=place < blocks)
    tl.store(out + 3, (d.to(tl.int64) < threshold).to(tl.int8), mask=place < blocks)


@triton.jit
def corners(
    e, height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    channels: tl.constexpr, kernel_h: tl.constexpr, kernel_w: tl.constexpr,
):  # fmt: skip
    """Where the windows of these outputs begin among the inputs."""
    x = (e // channels) % out_width
    y = (e // (channels * out_width)) % out_height
    record = e // (channels * out_width * out_height)
    return ((record * height + y * kernel_h) * width + x * kernel_w) * channels + e % channels


@triton.jit
def pool(
    outputs, winners, images, count,
    height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    channels: tl.constexpr, kernel_h: tl.constexpr, kernel_w: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The largest value of each window and which it was; ties go to the first, a NaN wins, as in torch."""
    e = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = e < count
    corner = corners(e, height, width, out_height, out_width, channels, kernel_h, kernel_w)
    best = tl.full((block,), float("-inf"), dtype=tl.float32)
    winner = tl.zeros((block,), dtype=tl.int32)
    for i in tl.static_range(kernel_h):
        for j in tl.static_range(kernel_w):
            value = tl.load(images + corner + (i * width + j) * channels, mask=inside, other=0.0)
            wins = (value > best) | (value != value)
            best = tl.where(wins, value, best)
            winner = tl.where(wins, i * kernel_w + j, winner)
    tl.store(outputs + e, best, mask=inside)
    tl.store(winners + e, winner.to(tl.int8), mask=inside)


@triton.jit
def unpool(
    gradient, winners, outputs, count,
    height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    channels: tl.constexpr, kernel_h: tl.constexpr, kernel_w: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Each window's gradient goes to its winner, zero to the others."""
    e = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = e < count
    corner = corners(e, height, width, out_height, out_width, channels, kernel_h, kernel_w)
    value = tl.load(gradient + e, mask=inside, other=0.0)
    winner = tl.load(winners + e, mask=inside, other=0)
    for i in tl.static_range(kernel_h):
        for j in tl.static_range(kernel_w):
            part = tl.where(winner == i * kernel_w + j, value, 0.0)
            tl.store(outputs + corner + (i * width + j) * channels, part, mask=inside)
