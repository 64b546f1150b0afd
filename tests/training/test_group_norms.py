"""Group norms on a processor: their kernels against loops, against float64 of torch, and in a model."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_loops import loop_of
from torch import Tensor, nn

from coterie.data.records import Task
from coterie.training import cpu_kernels
from coterie.training.layers import simple
from coterie.training.learner import Learner

pytestmark = pytest.mark.skipif(not cpu_kernels.available(), reason="no LLVM, or a small processor")
if cpu_kernels.available():
    from coterie.training import llvm_norms

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16]
SHAPES = {  # records, channels, lines, columns, groups
    "ResNet-18's first": (2, 64, 8, 8, 8),
    "its last": (3, 512, 2, 2, 32),
    "vectors of eight": (2, 24, 5, 3, 3),
    "groups across vectors": (2, 40, 3, 3, 5),
    "a channel a group": (2, 48, 7, 2, 48),
    "one group": (2, 96, 2, 3, 1),
    "one pixel, one record": (1, 8, 1, 1, 1),
}


def drawn(name: str, kind: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Images, gradient, weight, bias and groups."""
    records, channels, lines, columns, groups = SHAPES[name]
    rng = torch.Generator().manual_seed(seed)
    shape = (records, channels, lines, columns)
    images, gradient = (torch.randn(shape, generator=rng) * 2.0 + 0.5 for _ in range(2))
    weight, bias = (torch.randn(channels, generator=rng) for _ in range(2))
    return images.to(kind), gradient, weight, bias, groups


def both_ways(
    images: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None, groups: int
) -> tuple[Tensor, ...]:
    outputs, means, rates = cpu_kernels.normalise(images, weight, bias, groups, 1e-5)
    return outputs, *cpu_kernels.normalise_back(images, gradient, weight, means, rates)


def differentiated(
    images: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor, groups: int
) -> tuple[Tensor, ...]:
    """The same in float64 by torch, with parameters of its own for every record."""
    exact = images.double().requires_grad_()
    own = [part.double().expand(len(images), -1).clone().requires_grad_() for part in (weight, bias)]
    normal = nn.functional.group_norm(exact, groups)
    outputs = normal * own[0][..., None, None] + own[1][..., None, None]
    return outputs.detach(), *torch.autograd.grad(outputs, [exact, *own], gradient.double())


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("narrow")
def test_both_ways_are_those_of_float64(name: str, kind: torch.dtype) -> None:
    given = drawn(name, kind)
    found, exact = both_ways(*given), differentiated(*given)
    assert [part.dtype for part in found] == [torch.float32, kind, torch.float32, torch.float32]
    for part, wanted in zip(found, exact, strict=True):
        close = 2e-6 if part.dtype == torch.float32 else 2**-8  # eight bits
        assert float((part.double() - wanted).abs().max()) <= close * float(wanted.abs().max() + 1.0)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.usefixtures("narrow")
def test_each_kernel_computes_the_loop_that_stands_above_it(kind: torch.dtype) -> None:
    images, gradient, weight, bias, groups = drawn("groups across vectors", kind)
    records, channels = images.shape[:2]

    def pixels(part: Tensor) -> np.ndarray:
        return part.float().permute(0, 2, 3, 1).reshape(records, -1, channels).numpy()

    means, rates = np.zeros((2, records, groups))
    loops = {"weight": weight.numpy(), "groups": groups, "records": records, "means": means, "rates": rates}
    outputs, at_images = np.zeros((2, *pixels(images).shape))
    weight_rows, bias_rows = np.zeros((2, records, channels))
    loop_of(
        llvm_norms.normalise, images=pixels(images), bias=bias.numpy(), outputs=outputs, eps=1e-5, **loops
    )
    loop_of(
        llvm_norms.normalise_back,
        images=pixels(images),
        gradient=pixels(gradient),
        outputs=at_images,
        weight_rows=weight_rows,
        bias_rows=bias_rows,
        **loops,
    )
    made, own_means, own_rates = cpu_kernels.normalise(images, weight, bias, groups, 1e-5)
    np.testing.assert_allclose(own_means.numpy(), means, rtol=1e-12)
    np.testing.assert_allclose(own_rates.numpy(), rates, rtol=1e-12)
    np.testing.assert_allclose(pixels(made), outputs, rtol=2e-6, atol=2e-6)
    back = cpu_kernels.normalise_back(images, gradient, weight, own_means, own_rates)
    close = 2e-6 if kind == torch.float32 else 2**-8
    np.testing.assert_allclose(pixels(back[0]), at_images, rtol=close, atol=close)
    np.testing.assert_allclose(back[1].numpy(), weight_rows, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(back[2].numpy(), bias_rows, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", TYPES)
def test_a_record_has_the_same_bits_alone_and_beside_one_of_nothing_but_infinities(kind: torch.dtype) -> None:
    images, gradient, *given = drawn("its last", kind)
    together = both_ways(images, gradient, *given)
    for at in range(len(images)):
        own = slice(at, at + 1)
        alone = both_ways(images[own], gradient[own], *given)
        assert all(torch.equal(part[own], one) for part, one in zip(together, alone, strict=True))
    for poisoned, poison in ((images, math.inf), (images, math.nan), (gradient, -math.inf)):
        kept = poisoned[1].clone()
        poisoned[1] = poison
        found = both_ways(images, gradient, *given)
        poisoned[1] = kept
        assert all(torch.equal(part[[0, 2]], one[[0, 2]]) for part, one in zip(together, found, strict=True))
        assert not torch.isfinite(found[1][1]).any()  # so that nothing passes for a short gradient
        assert not torch.isfinite(found[2][1]).any()


def test_images_in_any_order_give_the_same_bits_and_no_bias_is_one_of_zeros() -> None:
    images, gradient, weight, bias, groups = drawn("vectors of eight", torch.float32)
    usual = both_ways(images, gradient, weight, bias, groups)
    last = [part.contiguous(memory_format=torch.channels_last) for part in (images, gradient)]
    assert all(map(torch.equal, usual, both_ways(*last, weight, bias, groups)))
    turned = [part.transpose(2, 3).contiguous().transpose(2, 3) for part in (images, gradient)]
    assert all(map(torch.equal, usual, both_ways(*turned, weight, bias, groups)))
    without = both_ways(images, gradient, weight, None, groups)
    zeros = both_ways(images, gradient, weight, torch.zeros_like(bias), groups)
    assert all(map(torch.equal, without, zeros))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(width=32), min_size=8, max_size=8))
