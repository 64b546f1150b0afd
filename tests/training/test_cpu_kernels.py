"""The processor's kernels against torch's operations, record by record, and without them."""

import copy
import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from kernel_loops import loop_of
from torch import nn

from coterie.data.records import Task
from coterie.engines.clients import behaviour
from coterie.models import ModelSettings, build_model
from coterie.privacy import Adjacency, PrivacyPlan, ThreatModel, Unit
from coterie.training import cpu_kernels
from coterie.training.chain import suits_places
from coterie.training.clipping import clipped_sum
from coterie.training.contributions import Products
from coterie.training.cpu_kernels import PooledConvolution
from coterie.training.layers.conv import ConvRule
from coterie.training.learner import Batch, Learner
from coterie.training.tiles import Tiles

if cpu_kernels.available():
    from coterie.training import llvm_code

CPU = torch.device("cpu")
IMAGES = Task(kind="classification", shape=(1, 12, 12), classes=4)
LAST = torch.channels_last

needs_llvm = pytest.mark.skipif(
    not cpu_kernels.available(), reason="no LLVM, or a processor without wide registers"
)
CONVOLUTIONS = {
    "papers' first": ((1, 28, 28), lambda: nn.Conv2d(1, 16, 5, padding=2), (2, 2)),
    "papers' second": ((16, 14, 14), lambda: nn.Conv2d(16, 32, 5, padding=2), (2, 2)),
    "more lines than registers": ((32, 9, 8), lambda: nn.Conv2d(32, 6, 5, padding=2), (2, 2)),
    "colour": ((3, 11, 9), lambda: nn.Conv2d(3, 7, (3, 2), padding=(1, 0)), (2, 3)),
    "half a register": ((8, 8, 8), lambda: nn.Conv2d(8, 5, 3), (2, 2)),
    "one pixel": ((16, 4, 4), lambda: nn.Conv2d(16, 3, 1), (2, 2)),
    "all of it": ((4, 6, 6), lambda: nn.Conv2d(4, 4, (3, 4), padding=(1, 2)), (6, 7)),
}


def kernel_of(layer: nn.Conv2d, window: tuple[int, int]) -> PooledConvolution:
    return PooledConvolution(layer.kernel_size, layer.in_channels, layer.out_channels, layer.padding, window)


