"""The papers' networks: sizes, per-record gradients, initialisation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from coterie.data import DataSettings, Task, load_dataset
from coterie.errors import InputError
from coterie.models import ModelSettings, build_model, check_model
from coterie.models.networks import FusedLstmLayer, LstmLayer, with_fused_lstms
from coterie.training.learner import Batch, Learner
from coterie.training.local_sgd import LocalSGD, train_one

DIGITS = Task("classification", (1, 8, 8), 10)
MNIST = Task("classification", (1, 28, 28), 10)
CIFAR = Task("classification", (3, 32, 32), 10)
TEXT = Task("classification", (12,), 77, vocabulary=77)
SCHOOL = Task("regression", (28,), 0, error_cap=0.1)
SMALL_LSTM = ModelSettings(name="lstm", hidden=16)

EVERY = [
    (ModelSettings(name="softmax"), DIGITS),
    (ModelSettings(name="linear"), SCHOOL),
    (ModelSettings(name="cnn"), MNIST),
    (ModelSettings(name="cnn"), Task("regression", (1, 9, 9), 0)),
    (ModelSettings(name="mcmahan-cnn"), DIGITS),
    (ModelSettings(name="resnet18"), Task("classification", (3, 8, 8), 10)),
    (SMALL_LSTM, TEXT),
    (ModelSettings(name="ngrams"), Task("classification", (4,), 9, vocabulary=9)),
    (ModelSettings(name="mlp", hidden=5), DIGITS),
    (ModelSettings(name="mlp"), SCHOOL),
]


def records(task: Task, count: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    if task.vocabulary is None:
        features = torch.rand(count, *task.shape, generator=draw)
    else:
        features = torch.randint(task.vocabulary, (count, *task.shape), generator=draw)
    if task.kind == "regression":
        return features, torch.rand(count, generator=draw)
    return features, torch.randint(task.classes, (count,), generator=draw)


def loss_of(outputs: Tensor, target: Tensor, task: Task) -> Tensor:
    if task.kind == "regression":
        return ((outputs[:, 0] - target) ** 2).mean()
    return nn.functional.cross_entropy(outputs, target)


def test_every_registered_model_is_tested_here() -> None:
    assert {settings.name for settings, _ in EVERY} == set(ModelSettings.functions)


@pytest.mark.parametrize(
    ("name", "task", "parameters"),
    [
        ("softmax", DIGITS, 650),
        ("linear", SCHOOL, 29),
        ("cnn", MNIST, 28_938),
        ("mcmahan-cnn", MNIST, 1_663_370),
        ("resnet18", CIFAR, 11_173_962),
        ("lstm", Task("classification", (80,), 77, vocabulary=77), 817_077),
    ],
)
def test_models_have_the_published_number_of_parameters(name: str, task: Task, parameters: int) -> None:
    model = build_model(ModelSettings(name=name), task, seed=0)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(("settings", "task"), EVERY, ids=lambda value: getattr(value, "name", ""))
def test_per_record_gradients_by_vmap_equal_one_backward_pass_per_record(
    settings: ModelSettings, task: Task
) -> None:
    model = build_model(settings, task, seed=0)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    features, targets = records(task, 3)

    def loss(weights: dict[str, Tensor], record: Tensor, target: Tensor) -> Tensor:
        return loss_of(functional_call(model, weights, (record[None],)), target[None], task)

    fast = vmap(grad(loss), (None, 0, 0))(parameters, features, targets)
    for index in range(3):
        model.zero_grad()
        loss_of(model(features[index : index + 1]), targets[index : index + 1], task).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(fast[name][index], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("settings", "task"), EVERY, ids=lambda value: getattr(value, "name", ""))
def test_every_model_passes_its_own_check(settings: ModelSettings, task: Task) -> None:
    check_model(build_model(settings, task, seed=0), task)


def test_a_stack_of_clients_can_be_trained_as_one_program() -> None:
    model = build_model(SMALL_LSTM, TEXT, seed=0)
    weights = {name: torch.stack([p.detach()] * 2) for name, p in model.named_parameters()}
    features, targets = records(TEXT, 6)

    def loss(one: dict[str, Tensor], record: Tensor, target: Tensor) -> Tensor:
        return loss_of(functional_call(model, one, (record[None],)), target[None], TEXT)

    stacked = vmap(vmap(grad(loss), (None, 0, 0)))(weights, features.view(2, 3, -1), targets.view(2, 3))
    alone = vmap(grad(loss), (None, 0, 0))({k: v[1] for k, v in weights.items()}, features[3:], targets[3:])
    for name, gradient in alone.items():
        torch.testing.assert_close(stacked[name][1], gradient)


def test_lstm_layer_computes_what_torch_computes() -> None:
    ours, theirs = LstmLayer(5, 7), nn.LSTM(5, 7, batch_first=True)
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(ours.input_map.weight)
        theirs.bias_ih_l0.copy_(ours.input_map.bias)
        theirs.weight_hh_l0.copy_(ours.recurrent_map.weight)
        theirs.bias_hh_l0.zero_()
    steps = torch.randn(3, 11, 5)
    torch.testing.assert_close(ours(steps), theirs(steps)[0])


@pytest.mark.parametrize("count", [1, 7])
def test_an_lstm_in_one_call_has_the_outputs_and_gradients_of_its_linear_maps(count: int) -> None:
    model = build_model(ModelSettings(name="lstm", hidden=16, layers=2), TEXT, seed=3)
    fused = with_fused_lstms(model)
    assert [type(part) for part in fused.children()].count(FusedLstmLayer) == 2
    assert not any(isinstance(part, FusedLstmLayer) for part in model.modules())
    assert [name for name, _ in fused.named_parameters()] == [name for name, _ in model.named_parameters()]
    features, targets = records(TEXT, count)
    found, expected = (
        (outputs := each(features), torch.autograd.grad(loss_of(outputs, targets, TEXT), each.parameters()))
        for each in (fused, model)
    )
    torch.testing.assert_close(found[0], expected[0])
    for mine, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_record_that_is_no_number_stays_alone_in_an_lstm_in_one_call() -> None:
    layer = FusedLstmLayer(LstmLayer(5, 16))
    steps = torch.randn(6, 9, 5)
    spoilt = steps.clone()
    spoilt[2, 4] = torch.nan
    clean, dirty = layer(steps), layer(spoilt)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(clean[others], dirty[others])
    assert torch.equal(clean[2, :4], dirty[2, :4])
    assert bool(dirty[2, 4:].isnan().all())


def test_a_client_learns_and_judges_on_a_processor_by_lstms_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_model(SMALL_LSTM, TEXT, seed=0)
    learner, batch = Learner(model, TEXT, torch.device("cpu")), Batch(*records(TEXT, 6))
    start = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    rule = LocalSGD(epochs=2, batch=4, lr=0.5)
    order = rule.batches(6, seed=1)
    slow = Learner(model, TEXT, torch.device("cpu"))
    slow._forward = model
    expected = train_one(slow, start, batch, order, rule), slow.outputs(start, batch.features)
    assert any(isinstance(part, FusedLstmLayer) for part in learner._forward.modules())
    monkeypatch.setattr(LstmLayer, "forward", None)
    found = train_one(learner, start, batch, order, rule), learner.predict(start, batch.features)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


class ReversedLstm(LstmLayer):
    """Of somebody's own, who took a layer of ours and computes something else."""

    def forward(self, steps: Tensor) -> Tensor:
        return super().forward(steps.flip(1))


