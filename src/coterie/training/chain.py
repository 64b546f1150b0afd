"""A plain sequence of layers, run forwards and backwards without autograd.

With the small batches of private learning, a tenth of a step on a processor goes into building and walking a
graph. A sequence needs none: every step returns, beside its outputs, its own way back. And of a convolution,
more is known than a layer rule knows: behind a max pool, a gradient is zero but at the places that the pool
chose, and a kernel skips what is zero.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coterie.training.contributions import Rows
from coterie.training.cpu_kernels import PooledConvolution
from coterie.training.layers.base import LayerRule, in_full
from coterie.training.layers.conv import LARGEST_ROW, MANY_CHANNELS, ConvRule, channels_last
from coterie.training.layers.pooling import PoolingLayer
from coterie.training.recording import Backward, RecordingLayer, hooked, masked


@dataclass(frozen=True)
class Step:
    """One layer of a chain.

    Args:
        trained: whether it has parameters, and so needs the gradient at its outputs.
    """

    forward: Callable[[Tensor], tuple[Tensor, Backward]]
    trained: bool = False


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
        gradient = self._gradients(in_full(values), targets).to(values.dtype)
        while len(ways_back) > self._first:  # each is dropped, with what it holds, once it was gone
            gradient = ways_back.pop()(gradient, len(ways_back) > self._first)


def relu(values: Tensor) -> tuple[Tensor, Backward]:
    outputs = torch.relu(values)
    return outputs, lambda gradient, needed: masked(gradient, outputs)


def flatten(values: Tensor) -> tuple[Tensor, Backward]:
    shape = values.shape
    return values.flatten(1), lambda gradient, needed: gradient.reshape(shape)


def recorded(layer: RecordingLayer) -> Step:
    """A layer that notes its inputs and the gradient at its outputs."""

    def forward(values: Tensor) -> tuple[Tensor, Backward]:
        layer.check(values)
        whole = layer.whole(values)
        if whole is not None:
            outputs, way_back = whole

            def back(gradient: Tensor, needed: bool) -> Tensor:
                at_inputs, formed = way_back(gradient, needed)
                layer.keep(formed)
                return gradient if at_inputs is None else at_inputs

            return outputs, back

        rule, weights, tiles, inputs = layer.rule, layer.weights(), layer.notes.tiles, in_full(values)

        def backward(gradient: Tensor, needed: bool) -> Tensor:
            layer.note(inputs, gradient)
            return rule.backward(inputs, gradient, weights, tiles).to(values.dtype) if needed else gradient

        return rule.forward(inputs, weights, tiles), backward

    return Step(forward, trained=True)


def flat_sequence(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested sequences, in order; a model of another kind is one layer."""
    if type(model) is nn.Sequential and not hooked(model):
        for layer in model:
            yield from flat_sequence(layer)
    else:
        yield model


def steps_of(model: nn.Module, compiled: bool) -> list[Step] | None:
    """A model of recording layers as a chain, if it is a plain sequence of layers that have a step."""
    layers = [layer for layer in flat_sequence(model) if type(layer) is not nn.Identity or hooked(layer)]
    steps: list[Step] = []
    while layers:
        layer = layers.pop(0)
        after = layers[0] if layers else None
        if hooked(layer):
            return None
        if isinstance(layer, RecordingLayer) and type(layer.rule).before is LayerRule.before:
            conv = layer.rule if isinstance(layer.rule, ConvRule) else None
            if conv and compiled and suits_places(conv) and isinstance(after, PoolingLayer):
                steps.append(pooled_convolution(layer, conv, after))
                layers.pop(0)
            else:
                steps.append(recorded(layer))
        elif isinstance(layer, PoolingLayer):
            steps.append(Step(layer.with_way_back))
        elif type(layer) is nn.ReLU:
            steps.append(Step(relu))
        elif type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            steps.append(Step(flatten))
        else:
            return None
    return steps


def suits_places(rule: ConvRule) -> bool:
    """Whether a kernel goes back from the places that a pool chose: a row of weights is small."""
    plain = not rule.flat and rule.groups == 1 and rule.stride == (1, 1) and rule.dilation == (1, 1)
    return plain and rule.inner * rule.outer <= LARGEST_ROW


def pooled_convolution(layer: RecordingLayer, rule: ConvRule, pool: PoolingLayer) -> Step:
    """A convolution and the max pool after it, whose way back skips what the pool left zero."""
    kernel = PooledConvolution(rule.kernel, rule.channels, rule.outer, rule.padding, pool.window)

    def forward(given: Tensor) -> tuple[Tensor, Backward]:
        layer.check(given)
        values, weights, notes = in_full(given), layer.weights(), layer.notes
        images, weight = rule.images(values), weights["weight"][0]
        if rule.channels < MANY_CHANNELS and kernel.runs_forward and weight.dtype == torch.float32:
            bias = weights["bias"][0] if rule.biased else None
            found = kernel.forward(_by_pixel(images), weight, bias, relu=pool.relu)
            pooled, places = (part.permute(0, 3, 1, 2) for part in found)
        else:
            pooled, places = pool.pool_with_places(rule.forward(values, weights, notes.tiles))
        notes.numbers += 3 * pooled.numel() * math.prod(pool.window)

        def at_inputs(whole: Tensor) -> Tensor:
            return rule.backward(values, whole, weights, notes.tiles).to(given.dtype)

        def backward(gradient: Tensor, needed: bool) -> Tensor:
            gradient = gradient.contiguous(memory_format=torch.channels_last)
            if pool.relu:
                gradient = masked(gradient, pooled)
            if gradient.dtype != torch.float32 or not rule.forms_rows(values):  # kernels know nothing else
                whole = _put_back(rule, images, gradient, places)
                layer.note(values, whole)
                return at_inputs(whole) if needed else gradient
            sparse = _by_pixel(images), _by_pixel(gradient), _by_pixel(places)
            notes.numbers += 3 * values.numel()
            notes.formed[layer.where] = {
                "weight": Rows(kernel.weight_rows(*sparse), (0, 3, 1, 2), compiled=True),
                "bias": Rows(gradient.sum(dim=(2, 3))),
            }
            if not needed:
                return gradient
            if not kernel.runs_back:
                return at_inputs(_put_back(rule, images, gradient, places))
            return kernel.input_gradient(*sparse, _by_pixel(weight)).permute(0, 3, 1, 2).to(given.dtype)

        return pooled, backward

    return Step(forward, trained=True)


def _put_back(rule: ConvRule, images: Tensor, gradient: Tensor, places: Tensor) -> Tensor:
    """The gradient at all outputs, zero where the pool chose another."""
    rows, columns = rule.geometry.output_size(*images.shape[2:])
    whole = gradient.new_zeros(*gradient.shape[:2], rows * columns)
    whole.scatter_(2, places.flatten(2), gradient.flatten(2))
    return channels_last(whole.view(*gradient.shape[:2], rows, columns))


def _by_pixel(images: Tensor) -> Tensor:
    """The same numbers, with the channels as their last dimension."""
    return images.permute(0, 2, 3, 1)