def pooled(layer: nn.Conv2d, window: tuple[int, int], images: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients at what a ReLU lets through of the pooled outputs, their places, and at all outputs."""
    with torch.no_grad():
        outputs = layer(images).contiguous(memory_format=LAST)
        values, places = torch.ops.aten.max_pool2d_with_indices(outputs, window)
        gradient = torch.where(values > 0, torch.randn_like(values), 0.0)
        whole = torch.zeros_like(outputs).flatten(2)
        whole = whole.scatter(2, places.flatten(2), gradient.flatten(2)).view_as(outputs)
    return gradient, places, whole


@needs_llvm
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.usefixtures("narrow")
def test_the_way_back_from_a_pools_places(name: str) -> None:
    torch.manual_seed(0)
    shape, make, window = CONVOLUTIONS[name]
    layer = make()
    images = torch.randn(5, *shape).contiguous(memory_format=LAST)
    gradient, places, whole = pooled(layer, window, images)
    assert 0 < int(whole.count_nonzero()) <= gradient.numel()
    kernel = kernel_of(layer, window)
    parts = [part.permute(0, 2, 3, 1) for part in (images, gradient, places)]
    rows = kernel.weight_rows(*parts).permute(0, 1, 4, 2, 3)
    weights, exact = layer.weight.detach(), copy.deepcopy(layer).double()
    for record, row in enumerate(rows):
        one = images[record : record + 1].double().requires_grad_()
        found = torch.autograd.grad(exact(one), [exact.weight, one], whole[record : record + 1].double())
        torch.testing.assert_close(row, found[0].float(), rtol=1e-5, atol=1e-5)
        if kernel.runs_back:
            back = kernel.input_gradient(*parts, weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            torch.testing.assert_close(back[record], found[1][0].float(), rtol=1e-5, atol=1e-5)


@needs_llvm
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.usefixtures("narrow")
def test_a_record_leaves_the_bits_of_its_neighbours_alone(name: str, poison: float) -> None:
    """Also one that is nothing but infinities, in the images or in the gradient."""
    torch.manual_seed(0)
    shape, make, window = CONVOLUTIONS[name]
    layer = make()
    images = torch.randn(3, *shape).contiguous(memory_format=LAST)
    gradient, places, _ = pooled(layer, window, images)
    kernel = kernel_of(layer, window)
    weights = layer.weight.detach().permute(0, 2, 3, 1)

    def both(images: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
        parts = [part.permute(0, 2, 3, 1) for part in (images, gradient, places)]
        found = [kernel.weight_rows(*parts)]
        if kernel.runs_back:
            found.append(kernel.input_gradient(*parts, weights))
        return found

    usual = both(images, gradient)
    for part in (images, gradient):
        part[1] = poison
        for before, after in zip(usual, both(images, gradient), strict=True):
            assert torch.equal(before[[0, 2]], after[[0, 2]])
        assert not torch.isfinite(both(images, gradient)[0][1]).all()


@needs_llvm
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("name", ["papers' first", "colour in whole vectors", "no padding"])
@pytest.mark.usefixtures("narrow")
def test_convolution_and_pool_at_once(name: str, relu: bool) -> None:
    """Outputs and places of torch's two operations, ties and what is no number included."""
    torch.manual_seed(0)
    shape, make, window = {
        "papers' first": CONVOLUTIONS["papers' first"],
        "colour in whole vectors": ((3, 11, 9), lambda: nn.Conv2d(3, 8, (3, 2), padding=(1, 0)), (2, 3)),
        "no padding": ((1, 7, 7), lambda: nn.Conv2d(1, 32, 3, bias=False), (3, 3)),
    }[name]
    layer, images = make(), torch.randn(4, *shape).contiguous(memory_format=LAST)
    images[1] = 0.0
    images[2, 0, 3, 4] = math.nan
    kernel = kernel_of(layer, window)
    assert kernel.runs_forward
    bias = None if layer.bias is None else layer.bias.detach()
    found, places = kernel.forward(images.permute(0, 2, 3, 1), layer.weight.detach(), bias, relu=relu)
    with torch.no_grad():
        expected, chosen = torch.ops.aten.max_pool2d_with_indices(layer(images), window)
    torch.testing.assert_close(
        found.permute(0, 3, 1, 2),
        expected.relu() if relu else expected,
        rtol=1e-5,
        atol=1e-5,
        equal_nan=True,
    )
    assert float((places.permute(0, 3, 1, 2) == chosen).double().mean()) > 0.999  # but for rounding
    assert torch.equal(places[1], chosen[1].permute(1, 2, 0))  # of equals, the first
    poisoned = torch.isnan(found[2])
    assert poisoned.any()
    assert torch.equal(places[2][poisoned], chosen[2].permute(1, 2, 0)[poisoned])


@needs_llvm
def test_norms_and_sums_of_rows() -> None:
    torch.manual_seed(0)
    rows = torch.randn(7, 192) * 10.0 ** torch.arange(-3, 4)[:, None]
    scales = torch.rand(7, dtype=torch.float64)
    assert cpu_kernels.suits_rows(rows)
    assert not any(
        cpu_kernels.suits_rows(other) for other in (rows[:, :100], rows.double(), rows[:0], rows.mT)
    )
    exact = rows.double()
    torch.testing.assert_close(cpu_kernels.squared_norms(rows), exact.square().sum(1), rtol=1e-14, atol=0)
    torch.testing.assert_close(cpu_kernels.scaled_sum(rows, scales), scales @ exact, rtol=1e-14, atol=1e-13)
    rows[3, 5] = math.inf
    assert torch.isinf(cpu_kernels.squared_norms(rows)).tolist() == [at == 3 for at in range(7)]


@needs_llvm
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.usefixtures("narrow")
def test_each_kernel_computes_the_loop_that_stands_above_it(relu: bool) -> None:
    rng = np.random.default_rng(0)
    layer, window = nn.Conv2d(4, 8, (3, 4), padding=(1, 0)), (2, 2)
    kernel, images = kernel_of(layer, window), rng.normal(size=(2, 5, 8, 4)).astype(np.float32)
    weights, bias = (part.detach().numpy() for part in (layer.weight, layer.bias) if part is not None)
    padded = np.pad(images, ((0, 0), (1, 1), (0, 0), (0, 0)))
    sizes = {"records": 2, "outer": 8, "windows": 4, "height": 3, "width": 4, "columns": 5}
    outputs, places = np.zeros((2, 2, 2, 8)), np.zeros((2, 2, 2, 8), dtype=np.int64)
    loop_of(
        llvm_code.pooled_convolution,
        padded=padded,
        weights=weights.transpose(2, 3, 1, 0),
        bias=bias,
        outputs=outputs,
        places=places,
        window_height=2,
        window_width=2,
        relu=relu,
        **sizes,
    )
    given = (torch.from_numpy(images), layer.weight.detach(), layer.bias.detach())  # type: ignore[union-attr]
    found, chosen = kernel.forward(*given, relu=relu)
    np.testing.assert_allclose(found.numpy(), outputs, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(chosen.numpy(), places)

    gradient = rng.normal(size=outputs.shape).astype(np.float32) * (rng.random(outputs.shape) < 0.7)
    flat = {"gradient": gradient.reshape(2, 4, 8), "places": places.reshape(2, 4, 8)}
    by_pixel = weights.transpose(0, 2, 3, 1)
    formed, inputs = np.zeros((2, 8, 3, 4, 4)), np.zeros(padded.shape)
    loop_of(llvm_code.weight_rows, padded=padded, formed=formed, **flat, **sizes)
    loop_of(llvm_code.input_gradient, weights=by_pixel, inputs=inputs, **flat, **sizes)
    sparse = (torch.from_numpy(images), torch.from_numpy(gradient.astype(np.float32)), chosen)
    np.testing.assert_allclose(kernel.weight_rows(*sparse).numpy(), formed, rtol=1e-5, atol=1e-5)
    assert kernel.runs_back
    back = kernel.input_gradient(*sparse, torch.from_numpy(by_pixel)).numpy()
    np.testing.assert_allclose(back, inputs[:, 1:-1], rtol=1e-5, atol=1e-5)

    rows, scales = rng.normal(size=(3, 128)).astype(np.float32), rng.random(3)
    squares, total = np.zeros(3), np.zeros(128)
    loop_of(llvm_code.squared_norms, rows=rows, squares=squares, records=3)
    loop_of(llvm_code.scaled_sum, rows=rows, scales=scales, total=total, records=3, numbers=128)
    given_rows = torch.from_numpy(rows)
    np.testing.assert_allclose(cpu_kernels.squared_norms(given_rows), squares, rtol=1e-14)
    summed = cpu_kernels.scaled_sum(given_rows, torch.from_numpy(scales))
    np.testing.assert_allclose(summed, total, rtol=1e-13, atol=1e-15)


@needs_llvm
def test_what_a_kernel_would_misread_is_refused() -> None:
    """A kernel takes addresses: a wrong type or shape would be read as whatever lies there."""
    layer = nn.Conv2d(4, 8, 3)
    kernel, images = kernel_of(layer, (2, 2)), torch.randn(2, 6, 6, 4)
    weight, bias = layer.weight.detach(), torch.zeros(8)
    pooled, places = kernel.forward(images, weight, bias, relu=False)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: kernel.forward(images.double(), weight, bias, relu=False), "images: torch.float64 on cpu"),
        (lambda: kernel.forward(images[..., :3], weight, bias, relu=False), r"images: shape \(2, 6, 6, 3\)"),
        (lambda: kernel.forward(images, weight[:4], bias, relu=False), "weights: shape"),
        (lambda: kernel.forward(images, weight, bias[:4], relu=False), "bias: shape"),
        (lambda: kernel.weight_rows(images, pooled[:1], places), "gradient: shape"),
        (lambda: kernel.weight_rows(images, pooled, places.int()), "places: torch.int32"),
        (lambda: kernel.weight_rows(images, pooled, places[:, :1]), "places: shape"),
        (lambda: kernel.input_gradient(images, pooled, places, weight), "weights: shape"),
        (lambda: cpu_kernels.squared_norms(torch.zeros(2, 100)), r"rows: .*\(2, 100\).* a multiple of 64"),
        (lambda: cpu_kernels.squared_norms(torch.zeros(64, 2).mT), "strides"),
        (lambda: cpu_kernels.scaled_sum(torch.zeros(2, 64), torch.zeros(2)), "scales: torch.float32"),
        (lambda: cpu_kernels.scaled_sum(torch.zeros(2, 64), torch.zeros(3).double()), "scales: shape"),
    ]
    for call, said in calls:
        with pytest.raises((TypeError, ValueError), match=said):
            call()


