"""The papers' networks. None mixes the records of a batch, works in place or draws random numbers."""

import copy
import math
from collections import OrderedDict
from itertools import pairwise

import torch
from torch import Tensor, nn

from coterie.data.records import Task
from coterie.errors import InputError


def softmax(task: Task, bias: bool = True) -> nn.Module:
    """Logistic regression on the flattened features."""
    if task.kind != "classification" or task.vocabulary is not None:
        raise _unsuitable("softmax", "numeric features and classes", task)
    head = nn.Linear(math.prod(task.shape), task.classes, bias=bias)
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), head=head))


def linear(task: Task, bias: bool = True) -> nn.Module:
    """Linear regression on the flattened features, from zero: random weights would only be unlearnt."""
    if task.kind != "regression" or task.vocabulary is not None:
        raise _unsuitable("linear", "numeric features and a regression target", task)
    head = nn.Linear(math.prod(task.shape), 1, bias=bias)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), head=head))


def mlp(task: Task, hidden: int = 64) -> nn.Module:
    """One hidden layer on the flattened features."""
    if task.vocabulary is not None:
        raise _unsuitable("mlp", "numeric features", task)
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    layers.update(dense=nn.Linear(math.prod(task.shape), hidden), relu=nn.ReLU())
    return nn.Sequential(OrderedDict(**layers, head=nn.Linear(hidden, task.outputs)))


def cnn(task: Task) -> nn.Module:
    """Two 5x5 convolutions of 16 and 32 channels and a dense layer: 28,938 parameters on MNIST."""
    layers, width = _two_convolutions("cnn", task, 16, 32)
    return nn.Sequential(OrderedDict(**layers, head=nn.Linear(width, task.outputs)))


def mcmahan_cnn(task: Task, hidden: int = 512) -> nn.Module:
    """The CNN of McMahan et al. 2017 with one hidden dense layer: 1,663,370 parameters on MNIST."""
    layers, width = _two_convolutions("mcmahan-cnn", task, 32, 64)
    dense = OrderedDict(dense=nn.Linear(width, hidden), relu3=nn.ReLU(), head=nn.Linear(hidden, task.outputs))
    return nn.Sequential(OrderedDict(**layers, **dense))


def _two_convolutions(name: str, task: Task, first: int, second: int) -> tuple[dict[str, nn.Module], int]:
    """The layers, and the width of what they make of an image."""
    channels, height, width = _image(name, task, smallest=4)
    return {
        "conv1": nn.Conv2d(channels, first, 5, padding=2),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(first, second, 5, padding=2),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
    }, second * (height // 4) * (width // 4)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2016), with group instead of batch norms."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = _group_norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = _group_norm(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(
                OrderedDict(conv=nn.Conv2d(channels, width, 1, stride, bias=False), norm=_group_norm(width))
            )

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm1(self.conv1(images)))
        return torch.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


def resnet18(task: Task) -> nn.Module:
    """ResNet-18 for small images: 3x3 stem without pooling, group norms; 11.2 million parameters."""
    channels, _, _ = _image("resnet18", task, smallest=8)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        stem=nn.Conv2d(channels, 64, 3, padding=1, bias=False), norm=_group_norm(64), relu=nn.ReLU()
    )
    widths = (64, 64, 128, 256, 512)
    for stage, (before, width) in enumerate(pairwise(widths), start=1):
        layers[f"block{stage}a"] = ResidualBlock(before, width, stride=1 if stage == 1 else 2)
        layers[f"block{stage}b"] = ResidualBlock(width, width, stride=1)
    layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), head=nn.Linear(512, task.outputs))
    return nn.Sequential(layers)


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels)


class AddedModels(nn.Module):
    """Two models whose outputs are added; all parameters of the first come before those of the second."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, features: Tensor) -> Tensor:
        return torch.add(self.first(features), self.second(features))


def lstm_step(drive: Tensor, recurrent: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """State and cell of an LSTM after a step.

    Args:
        drive, recurrent: what the inputs and the last state add to the gates, (records, 4 * hidden): input
            gate, forget gate, candidate, output gate.
    """
    if drive.is_cuda:  # one kernel there and one back, instead of nine and more than that
        state, cell, _ = torch.ops.aten._thnn_fused_lstm_cell(drive, recurrent, cell)
        return state, cell
    input_gate, forget_gate, candidate, output_gate = (drive + recurrent).chunk(4, dim=1)
    cell = torch.sigmoid(forget_gate) * cell + torch.sigmoid(input_gate) * torch.tanh(candidate)
    return torch.sigmoid(output_gate) * torch.tanh(cell), cell


class LstmLayer(nn.Module):
    """One LSTM layer made of linear maps.

    `nn.LSTM` is one fused kernel for which torch.func has no batching rule: under `vmap` it is run record by
    record. One bias instead of two; otherwise the same function.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.input_map = nn.Linear(width, 4 * hidden)
        self.recurrent_map = nn.Linear(hidden, 4 * hidden, bias=False)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)

    def forward(self, steps: Tensor) -> Tensor:
        driven = self.input_map(steps)
        state = cell = steps.new_zeros(len(steps), self.hidden)
        states = []
        for drive in driven.unbind(1):  # whose way back is one copy, not one sum for every step
            state, cell = lstm_step(drive, self.recurrent_map(state), cell)
            states.append(state)
        return torch.stack(states, dim=1)