def with_layer(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(TEXT.classes, 8), layer, nn.Flatten(), nn.Linear(192, TEXT.classes))


def hooked(layer: LstmLayer) -> LstmLayer:
    layer.register_forward_hook(lambda layer, inputs, states: 2.0 * states)
    return layer


def without_bias(layer: LstmLayer) -> LstmLayer:
    layer.input_map = nn.Linear(8, 64, bias=False)
    return layer


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    "layer",
    [ReversedLstm(8, 16), hooked(LstmLayer(8, 16)), without_bias(LstmLayer(8, 16))],
    ids=["a subclass", "a hook", "no bias"],
)
def test_an_lstm_of_somebodys_own_is_computed_as_it_is_written(layer: nn.Module, known: bool) -> None:
    model = with_layer(layer)
    learner = Learner(model, TEXT, torch.device("cpu"), fast=known)
    features, _ = records(TEXT, 4)
    with torch.no_grad():
        expected = model(features)
    torch.testing.assert_close(learner.outputs(learner.initial(), features), expected)


def test_a_model_that_is_one_lstm_is_computed_as_it_is_written() -> None:
    for layer in (LstmLayer(8, 16), ReversedLstm(8, 16)):
        assert with_fused_lstms(layer) is layer


def test_a_model_without_lstms_is_taken_as_it_is() -> None:
    model = nn.Linear(2, 3)
    assert with_fused_lstms(model) is model


