"""A model passes whole batches only where every operation of it is known to keep records apart."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.data import Task
from coterie.training.learner import Batch, Learner, random_batch
from coterie.training.proof import NotProven, proven_apart

VECTORS = Task("classification", (6,), 3)
IMAGES = Task("classification", (1, 8, 8), 3)
TOKENS = Task("classification", (7,), 3, vocabulary=11)
CPU = torch.device("cpu")


def prove(model: nn.Module, task: Task) -> nn.Module:
    return proven_apart(model, lambda size: random_batch(task, size).features)


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4 * 16, 3)  # first here, last in the graph
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.scale = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.first(x))), 2)
        return self.head((x * self.scale + x).view(x.size(0), -1))


class LastState(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], *, batch_first: bool = True) -> None:
        super().__init__()
        self.embed, self.cells = nn.Embedding(11, 4), kind(4, 5, batch_first=batch_first)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, state = self.cells(self.embed(x))
        return self.head((state[0] if isinstance(self.cells, nn.LSTM) else state)[-1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query, self.head = nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        values = self.embed(x)
        weights = torch.softmax(self.query(values) @ values.transpose(1, 2), dim=-1)
        return self.head(torch.cat([weights @ values, values], dim=1).mean(dim=1))


KNOWN: dict[str, tuple[Callable[[], nn.Module], Task]] = {
    "sequence": (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), VECTORS),
    "cnn": (CNN, IMAGES),
    "lstm": (lambda: LastState(nn.LSTM), TOKENS),
    "gru": (lambda: LastState(nn.GRU), TOKENS),
    "attention": (Attention, TOKENS),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_proven_model_computes_what_the_users_code_computes(name: str) -> None:
    torch.manual_seed(0)
    kind, task = KNOWN[name]
    model = kind().eval()
    proven, alone = Learner(prove(model, task), task, CPU), Learner(model, task, CPU, fast=False)
    assert list(proven.layout.shapes.items()) == list(alone.layout.shapes.items())
    parameters, batch = alone.initial(), random_batch(task, 9)
    assert torch.equal(proven.initial(), parameters)
    close = {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(
        proven.predict(parameters, batch.features), alone.predict(parameters, batch.features), **close
    )
    torch.testing.assert_close(
        proven.gradients(parameters, batch), alone.gradients(parameters, batch), **close
    )


@pytest.mark.parametrize("name", KNOWN)
def test_a_proven_model_keeps_the_bits_of_every_other_record(name: str) -> None:
    kind, task = KNOWN[name]
    learner = Learner(prove(kind(), task), task, CPU)
    batch, parameters = random_batch(task, 33), learner.initial()
    changed = batch.features.clone()
    changed[0] = 0 if task.vocabulary else -1e6
    for compute in (
        lambda features: learner.predict(parameters, features),
        lambda features: learner.gradients(parameters, Batch(features, batch.targets)),
    ):
        assert torch.equal(compute(batch.features)[1:], compute(changed)[1:])


def test_a_proven_model_travels_to_a_worker_and_says_nothing_when_it_fails(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = prove(CNN(), IMAGES)
    again = pickle.loads(pickle.dumps(model))
    features = random_batch(IMAGES, 3).features
    assert torch.equal(again(features), model(features))
    for each in (model, again):
        with pytest.raises(RuntimeError):
            each(torch.rand(7, 2, 8, 8))
    assert capfd.readouterr() == ("", "")


class Function(nn.Module):
    """A linear model of what a function makes of the features."""

    def __init__(self, function: Callable[[Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(6, 3) if layer is None else layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.function(x))


class _OtherGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clamp(min=0.0)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 3.0 * gradient


NOT: dict[str, Callable[[Tensor], Tensor]] = {
    "divided by the count": lambda x: x / x.size(0),
    "divided by the shape": lambda x: x / x.shape[0],
    "mean of all": lambda x: x - x.mean(),
    "mean of records": lambda x: x - x.mean(dim=0),
    "mean of records from behind": lambda x: x - x.mean(-2),
    "no dimensions": lambda x: x - x.sum(dim=()),
    "softmax": lambda x: torch.softmax(x, dim=0),
    "transposed": lambda x: (x.transpose(0, 1) @ x @ x.transpose(0, 1)).transpose(0, 1),
    "products of records": lambda x: x @ x.transpose(0, 1) @ x,
    "flattened": lambda x: x.flatten().view(x.size(0), -1),
    "moved": lambda x: x.roll(1, 0),
    "first": lambda x: x - x[0],
    "some": lambda x: x + x[0:1],
    "reversed": lambda x: x.flip(0),
    "misaligned": lambda x: (x.unsqueeze(1) + x.unsqueeze(0)).sum(dim=1),
    "in place": lambda x: functional.relu(x, inplace=True),
    "batch norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "by value": lambda x: x if x.sum() > 0 else -x,
    "by size": lambda x: x if x.shape[0] < 9 else -x,
    "other gradient": lambda x: _OtherGradient.apply(x - 0.5),  # type: ignore[no-any-return,no-untyped-call]
}


@pytest.mark.parametrize("name", NOT)
def test_what_is_not_known_to_keep_records_apart_is_not_proven(name: str) -> None:
    first = nn.Sequential(nn.Linear(6, 6), Function(NOT[name]))
    with pytest.raises(NotProven):
        prove(first, VECTORS)


def test_layers_that_mix_under_some_options_are_not_proven() -> None:
    by_frequency = nn.Sequential(nn.Embedding(11, 4, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(28, 3))
    hooked = nn.Sequential(nn.Linear(6, 3))
    hooked[0].register_forward_hook(lambda layer, given, outputs: outputs - outputs.mean(dim=0))
    replaced = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    replaced[0].forward = lambda x: x - x.mean(dim=0)  # type: ignore[method-assign]
    for model, task in (
        (by_frequency, TOKENS),
        (LastState(nn.LSTM, batch_first=False), TOKENS),
        (hooked, VECTORS),
        (replaced, VECTORS),
    ):
        with pytest.raises(NotProven):
            prove(model, task)
    handle = nn.modules.module.register_module_forward_hook(lambda layer, given, outputs: outputs)
    with pytest.raises(NotProven, match="hooks on all modules"):
        prove(nn.Linear(6, 3), VECTORS)
    handle.remove()
    prove(nn.Linear(6, 3), VECTORS)
