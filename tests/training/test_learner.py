"""The fast twin of a model is used only where it gives the gradients that the slow one gives."""

import logging

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.data.records import Task
from coterie.models import ModelSettings, build_model
from coterie.privacy import Adjacency, FullBatchSteps, PoissonSteps, SecretKey
from coterie.training import cpu_kernels
from coterie.training.dpsgd import train_privately
from coterie.training.isolation import same_gradients, same_outputs
from coterie.training.learner import Batch, Learner, LearnerShape
from coterie.training.parameters import flatten

CPU = torch.device("cpu")
IMAGES = Task(kind="classification", shape=(1, 12, 12), classes=4)
TEXT = Task(kind="classification", shape=(9,), classes=5, vocabulary=7)
VECTORS = Task(kind="classification", shape=(6,), classes=4)
NUMBERS = Task(kind="regression", shape=(6,), classes=0, error_cap=1.0)


def random_batch(task: Task, records: int) -> Batch:
    rng = np.random.default_rng(0)
    if task.vocabulary is not None:
        features = torch.from_numpy(rng.integers(task.vocabulary, size=(records, *task.shape)))
    else:
        features = torch.from_numpy(rng.normal(size=(records, *task.shape)).astype(np.float32))
    if task.classes:
        return Batch(features, torch.from_numpy(rng.integers(task.classes, size=records)))
    return Batch(features, torch.from_numpy(rng.normal(size=records).astype(np.float32)))


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("softmax", VECTORS),
        ("linear", NUMBERS),
        ("cnn", IMAGES),
        ("mcmahan-cnn", IMAGES),
        ("resnet18", IMAGES),
        ("lstm", TEXT),
    ],
)
def test_a_whole_round_ends_where_torch_func_would_end(name: str, task: Task) -> None:
    """Same coins, same noise, every network of the house; only rounding may differ."""
    settings = (
        ModelSettings(name=name, hidden=16) if name in ("mcmahan-cnn", "lstm") else ModelSettings(name=name)
    )
    count = 4 if name == "resnet18" else 12  # whose rows of torch.func are 11 million numbers each
    records = random_batch(task, count)
    common = {"clip": 0.5, "records": count, "noise_multiplier": 0.3, "adjacency": Adjacency.ZERO_OUT}
    plans = (
        PoissonSteps(batch=count // 2, epochs=1, **common),  # type: ignore[arg-type]
        FullBatchSteps(epochs=1, **common),  # type: ignore[arg-type]
    )
    ends = []
    for fast in (True, False):
        model = build_model(settings, task, seed=1)
        learner = Learner(model, task, CPU, fast=fast, full_precision=True)
        assert (learner.book is not None) == fast
        parameters = torch.from_numpy(flatten(model))
        for number, plan in enumerate(plans):
            key = SecretKey.from_seed(number)
            where = {"subject": "a", "round": 1, "release": "t", "input_hash": ""}
            noise, coins = (key.stream(purpose, **where) for purpose in ("noise", "coins"))  # type: ignore[arg-type]
            parameters = (
                parameters + train_privately(learner, parameters, records, plan, 0.2, noise, coins).float()
            )
        ends.append(parameters - torch.from_numpy(flatten(model)))
    assert float((ends[0] - ends[1]).norm() / ends[1].norm()) < 1e-4


class UsedDirectly(nn.Module):
    """Takes a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.second(functional.linear(values, self.first.weight))


class Merged(nn.Module):
    """Counts records and positions together in the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values.reshape(-1, 2)).view(len(values), 3, 4).mean(dim=1)


