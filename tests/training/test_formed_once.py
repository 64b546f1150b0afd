"""Gradients that a processor forms for their sum alone, and norms that bound them."""

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
from coterie.training.formed_once import FormedOnce
from coterie.training.kernels import Geometry
from coterie.training.layers import conv
from coterie.training.learner import Batch, Learner
from coterie.training.tiles import Tiles

if cpu_kernels.available():
    from coterie.training import llvm_builder, llvm_rows

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


def part_of(
    layer: nn.Conv2d, records: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[FormedOnce, Tensor]:
    """What records contribute to the layer's weight, and the same by torch's convolution in float64."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(records, layer.in_channels, 5, 4, generator=generator)
    outputs = layer(images).detach()
    gradient = torch.randn(outputs.shape, generator=generator).to(dtype)
    images = images.to(dtype)
    sides = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    exact = []
    for image, slope in zip(images.double(), gradient.double(), strict=True):
        weight = layer.weight.detach().double().requires_grad_()
        found = nn.functional.conv2d(image[None], weight, None, layer.stride, layer.padding, layer.dilation)
        (row,) = torch.autograd.grad(found, weight, slope[None])
        exact.append(row.flatten())
    return FormedOnce.of(images, gradient, Geometry(*sides)), torch.stack(exact)  # type: ignore[arg-type]


DTYPES = [torch.float32, torch.bfloat16]
"""Where a processor does not multiply bfloat16, the kernel reads it in float32."""


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_norms_sums_and_rows_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    part, exact = part_of(LAYERS[name](), 5, dtype=dtype)
    scales = torch.tensor([1.0, 0.0, 0.3, 1e-9, 0.7], dtype=torch.float64)
    torch.testing.assert_close(part.rows().double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(part.squared_norms(), exact.square().sum(dim=1), rtol=2e-4, atol=0)
    tiles = Tiles(1, 5)
    for usable in (None, scales > 0.1):
        weights = scales if usable is None else torch.where(usable, scales, 0.0)
        found = part.scaled_sum(scales, usable, tiles)
        torch.testing.assert_close(found, (weights @ exact)[None], rtol=1e-5, atol=1e-5)
    present = torch.tensor([[True, False], [True, True]])
    for joined in (FormedOnce.averaged, FormedOnce.summed):
        given = 2 if joined is FormedOnce.averaged else present
        four = FormedOnce(part.images[:4], part.gradient[:4], part.geometry)
        expected = getattr(Rows(exact[:4].float()), joined.__name__)(given).rows()
        pairs = joined(four, given)  # type: ignore[arg-type]
        assert isinstance(pairs, FormedOnce)
        torch.testing.assert_close(pairs.rows(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            pairs.squared_norms(), expected.double().square().sum(dim=1), rtol=4e-4, atol=0
        )


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_no_gradient_that_is_summed_is_longer_than_its_norm(name: str, dtype: torch.dtype) -> None:
    """Although the numbers are float32, places cancel, and some are as large or small as float32 can say."""
    part, _ = part_of(LAYERS[name](), 7, dtype=dtype)
    part.gradient[1] *= 1e-6
    part.gradient[2, :, :, 1:] = -part.gradient[2, :, :, :1]  # most of it cancels
    part.images[2] = part.images[2, :, :, :1, :1]
    part.gradient[3] *= 1e18
    part.gradient[4] *= 1e-30
    part.images[4] *= 1e-15  # products that are no number of float32 any more
    part.gradient[5] *= 1e25
    part.images[5] *= 1e15  # and some that are infinite
    part.images[6] = math.nan
    squares, rows = part.squared_norms(), part.rows().double()
    finite = rows.isfinite().all(dim=1)
    assert finite.tolist() == [True, True, True, True, True, False, False]
    assert (squares[finite] >= rows[finite].square().sum(dim=1)).all()
    assert not (squares[~finite] < math.inf).any()


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from(sorted(LAYERS)),
    power=st.integers(-12, 12),
    cancelled=st.floats(0.0, 1.0),
    dtype=st.sampled_from(DTYPES),
)
def test_norms_bound_gradients_that_cancel(
    seed: int, name: str, power: int, cancelled: float, dtype: torch.dtype
) -> None:
    """Every second place takes back what the one before it gave, but for a little."""
    torch.manual_seed(seed)
    part, _ = part_of(LAYERS[name](), 2, seed, dtype)
    part.images.copy_(part.images[:, :, :, :1, :1] + 2.0**-power * part.images)
    flat = part.gradient.flatten(3, 4)
    pairs = flat.shape[3] // 2
    flat[:, :, :, pairs : 2 * pairs] -= cancelled * (flat[:, :, :, pairs : 2 * pairs] + flat[:, :, :, :pairs])
    part = FormedOnce(part.images, flat.view(part.gradient.shape), part.geometry)
    assert (part.squared_norms() >= part.rows().double().square().sum(dim=1)).all()


def test_a_bound_that_forgets_what_float32_rounds_is_too_small() -> None:
    """Sixteen places whose products cancel: what is left is rounding, of which Gram matrices know nothing."""
    torch.manual_seed(1)
    part, _ = part_of(nn.Conv2d(64, 8, 1), 1)
    places = part.gradient.shape[3] * part.gradient.shape[4]
    images, slopes = part.images.flatten(3, 4), part.gradient.flatten(3, 4)
    images[:] = images[:, :, :, :1] * (1.0 + torch.rand(places, 1))
    slopes[:, :, :, 1:] = slopes[:, :, :, :1] * torch.randn(places - 1, 1)
    weights = (images[0, 0, 0, :, 0] / images[0, 0, 0, 0, 0]).double()
    last = -(weights[1:-1] * slopes[0, 0, 0, 1:-1, 0].double()).sum() - weights[0] * slopes[0, 0, 0, 0, 0]
    slopes[:, :, :, -1] = slopes[:, :, :, 0] * float(last / weights[-1] / slopes[0, 0, 0, 0, 0])
    part = FormedOnce(images.view(part.images.shape), slopes.view(part.gradient.shape), part.geometry)
    seen, right = (part.images.flatten(3, 4)[0, 0], part.gradient.flatten(3, 4)[0, 0])
    exact = torch.einsum("bpc,gpo->bcgo", seen.double(), right.double()).square().sum()
    formed = part.rows().double().square().sum()
    assert formed > exact
    assert part.squared_norms() >= formed


@pytest.mark.usefixtures("narrow")
def test_the_kernel_computes_the_loop_that_stands_above_it() -> None:
    records = 2 * llvm_rows.TOGETHER + 1
    part, _ = part_of(LAYERS["strides"](), records)
    scales, total = np.linspace(0.0, 2.0, records), np.ones((4, 64, 3, 2))
    sizes = {"height": 3, "width": 2, "channels": 64, "outer": 4, "records": records}
    steps = {"down": 2, "across": 1, "lower": 1, "further": 1}
    arrays = {"images": part.images.numpy(), "gradient": part.gradient.numpy()}
    found = torch.ones(total.size, dtype=torch.float64)
    loop_of(llvm_rows.row_sums, **arrays, **sizes, **steps, scales=scales, total=total)
    cpu_kernels.add_row_sums(part.images, part.gradient, torch.from_numpy(scales), part.geometry, found)
    np.testing.assert_allclose(found.view(total.shape).numpy(), total, rtol=1e-4, atol=1e-5)


def test_factors_that_are_smaller_than_a_processor_multiplies_make_no_gradient_longer() -> None:
    """Of bfloat16 they count as zero there, so that what they would have taken back stays."""
    images, gradient = torch.zeros(2, 64, 1, 2), torch.zeros(2, 4, 1, 2)
    small, large = 2.0**-127, 2.0**120
    images[0, :, 0, 0], gradient[0, :, 0, 0] = small, large
    images[1, :, 0, 0], gradient[1, :, 0, 0] = large, small
    images[:, :, 0, 1], gradient[:, :, 0, 1] = -small * large, 1.0
    geometry = Geometry((1, 1), (1, 1), (0, 0), (1, 1))
    part = FormedOnce.of(images.bfloat16(), gradient.bfloat16(), geometry)
    squares = part.rows().double().square().sum(dim=1)
    assert (squares > 0).tolist() == 2 * [llvm_builder.multiplies_bfloat16()]
    assert (part.squared_norms() >= squares).all()


PLACES = 16


def factors(case: str) -> tuple[Tensor, Tensor]:
    """Images and slopes of a convolution of one pixel, (1, 64, 1, places) and (1, 4, 1, places)."""
    images, slopes = torch.ones(1, 64, 1, PLACES), torch.zeros(1, 4, 1, PLACES)
    if case == "rounded up place by place":
        slopes[:] = 2.0**-24 * (1.0 + 2.0**-7)
        slopes[..., 1] = 1.0
    elif case == "sums that are flushed":
        images[:] = 2.0**-63
        slopes[..., 0], slopes[..., 1] = 2.0**-63, -0.75 * 2.0**-63
    else:
        small, large = 2.0**-126 * (1.0 - 2.0**-7), 2.0**120
        images[:] = 0.0
        images[..., 0], slopes[..., 0] = large, small
        images[..., 1], slopes[..., 1] = -small * large, 1.0
    return images, slopes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["rounded up place by place", "sums that are flushed", "factors that are"])
def test_the_bound_holds_where_little_would_be_too_little(case: str, dtype: torch.dtype) -> None:
    images, slopes = factors(case)
    part = FormedOnce.of(images.to(dtype), slopes.to(dtype), Geometry((1, 1), (1, 1), (0, 0), (1, 1)))
    assert float(part.squared_norms()) >= float(part.rows().double().square().sum())


@pytest.mark.skipif(not cpu_kernels.multiplies_bfloat16(), reason="no instructions for bfloat16")
def test_bfloat16_is_multiplied_as_it_is_and_not_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways round sums of the same products; with an odd number of columns there is one way."""
    taken: list[bool] = []
    real = llvm_builder.compiled

    def watched(make: object, taps: "llvm_rows.Taps") -> object:
        taken.append(taps.rounded)
        return real(make, taps)  # type: ignore[arg-type]

    monkeypatch.setattr(llvm_builder, "compiled", watched)
    part, _ = part_of(LAYERS["plain"](), 6, dtype=torch.bfloat16)
    whole = FormedOnce(part.images.float(), part.gradient.float(), part.geometry)
    found, expected = part.rows(), whole.rows()
    assert taken == [True] * 6 + [False] * 6
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found, expected)
    odd, _ = part_of(LAYERS["strides"](), 1, dtype=torch.bfloat16)
    assert odd.gradient.shape[4] == 3
    odd.rows()
    assert taken[-1] is False


