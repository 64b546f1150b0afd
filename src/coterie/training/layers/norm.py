"""Norms within a record: only their scale and shift have parameters."""

import math
from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional

from coterie.training.contributions import Contribution, Rows
from coterie.training.layers.base import LayerRule, Weights, rule_for
from coterie.training.tiles import Tiles


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
