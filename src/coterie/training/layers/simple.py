"""Dense layers, norms within a record, and tables looked up by token."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.training import cpu_kernels, kernels, norm_kernels
from coterie.training.contributions import (
    Contribution,
    Lookups,
    Recomputed,
    Rows,
    product_contributions,
    products_are_cheaper,
    rows_of_both,
)
from coterie.training.layers.base import LayerRule, UnsupportedLayer, WayBack, Weights, in_full, rule_for
from coterie.training.tiles import Tiles


@rule_for(nn.Linear)
class LinearRule(LayerRule):
    """A weight for every pair of an input and an output, on vectors or at every position of a sequence."""

    def __init__(self, layer: nn.Linear | nn.LSTM) -> None:
        """Of an LSTM: the rule of any of its matrices."""
        self.biased = bool(layer.bias) if isinstance(layer, nn.LSTM) else layer.bias is not None

    def forward(self, inputs: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        if tiles.single:
            return functional.linear(
                inputs, weights["weight"][0], weights["bias"][0] if self.biased else None
            )
        if tiles.bounds is not None and weights["weight"].shape[1] >= MANY_OUTPUTS:
            if "aligned" not in weights:
                weights["aligned"] = kernels.aligned(weights["weight"])
            bias = weights["bias"] if self.biased else None
            return self._pointwise(inputs, weights["aligned"], bias, tiles)
        flat = inputs.reshape(tiles.count, -1, inputs.shape[-1])
        bias = tiles.gather(weights["bias"])[:, None] if self.biased else None
        if tiles.owner is not None and _suits_everyone(weights["weight"], tiles):
            outputs = _everyone(flat, weights["weight"], tiles.owner)
            return (outputs if bias is None else outputs + bias).view(*inputs.shape[:-1], -1)
        matrix = tiles.gather(weights["weight"]).mT
        outputs = flat @ matrix if bias is None else torch.baddbmm(bias, flat, matrix)
        return outputs.view(*inputs.shape[:-1], -1)

    def backward(self, inputs: Tensor, gradient: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        if tiles.single:
            return gradient @ weights["weight"][0]
        if tiles.bounds is not None and weights["weight"].shape[1] >= MANY_OUTPUTS:
            if "turned" not in weights:
                weights["turned"] = weights["weight"].mT.contiguous()
            return self._pointwise(gradient, weights["turned"], None, tiles)
        flat = gradient.reshape(tiles.count, -1, gradient.shape[-1]) @ tiles.gather(weights["weight"])
        return flat.view(*gradient.shape[:-1], -1)

    def _pointwise(self, values: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles) -> Tensor:
        """By the kernel that takes each tile's weights from where its client's are."""
        outputs = kernels.convolve(
            _as_images(values), weight[:, :, None, None], bias, tiles, kernels.POINTWISE
        )
        return outputs.permute(0, 2, 3, 1).reshape(*values.shape[:-1], -1)

    def factors(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
        return (
            inputs.reshape(len(inputs), -1, inputs.shape[-1]),
            gradient.reshape(len(gradient), -1, gradient.shape[-1]),
        )

    def contributions(self, left: Tensor, right: Tensor, tiles: Tiles) -> Mapping[str, Contribution]:
        sizes = (left.shape[1], left.shape[2], right.shape[2])
        if tiles.bounds is not None and sizes[0] > 1 and products_are_cheaper(*sizes, left.device):
            images, gradient = _as_images(left), _as_images(right)
            weight = Recomputed(images, gradient, kernels.POINTWISE, tiles)
            return {"weight": weight, "bias": Rows(right.sum(dim=1))}
        return product_contributions(left, right)

    def totals(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> Mapping[str, Tensor]:
        flat = gradient.reshape(-1, gradient.shape[-1])
        return {"weight": flat.mT @ inputs.reshape(len(flat), -1), "bias": flat.sum(dim=0)}


def _as_images(values: Tensor) -> Tensor:
    """Vectors at any number of positions as images of one row, in channels-last order."""
    return values.reshape(len(values), 1, -1, values.shape[-1]).contiguous().permute(0, 3, 1, 2)


MANY_OUTPUTS = 64
"""Outputs from which a copy of the weights for every tile costs more than a kernel that needs none."""
MANY_INPUTS, FEW_OUTPUTS = 2**11, 2**11
"""Inputs from which a copy of the weights for every tile costs more than outputs under all clients' weights,
and outputs of all clients together up to which it does."""


def _suits_everyone(weight: Tensor, tiles: Tiles) -> bool:
    """Whether one product with the weights of all clients is quicker than one for each tile with its own."""
    clients, outer, inner = weight.shape
    return inner > MANY_INPUTS and clients * outer <= FEW_OUTPUTS and tiles.count > 2 * clients


def _everyone(flat: Tensor, weight: Tensor, owner: Tensor) -> Tensor:
    """Outputs of every record under every client's weights, of which its own client's are kept.

    A head on many features is wide and its outputs are few: the other clients' cost less than a copy of the
    weights for every tile. What is kept depends on the record and its own client's weights alone.
    """
    clients, outer, inner = weight.shape
    under_all = flat.reshape(-1, inner) @ weight.reshape(clients * outer, inner).mT
    under_all = under_all.view(len(flat), -1, clients, outer)
    own = owner[:, None, None, None].expand(-1, under_all.shape[1], 1, outer)
    return under_all.gather(2, own).squeeze(2)


@rule_for(nn.GroupNorm, nn.LayerNorm)
class NormRule(LayerRule):
    """A group norm scales and shifts every channel, a layer norm every entry that it normalises."""

    def __init__(self, layer: nn.GroupNorm | nn.LayerNorm) -> None:
        self.groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else None
        self.shape = list(layer.normalized_shape) if isinstance(layer, nn.LayerNorm) else []
        self.eps = layer.eps
        self.biased = layer.bias is not None

    def before(self, inputs: Tensor) -> Tensor:
        if self.groups is not None:
            return functional.group_norm(inputs, self.groups, eps=self.eps)
        return functional.layer_norm(inputs, self.shape, eps=self.eps)

    def whole(
        self, inputs: Tensor, weights: Weights, tiles: Tiles, compiled: bool
    ) -> tuple[Tensor, WayBack] | None:
        if self.groups is None:
            return None
        if tiles.single and inputs.device.type == "cpu" and inputs.dim() == 4:
            if compiled and cpu_kernels.suits_norm(inputs):
                return self._by_a_kernel(inputs, weights, self.groups)
            return self._record_by_record(inputs, weights, self.groups)
        if tiles.bounds is None or not norm_kernels.suits_norm(inputs):
            return None
        groups, biased = self.groups, self.biased
        images, weight = inputs.contiguous(memory_format=torch.channels_last), weights["weight"]
        bias = weights["bias"] if biased else None
        outputs, means, rates = norm_kernels.normalise(images, weight, bias, tiles, groups, self.eps)

        def back(gradient: Tensor, needed: bool) -> tuple[Tensor, Mapping[str, Contribution]]:
            gradient = gradient.contiguous(memory_format=torch.channels_last)
            at_images, weight_rows, bias_rows, squares = norm_kernels.normalise_back(
                images, gradient, weight, means, rates, tiles, groups, biased=biased
            )
            return at_images, rows_of_both(Rows(weight_rows, squares=squares), bias_rows)

        return outputs, back

    def _by_a_kernel(self, inputs: Tensor, weights: Weights, groups: int) -> tuple[Tensor, WayBack]:
        """Of one client's images on a processor, in whatever precision they are."""
        weight, bias = weights["weight"][0], weights["bias"][0] if self.biased else None
        outputs, means, rates = cpu_kernels.normalise(inputs, weight, bias, groups, self.eps)

        def back(gradient: Tensor, needed: bool) -> tuple[Tensor, Mapping[str, Contribution]]:
            found = cpu_kernels.normalise_back(inputs, gradient, weight, means, rates)
            return found[0], {"weight": Rows(found[1]), "bias": Rows(found[2])}

        return outputs, back

    def _record_by_record(self, inputs: Tensor, weights: Weights, groups: int) -> tuple[Tensor, WayBack]:
        """The same by torch's own: back from one image, it gives its row, too."""
        images = in_full(inputs).contiguous(memory_format=torch.channels_last)
        weight = weights["weight"][0]
        bias, (records, channels, height, width) = weights["bias"][0] if self.biased else None, inputs.shape
        numbers = (channels, height * width, groups)
        outputs, means, rates = torch.native_group_norm(images, weight, bias, records, *numbers, self.eps)

        def back(gradient: Tensor, needed: bool) -> tuple[Tensor, Mapping[str, Contribution]]:
            gradient = gradient.contiguous(memory_format=torch.channels_last)
            at_images = torch.empty_like(images) if needed else gradient
            weight_rows, bias_rows = (weight.new_empty(records, channels) for _ in range(2))
            places, wanted = (at_images, weight_rows, bias_rows), (needed, True, self.biased)
            for at in range(records):
                own = (part[at : at + 1] for part in (gradient, images, means, rates))
                found = torch.ops.aten.native_group_norm_backward(*own, weight, 1, *numbers, wanted)
                for place, part in zip(places, found, strict=True):
                    if part is not None:
                        place[at] = part[0] if place is at_images else part
            return at_images.to(inputs.dtype), {"weight": Rows(weight_rows), "bias": Rows(bias_rows)}

        return outputs, back

    def forward(self, inputs: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        scaled = inputs * self._spread(weights["weight"], inputs, tiles)
        return scaled + self._spread(weights["bias"], inputs, tiles) if self.biased else scaled

    def backward(self, inputs: Tensor, gradient: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        return gradient * self._spread(weights["weight"], inputs, tiles)

    def factors(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
        return self._by_position(inputs), self._by_position(gradient)

    def contributions(self, left: Tensor, right: Tensor, tiles: Tiles) -> Mapping[str, Contribution]:
        return {"weight": Rows((left * right).sum(dim=1)), "bias": Rows(right.sum(dim=1))}

    def _by_position(self, values: Tensor) -> Tensor:
        if self.groups is not None:
            return values.flatten(2).mT if values.dim() > 2 else values[:, None]
        return values.reshape(len(values), -1, math.prod(self.shape))

    def _spread(self, stacked: Tensor, inputs: Tensor, tiles: Tiles) -> Tensor:
        """A parameter of each record's client, in a shape that broadcasts over its inputs."""
        if self.groups is not None:
            shape = (inputs.shape[1], *(1,) * (inputs.dim() - 2))
        else:
            shape = (*(1,) * (inputs.dim() - 1 - len(self.shape)), *stacked.shape[1:])
        if tiles.single:
            return stacked[0].reshape(shape)
        values = tiles.gather(stacked).reshape(tiles.count, 1, *shape)
        return values.expand(-1, tiles.size, *shape).reshape(tiles.records, *shape)


@rule_for(nn.Embedding)
class EmbeddingRule(LayerRule):
    """A row of a table for every token."""

    def __init__(self, layer: nn.Embedding) -> None:
        if layer.max_norm is not None or layer.scale_grad_by_freq:
            raise UnsupportedLayer("Embedding with max_norm or scale_grad_by_freq")
        self.size = layer.num_embeddings
        self.padding = layer.padding_idx

    def forward(self, inputs: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        table = weights["weight"]
        if tiles.single:
            return functional.embedding(inputs, table[0])
        client = torch.arange(tiles.count, device=inputs.device) if tiles.owner is None else tiles.owner
        rows = inputs.view(tiles.count, -1) + self.size * client[:, None]
        return functional.embedding(rows, table.reshape(-1, table.shape[2])).view(*inputs.shape, -1)

    def backward(self, inputs: Tensor, gradient: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        raise UnsupportedLayer("Embedding of values that need a gradient")

    def factors(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
        if self.padding is not None:
            gradient = torch.where((inputs == self.padding)[..., None], 0.0, gradient)
        return inputs.reshape(len(inputs), -1), gradient.reshape(len(inputs), -1, gradient.shape[-1])

    def contributions(self, left: Tensor, right: Tensor, tiles: Tiles) -> Mapping[str, Contribution]:
        return {"weight": Lookups(left, right, self.size)}