def test_a_record_of_many_pixels_keeps_its_row() -> None:
    """Inner products of all their pairs would take more memory, and time, than the gradient."""
    task = Task(kind="classification", shape=(64, 24, 24), classes=4)
    small = nn.Sequential(nn.Conv2d(64, 128, 6, stride=6), nn.Flatten(), nn.Linear(2048, 4))
    found = {}
    for most in (conv.MOST_PIXELS, 24 * 24):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(conv, "MOST_PIXELS", most)
            learner = Learner(small, task, CPU)
            assert learner.book is not None
            probe = learner.random_batch(2)
            given = (learner.initial()[None], probe.features, probe.targets, Tiles(1, 2))
            found[most] = learner.book.contributions(*given)["0.weight"]
    rows, once = found.values()
    assert not isinstance(rows, FormedOnce)
    assert isinstance(once, FormedOnce)
    assert once.numbers > 2 * 2 * 24**4
    torch.testing.assert_close(rows.rows(), once.rows(), rtol=1e-4, atol=1e-6)


def test_a_scale_that_float32_would_round_up_leaves_its_record_out() -> None:
    part, _ = part_of(LAYERS["plain"](), 1)
    for scale, counts in ((2.0**-126, True), (2.0**-126 - 2.0**-149, False), (1.2 * 2.0**-149, False)):
        sums = part.scaled_sum(torch.tensor([scale], dtype=torch.float64), None, Tiles(1, 1))
        assert bool(sums.any()) is counts
        assert float(sums.norm()) <= scale * float(part.squared_norms().sqrt())