@pytest.mark.parametrize(("settings", "task"), EVERY, ids=lambda value: getattr(value, "name", ""))
def test_initialisation_depends_on_the_seed_alone_and_leaves_the_global_state(
    settings: ModelSettings, task: Task
) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = build_model(settings, task, seed=7).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(321)
    again = build_model(settings, task, seed=7).state_dict()
    other = build_model(settings, task, seed=8).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    starts_at_zero = settings.name in ("linear", "ngrams")
    assert all(torch.equal(first[name], other[name]) for name in first) == starts_at_zero


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("softmax", SCHOOL),
        ("softmax", TEXT),
        ("linear", DIGITS),
        ("cnn", SCHOOL),
        ("cnn", Task("classification", (1, 3, 3), 2)),
        ("resnet18", TEXT),
        ("lstm", MNIST),
    ],
)
def test_a_model_that_does_not_suit_the_data_is_refused(name: str, task: Task) -> None:
    with pytest.raises(InputError, match=f"model.name: {name}; it needs"):
        build_model(ModelSettings(name=name), task, seed=0)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ValidationError, match="did you mean resnet18"):
        ModelSettings(name="resnet-18")


def test_options_of_another_model_are_refused() -> None:
    with pytest.raises(ValidationError, match="embedding: cnn has no such option; it belongs to lstm"):
        ModelSettings(name="cnn", embedding=3)


def test_settings_survive_a_round_trip_through_plain_data() -> None:
    settings = ModelSettings(name="lstm", hidden=16)
    assert ModelSettings.model_validate(settings.model_dump()) == settings


def test_options_change_the_model() -> None:
    narrow = build_model(ModelSettings(name="mcmahan-cnn", hidden=3), MNIST, seed=0)
    assert narrow.get_submodule("dense").weight.shape == (3, 3136)


def test_softmax_learns_the_digits() -> None:
    train = load_dataset(DataSettings(name="digits"), seed=0).train
    model = build_model(ModelSettings(name="softmax"), DIGITS, seed=0)
    features, targets = torch.from_numpy(train.features), torch.from_numpy(train.targets)
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(features), targets).backward()
        optimiser.step()
    assert np.mean(model(features).argmax(dim=1).numpy() == train.targets) > 0.93


def test_one_step_of_ngrams_is_the_counts_of_what_follows_what() -> None:
    """Counted by hand: which token follows which pair, less what equal chances would give each."""
    text = [0, 1, 2, 0, 1, 2, 1, 1, 0, 1]
    windows = [text[first : first + 3] for first in range(len(text) - 3)]
    task = Task("classification", (3,), 3, vocabulary=3)
    learner = Learner(build_model(ModelSettings(name="ngrams"), task, 0), task, torch.device("cpu"))
    batch = Batch(torch.tensor(windows), torch.tensor(text[3:]))
    rule = LocalSGD(epochs=1, batch=100, lr=1.0)
    order = rule.batches(len(batch), seed=0)
    update = train_one(learner, learner.initial(), batch, order, rule) * len(batch)
    counts = np.zeros((9, 3))
    for window, following in zip(windows, text[3:], strict=True):
        row = window[-1] + 3 * window[-2]
        counts[row] -= 1 / 3
        counts[row, following] += 1
    np.testing.assert_allclose(update.view(9, 3).numpy(), counts, atol=1e-6)


def test_ngrams_need_a_text_that_is_long_enough() -> None:
    with pytest.raises(InputError, match=r"model.name: ngrams; it needs text of at least 3 tokens a record"):
        build_model(ModelSettings(name="ngrams", order=3), Task("classification", (2,), 9, vocabulary=9), 0)
    with pytest.raises(InputError, match=r"would take .* GiB of memory"):
        build_model(ModelSettings(name="ngrams", order=4), TEXT, 0)