def test_without_llvm_everything_runs_on_torchs_operations() -> None:
    """In a process in which it cannot be imported, as where the extra is not installed."""
    code = (
        "import sys; sys.modules['llvmlite'] = None\n"
        "import torch\n"
        "from coterie.data.records import Task\n"
        "from coterie.models import ModelSettings, build_model\n"
        "from coterie.training import cpu_kernels\n"
        "from coterie.training.clipping import clipped_sum\n"
        "from coterie.training.learner import Learner\n"
        "task = Task(kind='classification', shape=(1, 12, 12), classes=4)\n"
        "learner = Learner(build_model(ModelSettings(name='cnn'), task, seed=0), task, torch.device('cpu'))\n"
        "assert not cpu_kernels.available() and learner.book is not None and not learner.shape.compiled\n"
        "print(float(clipped_sum(learner, learner.initial(), learner.random_batch(5), 0.5).norm()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.0 < float(done.stdout) <= 5 * 0.5


@needs_llvm
def test_noise_is_bound_to_the_choice_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums differ in their last bits: the same noise on both would cancel, so each draws its own."""
    plan = PrivacyPlan(Unit.RECORD, Adjacency.ZERO_OUT, ThreatModel("the server", "everything"), ())
    texts = {
        behaviour(ModelSettings(name="cnn"), 0.1, None, plan, learner_of(monkeypatch, compiled=compiled))
        for compiled in (True, False)
    }
    assert len(texts) == 2


def learner_of(monkeypatch: pytest.MonkeyPatch, *, compiled: bool) -> Learner:
    with monkeypatch.context() as patch:
        if not compiled:
            patch.setattr(cpu_kernels, "available", lambda: False)
        return Learner(build_model(ModelSettings(name="cnn"), IMAGES, seed=0), IMAGES, CPU)


@needs_llvm
def test_clipped_sums_are_the_same_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    batch = Batch(torch.randn(9, 1, 12, 12), torch.arange(9) % 4)
    learners = [learner_of(monkeypatch, compiled=compiled) for compiled in (True, False)]
    assert [learner.shape.compiled for learner in learners] == [True, False]
    sums = [clipped_sum(learner, learner.initial(), batch, 0.7) for learner in learners]
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-6)
    totals = [
        learner.book.total_gradient(learner.initial(), batch.features, batch.targets)
        for learner in learners
        if learner.book is not None
    ]
    torch.testing.assert_close(*totals, rtol=1e-4, atol=1e-5)


@needs_llvm
def test_kernels_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = PooledConvolution.weight_rows
    monkeypatch.setattr(PooledConvolution, "weight_rows", lambda *parts: 1.01 * rows(*parts))
    learner = learner_of(monkeypatch, compiled=True)
    assert learner.book is not None
    assert not learner.shape.compiled


@needs_llvm
def test_large_layers_and_few_positions_stay_products() -> None:
    """A pool does not change which layers form a row for every record."""
    body = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    task = Task(kind="classification", shape=(16, 2, 2), classes=4)
    learner = Learner(nn.Sequential(body, nn.Linear(32, 4)), task, CPU)
    assert learner.book is not None
    assert learner.shape.compiled
    batch = learner.random_batch(6)
    parts = (batch.features, batch.targets, Tiles(1, 6))
    found = learner.book.contributions(learner.initial()[None], *parts)
    assert isinstance(found["0.0.weight"], Products)
    wide = ConvRule(nn.Conv2d(128, 128, 3))
    assert not suits_places(wide)
