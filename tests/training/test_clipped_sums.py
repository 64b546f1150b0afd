"""One record moves a released sum by at most the clip, whatever it holds."""

import numpy as np
import pytest
import torch
from torch import nn

from coterie.data.records import Task
from coterie.models import ModelSettings, build_model
from coterie.privacy import Adjacency, FullBatchSketch, FullBatchSteps, PoissonSteps, SecretKey
from coterie.training import clipping, cpu_kernels, kernels
from coterie.training.clipping import MARGIN, clip_rows, clip_scales, clipped_sum
from coterie.training.contributions import WIDE
from coterie.training.dpsgd import noisy_mean
from coterie.training.learner import Batch, Learner
from coterie.training.parameters import flatten
from coterie.training.sketch import Projection

CPU = torch.device("cpu")
TASK = Task(kind="classification", shape=(1, 8, 8), classes=10)
CLIP = 0.7


@pytest.fixture(autouse=True, params=["compiled", "torch alone"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guarantee is the same with the processor's kernels and without."""
    if request.param == "torch alone":
        monkeypatch.setattr(cpu_kernels, "available", lambda: False)
    elif not cpu_kernels.available():
        pytest.skip("no LLVM, or a processor without wide registers")


def learner_of(name: str, task: Task = TASK) -> tuple[Learner, torch.Tensor]:
    model = build_model(ModelSettings(name=name), task, seed=3)
    return Learner(model, task, CPU), torch.from_numpy(flatten(model))


def batch_of(records: int, seed: int = 0, scale: float = 1.0) -> Batch:
    rng = np.random.default_rng(seed)
    features = (scale * rng.normal(size=(records, *TASK.shape))).astype(np.float32)
    return Batch(torch.from_numpy(features), torch.from_numpy(rng.integers(10, size=records)))


def loop_of_backward_passes(model: nn.Module, batch: Batch, clip: float) -> torch.Tensor:
    """The obviously right sum: one record at a time, in float64."""
    model = model.double().requires_grad_(True)
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for features, target in zip(batch.features.double(), batch.targets, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(features[None]), target[None]).backward()
        row = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        total += row * min(1.0, clip / float(row.norm()))
    return total


@pytest.mark.parametrize("name", ["softmax", "cnn"])
def test_clipped_sum_equals_a_loop_of_single_backward_passes(name: str) -> None:
    learner, parameters = learner_of(name)
    batch = batch_of(19)
    slow = loop_of_backward_passes(build_model(ModelSettings(name=name), TASK, seed=3), batch, CLIP)
    torch.testing.assert_close(clipped_sum(learner, parameters, batch, CLIP), slow, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_a_wide_head_sums_what_single_backward_passes_sum(bias: bool) -> None:
    """On as many features as a transform makes; one record moves it by the clip, if finite."""
    task = Task(kind="classification", shape=(WIDE + 52,), classes=10)
    settings = ModelSettings(name="softmax", bias=bias)
    model = build_model(settings, task, seed=3)
    learner, parameters = Learner(model, task, CPU), torch.from_numpy(flatten(model))
    rng = np.random.default_rng(0)
    scales = 10.0 ** rng.integers(-3, 2, size=(9, 1))
    features = torch.from_numpy((scales * rng.normal(size=(9, *task.shape))).astype(np.float32))
    batch = Batch(features, torch.arange(9))
    slow = loop_of_backward_passes(build_model(settings, task, seed=3), batch, CLIP)
    found = clipped_sum(learner, parameters, batch, CLIP)
    torch.testing.assert_close(found, slow, rtol=1e-4, atol=1e-5)
    for gone in range(9):
        without = clipped_sum(learner, parameters, batch.take(torch.arange(9) != gone), CLIP)
        assert float((found - without).norm()) <= CLIP
    features[4, 7] = float("inf")
    others = clipped_sum(learner, parameters, batch.take(torch.arange(9) != 4), CLIP)
    torch.testing.assert_close(clipped_sum(learner, parameters, batch, CLIP), others)


def test_micro_batches_do_not_change_the_sum() -> None:
    learner, parameters = learner_of("cnn")
    batch = batch_of(23)
    whole = clipped_sum(learner, parameters, batch, CLIP)
    learner.micro_batch = 5
    torch.testing.assert_close(clipped_sum(learner, parameters, batch, CLIP), whole, rtol=1e-5, atol=1e-7)


def test_memory_of_a_full_batch_step_is_bounded_by_the_micro_batch() -> None:
    learner, parameters = learner_of("cnn")
    learner.micro_batch = 4
    sizes = []
    assert learner.book is not None
    once = learner.book.contributions
    learner.book.contributions = lambda p, x, y, t: (sizes.append(len(y)), once(p, x, y, t))[1]  # type: ignore[method-assign, func-returns-value]
    clipped_sum(learner, parameters, batch_of(30), CLIP)
    assert max(sizes) == 4
    assert sum(sizes) == 30


ADVERSARIAL = {
    "ordinary": 1.0,
    "tiny": 1e-30,
    "large": 1e6,
    "at the edge of float32": 1e37,
    "overflowing": 3e38,
    "infinite": float("inf"),
    "not a number": float("nan"),
}


@pytest.mark.parametrize("name", ["softmax", "cnn"])
@pytest.mark.parametrize("record", ADVERSARIAL, ids=str)
@pytest.mark.parametrize("projected", [False, True], ids=["update", "sketch"])
def test_removing_one_record_moves_the_sum_by_at_most_the_clip(
    name: str, record: str, projected: bool
) -> None:
    """Full-batch and Poisson steps, equal parameters and coins, with and without the record."""
    learner, parameters = learner_of(name)
    project = Projection(len(parameters), 16, seed=1, device=CPU) if projected else None
    everyone = batch_of(40, seed=5)
    everyone.features[7] *= ADVERSARIAL[record]
    coins = SecretKey.from_seed(0).stream("coins", subject="a", round=1, release="t", input_hash="")
    drawn = torch.from_numpy(coins.bernoulli(0.5, (40,)))
    drawn[7] = True
    for batch in (torch.ones(40, dtype=torch.bool), drawn):
        without = batch.clone()
        without[7] = False
        with_record = clipped_sum(learner, parameters, everyone.take(batch), CLIP, project)
        without_record = clipped_sum(learner, parameters, everyone.take(without), CLIP, project)
        assert torch.isfinite(with_record).all()
        assert float((with_record - without_record).norm()) <= CLIP


def test_an_adversary_cannot_exceed_the_clip_by_rounding() -> None:
    rng = np.random.default_rng(0)
    for exponent in (-40, -20, 0, 10, 30):
        rows = torch.from_numpy((10.0**exponent * rng.normal(size=(200, 300))).astype(np.float32))
        assert float(clip_rows(rows, CLIP).norm(dim=1).max()) <= CLIP


def test_scales_of_nothing_and_of_everything() -> None:
    norms = torch.tensor([0.0, 1e-310, 1.0, 1e300, float("inf"), float("nan")], dtype=torch.float64)
    scales = clip_scales(norms, 2.0)
    assert scales[:3].tolist() == [1.0, 1.0, 1.0]
    assert 0.0 < float(scales[3]) * 1e300 <= 2.0
    assert scales[4:].tolist() == [0.0, 0.0]


def test_what_a_gpu_rounds_in_norms_and_sums_is_within_the_margin() -> None:
    """As `WeighedRows` counts it: lines of 128 inputs, and so many records, with and without one."""
    norms, sums = 128 * 2.0**-24 / 2, 2 * kernels.TOGETHER**2 * 2.0**-24
    assert norms + sums < 1.0 - MARGIN


def test_a_small_gradient_is_not_scaled_up() -> None:
    rows = torch.full((1, 4), 1e-3)
    torch.testing.assert_close(clip_rows(rows, CLIP), rows.double())


def mechanism(kind: str, records: int, noise: float) -> PoissonSteps | FullBatchSteps | FullBatchSketch:
    common = {"clip": CLIP, "noise_multiplier": noise, "records": records, "adjacency": Adjacency.ZERO_OUT}
    if kind == "poisson":
        return PoissonSteps(batch=10, epochs=1, **common)  # type: ignore[arg-type]
    if kind == "full":
        return FullBatchSteps(epochs=1, **common)  # type: ignore[arg-type]
    return FullBatchSketch(dimensions=16, **common)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 3, 25])
def test_the_denominator_is_the_public_batch_whatever_was_drawn(size: int) -> None:
    learner, parameters = learner_of("softmax")
    batch = batch_of(size)
    noise = SecretKey.from_seed(0).stream("noise", subject="a", round=1, release="t", input_hash="")
    released = noisy_mean(learner, parameters, batch, mechanism("poisson", 40, 0.0), noise)
    torch.testing.assert_close(released, clipped_sum(learner, parameters, batch, CLIP) / 10)


def test_an_empty_batch_still_releases_noise() -> None:
    learner, parameters = learner_of("softmax")
    noise = SecretKey.from_seed(0).stream("noise", subject="a", round=1, release="t", input_hash="")
    released = noisy_mean(learner, parameters, batch_of(0), mechanism("poisson", 40, 2.0), noise)
    assert float(released.std()) == pytest.approx(2.0 * CLIP / 10, rel=0.1)


@pytest.mark.parametrize("kind", ["poisson", "full", "sketch"])
def test_released_noise_has_the_declared_size(kind: str) -> None:
    """Standard deviation of release minus exact sum, pooled over draws.

    With 16 * 400 or more normal values the sample deviation is within 4.5 % of the true one except
    with probability below 1e-6; 90 % of the noise is outside.
    """
    learner, parameters = learner_of("softmax")
    batch = batch_of(30)
    planned = mechanism(kind, 30, 1.5)
    project = Projection(len(parameters), 16, seed=1, device=CPU) if kind == "sketch" else None
    exact = clipped_sum(learner, parameters, batch, CLIP, project)
    key = SecretKey.from_seed(11)
    noises = []
    for draw in range(400 if kind == "sketch" else 40):
        stream = key.stream("noise", subject="a", round=draw, release=kind, input_hash="")
        released = noisy_mean(learner, parameters, batch, planned, stream, project)
        noises.append(released * planned.denominator - exact)
    pooled = torch.cat(noises)
    assert float(pooled.std()) == pytest.approx(1.5 * CLIP, rel=0.045)
    assert abs(float(pooled.mean())) < 5 * 1.5 * CLIP / len(pooled) ** 0.5


def test_sketches_keep_distances() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(6, 5000, generator=generator)
    sketch = Projection(5000, 400, seed=2, device=CPU)(vectors)
    ratio = torch.pdist(sketch) / torch.pdist(vectors)
    assert float((ratio - 1).abs().max()) < 0.2


def test_signed_sums_replace_a_matrix_that_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces or at once, with a rest that fills no turn: the same linear map that keeps distances."""
    monkeypatch.setattr("coterie.training.sketch.DENSE_ENTRIES", 1000)
    vectors = torch.randn(6, 5003, generator=torch.Generator().manual_seed(1))
    sketch = Projection(5003, 400, seed=2, device=CPU)
    matrix = sketch(torch.eye(5003))
    assert torch.equal(matrix.abs(), torch.eye(400).repeat(13, 1)[:5003])
    assert abs(float(matrix.sum())) < 6 * 5003**0.5  # signs, not all alike
    torch.testing.assert_close(sketch(vectors), vectors @ matrix, rtol=1e-4, atol=1e-4)
    whole = sketch(vectors)
    monkeypatch.setattr("coterie.training.sketch.NUMBERS_AT_ONCE", 7000)
    torch.testing.assert_close(sketch(vectors), whole, rtol=1e-4, atol=1e-4)
    ratio = torch.pdist(whole) / torch.pdist(vectors)
    assert float((ratio - 1).abs().max()) < 0.2


@pytest.mark.parametrize("width", [1, 5, 40])
def test_rows_are_clipped_a_few_at_a_time(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also rows that are longer than that: each still alone, and all of them."""
    rng = torch.Generator().manual_seed(width)
    rows = torch.randn(13, width, generator=rng)
    rows[3], rows[7] = torch.inf, torch.nan
    taken: list[int] = []
    monkeypatch.setattr(clipping, "_NUMBERS_AT_ONCE", 20)
    monkeypatch.setattr(
        clipping, "clip_rows", lambda part, clip: (taken.append(part.numel()), clip_rows(part, clip))[1]
    )
    found = clipping.clipped_row_sum(rows, CLIP)
    torch.testing.assert_close(found, clip_rows(rows, CLIP).sum(dim=0), rtol=1e-14, atol=1e-15)
    assert sum(taken) == rows.numel()
    assert max(taken) <= max(20, width)
    assert torch.equal(clipping.clipped_row_sum(rows[:0], CLIP), torch.zeros(width, dtype=torch.float64))
