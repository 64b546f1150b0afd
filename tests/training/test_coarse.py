"""Factors of bfloat16 on a processor: what is rounded, and that norms are those of what is summed."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from coterie.data.records import Task
from coterie.engines.clients import TrainingFacts, behaviour
from coterie.models import ModelSettings
from coterie.privacy import Adjacency, SecretKey, Unit, plans
from coterie.training import cpu_kernels
from coterie.training.bookkeeping import Bookkeeping
from coterie.training.clipping import MARGIN, clipped_sum
from coterie.training.formed_once import FormedOnce
from coterie.training.isolation import off_by
from coterie.training.layers import conv
from coterie.training.layers.conv import ConvRule
from coterie.training.learner import Batch, Learner
from coterie.training.tiles import Tiles

pytestmark = pytest.mark.skipif(not cpu_kernels.available(), reason="no LLVM, or a small processor")

CPU = torch.device("cpu")
CLIP = 0.7
TASK = Task(kind="classification", shape=(3, 8, 8), classes=4)


@pytest.fixture(autouse=True, scope="module")
def _with_instructions() -> Iterator[None]:
    """Torch computes the same, more slowly, where a processor has no instructions for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernels, "multiplies_bfloat16", lambda: True)
        patch.setattr(conv, "LARGE_PRODUCT", 2**20)
        yield


class Residual(nn.Module):
    """Convolutions of few channels and of many, on many places and on few, with and without constants."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(8, 64)
        self.same = nn.Conv2d(64, 64, 3, padding=1)
        self.down = nn.Conv2d(64, 128, 3, stride=2, padding=1, bias=False)
        self.short = nn.Conv2d(64, 128, 1, stride=2)
        self.head = nn.Linear(128, 4)

    def forward(self, images: Tensor) -> Tensor:
        stem = torch.relu(self.norm(self.stem(images)))
        stem = stem + torch.tanh(self.same(stem))
        pooled: Tensor = (torch.relu(self.down(stem)) + self.short(stem)).mean(dim=(2, 3))
        outputs: Tensor = self.head(pooled)
        return outputs


def sequence() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64 * 16, 4)
    )


class PartlyFrozen(nn.Module):
    """Layers that are not replaced, whose float32 no bfloat16 may meet."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.wide = nn.Conv2d(64, 64, 3, bias=False)
        self.frozen = nn.Conv2d(64, 64, 3).requires_grad_(False)
        self.head = nn.Linear(64, 4)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.tanh(self.frozen(self.wide(self.same(images)))).mean(dim=(2, 3)))
        return outputs