def test_bfloat16_is_rounded_as_torch_rounds_it(values: list[float]) -> None:
    """Of any float32, also those that are no numbers."""
    images, gradient = torch.zeros(1, 8, 1, 1), torch.tensor(values).view(1, 8, 1, 1)
    spread = [torch.full((1, 1), value, dtype=torch.float64) for value in (0.0, 1.0)]
    exact, rounded = (
        cpu_kernels.normalise_back(images.to(kind), gradient, torch.ones(8), *spread)[0] for kind in TYPES
    )
    torch.testing.assert_close(rounded, exact.bfloat16(), rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("chosen", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", TYPES)
def test_what_torch_takes_where_nobody_says_changes_nothing(kind: torch.dtype, chosen: torch.dtype) -> None:
    """A model's file may set it: kernels write so many bytes to an address, whatever is there."""
    given = drawn("its last", kind)
    usual, before = both_ways(*given), torch.get_default_dtype()
    torch.set_default_dtype(chosen)
    try:
        assert all(map(torch.equal, usual, both_ways(*given)))
    finally:
        torch.set_default_dtype(before)


def test_what_the_kernels_cannot_take_is_refused_before_memory_is_touched() -> None:
    images, gradient, weight, bias, groups = drawn("vectors of eight", torch.float32)
    for wrong in (images[:0], images[:, :23], images.double(), images[0], images[:, :, :0]):
        assert not cpu_kernels.suits_norm(wrong)
        with pytest.raises(ValueError, match="allowed: some, of whole vectors"):
            cpu_kernels.normalise(wrong, weight, bias, groups, 1e-5)
    with pytest.raises(ValueError, match="in 5 groups"):
        cpu_kernels.normalise(images, weight, bias, 5, 1e-5)
    with pytest.raises(ValueError, match="weight: shape"):
        cpu_kernels.normalise(images, weight[:8], bias, groups, 1e-5)
    _, means, rates = cpu_kernels.normalise(images, weight, bias, groups, 1e-5)
    with pytest.raises(ValueError, match="gradient: shape"):
        cpu_kernels.normalise_back(images, gradient[:1], weight, means, rates)
    with pytest.raises(TypeError, match="means: "):
        cpu_kernels.normalise_back(images, gradient, weight, means.float(), rates)


@pytest.mark.parametrize("affine_bias", [True, False])
def test_a_model_has_the_gradients_that_torch_has(monkeypatch: pytest.MonkeyPatch, affine_bias: bool) -> None:
    """The rows are taken by the kernels, and by torch record by record where these are not."""
    torch.manual_seed(0)
    norm = nn.GroupNorm(2, 16)
    norm.bias.requires_grad_(affine_bias)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 4))
    calls: list[int] = []
    normalise_back = cpu_kernels.normalise_back

    def counted(images: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        calls.append(len(images))
        return normalise_back(images, *rest)

    monkeypatch.setattr(simple.cpu_kernels, "normalise_back", counted)
    learner = Learner(model, Task(kind="classification", shape=(3, 8, 8), classes=4), CPU)
    assert learner.book is not None
    assert learner.book.compiled
    calls.clear()
    probe = learner.random_batch(7)
    rows = learner.gradients(learner.initial(), probe)
    assert calls == [7]
    monkeypatch.setattr(simple.cpu_kernels, "suits_norm", lambda images: False)
    by_torch = learner.gradients(learner.initial(), probe)
    assert calls == [7]
    torch.testing.assert_close(rows, by_torch, rtol=1e-4, atol=1e-6)
