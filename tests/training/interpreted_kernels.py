"""The GPU's kernels against torch's operations, in Triton's interpreter (`test_kernels.py` starts it)."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import nn
from torch.nn import functional
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from coterie.data.records import Task
from coterie.models import ModelSettings, build_model
from coterie.privacy import Adjacency, PoissonSteps
from coterie.training import contributions, head, kernel_trial, kernels, norm_kernels, philox, stacked
from coterie.training.clipping import MARGIN, clip_scales, stacked_clipped_sum
from coterie.training.kernels import Geometry, MaxPool
from coterie.training.layers import simple
from coterie.training.learner import Batch, Learner, precision
from coterie.training.local_sgd import LocalJob, LocalSGD, LocalTrainer, train_one
from coterie.training.parameters import flatten
from coterie.training.stacked import StackedJob, StackedTrainer
from coterie.training.tiles import Tiles, tiles_of

CPU = torch.device("cpu")
LAST = torch.channels_last
CONVOLUTIONS = {
    "one channel": (1, 16, (9, 9), Geometry((5, 5), (1, 1), (2, 2), (1, 1))),
    "many channels": (16, 32, (7, 6), Geometry((5, 5), (1, 1), (2, 2), (1, 1))),
    "stride and dilation": (3, 10, (9, 8), Geometry((3, 2), (2, 1), (1, 0), (1, 2))),
    "dilation": (4, 5, (9, 8), Geometry((3, 2), (1, 1), (1, 0), (1, 2))),
    "wide": (20, 70, (4, 4), Geometry((3, 3), (1, 1), (1, 1), (1, 1))),
}


BROKEN_INTERPRETER = 77
"""Exit code by which `test_kernels.py` knows that nothing was compared."""


@triton.jit
def _count_up(bound, found):
    counted = 0
    for _ in range(tl.load(bound)):
        counted += 1
    tl.store(found, counted)


@pytest.fixture(scope="session", autouse=True)
def _the_interpreter_counts() -> None:
    """Triton 3.6 turns arrays of one element into numbers, which newer versions of NumPy refuse to do.

    Then it cannot even run a loop whose bound is loaded from memory, and says nothing about our kernels.
    Whatever else goes wrong is for the tests to find.
    """
    bound, found = torch.tensor([3]), torch.zeros(1, dtype=torch.int64)
    try:
        _count_up[(1,)](bound, found)
    except Exception as error:
        if "only 0-dimensional arrays can be converted" not in str(error):
            raise
        pytest.exit(f"Triton's interpreter does not work with this NumPy: {error}", BROKEN_INTERPRETER)
    assert found.tolist() == [3]


@pytest.fixture(scope="session", autouse=True)
def _bfloat16_is_a_number() -> Iterator[None]:
    """Triton's interpreter multiplies the bits of bfloat16 as whole numbers and rounds without a carry."""
    builder = interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def widened(value: TensorHandle) -> TensorHandle:
        if value.dtype.scalar != tl.bfloat16:
            return value
        return TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, d, *options):
        return dot(self, widened(a), widened(b), d, *options)

    def cast_impl(self, src, dst_type):
        if dst_type.scalar != tl.bfloat16 or src.dtype.scalar != tl.float32:
            return cast(self, src, dst_type)
        bits = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.bfloat16).view(torch.int16).numpy()
        return TensorHandle(bits.view(np.uint16), tl.bfloat16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_dot", create_dot)
        patch.setattr(builder, "cast_impl", cast_impl)
        yield


def images(records: int, channels: int, size: tuple[int, int]) -> torch.Tensor:
    return torch.randn(records, *size, channels).permute(0, 3, 1, 2)


@pytest.fixture
def tiles() -> Tiles:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    owner = torch.tensor([0, 0, 1, 2, 2])
    return Tiles(5, 3, owner, dynamic=False, bounds=torch.tensor([0, 2, 3, 5]))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_and_their_gradients(name: str, tiles: Tiles) -> None:
    channels, outer, size, shape = CONVOLUTIONS[name]
    inputs = images(15, channels, size)
    weights, bias = torch.randn(3, outer, channels, *shape.kernel), torch.randn(3, outer)
    options = (shape.stride, shape.padding, shape.dilation)
    assert tiles.owner is not None
    parts = [(inputs[3 * k : 3 * k + 3], int(client)) for k, client in enumerate(tiles.owner)]
    found = kernels.convolve(inputs, weights.permute(0, 1, 3, 4, 2).contiguous(), bias, tiles, shape)
    expected = torch.cat([functional.conv2d(x, weights[c], bias[c], *options) for x, c in parts])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    gradient = torch.randn_like(expected).contiguous(memory_format=LAST)
    rows, bias_rows, squares = kernels.form_rows(inputs, gradient, shape, tiles, biased=True)
    assert bias_rows is not None
    without, none, alone = kernels.form_rows(inputs, gradient, shape, tiles, biased=False)
    assert none is None
    torch.testing.assert_close(without, rows)
    torch.testing.assert_close(alone, rows.flatten(1).double().square().sum(dim=1))
    one_by_one = torch.stack(
        [
            nn.grad.conv2d_weight(inputs[n : n + 1], weights[0].shape, gradient[n : n + 1], *options)
            for n in range(15)
        ]
    )
    torch.testing.assert_close(rows.permute(0, 1, 4, 2, 3), one_by_one, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bias_rows, gradient.sum(dim=(2, 3)), rtol=1e-4, atol=1e-4)
    both = torch.cat((rows.flatten(1), bias_rows), dim=1).double()
    torch.testing.assert_close(squares, both.square().sum(dim=1))

    other = weights.permute(0, 2, 3, 4, 1).contiguous()
    back = kernels.convolve(gradient, other, None, tiles, shape.turned_around(), back_to=size)
    split = torch.split(gradient, 3)
    slow = [
        nn.grad.conv2d_input(x.shape, weights[c], g, *options) for (x, c), g in zip(parts, split, strict=True)
    ]
    torch.testing.assert_close(back, torch.cat(slow), rtol=1e-4, atol=1e-4)

    # Rows that are formed twice, and sums in the order of the weights, in a part of something larger.
    twice = kernels.WeighedRows(inputs, gradient, shape, tiles)
    torch.testing.assert_close(twice.squares(), alone, rtol=1e-5, atol=0)
    scales, usable = torch.rand(15).double(), torch.arange(15) != 4
    before = torch.randn(3, rows[0].numel() + 7).double()
    expected = by_client(rows.permute(0, 1, 4, 2, 3).flatten(1).double() * (scales * usable)[:, None])
    channels_and_taps = (channels, math.prod(shape.kernel))
    for add in (
        lambda sums: twice.add(scales, usable, sums),
        lambda sums: kernels.add_by_client(rows.flatten(1), scales, usable, tiles, sums, *channels_and_taps),
    ):
        whole = before.clone()
        add(whole[:, 5:-2])
        torch.testing.assert_close(whole[:, 5:-2] - before[:, 5:-2], expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(whole[:, :5], before[:, :5])
        assert torch.equal(whole[:, -2:], before[:, -2:])


def by_client(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([values[a:b].sum(dim=0) for a, b in ((0, 6), (6, 9), (9, 15))])


def test_rows_that_are_summed_have_the_norms_that_were_taken(tiles: Tiles) -> None:
    """One record of a client at a time: the sum is its row, to the last bit, and the norm is the row's."""
    _, _, size, shape = CONVOLUTIONS["wide"]
    inputs, gradient = images(15, 20, size), images(15, 70, size)
    rows = kernels.WeighedRows(inputs, gradient, shape, tiles)
    for record in (0, 7, 14):
        found = torch.zeros(3, 70 * 20 * 9, dtype=torch.float64)
        rows.add(torch.ones(15, dtype=torch.float64), torch.arange(15) == record, found)
        assert torch.equal(found.float().double(), found)
        torch.testing.assert_close(found.square().sum(), rows.squares()[record], rtol=2.0**-17, atol=0)


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e6, 1e17])
def test_a_record_moves_rows_formed_twice_by_the_clip_at_most(size: float, tiles: Tiles) -> None:
    """With one record less, in the same places; all others of its client are summed with it in float32."""
    _, _, side, shape = CONVOLUTIONS["wide"]
    inputs, gradient, clip = images(15, 20, side), size * images(15, 70, side), 1e-6
    rows = kernels.WeighedRows(inputs, gradient, shape, tiles)
    clips, present = torch.full((15,), clip, dtype=torch.float64), torch.ones(15, dtype=torch.bool)
    scales, usable = kernels.clip_scales([rows.squares()], clips, present, MARGIN)
    with_it, without = (torch.zeros(3, 70 * 20 * 9, dtype=torch.float64) for _ in range(2))
    rows.add(scales, usable, with_it)
    rows.add(scales * (torch.arange(15) != 2), usable & (torch.arange(15) != 2), without)
    moved = (with_it - without).norm(dim=1)
    assert moved[1:].tolist() == [0.0, 0.0]
    assert float(moved[0]) <= clip
    # What is longer than float32 can square is not finite, and contributes nothing.
    if size < 1e17:
        assert float(moved[0]) > 0.9999 * min(clip, float(rows.squares()[2]) ** 0.5)


def test_rows_are_summed_alike_wherever_their_client_lies() -> None:
    """In a program of local steps, what lies before a client depends on who else was sampled."""
    _, _, side, shape = CONVOLUTIONS["wide"]
    inputs, gradient = images(15, 20, side), images(15, 70, side)
    scales, usable = torch.rand(5).double(), torch.ones(10, dtype=torch.bool)
    found = []
    for first in (0, 5):
        places = torch.tensor([*range(5)] * 2) if first else torch.arange(10)
        tiles = Tiles(2, 5, torch.arange(2), dynamic=False, bounds=torch.arange(3))
        rows = kernels.WeighedRows(inputs[places], gradient[places], shape, tiles)
        sums = torch.zeros(2, 70 * 20 * 9, dtype=torch.float64)
        rows.add(torch.cat([scales, scales]), usable, sums)
        found.append(sums[first // 5])
    assert torch.equal(found[0], found[1])


def test_a_scale_that_float32_cannot_hold_counts_as_zero(tiles: Tiles) -> None:
    _, _, side, shape = CONVOLUTIONS["wide"]
    rows = kernels.WeighedRows(images(15, 20, side), images(15, 70, side), shape, tiles)
    found = torch.zeros(3, 70 * 20 * 9, dtype=torch.float64)
    rows.add(torch.full((15,), 2.0**-127, dtype=torch.float64), torch.ones(15, dtype=torch.bool), found)
    assert not found.any()


@pytest.mark.parametrize(("channels", "groups", "size"), [(64, 32, (6, 5)), (16, 4, (4, 4)), (8, 8, (3, 3))])
def test_group_norms_and_their_gradients(
    channels: int, groups: int, size: tuple[int, int], tiles: Tiles
) -> None:
    inputs = images(15, channels, size).requires_grad_()
    stacked = torch.randn(3, 2 * channels + 5)
    weight, bias = stacked[:, 3 : 3 + channels], stacked[:, 3 + channels : 3 + 2 * channels]
    found, means, rates = norm_kernels.normalise(inputs.detach(), weight, bias, tiles, groups, 1e-5)
    assert tiles.owner is not None
    own = tiles.owner.repeat_interleave(3)
    by_record = [part[own].requires_grad_() for part in (weight, bias)]
    spread = [part[:, :, None, None] for part in by_record]
    expected = functional.group_norm(inputs, groups, eps=1e-5) * spread[0] + spread[1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    gradient = torch.randn_like(expected).contiguous(memory_format=LAST)
    slow = torch.autograd.grad(expected, (inputs, *by_record), gradient)
    given = (inputs.detach(), gradient, weight, means, rates, tiles, groups)
    *fast, squares = norm_kernels.normalise_back(*given, biased=True)
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    _, weight_rows, none, alone = norm_kernels.normalise_back(*given, biased=False)
    assert none is None
    torch.testing.assert_close(alone, weight_rows.double().square().sum(dim=1))
    assert fast[2] is not None
    torch.testing.assert_close(squares, alone + fast[2].double().square().sum(dim=1))


def residual_network() -> tuple[nn.Module, Task]:
    layers = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.GroupNorm(4, 8), nn.ReLU())
    down = nn.Sequential(nn.Conv2d(8, 16, 3, 2, padding=1), nn.GroupNorm(4, 16), nn.ReLU())
    last = (nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 2, bias=False), nn.Flatten())
    task = Task(kind="classification", shape=(3, 4, 4), classes=4)
    return nn.Sequential(*layers, down, *last, nn.Linear(64, 4)), task


def text_network() -> tuple[nn.Module, Task]:
    task = Task(kind="classification", shape=(5,), classes=7, vocabulary=7)
    return build_model(ModelSettings(name="lstm", hidden=32, embedding=4, layers=2), task, seed=0), task


@pytest.mark.parametrize("network", [residual_network, text_network])
def test_clipped_sums_of_whole_models(
    network: Callable[[], tuple[nn.Module, Task]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our kernels, which skip what is not there, and without; and rows are formed twice somewhere."""
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setattr(contributions, "products_are_cheaper", lambda positions, *sizes: positions < 5)
    monkeypatch.setattr(simple, "products_are_cheaper", lambda positions, *sizes: positions >= 5)
    formed = []
    taken = kernels.WeighedRows.squares
    monkeypatch.setattr(
        kernels.WeighedRows,
        "squares",
        lambda self: formed.append(self) or taken(self),  # type: ignore[func-returns-value]
    )
    model, task = network()
    learner = Learner(model, task, CPU)
    assert learner.book is not None
    owner, probe = torch.tensor([0, 0, 1, 2, 2]), learner.random_batch(20)
    present = torch.arange(20) % 4 < 3
    present[-4:] = False
    stacked = torch.tensor([[1.0], [0.9], [1.1]]) * learner.initial()
    clips = torch.full((20,), 0.5, dtype=torch.float64)
    fast, slow = (
        stacked_clipped_sum(learner.book, stacked, probe, tiles_of(owner, 4, 3, own), clips, present)
        for own in (present, None)
    )
    assert formed
    assert (fast - slow).norm() < 1e-5 * slow.norm()


@pytest.mark.parametrize("kept", [True, False], ids=["rows kept", "rows formed twice"])
def test_images_handed_on_in_bfloat16(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near to what full precision finds; and who is alone adds its clip, neither more nor much less."""
    monkeypatch.setattr(kernels, "COARSE_FROM", 16)
    monkeypatch.setattr(contributions, "products_are_cheaper", lambda *sizes: not kept)
    down = (nn.Conv2d(3, 16, 3, 2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2))
    last = (nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.GroupNorm(8, 32), nn.Conv2d(32, 16, 2))
    model = nn.Sequential(*down, *last, nn.Flatten(), nn.Linear(16, 4))
    learner = Learner(model, Task(kind="classification", shape=(3, 8, 8), classes=4), CPU)
    assert learner.book is not None
    assert learner.book.many_channels
    given, convolve = [], kernels.convolve

    def seen(images: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        given.append(images.dtype)
        return convolve(images, *rest, **more)

    monkeypatch.setattr(kernels, "convolve", seen)
    owner, probe = torch.tensor([0, 0, 1, 2, 2]), learner.random_batch(20)
    present = torch.arange(20) % 4 < 3
    present[-4:] = False
    alone = torch.zeros_like(present)
    alone[[0, 8, 12]] = True
    stacked = torch.tensor([[1.0], [0.9], [1.1]]) * learner.initial()
    clip = 0.01
    clips = torch.full((20,), clip, dtype=torch.float64)

    def sums(shown: torch.Tensor, *, ours: bool) -> torch.Tensor:
        assert learner.book is not None
        tiles = tiles_of(owner, 4, 3, shown if ours else None, coarse=True)
        return stacked_clipped_sum(learner.book, stacked, probe, tiles, clips, shown)

    with precision(tf32=True):
        found, slow, lone = sums(present, ours=True), sums(present, ours=False), sums(alone, ours=True)
    assert torch.bfloat16 in given
    assert (found - slow).norm() < 0.1 * slow.norm()
    assert (lone.norm(dim=1) <= clip).all()
    assert (lone.norm(dim=1) > 0.9999 * clip).all()


def test_sums_by_client_leave_out_what_is_not_finite(tiles: Tiles) -> None:
    rows, scales = torch.randn(15, 300), torch.rand(15).double()
    usable = torch.ones(15, dtype=torch.bool)
    rows[1], scales[1], usable[1] = float("nan"), 0.0, False
    found = torch.zeros(3, 300, dtype=torch.float64)
    kernels.add_by_client(rows, scales, usable, tiles, found)
    scaled = torch.where(usable[:, None], scales[:, None] * rows.double(), 0.0)
    torch.testing.assert_close(found, by_client(scaled))


def test_sums_of_products_by_client(tiles: Tiles) -> None:
    left, right, scales = torch.randn(15, 40), torch.randn(15, 7), torch.rand(15).double()
    usable = torch.ones(15, dtype=torch.bool)
    left[4], scales[4], usable[4] = float("inf"), 0.0, False
    found = torch.zeros(3, 7 * 40, dtype=torch.float64)
    kernels.add_products(left, right, scales, usable, tiles, found)
    for client, (a, b) in enumerate(((0, 6), (6, 9), (9, 15))):
        kept = [n for n in range(a, b) if usable[n]]
        expected = torch.einsum("n,no,ni->oi", scales[kept], right[kept].double(), left[kept].double())
        torch.testing.assert_close(found[client].view(7, 40), expected)


def test_clip_scales() -> None:
    squares = torch.tensor([[0.0, 4.0, float("nan"), float("inf"), 0.01, 9.0]] * 2, dtype=torch.float64)
    clips = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    present = torch.tensor([True, True, True, True, True, False])
    scales, usable = kernels.clip_scales(list(squares), clips, present, MARGIN)
    assert usable.tolist() == [True, True, False, False, True, False]
    expected = torch.where(present, clip_scales(squares.sum(dim=0).sqrt(), clips), 0.0)
    torch.testing.assert_close(scales, expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("clip", [1e-6, 1.0, 1e6])
def test_clip_scales_let_nothing_longer_than_the_clip_through(clip: float) -> None:
    norms = torch.tensor(
        [0.0, 1e-170, 1e-45, clip * MARGIN, clip, 2 * clip, 1e38, 1e150], dtype=torch.float64
    )
    clips, present = torch.full_like(norms, clip), torch.ones(len(norms), dtype=torch.bool)
    scales, usable = kernels.clip_scales([norms.square()], clips, present, MARGIN)
    assert usable.all()
    assert (scales * norms <= clip).all()
    assert (scales <= 1.0).all()


@pytest.mark.parametrize(("size", "window"), [((6, 4), (2, 2)), ((7, 5), (3, 2))])
def test_pooling_and_its_gradient(size: tuple[int, int], window: tuple[int, int]) -> None:
    values = torch.relu(images(5, 3, size))  # zeros tie
    values[0, 0, 0, 0] = float("nan")
    inputs = values.detach().requires_grad_()
    found, expected = MaxPool.apply(inputs, window), functional.max_pool2d(inputs, window)
    torch.testing.assert_close(found, expected, equal_nan=True)
    gradient = torch.randn_like(expected)
    one, other = (torch.autograd.grad(outputs, inputs, gradient)[0] for outputs in (found, expected))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("own_coins", [3, 2**63 + 9])
def test_coins_and_whole_rounds(own_coins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps with our kernels (convolution, pooling, sums, noise, coins) and without."""
    task = Task(kind="classification", shape=(1, 8, 8), classes=4)
    model = build_model(ModelSettings(name="cnn"), task, seed=0)
    learner, start = Learner(model, task, CPU), torch.from_numpy(flatten(model))
    table = Batch(torch.rand(24, 1, 8, 8), torch.arange(24) % 4)
    plan = PoissonSteps(
        clip=1.0, noise_multiplier=1.0, records=12, batch=6, epochs=1, adjacency=Adjacency.ZERO_OUT
    )
    jobs = [
        StackedJob(0, start, plan, 0.1, noise_key=2**63 + 5, coin_key=own_coins),
        StackedJob(
            1, start, plan, 0.1, noise_key=6, coin_key=own_coins + 1, anchor=start - 1, anchor_weight=0.1
        ),
    ]
    slow = StackedTrainer(learner, table, [12, 12], tf32=False).train(jobs)
    monkeypatch.setattr(kernels, "available", lambda device: True)
    trainer = StackedTrainer(learner, table, [12, 12], tf32=False)
    assert trainer.own_kernels
    torch.testing.assert_close(trainer.train(jobs), slow, rtol=1e-4, atol=1e-6)
    keys, rates = philox.split_keys([own_coins, 1], CPU), torch.tensor([0.1, 1.0], dtype=torch.float64)
    expected = philox.coins(keys, rates, torch.arange(7, 12), philox.places(42, 4, CPU))
    assert torch.equal(kernels.coins(keys, rates, 7, 5, 42), expected)


@pytest.mark.parametrize("agrees", [True, False])
def test_a_trainer_hands_on_bfloat16_where_that_agrees(agrees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "COARSE_FROM", 16)
    monkeypatch.setattr(kernels, "available", lambda device: True)
    tried = []

    def trial(learner: Learner, tile: int, *, coarse: bool = False, **how: Any) -> bool:
        tried.append(coarse)
        return kernel_trial.kernels_agree(learner, tile, coarse=coarse, **how) and (agrees or not coarse)

    monkeypatch.setattr(stacked, "kernels_agree", trial)
    images = (nn.Conv2d(1, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 1))
    layers = (*images, nn.Flatten(), nn.Linear(64, 4))
    task = Task(kind="classification", shape=(1, 4, 4), classes=4)
    learner, table = (
        Learner(nn.Sequential(*layers), task, CPU),
        Batch(torch.rand(24, 1, 4, 4), torch.arange(24) % 4),
    )
    trainer = StackedTrainer(learner, table, [12, 12])
    assert (trainer.own_kernels, trainer.coarse, tried) == (True, agrees, [True] if agrees else [True, False])
    assert not StackedTrainer(learner, table, [12, 12], tf32=False).coarse


@pytest.mark.parametrize("micro_batch", [512, 2])
def test_local_learning(micro_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that learn as one program of our kernels, one of them with fewer records, and each alone."""
    task = Task(kind="classification", shape=(1, 8, 8), classes=4)
    learner = Learner(build_model(ModelSettings(name="cnn"), task, seed=0), task, CPU)
    rule = LocalSGD(epochs=2, batch=3, lr=0.1, momentum=0.5, proximal=0.1)
    records = [Batch(torch.rand(size, 1, 8, 8), torch.arange(size) % 4) for size in (7, 3)]
    batches = [rule.batches(len(own), seed) for seed, own in enumerate(records)]
    starts = torch.stack([learner.initial(), 1.1 * learner.initial()])
    alone = [train_one(learner, *one, rule) for one in zip(starts, records, batches, strict=True)]
    monkeypatch.setattr(kernels, "available", lambda device: True)
    learner.micro_batch = micro_batch
    trainer = LocalTrainer(learner)
    (found,) = trainer.train([LocalJob(lambda: starts, records, batches, rule, wave=2)])
    (program,) = trainer._programs.values()
    assert program.own_kernels
    torch.testing.assert_close(found, torch.stack(alone), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("biased", [True, False])
def test_a_wide_head_reads_records_where_they_lie(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes over the table give what the layer rules find on copies; what is not finite counts zero."""
    task = Task(kind="classification", shape=(40, 7), classes=5)
    monkeypatch.setattr(head, "WIDE", 100)
    model = nn.Sequential(nn.Flatten(), nn.Linear(280, 5, bias=biased))
    learner, start = Learner(model, task, CPU), torch.from_numpy(flatten(model))
    table = Batch(torch.randn(24, 40, 7), torch.arange(24) % 5)
    table.features[5, 3, 3] = float("nan")
    table.features[17, 0, 0] = float("inf")
    plan = PoissonSteps(
        clip=0.7, noise_multiplier=1.0, records=12, batch=6, epochs=1, adjacency=Adjacency.ZERO_OUT
    )
    jobs = [StackedJob(k, start, plan, 0.1, noise_key=5 + k, coin_key=8 + k) for k in range(2)]
    slow = StackedTrainer(learner, table, [12, 12], tf32=False).train(jobs)
    monkeypatch.setattr(kernels, "available", lambda device: True)
    trainer = StackedTrainer(learner, table, [12, 12], tf32=False)
    assert trainer.wide_head is not None
    assert trainer.tile == head.TILE
    found = trainer.train(jobs)
    assert bool(torch.isfinite(found).all())
    torch.testing.assert_close(found, slow, rtol=1e-4, atol=1e-6)


def test_a_record_moves_a_wide_head_by_the_clip_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one record less, in the same places, and the others as they are; however large its features."""
    task, clip = Task(kind="classification", shape=(130,), classes=3), 0.5
    monkeypatch.setattr(head, "WIDE", 100)
    model = nn.Linear(130, 3)
    learner = Learner(model, task, CPU)
    stacked = torch.from_numpy(flatten(model)).expand(2, -1).contiguous()
    owner, places = torch.tensor([0, 1]), torch.tensor([3, 0, 5, 1, 4, 2])
    tiles = Tiles(2, 3, owner, dynamic=False, bounds=torch.tensor([0, 1, 2]))
    clips, present = torch.full((6,), clip, dtype=torch.float64), torch.ones(6, dtype=torch.bool)
    for size in (1e-3, 1.0, 1e4, 1e18):
        table = Batch(torch.randn(6, 130), torch.arange(6) % 3)
        table.features[5] *= size
        made = head.StackedHead.of(learner, table)
        assert made is not None
        with_it = made.clipped_sum(stacked, places, tiles, clips, present)
        gone = present & (torch.arange(6) != 2)
        moved = with_it - made.clipped_sum(stacked, places, tiles, clips, gone)
        assert float(moved[1].norm()) == 0.0
        assert float(moved[0].norm()) <= clip
        assert size > 1.0 or float(moved[0].norm()) > 0.0