def test_of_many_views_rows_are_formed() -> None:
    """Gram matrices of all their pixels would be larger than the gradient."""
    torch.manual_seed(0)
    part, exact = part_of(LAYERS["plain"](), 60)
    assert isinstance(part.averaged(2), FormedOnce)
    expected = Rows(exact.float())
    torch.testing.assert_close(part.averaged(60).rows(), expected.averaged(60).rows(), rtol=1e-4, atol=1e-5)
    present = torch.arange(60)[None] % 3 > 0
    found = part.summed(present)
    assert isinstance(found, Rows)
    torch.testing.assert_close(found.rows(), expected.summed(present).rows(), rtol=1e-4, atol=1e-4)
    # Views of views count as what they are.
    four = part.averaged(4)
    assert isinstance(four, FormedOnce)
    assert isinstance(four.summed(torch.ones(3, 5, dtype=torch.bool)), Rows)


def test_what_a_kernel_would_misread_is_refused() -> None:
    part, _ = part_of(LAYERS["plain"](), 3)
    images, gradient, geometry = part.images, part.gradient, part.geometry
    scales, sums = torch.ones(3, dtype=torch.float64), torch.zeros(64 * 8 * 9, dtype=torch.float64)
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
            cpu_kernels.add_row_sums(*wrong, geometry, sums)
    for other in (sums[1:], sums.float(), torch.zeros(2 * len(sums), dtype=torch.float64)[::2]):
        with pytest.raises((TypeError, ValueError), match="allowed"):
            cpu_kernels.add_row_sums(images, gradient, scales, geometry, other)


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
    assert isinstance(found["0.weight"], FormedOnce)
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
    nobody = FormedOnce(part.images[:0], part.gradient[:0], part.geometry)
    assert nobody.rows().shape == (0, part.rows().shape[1])


