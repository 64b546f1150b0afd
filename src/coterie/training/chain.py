"""A plain sequence of layers, run forwards and backwards without autograd.

With the small batches of private learning, a tenth of a step on a processor goes into building and walking a
graph. A sequence needs none: every stage remembers what its own way back needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Stage(ABC):
    """One layer: forwards, and then backwards once."""

    trained = False
    """Whether it has parameters, and so needs the gradient at its outputs."""

    @abstractmethod
    def forward(self, values: Tensor) -> Tensor:
        """The layer's outputs."""

    @abstractmethod
    def backward(self, gradient: Tensor, *, needed: bool) -> Tensor:
        """The gradient at the inputs; anything where it is not needed."""


class Chain:
    """Stages one after the other."""

    def __init__(self, stages: Sequence[Stage], gradients: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Args:
        gradients: from outputs and targets to the gradient of the losses' sum at the outputs.
        """
        self._stages = stages
        self._gradients = gradients
        self._first = next((place for place, stage in enumerate(stages) if stage.trained), len(stages))

    @torch.no_grad()
    def run(self, features: Tensor, targets: Tensor) -> None:
        """Forwards to the losses, and backwards from their sum to the first layer that has parameters."""
        values = features
        for stage in self._stages:
            values = stage.forward(values)
        gradient = self._gradients(values, targets)
        for position in range(len(self._stages) - 1, self._first - 1, -1):
            gradient = self._stages[position].backward(gradient, needed=position > self._first)


class Relu(Stage):
    """Keeps what is positive."""

    def __init__(self) -> None:
        self._outputs: Tensor | None = None

    def forward(self, values: Tensor) -> Tensor:
        self._outputs = torch.relu(values)
        return self._outputs

    def backward(self, gradient: Tensor, *, needed: bool) -> Tensor:
        outputs, self._outputs = self._outputs, None
        assert outputs is not None
        return masked(gradient, outputs)


def masked(gradient: Tensor, outputs: Tensor) -> Tensor:
    """The gradient where a ReLU let something through."""
    passed: Tensor = torch.ops.aten.threshold_backward(gradient, outputs, 0)
    return passed


class Flatten(Stage):
    """A vector for every record."""

    def __init__(self) -> None:
        self._shape: torch.Size | None = None

    def forward(self, values: Tensor) -> Tensor:
        self._shape = values.shape
        return values.flatten(1)

    def backward(self, gradient: Tensor, *, needed: bool) -> Tensor:
        assert self._shape is not None
        return gradient.reshape(self._shape)


class MaxPool(Stage):
    """The largest of every window (windows do not overlap), and whether a ReLU follows."""

    def __init__(self, window: tuple[int, int], *, relu: bool) -> None:
        self._window = window
        self._relu = relu
        self._seen: tuple[Tensor, Tensor, Tensor] | None = None

    def forward(self, values: Tensor) -> Tensor:
        outputs: Tensor
        outputs, places = torch.ops.aten.max_pool2d_with_indices(values, self._window)
        if self._relu:
            outputs = outputs.relu_()
        self._seen = values, outputs, places
        return outputs

    def backward(self, gradient: Tensor, *, needed: bool) -> Tensor:
        assert self._seen is not None
        (inputs, outputs, places), self._seen = self._seen, None
        # In the order of the outputs: with another one, the way back takes five times as long.
        gradient = gradient.contiguous(memory_format=_order(outputs))
        if self._relu:
            gradient = masked(gradient, outputs)
        back: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
            gradient, inputs, self._window, self._window, (0, 0), (1, 1), False, places
        )
        return back


def _order(images: Tensor) -> torch.memory_format:
    by_channel = images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if by_channel else torch.contiguous_format


def flat_sequence(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested sequences, in order; a model of another kind is one layer."""
    if type(model) is nn.Sequential and not hooked(model):
        for layer in model:
            yield from flat_sequence(layer)
    else:
        yield model


def hooked(layer: nn.Module) -> bool:
    """Whether somebody looks at, or changes, what the layer computes."""
    hooks: tuple[Any, ...] = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
    )
    return any(hooks)
