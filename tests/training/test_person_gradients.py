"""A person, with all its records, moves a released sum by at most one clip: the fast ways against a loop."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from coterie.data.records import Task
from coterie.models import ModelSettings, build_model
from coterie.privacy import Adjacency, FullBatchSketch, FullBatchSteps, PoissonSteps, RandomStream, SecretKey
from coterie.privacy.joint_scores import JointScores, Statistic, joint_clip
from coterie.training import cpu_kernels
from coterie.training.augmentation import Augmentation
from coterie.training.clipping import clip_rows, clipped_sum
from coterie.training.contributions import Rows
from coterie.training.dpsgd import sketch_privately, train_privately
from coterie.training.learner import Batch, Learner, random_batch
from coterie.training.parameters import flatten
from coterie.training.scoring import score_sums
from coterie.training.sketch import Projection
from coterie.training.stacked import StackedJob, StackedTrainer
from coterie.training.statistics import statistic_rows, statistic_sums
from coterie.training.views import DrawnViews

CPU = torch.device("cpu")
IMAGES = Task(kind="classification", shape=(1, 8, 8), classes=5)
TEXT = Task(kind="classification", shape=(12,), classes=6, vocabulary=6)
NUMBERS = Task(kind="regression", shape=(7,), classes=0, error_cap=0.1)
MODELS = {"softmax": IMAGES, "cnn": IMAGES, "lstm": TEXT, "linear": NUMBERS}
CLIP, PLACES = 0.7, 3


def learner_of(name: str, *, fast: bool = True) -> tuple[Learner, torch.Tensor]:
    options = {"hidden": 8, "embedding": 4} if name == "lstm" else {}
    model = build_model(ModelSettings(name=name, **options), MODELS[name], seed=3)
    return Learner(model, MODELS[name], CPU, fast=fast), torch.from_numpy(flatten(model))


def people(task: Task, persons: int, seed: int = 0) -> Batch:
    """Persons with one to three records each; what stands in empty places is somebody else's at first."""
    rng = np.random.default_rng(seed)
    flat = random_batch(task, persons * PLACES)
    features = flat.features.view(persons, PLACES, *task.shape)
    if task.vocabulary is None:
        features = features + torch.from_numpy(rng.normal(size=features.shape).astype(np.float32))
    present = torch.from_numpy(np.arange(PLACES) < rng.integers(1, PLACES + 1, size=persons)[:, None])
    return Batch(features, flat.targets.view(persons, PLACES), present)


