"""A convolution as a step of a chain, where more is known than a layer rule knows: what comes after.

Behind a max pool, a gradient is zero but at the places that the pool chose, and a kernel skips what is zero.
"""

import math

import torch
from torch import Tensor

from coterie.training.chain import Backward, Step, masked
from coterie.training.contributions import Rows
from coterie.training.cpu_kernels import PooledConvolution
from coterie.training.layers.conv import LARGEST_ROW, MANY_CHANNELS, ConvRule, channels_last
from coterie.training.layers.pooling import PoolingLayer
from coterie.training.recording import RecordingLayer


def suits_places(rule: ConvRule) -> bool:
    """Whether a kernel goes back from the places that a pool chose: a row of weights is small."""
    plain = not rule.flat and rule.groups == 1 and rule.stride == (1, 1) and rule.dilation == (1, 1)
    return plain and rule.inner * rule.outer <= LARGEST_ROW


def pooled_convolution(layer: RecordingLayer, rule: ConvRule, pool: PoolingLayer) -> Step:
    """A convolution and the max pool after it, whose way back skips what the pool left zero."""
    kernel = PooledConvolution(rule.kernel, rule.channels, rule.outer, rule.padding, pool.window)

    def forward(values: Tensor) -> tuple[Tensor, Backward]:
        layer.check(values)
        weights, notes = layer.weights(), layer.notes
        images, weight = rule.images(values), weights["weight"][0]
        if rule.channels < MANY_CHANNELS and kernel.runs_forward and weight.dtype == torch.float32:
            bias = weights["bias"][0] if rule.biased else None
            found = kernel.forward(_by_pixel(images), weight, bias, relu=pool.relu)
            pooled, places = (part.permute(0, 3, 1, 2) for part in found)
        else:
            pooled, places = pool.pool_with_places(rule.forward(values, weights, notes.tiles))
        notes.numbers += 3 * pooled.numel() * math.prod(pool.window)

        def backward(gradient: Tensor, needed: bool) -> Tensor:
            gradient = gradient.contiguous(memory_format=torch.channels_last)
            if pool.relu:
                gradient = masked(gradient, pooled)
            if gradient.dtype != torch.float32 or not rule.forms_rows(values):  # kernels know nothing else
                whole = _put_back(rule, images, gradient, places)
                layer.note(values, whole)
                return rule.backward(values, whole, weights, notes.tiles) if needed else gradient
            sparse = _by_pixel(images), _by_pixel(gradient), _by_pixel(places)
            notes.numbers += 3 * values.numel()
            notes.formed[layer.where] = {
                "weight": Rows(kernel.weight_rows(*sparse), (0, 3, 1, 2), compiled=True),
                "bias": Rows(gradient.sum(dim=(2, 3))),
            }
            if not needed:
                return gradient
            if not kernel.runs_back:
                return rule.backward(values, _put_back(rule, images, gradient, places), weights, notes.tiles)
            return kernel.input_gradient(*sparse, _by_pixel(weight)).permute(0, 3, 1, 2)

        return pooled, backward

    return Step(forward, trained=True, compiled=True)


def _put_back(rule: ConvRule, images: Tensor, gradient: Tensor, places: Tensor) -> Tensor:
    """The gradient at all outputs, zero where the pool chose another."""
    rows, columns = rule.geometry.output_size(*images.shape[2:])
    whole = gradient.new_zeros(*gradient.shape[:2], rows * columns)
    whole.scatter_(2, places.flatten(2), gradient.flatten(2))
    return channels_last(whole.view(*gradient.shape[:2], rows, columns))


def _by_pixel(images: Tensor) -> Tensor:
    """The same numbers, with the channels as their last dimension."""
    return images.permute(0, 2, 3, 1)
