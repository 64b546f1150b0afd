"""Views of a record are averaged before the clip: one record is one contribution, however many there are."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from coterie.data.records import Task
from coterie.models import ModelSettings, build_model
from coterie.privacy import Adjacency, FullBatchSteps, PoissonSteps
from coterie.training import philox
from coterie.training.augmentation import Augmentation
from coterie.training.clipping import clip_rows, clipped_sum
from coterie.training.learner import Batch, Learner
from coterie.training.parameters import flatten
from coterie.training.sketch import Projection
from coterie.training.stacked import StackedJob, StackedTrainer
from coterie.training.views import DrawnViews, _draw, views_of

CPU = torch.device("cpu")
TASK = Task(kind="classification", shape=(1, 8, 8), classes=10)
CLIP = 0.7
AUGMENTATION = Augmentation(copies=3, shift=2, flip=True)


def learner_of(name: str, *, fast: bool = True) -> tuple[Learner, torch.Tensor]:
    model = build_model(ModelSettings(name=name), TASK, seed=3)
    return Learner(model, TASK, CPU, fast=fast), torch.from_numpy(flatten(model))


def batch_of(records: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(records, *TASK.shape)).astype(np.float32)
    return Batch(torch.from_numpy(features), torch.from_numpy(rng.integers(10, size=records)))


def everyone(batch: Batch) -> torch.Tensor:
    return torch.arange(len(batch))


def augmented_sum(
    learner: Learner,
    parameters: torch.Tensor,
    batch: Batch,
    places: torch.Tensor,
    project: Projection | None = None,
) -> torch.Tensor:
    views = DrawnViews(AUGMENTATION, places, step=4, key=99)
    return clipped_sum(learner, parameters, batch, CLIP, project, views)


@pytest.mark.parametrize("name", ["softmax", "cnn"])
@pytest.mark.parametrize("fast", [True, False], ids=["layer rules", "torch.func"])
def test_the_sum_equals_a_loop_over_records_that_averages_and_then_clips(name: str, fast: bool) -> None:
    learner, parameters = learner_of(name, fast=fast)
    learner.micro_batch = learner.row_batch = 13  # four records of three views
    batch = batch_of(11)
    views = views_of(AUGMENTATION, batch, everyone(batch), 4, 99)
    model = build_model(ModelSettings(name=name), TASK, seed=3).double()
    slow = torch.zeros(len(parameters), dtype=torch.float64)
    for record in range(len(batch)):
        mean = torch.zeros_like(slow)
        for view in range(3 * record, 3 * record + 3):
            model.zero_grad()
            nn.functional.cross_entropy(
                model(views.features[view : view + 1].double()), batch.targets[record : record + 1]
            ).backward()
            mean += torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]) / 3
        slow += mean * min(1.0, CLIP / float(mean.norm()))
    found = augmented_sum(learner, parameters, batch, everyone(batch))
    torch.testing.assert_close(found, slow, rtol=1e-4, atol=1e-5)


def test_views_of_a_sequence_average_like_any_other() -> None:
    """Embeddings and recurrent layers: any model, whatever makes the views."""
    task = Task(kind="classification", shape=(6,), classes=9, vocabulary=9)
    model = build_model(ModelSettings(name="lstm", hidden=8), task, seed=0)
    learner, parameters = Learner(model, task, CPU), torch.from_numpy(flatten(model))
    assert learner.book is not None
    generator = torch.Generator().manual_seed(0)
    views = Batch(torch.randint(9, (10, 6), generator=generator), torch.arange(5).repeat_interleave(2))
    records = views.take(slice(0, 10, 2))

    class Given(DrawnViews):
        def of(self, records: Batch, first: int) -> Batch:
            return views.take(slice(2 * first, 2 * (first + len(records))))

    given = Given(Augmentation(copies=2), torch.arange(5), step=0, key=0)
    alone = Learner(model, task, CPU, fast=False)
    rows = alone.gradients(parameters, views).view(5, 2, -1).mean(dim=1)
    found = clipped_sum(learner, parameters, records, 0.05, None, given)
    torch.testing.assert_close(found, clip_rows(rows, 0.05).sum(dim=0), rtol=1e-4, atol=1e-6)


ADVERSARIAL = {"ordinary": 1.0, "large": 1e6, "overflowing": 3e38, "infinite": np.inf, "no number": np.nan}


@pytest.mark.parametrize("name", ["softmax", "cnn"])
@pytest.mark.parametrize("record", ADVERSARIAL, ids=str)
@pytest.mark.parametrize("projected", [False, True], ids=["update", "sketch"])
def test_removing_one_record_moves_the_sum_by_at_most_the_clip(
    name: str, record: str, projected: bool
) -> None:
    learner, parameters = learner_of(name)
    project = Projection(len(parameters), 16, seed=1, device=CPU) if projected else None
    batch = batch_of(20, seed=5)
    batch.features[7] *= ADVERSARIAL[record]
    others = everyone(batch) != 7
    with_record = augmented_sum(learner, parameters, batch, everyone(batch), project)
    without = augmented_sum(learner, parameters, batch.take(others), everyone(batch)[others], project)
    assert torch.isfinite(with_record).all()
    assert float((with_record - without).norm()) <= CLIP


def test_one_bad_pixel_that_some_views_shift_away_spoils_the_record_and_nobody_else() -> None:
    learner, parameters = learner_of("cnn")
    batch = batch_of(20, seed=5)
    batch.features[7, 0, 0, 0] = float("nan")
    views = views_of(AUGMENTATION, batch, everyone(batch), 4, 99)
    spoilt = torch.isnan(views.features).flatten(1).any(dim=1).view(-1, 3)
    assert int(spoilt[7].sum()) > 0
    others = everyone(batch) != 7
    assert not bool(spoilt[others].any())
    with_record = augmented_sum(learner, parameters, batch, everyone(batch))
    without = augmented_sum(learner, parameters, batch.take(others), everyone(batch)[others])
    torch.testing.assert_close(with_record, without, rtol=1e-6, atol=1e-7)


def test_views_written_into_the_data_would_move_the_sum_by_several_clips() -> None:
    """What averaging before the clip avoids: the same views as records of their own."""
    learner, parameters = learner_of("softmax")
    batch = batch_of(6)
    batch.features[2] = 1.0  # a constant image: all its views are the same
    views = views_of(AUGMENTATION, batch, everyone(batch), 4, 99)
    of_record = torch.arange(len(views)) // 3 == 2
    both = [clipped_sum(learner, parameters, part, CLIP) for part in (views, views.take(~of_record))]
    assert float((both[0] - both[1]).norm()) > 2.9 * CLIP


# --- views --------------------------------------------------------------------------------------------


def test_a_view_is_the_image_mirrored_and_shifted_with_its_edge_repeated() -> None:
    batch = batch_of(40)
    views = views_of(AUGMENTATION, batch, everyone(batch), 2, 5)
    down, right, mirrored = _draw(AUGMENTATION, everyone(batch), 2, 5)
    for record in range(40):
        for copy in range(3):
            image = np.pad(batch.features[record, 0].numpy(), 2, mode="edge")
            across = range(9, 1, -1) if mirrored[record, copy] else range(2, 10)
            rows = np.arange(2, 10) - int(down[record, copy])
            columns = np.array(across) - int(right[record, copy])
            view = views.features[3 * record + copy, 0].numpy()
            np.testing.assert_array_equal(view, image[rows][:, columns])
            assert views.targets[3 * record + copy] == batch.targets[record]
    assert bool(mirrored.any())
    assert not bool(mirrored.all())


def test_without_shift_and_flip_every_view_is_the_record() -> None:
    batch = batch_of(5)
    views = views_of(Augmentation(copies=2), batch, everyone(batch), 0, 1)
    torch.testing.assert_close(views.features, batch.features.repeat_interleave(2, dim=0), rtol=0, atol=0)


def test_shifts_are_uniform_and_differ_by_step_place_view_and_key() -> None:
    """Chi-square of all 25 x 2 outcomes at 1e-6, over places and over steps."""
    places = torch.arange(4000)
    by_place = _draw(AUGMENTATION, places, 0, 3)
    by_step = _draw(AUGMENTATION, torch.zeros(4000, dtype=torch.int64), places, 3)
    for down, right, mirrored in (by_place, by_step):
        outcomes = ((down + 2) * 5 + right + 2) * 2 + mirrored.long()
        for view in range(3):
            counts = np.bincount(outcomes[:, view].numpy(), minlength=50)
            assert stats.chisquare(counts).pvalue > 1e-6
        assert 0.01 < float((outcomes[:, 0] == outcomes[:, 1]).double().mean()) < 0.03
    again, other = _draw(AUGMENTATION, places, 0, 3), _draw(AUGMENTATION, places, 0, 4)
    assert bool((again[0] == by_place[0]).all())
    assert 0.15 < float((other[0] == by_place[0]).double().mean()) < 0.25


# --- all clients as one program -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "cnn"])
def test_stacked_clients_draw_the_views_that_each_would_draw_alone(name: str) -> None:
    learner, start = learner_of(name)
    records = [batch_of(20, 1), batch_of(31, 2)]
    common = {"clip": CLIP, "noise_multiplier": 1.0, "adjacency": Adjacency.ZERO_OUT, "epochs": 1}
    jobs = [
        StackedJob(0, start, PoissonSteps(records=20, batch=5, **common), 0.3, 5, 6, view_key=2**62 + 1),  # type: ignore[arg-type]
        StackedJob(1, start, FullBatchSteps(records=31, **common), 0.3, 7, 8, view_key=9),  # type: ignore[arg-type]
    ]
    table = Batch(torch.cat([r.features for r in records]), torch.cat([r.targets for r in records]))
    trainer = StackedTrainer(learner, table, [20, 31], augmentation=AUGMENTATION)
    found = trainer.train(jobs)
    for job, own, update in zip(jobs, records, found, strict=True):
        keys = [philox.split_keys([key], CPU) for key in (job.coin_key, job.noise_key)]
        rate = torch.tensor([job.mechanism.rate], dtype=torch.float64)
        steps = torch.arange(job.mechanism.steps)
        coins = philox.coins(keys[0], rate, steps, philox.places(len(own), 4, CPU))[:, 0, : len(own)]
        parameters = start.double()
        for step in range(job.mechanism.steps):
            views = DrawnViews(AUGMENTATION, everyone(own)[coins[step]], step, job.view_key)
            total = clipped_sum(learner, parameters.float(), own.take(coins[step]), CLIP, None, views)
            normals = philox.normals(keys[1], torch.tensor([step]), philox.places(len(total), 2, CPU))[
                0, : len(total)
            ]
            total += job.mechanism.noise_std * normals
            parameters = parameters - 0.3 * total / job.mechanism.denominator
        torch.testing.assert_close(update, parameters - start.double(), rtol=1e-5, atol=1e-6)
