"""Gradients that a processor forms once for their norms and once more for their sum."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_loops import loop_of
from torch import Tensor, nn

from coterie.data.records import Task
from coterie.training import cpu_kernels
from coterie.training.clipping import MARGIN, clipped_sum
from coterie.training.contributions import Rows
from coterie.training.formed_twice import FormedTwice
from coterie.training.kernels import Geometry
from coterie.training.layers import conv
from coterie.training.learner import Batch, Learner
from coterie.training.tiles import Tiles

if cpu_kernels.available():
    from coterie.training import llvm_rows

pytestmark = pytest.mark.skipif(not cpu_kernels.available(), reason="no LLVM, or a small processor")

CPU = torch.device("cpu")
CLIP = 0.7
TASK = Task(kind="classification", shape=(64, 4, 4), classes=4)
LAYERS = {
    "plain": lambda: nn.Conv2d(64, 8, 3, padding=1),
    "strides": lambda: nn.Conv2d(64, 4, (3, 2), stride=(2, 1), padding=(1, 0)),
    "dilation": lambda: nn.Conv2d(128, 4, 2, dilation=2, padding=1),
    "one pixel": lambda: nn.Conv2d(64, 12, 1, stride=2),
}


def part_of(layer: nn.Conv2d, records: int, seed: int = 0) -> tuple[FormedTwice, Tensor]:
    """What records contribute to the layer's weight, and the same by torch's convolution in float64."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(records, layer.in_channels, 5, 4, generator=generator)
    outputs = layer(images).detach()
    gradient = torch.randn(outputs.shape, generator=generator)
    sides = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    exact = []
    for image, slope in zip(images.double(), gradient.double(), strict=True):
        weight = layer.weight.detach().double().requires_grad_()
        found = nn.functional.conv2d(image[None], weight, None, layer.stride, layer.padding, layer.dilation)
        (row,) = torch.autograd.grad(found, weight, slope[None])
        exact.append(row.flatten())
    return FormedTwice.of(images, gradient, Geometry(*sides)), torch.stack(exact)  # type: ignore[arg-type]


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", LAYERS)
def test_norms_sums_and_rows_are_those_of_torch(name: str) -> None:
    torch.manual_seed(0)
    part, exact = part_of(LAYERS[name](), 5)
    scales = torch.tensor([1.0, 0.0, 0.3, 1e-9, 0.7], dtype=torch.float64)
    torch.testing.assert_close(part.rows().double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(part.squared_norms(), exact.square().sum(dim=1), rtol=1e-6, atol=0)
    tiles = Tiles(1, 5)
    for usable in (None, scales > 0.1):
        weights = scales if usable is None else torch.where(usable, scales, 0.0)
        found = part.scaled_sum(scales, usable, tiles)
        torch.testing.assert_close(found, (weights @ exact)[None], rtol=1e-5, atol=1e-5)
    present = torch.tensor([[True, False], [True, True]])
    for joined in (FormedTwice.averaged, FormedTwice.summed):
        given = 2 if joined is FormedTwice.averaged else present
        four = FormedTwice(part.images[:4], part.gradient[:4], part.geometry)
        expected = getattr(Rows(exact[:4].float()), joined.__name__)(given).rows()
        pairs = joined(four, given)  # type: ignore[arg-type]
        torch.testing.assert_close(pairs.rows(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            pairs.squared_norms(), expected.double().square().sum(dim=1), rtol=1e-5, atol=0
        )


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", LAYERS)
def test_norms_are_those_of_the_very_numbers_that_are_summed(name: str) -> None:
    """To float64's last bits, although the numbers are float32 and places cancel."""
    part, _ = part_of(LAYERS[name](), 6)
    part.gradient[1] *= 1e-6
    part.gradient[2, :, :, 1:] = -part.gradient[2, :, :, :1]  # most of it cancels
    part.images[2] = part.images[2, :, :, :1, :1]
    part.gradient[3] *= 1e18
    torch.testing.assert_close(
        part.squared_norms(), part.rows().double().square().sum(dim=1), rtol=1e-13, atol=0
    )


@pytest.mark.usefixtures("narrow")
def test_each_kernel_computes_the_loop_that_stands_above_it() -> None:
    part, _ = part_of(LAYERS["strides"](), 3)
    squares, scales, total = np.zeros(3), np.array([0.5, 2.0, 0.1]), np.zeros((4, 3, 2, 64))
    sizes = {"height": 3, "width": 2, "channels": 64, "outer": 4, "records": 3}
    steps = {"down": 2, "across": 1, "lower": 1, "further": 1}
    arrays = {"images": part.images.numpy(), "gradient": part.gradient.numpy()}
    loop_of(llvm_rows.row_norms, **arrays, **sizes, **steps, squares=squares, scales=scales, total=total)
    np.testing.assert_allclose(part.squared_norms().numpy(), squares, rtol=1e-6)
    found = cpu_kernels.row_sums(part.images, part.gradient, torch.from_numpy(scales), part.geometry)
    np.testing.assert_allclose(found.numpy(), total, rtol=1e-4, atol=1e-5)


def test_what_a_kernel_would_misread_is_refused() -> None:
    part, _ = part_of(LAYERS["plain"](), 3)
    images, gradient, geometry = part.images, part.gradient, part.geometry
    scales = torch.ones(3, dtype=torch.float64)
    for wrong in (
        (images.double(), gradient, scales),
        (images[..., :63], gradient, scales),
        (images[:, :, :, 1:], gradient, scales),
        (images, gradient[..., :3], scales),
        (images, gradient[:, :, :, 1:], scales),
        (images, gradient[:2], scales),
        (images, gradient, scales[:2]),
        (images, gradient, scales.float()),
        (images[:, :0], gradient[:, :0], scales),
        (images[:, :, :0], gradient, scales),
        (images, gradient[:, :, :0], scales),
        (images[:, :, :, :2], gradient[:, :, :, :0], scales),
    ):
        with pytest.raises((TypeError, ValueError), match="allowed"):
            cpu_kernels.row_sums(*wrong, geometry)


# --- in a model -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learner() -> Iterator[Learner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv, "LARGE_PRODUCT", 1)
        torch.manual_seed(0)
        learner = Learner(small_network(), TASK, CPU)
        assert learner.shape.compiled
        yield learner


def small_network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(64, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(128, 4))


def batch_of(records: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(records, 64, 4, 4, generator=generator), torch.arange(records) % 4)


def test_a_model_uses_it(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(6, 0)
    assert learner.book is not None
    tiles = Tiles(1, 6)
    found = learner.book.contributions(learner.initial()[None], batch.features, batch.targets, tiles)
    assert isinstance(found["0.weight"], FormedTwice)
    sums = clipped_sum(learner, learner.initial(), batch, CLIP)
    monkeypatch.setattr(cpu_kernels, "available", lambda: False)
    without = Learner(learner.model, TASK, CPU)
    assert not without.shape.compiled
    expected = clipped_sum(without, learner.initial(), batch, CLIP)
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), place=st.integers(0, 6), power=st.integers(-30, 37), flat=st.booleans())
def test_a_neighbour_differs_by_what_the_clip_allows(
    seed: int, place: int, power: int, flat: bool, learner: Learner
) -> None:
    batch = batch_of(7, seed)
    if flat:  # all places alike, so that gradients which sum to nothing cancel
        batch.features[place] = batch.features[place, :, :1, :1]
    batch.features[place] *= 10.0**power
    missing = Batch(batch.features.clone(), batch.targets)
    missing.features[place] = math.nan
    both = [clipped_sum(learner, learner.initial(), one, CLIP) for one in (batch, missing)]
    assert bool(both[0].isfinite().all())
    assert float((both[0] - both[1]).norm()) <= CLIP
    alone = clipped_sum(learner, learner.initial(), batch.take(slice(place, place + 1)), 1e-3)
    assert float(alone.norm()) <= 1e-3 * MARGIN * (1.0 + 2.0**-30)


def test_of_no_records_there_are_no_rows() -> None:
    part, _ = part_of(LAYERS["plain"](), 3)
    nobody = FormedTwice(part.images[:0], part.gradient[:0], part.geometry)
    assert nobody.rows().shape == (0, part.rows().shape[1])


@pytest.mark.parametrize("wrong", ["scales of neighbours", "no scales of several"])
def test_a_kernel_that_is_wrong_of_several_records_alone_is_not_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cpu_kernels.row_sums

    def planted(images: Tensor, gradient: Tensor, scales: Tensor, geometry: Geometry) -> Tensor:
        if len(scales) > 1:
            scales = scales.roll(1) if wrong == "scales of neighbours" else torch.ones_like(scales)
        return real(images, gradient, scales, geometry)

    monkeypatch.setattr(cpu_kernels, "row_sums", planted)
    monkeypatch.setattr(conv, "LARGE_PRODUCT", 1)
    assert not Learner(small_network(), TASK, CPU).shape.compiled


@pytest.mark.parametrize("factor", [1.01, 0.99])
@pytest.mark.parametrize("name", ["row_norms", "row_sums"])
def test_kernels_that_are_wrong_are_not_used(
    name: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(cpu_kernels, name)
    monkeypatch.setattr(cpu_kernels, name, lambda *given: factor * real(*given))
    monkeypatch.setattr(conv, "LARGE_PRODUCT", 1)
    learner = Learner(small_network(), TASK, CPU)
    harmless = name == "row_norms" and factor > 1.0  # who is clipped by more than its norm stays private
    assert learner.shape.compiled is harmless
