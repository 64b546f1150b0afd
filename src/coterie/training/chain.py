"""A plain sequence of layers, run forwards and backwards without autograd.

With the small batches of private learning, a tenth of a step on a processor goes into building and walking a
graph. A sequence needs none: every step returns, beside its outputs, its own way back.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coterie.training.recording import RecordingLayer

Backward = Callable[[Tensor, bool], Tensor]
"""From the gradient at the outputs to that at the inputs (anything where that is not needed); called once."""


@dataclass(frozen=True)
class Step:
    """One layer of a chain.

    Args:
        trained: whether it has parameters, and so needs the gradient at its outputs.
        compiled: whether it uses kernels of `cpu_kernels.py`.
    """

    forward: Callable[[Tensor], tuple[Tensor, Backward]]
    trained: bool = False
    compiled: bool = False


class Chain:
    """Steps one after the other."""

    def __init__(self, steps: Sequence[Step], gradients: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Args:
        gradients: from outputs and targets to the gradient of the losses' sum at the outputs.
        """
        self._steps = steps
        self._gradients = gradients
        self._first = next((place for place, step in enumerate(steps) if step.trained), len(steps))

    @torch.no_grad()
    def run(self, features: Tensor, targets: Tensor) -> None:
        """Forwards to the losses, and backwards from their sum to the first layer that has parameters."""
        values, ways_back = features, []
        for step in self._steps:
            values, back = step.forward(values)
            ways_back.append(back)
        gradient = self._gradients(values, targets)
        while len(ways_back) > self._first:  # each is dropped, with what it holds, once it was gone
            gradient = ways_back.pop()(gradient, len(ways_back) > self._first)


def relu(values: Tensor) -> tuple[Tensor, Backward]:
    outputs = torch.relu(values)
    return outputs, lambda gradient, needed: masked(gradient, outputs)


def masked(gradient: Tensor, outputs: Tensor) -> Tensor:
    """The gradient where a ReLU let something through."""
    passed: Tensor = torch.ops.aten.threshold_backward(gradient, outputs, 0)
    return passed


def flatten(values: Tensor) -> tuple[Tensor, Backward]:
    shape = values.shape
    return values.flatten(1), lambda gradient, needed: gradient.reshape(shape)


def recorded(layer: RecordingLayer) -> Step:
    """A layer that notes its inputs and the gradient at its outputs."""

    def forward(values: Tensor) -> tuple[Tensor, Backward]:
        layer.check(values)
        rule, weights, tiles = layer.rule, layer.weights(), layer.notes.tiles

        def backward(gradient: Tensor, needed: bool) -> Tensor:
            layer.note(values, gradient)
            return rule.backward(values, gradient, weights, tiles) if needed else gradient

        return rule.forward(values, weights, tiles), backward

    return Step(forward, trained=True)


def flat_sequence(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested sequences, in order; a model of another kind is one layer."""
    if type(model) is nn.Sequential and not hooked(model):
        for layer in model:
            yield from flat_sequence(layer)
    else:
        yield model


def hooked(layer: nn.Module) -> bool:
    """Whether somebody looks at, or changes, what the layer computes."""
    return any(value for name, value in vars(layer).items() if name.endswith("_hooks"))