class OwnParameter(nn.Module):
    """Has a parameter of its own beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(6)), nn.Linear(6, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values * self.scale)


@pytest.mark.parametrize("kind", [UsedDirectly, Merged, OwnParameter])
def test_what_the_rules_would_get_wrong_goes_to_torch_func(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    learner = Learner(kind(), VECTORS, CPU)
    assert learner.book is None
    assert "torch.func" in caplog.text
    rows = learner.gradients(torch.rand(learner.layout.size), random_batch(VECTORS, 3))
    assert rows.shape == (3, learner.layout.size)


def test_one_line_says_which_way_gradients_are_found(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Learner(build_model(ModelSettings(name="cnn"), IMAGES, seed=0), IMAGES, CPU)
    how = ", compiled" if cpu_kernels.available() else ""
    assert [record.message for record in caplog.records] == [f"per-record gradients by layer rules{how}"]


def test_predictions_of_both_twins_agree() -> None:
    model = build_model(ModelSettings(name="cnn"), IMAGES, seed=0)
    learner = Learner(model, IMAGES, CPU)
    parameters, features = torch.from_numpy(flatten(model)), random_batch(IMAGES, 7).features
    torch.testing.assert_close(
        learner.predict(parameters, features), learner.outputs(parameters, features), rtol=1e-4, atol=1e-5
    )


def test_a_learner_can_be_rebuilt_elsewhere_without_trying_again() -> None:
    model = build_model(ModelSettings(name="cnn"), IMAGES, seed=0)
    learner = Learner(model, IMAGES, CPU)
    again = Learner.from_shape(model, IMAGES, learner.shape)
    assert (
        again.shape
        == learner.shape
        == LearnerShape(
            True,
            **{name: getattr(learner, name) for name in ("micro_batch", "row_batch", "bytes_per_record")},
            compiled=cpu_kernels.available(),
        )
    )


def test_parts_of_a_batch_are_even_and_none_is_lost() -> None:
    batch = random_batch(VECTORS, 50)
    for most in (1, 7, 48, 49, 50, 51):
        parts = list(batch.split(most))
        assert max(len(part) for part in parts) <= most
        assert torch.equal(torch.cat([part.features for part in parts]), batch.features)
    assert [len(part) for part in batch.split(48)] == [25, 25]
    assert list(random_batch(VECTORS, 0).split(5)) == []


@pytest.mark.parametrize("task", [VECTORS, NUMBERS], ids=["classes", "numbers"])
def test_the_formula_for_the_gradient_at_the_outputs_is_that_of_the_losses(task: Task) -> None:
    learner = Learner(nn.Linear(6, max(1, task.classes)), task, CPU)
    batch = random_batch(task, 5)
    outputs = torch.randn(5, max(1, task.classes), requires_grad=True)
    (expected,) = torch.autograd.grad(learner.output_losses(outputs, batch.targets).sum(), outputs)
    torch.testing.assert_close(learner.output_gradients(outputs.detach(), batch.targets), expected)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_unit_that_rounding_switches_does_not_cost_a_deep_network_its_fast_twin(seed: int) -> None:
    """Of half a million units some are zero but for rounding: on in one twin, off in the other."""
    task = Task(kind="classification", shape=(3, 32, 32), classes=10)
    learner = Learner(build_model(ModelSettings(name="resnet18"), task, seed=seed), task, CPU)
    assert learner.book is not None


def test_gradients_that_are_off_for_every_record_or_by_much_are_not_the_same() -> None:
    right = torch.eye(4, dtype=torch.float64)[:3]
    kink, wrong = torch.zeros_like(right), torch.zeros_like(right)
    kink[1, 0], wrong[1, 0] = 0.01, 0.2
    assert same_gradients(right, right)
    assert same_gradients(right + kink, right)
    assert not same_outputs(right + kink, right)
    assert not same_gradients(right + wrong, right)
    assert not same_gradients(1.01 * right, right)
    assert not same_gradients(right * torch.nan, right)


class Brighter(nn.Module):
    """The same layers, in code that treats what they are given otherwise."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.inner(1.01 * features)
        return outputs


@pytest.mark.parametrize("name", ["softmax", "mlp", "cnn", "mcmahan-cnn"])
def test_code_is_told_apart_by_what_it_computes_whatever_the_network(name: str) -> None:
    task = Task(kind="classification", shape=(1, 28, 28), classes=10)

    def built(seed: int) -> nn.Module:
        return build_model(ModelSettings(name=name), task, seed)

    found = Learner(built(0), task, torch.device("cpu")).fingerprint()
    assert found == Learner(built(1), task, torch.device("cpu")).fingerprint()
    assert found != Learner(Brighter(built(0)), task, torch.device("cpu")).fingerprint()
