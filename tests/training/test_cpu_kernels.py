"""The processor's kernels against torch's operations, record by record, and without them."""

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from coterie.data.records import Task
from coterie.models import ModelSettings, build_model
from coterie.training import cpu_kernels
from coterie.training.clipping import clipped_sum
from coterie.training.contributions import Products
from coterie.training.cpu_kernels import PooledConvolution, SparseConvolution
from coterie.training.layers.conv import ConvRule
from coterie.training.layers.conv_steps import suits_places
from coterie.training.learner import Batch, Learner
from coterie.training.tiles import Tiles

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


@pytest.fixture(params=[False, True], ids=["widest", "narrow"])
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also the code for a processor with AVX2 alone."""
    compiled = (cpu_kernels._compiled_rows, cpu_kernels._compiled_back, cpu_kernels._compiled_pool)
    if request.param:
        monkeypatch.setattr(cpu_kernels, "LANES", 8)
        monkeypatch.setattr(cpu_kernels.machine_code, "machine", lambda: (8, 10))
        for function in compiled:
            function.cache_clear()
    yield
    for function in compiled if request.param else ():
        function.cache_clear()


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
    kernel = SparseConvolution(layer.kernel_size, shape[0], whole.shape[3], layer.padding, window)
    parts = [part.permute(0, 2, 3, 1) for part in (images, gradient, places)]
    rows = kernel.rows(*parts).permute(0, 1, 4, 2, 3)
    weights, exact = layer.weight.detach(), copy.deepcopy(layer).double()
    for record, row in enumerate(rows):
        one = images[record : record + 1].double().requires_grad_()
        found = torch.autograd.grad(exact(one), [exact.weight, one], whole[record : record + 1].double())
        torch.testing.assert_close(row, found[0].float(), rtol=1e-5, atol=1e-5)
        if kernel.goes_back(layer.out_channels):
            back = kernel.back(*parts, weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
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
    gradient, places, whole = pooled(layer, window, images)
    kernel = SparseConvolution(layer.kernel_size, shape[0], whole.shape[3], layer.padding, window)
    weights = layer.weight.detach().permute(0, 2, 3, 1)

    def both(images: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
        parts = [part.permute(0, 2, 3, 1) for part in (images, gradient, places)]
        found = [kernel.rows(*parts)]
        if kernel.goes_back(layer.out_channels):
            found.append(kernel.back(*parts, weights))
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
    sizes = (shape[0], layer.out_channels, layer.padding, window, shape[1:])
    assert PooledConvolution.suits(layer.kernel_size, shape[0], layer.out_channels, window)
    kernel = PooledConvolution(layer.kernel_size, *sizes, relu=relu)
    bias = None if layer.bias is None else layer.bias.detach()
    found, places = kernel.run(images.permute(0, 2, 3, 1), layer.weight.detach(), bias)
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
    rows = SparseConvolution.rows
    monkeypatch.setattr(SparseConvolution, "rows", lambda *parts: 1.01 * rows(*parts))
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
