"""Dense layers."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.training.contributions import Contribution, product_contributions
from coterie.training.layers.base import LayerRule, Weights, rule_for
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
        flat = inputs.reshape(tiles.count, -1, inputs.shape[-1])
        matrix = tiles.gather(weights["weight"]).mT
        if self.biased:
            outputs = torch.baddbmm(tiles.gather(weights["bias"])[:, None], flat, matrix)
        else:
            outputs = flat @ matrix
        return outputs.view(*inputs.shape[:-1], -1)

    def backward(self, inputs: Tensor, gradient: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        if tiles.single:
            return gradient @ weights["weight"][0]
        flat = gradient.reshape(tiles.count, -1, gradient.shape[-1])
        return (flat @ tiles.gather(weights["weight"])).view(*gradient.shape[:-1], -1)

    def factors(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
        return (
            inputs.reshape(len(inputs), -1, inputs.shape[-1]),
            gradient.reshape(len(gradient), -1, gradient.shape[-1]),
        )

    def contributions(self, left: Tensor, right: Tensor, tiles: Tiles) -> Mapping[str, Contribution]:
        return product_contributions(left, right)

    def totals(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> Mapping[str, Tensor]:
        flat = gradient.reshape(-1, gradient.shape[-1])
        return {"weight": flat.mT @ inputs.reshape(len(flat), -1), "bias": flat.sum(dim=0)}
