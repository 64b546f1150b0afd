"""A model of one small layer on a processor: a short way to the sums that the layer rules find."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_loops import loop_of
from torch import nn

from coterie.data.records import Task
from coterie.training import cpu_kernels
from coterie.training.clipping import clipped_sum
from coterie.training.contributions import WIDE
from coterie.training.learner import Batch, Learner
from coterie.training.narrow_head import NarrowHead

if cpu_kernels.available():
    from coterie.training import llvm_head

pytestmark = pytest.mark.skipif(not cpu_kernels.available(), reason="no LLVM, or a small processor")

CPU = torch.device("cpu")
CLIP = 0.7
TASKS = {
    "classes": Task("classification", (2, 3), classes=4),
    "numbers": Task("regression", (2, 3), classes=None, error_cap=4.0),
}


def learner_of(kind: str = "classes", *, bias: bool = True) -> Learner:
    torch.manual_seed(1)
    outputs = 4 if kind == "classes" else 1
    return Learner(nn.Sequential(nn.Flatten(), nn.Linear(6, outputs, bias=bias)), TASKS[kind], CPU)


def batch_of(kind: str, records: int, seed: int = 0, scale: float = 1.0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    features = scale * torch.randn(records, 2, 3, generator=generator)
    if kind == "classes":
        return Batch(features, torch.randint(4, (records,), generator=generator))
    return Batch(features, torch.randn(records, generator=generator))


def by_layer_rules(learner: Learner, parameters: torch.Tensor, batch: Batch) -> torch.Tensor:
    head, learner.narrow_head = learner.narrow_head, None
    try:
        return clipped_sum(learner, parameters, batch, CLIP)
    finally:
        learner.narrow_head = head


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(list(TASKS)),
    bias=st.booleans(),
    records=st.integers(0, 40),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.0, 1e-20, 0.1, 1.0, 30.0, 1e18]),
)
def test_the_sum_is_that_of_the_layer_rules(
    kind: str, bias: bool, records: int, seed: int, scale: float
) -> None:
    learner, batch = learner_of(kind, bias=bias), batch_of(kind, records, seed, scale)
    assert learner.narrow_head is not None
    parameters = torch.randn(learner.layout.size, generator=torch.Generator().manual_seed(seed))
    found, expected = (
        clipped_sum(learner, parameters, batch, CLIP),
        by_layer_rules(learner, parameters, batch),
    )
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * CLIP * max(1, records))


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38])
def test_what_is_not_finite_adds_nothing_and_leaves_the_others_alone(kind: str, value: float) -> None:
    learner, batch = learner_of(kind), batch_of(kind, 7)
    parameters = learner.initial()
    batch.features[3] = value
    found = clipped_sum(learner, parameters, batch, CLIP)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found, by_layer_rules(learner, parameters, batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", TASKS)
def test_one_record_moves_the_sum_by_at_most_the_clip(kind: str) -> None:
    learner, parameters = learner_of(kind), learner_of(kind).initial()
    for seed in range(30):
        batch = batch_of(kind, 9, seed, 10.0 ** (seed % 7 - 2))
        sums = clipped_sum(learner, parameters, batch, CLIP)
        without = clipped_sum(learner, parameters, batch.take(slice(0, 8)), CLIP)
        assert float((sums - without).norm()) <= CLIP


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(list(TASKS)),
    seed=st.integers(0, 1000),
    place=st.integers(0, 8),
    power=st.integers(-30, 37),
)
def test_a_neighbour_differs_by_what_the_clip_allows_and_no_more(
    kind: str, seed: int, place: int, power: int
) -> None:
    """One record becomes zero, others keep their values: the bound holds, and a large record reaches it."""
    learner, batch = learner_of(kind), batch_of(kind, 9, seed)
    batch.features[place] *= 10.0**power
    missing = Batch(batch.features.clone(), batch.targets)
    missing.features[place] = float("nan")
    both = [clipped_sum(learner, learner.initial(), one, CLIP) for one in (batch, missing)]
    moved = float((both[0] - both[1]).norm())
    assert moved <= CLIP
    if kind == "numbers" and power > 3:
        assert moved >= CLIP * (1.0 - 2.0**-15)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("inner", [1, 7, 8, 65])
def test_the_kernel_computes_the_loop_that_stands_above_it(kind: str, inner: int, bias: bool) -> None:
    """In float64: an error of ten bits, as float32 would make over many inputs, would show."""
    rng, outer, classes = np.random.default_rng(inner), 5 if kind == "classes" else 1, kind == "classes"
    inputs = (10.0 ** rng.uniform(-6, 2, (9, inner))).astype(np.float32)
    weight, biases = (rng.normal(size=shape).astype(np.float32) for shape in ((outer, inner), (outer,)))
    targets = rng.integers(-1, outer + 1, 9) if classes else rng.normal(size=9).astype(np.float32)
    sums = np.zeros((outer, inner)), np.zeros(outer)
    loop_of(
        llvm_head.head_sum,
        records=9,
        outer=outer,
        inputs=inputs,
        weight=weight,
        bias=biases if bias else 0.0,
        biased=bias,
        classes=classes,
        targets=targets,
        clip=0.3,
        total=sums[0],
        total_bias=sums[1],
    )
    found = [torch.zeros(size, dtype=torch.float64) for size in (outer * inner, outer)]
    parts = list(zip((torch.from_numpy(weight).flatten(), torch.from_numpy(biases)), found, strict=True))
    given = torch.from_numpy(inputs), torch.from_numpy(targets), (outer, inner), parts[0]
    cpu_kernels.add_head_sum(*given, parts[1] if bias else None, 0.3, classes=classes)
    assert np.linalg.norm(sums[0]) > 0.1
    np.testing.assert_allclose(found[0].view(outer, inner).numpy(), sums[0], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found[1].numpy(), sums[1] if bias else 0.0, rtol=1e-6, atol=1e-9)


def test_what_the_kernel_would_misread_is_refused() -> None:
    weight = torch.zeros(8), torch.zeros(8, dtype=torch.float64)
    inputs, targets, shape = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), (2, 4)
    for wrong in (
        (inputs.double(), targets, shape, weight),
        (inputs[:, :3], targets, shape, weight),
        (inputs, targets.int(), shape, weight),
        (inputs, targets[:2], shape, weight),
        (inputs, targets, shape, (weight[0][:7], weight[1])),
        (inputs, targets, shape, (weight[0], weight[1].float())),
        (inputs, targets, shape, (weight[0], torch.zeros(16, dtype=torch.float64)[::2])),
    ):
        with pytest.raises((TypeError, ValueError), match="allowed"):
            cpu_kernels.add_head_sum(*wrong, None, 1.0, classes=True)


def test_who_has_no_narrow_head() -> None:
    task, hidden = TASKS["classes"], nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    assert Learner(hidden, task, CPU).narrow_head is None
    wide = nn.Sequential(nn.Flatten(), nn.Linear(WIDE + 1, 4))
    assert Learner(wide, Task("classification", (WIDE + 1,), classes=4), CPU).narrow_head is None
    frozen = nn.Sequential(nn.Flatten(), nn.Linear(6, 4))
    frozen[1].bias.requires_grad_(False)
    assert Learner(frozen, task, CPU).narrow_head is None


@pytest.mark.parametrize("factor", [1.01, 0.99])
@pytest.mark.parametrize("wrong", ["gradient", "clip"])
def test_a_head_that_finds_other_sums_is_not_used(
    wrong: str, factor: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = NarrowHead.clipped_sum

    def planted(head: NarrowHead, *given: torch.Tensor, most: float) -> torch.Tensor:
        if wrong == "gradient" and math.isinf(most):
            return factor * real(head, *given, most=most)
        return real(head, *given, most=most if math.isinf(most) else max(1.01, factor) * most)

    monkeypatch.setattr(
        NarrowHead, "clipped_sum", lambda head, *given: planted(head, *given[:3], most=given[3])
    )
    assert learner_of().narrow_head is None
    assert "those of one small layer are others" in caplog.text


def test_a_learner_of_a_known_shape_takes_the_same_way() -> None:
    learner = learner_of()
    other = Learner.from_shape(learner.model, learner.task, learner.shape)
    assert other.narrow_head == learner.narrow_head
    batch = batch_of("classes", 12)
    sums = [clipped_sum(each, learner.initial(), batch, CLIP) for each in (learner, other)]
    assert torch.equal(*sums)