def without_constants() -> nn.Module:
    """A chain through which bfloat16 goes, to layers of every kind."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, bias=False), nn.GroupNorm(8, 64), nn.ReLU(), nn.Conv2d(64, 64, 3, bias=False),
        nn.Tanh(), nn.Conv2d(64, 8, 3, bias=False), nn.Flatten(), nn.Linear(8 * 4, 4),
    )  # fmt: skip


MODELS = {
    "residual": Residual,
    "sequence": sequence,
    "partly frozen": PartlyFrozen,
    "without constants": without_constants,
}


@pytest.fixture(params=sorted(MODELS), scope="module")
def learner(request: pytest.FixtureRequest) -> Learner:
    torch.manual_seed(0)
    learner = Learner(MODELS[request.param](), TASK, CPU)
    assert learner.coarse
    return learner


def batch_of(records: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(records, *TASK.shape, generator=generator), torch.arange(records) % 4)


# --- what is rounded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [True, False])
def test_a_convolution_is_that_of_rounded_factors(biased: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(64, 64, 3, padding=1, bias=biased)
    rule, images, slopes = ConvRule(layer), torch.randn(3, 64, 6, 5), torch.randn(3, 64, 6, 5)
    weights = {name: value.detach()[None] for name, value in layer.named_parameters()}
    whole = rule.whole(images, weights, Tiles(1, 3, coarse=True), True)
    assert whole is not None
    outputs, back = whole
    at_inputs, found = back(slopes, True)
    assert at_inputs is not None
    exact_images = images.bfloat16().double().requires_grad_()
    exact_weight = weights["weight"][0].bfloat16().double().requires_grad_()
    exact = functional.conv2d(exact_images, exact_weight, None, padding=1)
    bias = weights["bias"][0][:, None, None].double() if biased else 0.0
    torch.testing.assert_close(outputs.double(), exact.detach() + bias, rtol=2**-8, atol=2**-8)
    rows = []
    for at in range(3):
        wanted = (exact_images, exact_weight)
        grads = torch.autograd.grad(exact[at], wanted, slopes[at].bfloat16().double(), retain_graph=True)
        torch.testing.assert_close(at_inputs[at].double(), grads[0][at], rtol=2**-8, atol=2**-8)
        rows.append(grads[1].flatten())
    torch.testing.assert_close(found["weight"].rows().double(), torch.stack(rows), rtol=2**-8, atol=2**-6)
    slopes = slopes.bfloat16().double()
    torch.testing.assert_close(found["bias"].rows().double(), slopes.sum(dim=(2, 3)), rtol=1e-5, atol=1e-5)


def test_few_channels_and_wide_numbers_are_not_rounded() -> None:
    for layer in (nn.Conv2d(3, 64, 3), nn.Conv2d(64, 32, 3), nn.Conv2d(128, 128, 3, groups=2)):
        weights = {name: value.detach()[None] for name, value in layer.named_parameters()}
        images = torch.randn(2, layer.in_channels, 5, 5)
        assert ConvRule(layer).whole(images, weights, Tiles(1, 2, coarse=True), True) is None
        assert ConvRule(nn.Conv2d(64, 64, 3)).whole(images, weights, Tiles(1, 2), True) is None
    assert not Learner(Residual().double(), TASK, CPU).coarse
    assert not Learner(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), TASK, CPU).coarse


def test_gradients_are_those_of_the_model_but_for_rounding(learner: Learner) -> None:
    batch = batch_of(6, 1)
    sums = clipped_sum(learner, learner.initial(), batch, 1e3)
    exact = clipped_sum(Learner(learner.model, TASK, CPU, full_precision=True), learner.initial(), batch, 1e3)
    error = float((sums - exact).norm() / exact.norm())
    assert 1e-5 < error < 0.05
    assert torch.equal(sums, clipped_sum(learner, learner.initial(), batch, 1e3))


def test_layers_that_are_not_ours_find_float32_and_the_rest_goes_on_in_bfloat16() -> None:
    assert [Learner(make(), TASK, CPU).shape.hands_on for make in MODELS.values()] == [
        True,
        True,
        False,
        True,
    ]


def test_a_worker_computes_what_the_engine_does(learner: Learner) -> None:
    twin = Learner.from_shape(learner.model, TASK, learner.shape)
    given = (learner.initial(), batch_of(6, 3), 1.0)
    assert torch.equal(clipped_sum(learner, *given), clipped_sum(twin, *given))
    assert twin.shape == learner.shape


def test_few_places_are_formed_for_the_sum_alone() -> None:
    torch.manual_seed(0)
    learner = Learner(Residual(), TASK, CPU)
    batch, book = batch_of(3, 0), learner.book
    assert book is not None
    given = (learner.initial()[None], batch.features, batch.targets, Tiles(1, 3, coarse=True))
    assert isinstance(book.contributions(*given)["down.weight"], FormedOnce)


# --- what a record adds -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), place=st.integers(0, 4), power=st.integers(-30, 37))
def test_a_neighbour_differs_by_what_the_clip_allows(
    seed: int, place: int, power: int, learner: Learner
) -> None:
    batch = batch_of(5, seed)
    batch.features[place] *= 10.0**power
    missing = Batch(batch.features.clone(), batch.targets)
    missing.features[place] = math.nan
    both = [clipped_sum(learner, learner.initial(), one, CLIP) for one in (batch, missing)]
    assert bool(both[0].isfinite().all())
    assert float((both[0] - both[1]).norm()) <= CLIP
    alone = clipped_sum(learner, learner.initial(), batch.take(slice(place, place + 1)), 1e-3)
    assert float(alone.norm()) <= 1e-3 * MARGIN * (1.0 + 2.0**-18)


def test_norms_are_no_shorter_than_what_is_summed(learner: Learner) -> None:
    batch, book = batch_of(5, 2), learner.book
    assert book is not None
    given = (learner.initial(), batch.features, batch.targets)
    assert book.weighs_what_it_adds(*given, coarse=True)
    tiles = Tiles(1, 5, coarse=True)
    for part in book.contributions(given[0][None], *given[1:], tiles).values():
        rows = part.rows().double()
        assert (part.squared_norms() >= rows.square().sum(dim=1) * (1.0 - 2.0**-20)).all()


# --- when ---------------------------------------------------------------------------------------------------


def test_who_wants_every_bit_or_has_no_instructions_rounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Learner(Residual(), TASK, CPU, full_precision=True).coarse
    with monkeypatch.context() as patch:
        patch.setattr(cpu_kernels, "multiplies_bfloat16", lambda: False)
        assert not Learner(Residual(), TASK, CPU).coarse
    monkeypatch.setattr(cpu_kernels, "available", lambda: False)
    assert not Learner(Residual(), TASK, CPU).coarse


def test_another_process_rounds_alike_and_noise_is_bound_to_it(learner: Learner) -> None:
    again = Learner.from_shape(learner.model, TASK, learner.shape)
    batch = batch_of(4, 3)
    assert again.coarse
    sums = [clipped_sum(each, learner.initial(), batch, CLIP) for each in (learner, again)]
    assert torch.equal(*sums)
    plan = plans.plan_of(
        Unit.RECORD, Adjacency.ZERO_OUT, {"a": [plans.RecordReleases(9, clip=1.0).steps("t", 1, 3, 1.0)]}
    )
    full = Learner(learner.model, TASK, CPU, full_precision=True)
    said = {behaviour(ModelSettings(), 0.1, None, plan, each) for each in (learner, again, full)}
    assert len(said) == 2


@pytest.mark.parametrize("wrong", ["far off", "too short", "not there"])
def test_what_is_wrong_or_missing_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weighs = Bookkeeping.rows, Bookkeeping.weighs_what_it_adds

    def planted(book: Bookkeeping, *given: Tensor, coarse: bool = False) -> Tensor:
        if coarse and wrong == "not there":
            raise RuntimeError("no kernel of bfloat16")
        return rows(book, *given, coarse=coarse) * (1.3 if coarse and wrong == "far off" else 1.0)

    monkeypatch.setattr(Bookkeeping, "rows", planted)
    if wrong == "too short":
        monkeypatch.setattr(
            Bookkeeping,
            "weighs_what_it_adds",
            lambda book, *given, coarse=False: not coarse and weighs(book, *given),
        )
    learner = Learner(Residual(), TASK, CPU)
    assert learner.shape.compiled
    assert not learner.coarse


def test_facts_of_training_name_no_precision() -> None:
    """It is part of the learner's shape, to which noise is bound, and of nothing that a client is sent."""
    key = SecretKey.from_seed(0)
    facts = TrainingFacts(("a",), (1,), 0.1, key, key, 0)
    assert not any("precision" in name for name in vars(facts))