class FusedLstmLayer(nn.Module):
    """The same layer by torch's kernel for all steps at once, which nobody can map or look into."""

    def __init__(self, layer: LstmLayer) -> None:
        super().__init__()
        self.hidden, self.input_map, self.recurrent_map = layer.hidden, layer.input_map, layer.recurrent_map

    def forward(self, steps: Tensor) -> Tensor:
        start = steps.new_zeros(1, len(steps), self.hidden)
        bias = self.input_map.bias
        weights = (self.input_map.weight, self.recurrent_map.weight, bias, torch.zeros_like(bias))
        states: Tensor = torch.lstm(
            steps,
            (start, start),
            weights,
            has_biases=True,
            num_layers=1,
            dropout=0.0,
            train=self.training,
            bidirectional=False,
            batch_first=True,
        )[0]
        return states


def with_fused_lstms(model: nn.Module) -> nn.Module:
    """The model, or a copy of it with the same parameters in which every LSTM layer inside is one call.

    Subclasses of the layer stay, and layers with hooks or with maps of another kind: they may compute
    something else.
    """
    layers = [name for name, layer in model.named_modules() if name and _is_plain(layer)]
    if not layers:
        return model
    model = copy.deepcopy(model)
    for name in layers:
        model.set_submodule(name, FusedLstmLayer(model.get_submodule(name)))  # type: ignore[arg-type]
    return model


def _is_plain(layer: nn.Module) -> bool:
    parts = list(layer.modules())
    kinds = [type(part) for part in parts]
    hooks = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
    return kinds == [LstmLayer, nn.Linear, nn.Linear] and not hooks


class LastStep(nn.Module):
    """What a sequence model knows at the end of the window."""

    def forward(self, steps: Tensor) -> Tensor:
        return steps[:, -1]


def lstm(task: Task, embedding: int = 8, hidden: int = 256, layers: int = 2) -> nn.Module:
    """Character model: embedding, LSTM layers, and a dense layer on the last step."""
    if task.vocabulary is None or len(task.shape) != 1:
        raise _unsuitable("lstm", "text", task)
    parts: OrderedDict[str, nn.Module] = OrderedDict(embedding=nn.Embedding(task.vocabulary, embedding))
    for layer in range(1, layers + 1):
        parts[f"lstm{layer}"] = LstmLayer(embedding if layer == 1 else hidden, hidden)
    return nn.Sequential(OrderedDict(**parts, last=LastStep(), head=nn.Linear(hidden, task.outputs)))


class NGramTable(nn.Module):
    """A row of scores for every sequence of so many last tokens, all zero at first.

    One step from there moves a client's model along how often it has which token after which: the counts of
    its n-grams, less what equal chances would give.
    """

    def __init__(self, vocabulary: int, order: int, outputs: int) -> None:
        super().__init__()
        self.vocabulary, self.order = vocabulary, order
        self.table = nn.Embedding(vocabulary**order, outputs)
        nn.init.zeros_(self.table.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        last = tokens[:, -1]
        for back in range(1, self.order):
            last = last + self.vocabulary**back * tokens[:, -1 - back]
        found: Tensor = self.table(last)
        return found


def ngrams(task: Task, order: int = 2) -> nn.Module:
    """A linear model on the last tokens, one-hot: 456,533 parameters for pairs of 77 characters."""
    if task.vocabulary is None or len(task.shape) != 1 or task.shape[0] < order:
        raise _unsuitable("ngrams", f"text of at least {order} tokens a record", task)
    return nn.Sequential(OrderedDict(ngrams=NGramTable(task.vocabulary, order, task.outputs)))


def _image(name: str, task: Task, smallest: int) -> tuple[int, int, int]:
    if len(task.shape) != 3 or task.vocabulary is not None or min(task.shape[1:]) < smallest:
        raise _unsuitable(name, f"images of at least {smallest}x{smallest} pixels", task)
    return task.shape


def _unsuitable(name: str, needs: str, task: Task) -> InputError:
    kind = "text" if task.vocabulary is not None else task.kind
    return InputError(
        f"model.name: {name}; it needs {needs}, the data are {kind} with records of shape {task.shape}"
    )