@pytest.mark.parametrize("wrong", ["scales of neighbours", "no scales of several"])
def test_a_kernel_that_is_wrong_of_several_records_alone_is_not_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cpu_kernels.add_row_sums

    def planted(images: Tensor, gradient: Tensor, scales: Tensor, geometry: Geometry, total: Tensor) -> None:
        if len(scales) > 1:
            scales = scales.roll(1) if wrong == "scales of neighbours" else torch.ones_like(scales)
        real(images, gradient, scales, geometry, total)

    monkeypatch.setattr(cpu_kernels, "add_row_sums", planted)
    monkeypatch.setattr(conv, "LARGE_PRODUCT", 1)
    assert not Learner(small_network(), TASK, CPU).shape.compiled


@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_sums_that_are_wrong_are_not_used(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    real = cpu_kernels.add_row_sums
    monkeypatch.setattr(
        cpu_kernels,
        "add_row_sums",
        lambda images, gradient, scales, *rest: real(images, gradient, factor * scales, *rest),
    )
    monkeypatch.setattr(conv, "LARGE_PRODUCT", 1)
    assert not Learner(small_network(), TASK, CPU).shape.compiled


@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_norms_that_are_too_small_are_not_used(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FormedOnce.squared_norms
    monkeypatch.setattr(FormedOnce, "squared_norms", lambda part: factor * real(part))
    monkeypatch.setattr(conv, "LARGE_PRODUCT", 1)
    learner = Learner(small_network(), TASK, CPU)
    assert learner.shape.compiled is (factor > 1.0)  # who is clipped by more than its norm stays private