def test_a_model_that_learns_nothing_at_first_is_taken_as_it_is() -> None:
    """Gradients that are zero have no length to which another could be compared."""
    head = nn.Linear(4096, 4)
    for parameter in head.parameters():
        nn.init.zeros_(parameter).requires_grad_(False)
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Tanh(), nn.Flatten(), head)
    assert not Learner(model, Task(kind="classification", shape=(64, 8, 8), classes=4), CPU).coarse


def test_gradients_have_no_distance_from_none_or_from_what_is_no_number() -> None:
    some = torch.ones(2, 3)
    assert off_by(some, torch.zeros(2, 3), [1, 2]) == (math.inf, math.inf)
    assert off_by(some, torch.full((2, 3), math.nan), [1, 2]) == (math.inf, math.inf)
    assert off_by(some, some, [1, 2]) == (0.0, 0.0)
    error, worst = off_by(torch.full((2, 3), math.nan), some, [1, 2])
    assert not error < 1.0
    assert not worst < 1.0


def test_layers_that_cannot_read_bfloat16_keep_the_model_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Bookkeeping.rows

    def refusing(book: Bookkeeping, *given: Tensor, coarse: bool = False) -> Tensor:
        if coarse:
            raise TypeError("not of bfloat16")
        return real(book, *given)

    monkeypatch.setattr(Bookkeeping, "rows", refusing)
    assert not Learner(Residual(), TASK, CPU).coarse