def loop_over_persons(learner: Learner, name: str, parameters: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The obviously right sum: one record at a time by autograd, in float64; add up a person's, then clip."""
    model = build_model(
        ModelSettings(name=name, **({"hidden": 8, "embedding": 4} if name == "lstm" else {})),
        learner.task,
        seed=3,
    )
    nn.utils.vector_to_parameters(parameters, model.parameters())
    model = model.double()
    total = torch.zeros(len(parameters), dtype=torch.float64)
    assert batch.present is not None
    for features, targets, present in zip(batch.features, batch.targets, batch.present, strict=True):
        person = torch.zeros_like(total)
        for record, target in zip(features[present], targets[present], strict=True):
            model.zero_grad()
            own = record[None] if learner.task.vocabulary is not None else record[None].double()
            learner.output_losses(model(own), target[None]).sum().backward()
            person += torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        total += person * min(1.0, CLIP / float(person.norm()))
    return total


@pytest.fixture(params=["compiled", "torch alone"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch alone":
        monkeypatch.setattr(cpu_kernels, "available", lambda: False)
    elif not cpu_kernels.available():
        pytest.skip("no LLVM, or a processor without wide registers")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fast", [True, False], ids=["layer rules", "rows"])
def test_the_clipped_sum_is_that_of_a_loop_over_persons(name: str, fast: bool) -> None:
    learner, parameters = learner_of(name, fast=fast)
    batch = people(MODELS[name], 11)
    slow = loop_over_persons(learner, name, parameters, batch)
    torch.testing.assert_close(clipped_sum(learner, parameters, batch, CLIP), slow, rtol=1e-4, atol=1e-5)
    for most in (2 * PLACES + 1, 2, 1):  # of several persons, or less than one has records
        learner.micro_batch = learner.row_batch = most
        torch.testing.assert_close(clipped_sum(learner, parameters, batch, CLIP), slow, rtol=1e-4, atol=1e-5)


def test_a_clip_per_record_is_found_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation that matters: as many clips as a person has records."""

    def clipped_first(rows: Rows, present: torch.Tensor) -> Rows:
        kept = torch.where(present.flatten()[:, None], clip_rows(rows.rows(), CLIP), 0.0)
        return Rows(kept.view(*present.shape, -1).sum(dim=1).float())

    learner, parameters = learner_of("softmax", fast=False)
    batch = people(IMAGES, 11)
    slow = loop_over_persons(learner, "softmax", parameters, batch)
    assert float((clipped_sum(learner, parameters, batch, CLIP) - slow).norm()) < 1e-3
    monkeypatch.setattr(Rows, "summed", clipped_first)
    assert float((clipped_sum(learner, parameters, batch, CLIP) - slow).norm()) > 0.1


ADVERSARIAL = [1.0, 1e-30, 1e6, 1e37, 3e38, float("inf"), float("nan")]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["softmax", "cnn", "lstm"])
@pytest.mark.parametrize("projected", [False, True], ids=["update", "sketch"])
def test_a_person_that_contributes_nothing_moves_the_sum_by_at_most_the_clip(
    name: str, projected: bool
) -> None:
    """Same coins: everybody else keeps place and bits, whatever the person holds and however many records."""
    learner, parameters = learner_of(name)
    project = Projection(len(parameters), 16, seed=1, device=CPU) if projected else None
    for scale in ADVERSARIAL[: 1 if name == "lstm" else None]:
        batch = people(MODELS[name], 20, seed=5)
        assert batch.present is not None
        batch.present[7] = True
        if name != "lstm":
            batch.features[7] *= scale
        with_them = clipped_sum(learner, parameters, batch, CLIP, project)
        batch.present[7] = False
        without = clipped_sum(learner, parameters, batch, CLIP, project)
        assert torch.isfinite(with_them).all()
        assert float((with_them - without).norm()) <= CLIP
        # One record more or less of theirs is less than all of them, replaced: two clips.
        batch.present[7, 0] = True
        assert float((with_them - clipped_sum(learner, parameters, batch, CLIP, project)).norm()) <= 2 * CLIP


def test_what_stands_in_an_empty_place_is_nobodys() -> None:
    learner, parameters = learner_of("cnn")
    batch = people(IMAGES, 9)
    assert batch.present is not None
    before = clipped_sum(learner, parameters, batch, CLIP)
    scores = score_sums(learner, parameters, batch, [9])
    batch.features[~batch.present] = float("nan")
    assert torch.equal(clipped_sum(learner, parameters, batch, CLIP), before)
    np.testing.assert_array_equal(score_sums(learner, parameters, batch, [9]), scores)


def test_views_are_averaged_by_record_before_a_person_is_summed() -> None:
    learner, parameters = learner_of("cnn")
    batch, views = people(IMAGES, 6), Augmentation(copies=2, shift=1)
    drawn = DrawnViews(views, torch.arange(6), 0, 77)
    found = clipped_sum(learner, parameters, batch, CLIP, views=drawn)
    seen = drawn.of(batch, 0)
    rows = learner.gradients(parameters, seen).view(6 * PLACES, 2, -1).mean(dim=1)
    assert batch.present is not None
    person = torch.where(batch.present.view(-1, 1), rows, 0.0).view(6, PLACES, -1).sum(dim=1)
    torch.testing.assert_close(found, clip_rows(person, CLIP).sum(dim=0), rtol=1e-4, atol=1e-6)
    learner.micro_batch = learner.row_batch = 3
    in_parts = clipped_sum(learner, parameters, batch, CLIP, views=drawn)
    torch.testing.assert_close(in_parts, found, rtol=1e-4, atol=1e-6)


# --- batches, noise and denominators ----------------------------------------------------------------------


def stream(purpose: str, seed: int = 0) -> RandomStream:
    return SecretKey.from_seed(seed).stream(purpose, subject="a", round=1, release="t", input_hash="")


def test_persons_come_by_coins_and_sums_are_divided_by_their_public_number() -> None:
    learner, start = learner_of("softmax")
    batch = people(IMAGES, 40)
    steps = PoissonSteps(CLIP, 0.0, 40, 8, 1, Adjacency.ZERO_OUT)
    update = train_privately(learner, start, batch, steps, 0.5, stream("noise"), stream("coins"))
    coins, slow = stream("coins"), start.double()
    assert steps.steps == 5
    for _ in range(5):
        drawn = torch.from_numpy(np.flatnonzero(coins.bernoulli(8 / 40, (40,))))
        slow = slow - 0.5 * clipped_sum(learner, slow.float(), batch.take(drawn), CLIP) / 8
    torch.testing.assert_close(update, slow - start.double(), rtol=0, atol=0)


def test_every_person_is_in_a_batch_as_often_and_apart_from_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole persons, as many as a binomial says, however many records each has: in 4,000 steps."""
    learner, start = learner_of("linear")
    batch = people(NUMBERS, 60)
    assert batch.present is not None
    batch.features[:, :, 0] = torch.arange(60)[:, None]
    drawn: list[torch.Tensor] = []

    def noted(learner: Learner, parameters: torch.Tensor, batch: Batch, *rest: object) -> torch.Tensor:
        assert batch.features.shape[1] == PLACES
        assert batch.present is not None
        drawn.append(batch.features[:, 0, 0].long())
        return torch.zeros(len(parameters), dtype=torch.float64)

    monkeypatch.setattr("coterie.training.dpsgd.clipped_sum", noted)
    steps = PoissonSteps(CLIP, 0.0, 60, 15, 1000, Adjacency.ZERO_OUT)
    train_privately(learner, start, batch, steps, 0.5, stream("noise"), stream("coins", seed=4))
    assert len(drawn) == 4000
    expected, edges = stats.binom(60, 0.25), np.arange(8, 23)
    cells = np.bincount(np.digitize([len(each) for each in drawn], edges), minlength=len(edges) + 1)
    chances = np.diff(np.concatenate([[0.0], expected.cdf(edges - 1), [1.0]]))
    assert stats.chisquare(cells, 4000 * chances).pvalue > 1e-6
    often = np.bincount(torch.cat(drawn).numpy(), minlength=60)
    # Sixty of them, each within six standard deviations.
    assert np.abs(often - 1000).max() < 6 * np.sqrt(4000 * 0.25 * 0.75)
    # Nobody comes along with the one before: the share of pairs is that of two coins.
    pairs = sum(int(torch.isin(each + 1, each).sum()) for each in drawn)
    assert abs(pairs - 4000 * 59 / 16) < 6 * np.sqrt(4000 * 59 / 16)


def test_a_released_step_moves_by_at_most_one_clip_when_a_person_is_silenced() -> None:
    """The whole release, with the same coins and noise: a step of a batch and of all, and a sketch."""
    learner, start = learner_of("cnn")
    project = Projection(len(start), 16, seed=2, device=CPU)
    full = FullBatchSteps(CLIP, 1.3, 20, 1, Adjacency.ZERO_OUT)
    one = PoissonSteps(CLIP, 1.3, 20, 20, 1, Adjacency.ZERO_OUT)
    sketch = FullBatchSketch(CLIP, 1.3, 20, 16, Adjacency.ZERO_OUT)
    worlds: list[list[torch.Tensor]] = []
    for silenced in (False, True):
        batch = people(IMAGES, 20)
        assert batch.present is not None
        batch.present[3] = not silenced
        given = (learner, start, batch)
        steps = [
            train_privately(*given, each, 0.5, stream("noise"), stream("coins")) / 0.5 for each in (full, one)
        ]
        worlds.append([*steps, sketch_privately(*given, sketch, project, stream("noise"))])
    for with_them, without in zip(*worlds, strict=True):
        moved = 20 * float((with_them - without).norm())
        assert 0.5 * CLIP < moved <= CLIP * (1 + 1e-9)


def test_noise_is_that_of_the_plan_on_the_sum_over_persons() -> None:
    learner, start = learner_of("cnn")
    batch = people(IMAGES, 10)
    quiet, noisy = (FullBatchSteps(CLIP, z, 10, 1, Adjacency.ZERO_OUT) for z in (0.0, 1.5))
    found = [
        train_privately(learner, start, batch, each, 1.0, stream("noise"), stream("coins"))
        for each in (quiet, noisy)
    ]
    drawn = (found[1] - found[0]).numpy() * 10 / (CLIP * 1.5)
    assert len(drawn) > 500
    assert stats.kstest(drawn, "norm").pvalue > 1e-6
    # 90 % of it would be seen: the variance of so many draws is known to some percent.
    low, high = stats.chi2(len(drawn)).ppf([1e-6, 1 - 1e-6]) / len(drawn)
    assert low < np.mean(drawn**2) < high
    assert not low < 0.81 < high


def test_a_sketch_projects_a_persons_sum_and_clips_it() -> None:
    learner, start = learner_of("softmax")
    batch = people(IMAGES, 12)
    project = Projection(len(start), 8, seed=2, device=CPU)
    sketch = FullBatchSketch(CLIP, 0.0, 12, 8, Adjacency.ZERO_OUT)
    found = sketch_privately(learner, start, batch, sketch, project, stream("noise"))
    rows = learner.gradients(start, batch.flat)
    assert batch.present is not None
    person = torch.where(batch.present.view(-1, 1), rows, 0.0).view(12, PLACES, -1).sum(dim=1)
    torch.testing.assert_close(found, clip_rows(project(person), CLIP).sum(dim=0) / 12)


@pytest.mark.parametrize("augmentation", [None, Augmentation(copies=2, shift=1)], ids=["plain", "views"])
def test_many_clients_as_one_program_learn_from_persons_as_each_alone(
    augmentation: Augmentation | None,
) -> None:
    learner, start = learner_of("cnn")
    batches = [people(IMAGES, size, seed) for seed, size in enumerate((6, 9))]
    parts = (torch.cat(tensors) for tensors in zip(*(batch.tensors for batch in batches), strict=True))
    trainer = StackedTrainer(learner, Batch(*parts), [6, 9], tf32=False, augmentation=augmentation)
    steps = [FullBatchSteps(CLIP, 0.0, len(batch), 2, Adjacency.ZERO_OUT) for batch in batches]
    jobs = [
        StackedJob(place, start, mechanism, 0.3, 1, 2, view_key=50 + place)
        for place, mechanism in enumerate(steps)
    ]
    found = trainer.train(jobs)
    for place, (batch, mechanism) in enumerate(zip(batches, steps, strict=True)):
        alone = train_privately(
            learner,
            start,
            batch,
            mechanism,
            0.3,
            stream("noise"),
            stream("coins"),
            augmentation=augmentation,
            view_key=50 + place,
        )
        torch.testing.assert_close(found[place], alone, rtol=1e-3, atol=1e-6)


# --- scores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "linear"])
def test_a_person_scores_by_the_mean_of_its_records(name: str) -> None:
    learner, parameters = learner_of(name)
    batch = people(MODELS[name], 300)
    assert batch.present is not None
    scores, losses = score_sums(learner, parameters, batch, [100, 200])
    outputs = learner.predict(parameters, batch.flat.features)
    hits = learner.scores(outputs, batch.flat.targets).view(300, PLACES)
    lost = learner.output_losses(outputs, batch.flat.targets).double().view(300, PLACES)
    means = [
        [float(values[person][batch.present[person]].mean()) for person in range(300)]
        for values in (hits, lost)
    ]
    assert 0 <= min(means[0]) <= max(means[0]) <= 1
    np.testing.assert_allclose(scores, [sum(means[0][:100]), sum(means[0][100:])])
    np.testing.assert_allclose(losses, [sum(means[1][:100]), sum(means[1][100:])], rtol=1e-5)


def test_no_person_adds_more_than_the_clip_to_joint_scores() -> None:
    learner, parameters = learner_of("softmax")
    statistics = (Statistic.RIGHT, Statistic.CLASSES, Statistic.RANKS)
    mechanism = JointScores(joint_clip(3), 1.0, 30, statistics, 5, Adjacency.ZERO_OUT)
    batch = people(IMAGES, 30)
    whole = statistic_sums(learner, parameters, batch, statistics)
    each = [
        statistic_sums(learner, parameters, batch.take(slice(at, at + 1)), statistics) for at in range(30)
    ]
    np.testing.assert_allclose(np.sum(each, axis=0), whole)
    lengths = [float(np.linalg.norm(mechanism.centred(own, 1.0))) for own in each]
    assert max(lengths) <= mechanism.clip * (1 + 1e-12)
    # Summed instead, the records of one person would be too much.
    outputs = learner.predict(parameters, batch.flat.features)
    rows = statistic_rows(learner, outputs, batch.flat.targets, statistics).view(30, PLACES, -1).sum(dim=1)
    assert max(float(np.linalg.norm(mechanism.centred(row.numpy(), 1.0))) for row in rows) > mechanism.clip


def test_a_person_with_more_records_than_fit_the_memory_is_added_up_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner, parameters = learner_of("cnn")
    learner.micro_batch = learner.row_batch = 2
    sizes: list[int] = []
    once = learner.gradients

    def noted(parameters: torch.Tensor, batch: Batch) -> torch.Tensor:
        sizes.append(len(batch))
        return once(parameters, batch)

    monkeypatch.setattr(learner, "gradients", noted)
    clipped_sum(learner, parameters, people(IMAGES, 4), CLIP)
    assert sizes == [2, 1] * 4  # whoever has how many records
