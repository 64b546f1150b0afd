"""Tables looked up by token."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.training.contributions import Contribution, Lookups
from coterie.training.layers.base import LayerRule, UnsupportedLayer, Weights, rule_for
from coterie.training.tiles import Tiles


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
