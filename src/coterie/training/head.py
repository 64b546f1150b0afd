"""A wide dense layer on records that lie on a GPU: a step reads what it drew twice, and copies nothing.

On public features a model is one dense layer. The gradient of a record is the product of its features and of
the gradient at the outputs, so its norm is known from both norms, which come with the outputs, and the
clipped sum is one more product: two passes over the records drawn, straight from the table. The layer rules
(`stacked_clipped_sum`) compute the same from a copy of the records, and are the twin of this.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from coterie.training import kernels
from coterie.training.clipping import MARGIN
from coterie.training.contributions import WIDE
from coterie.training.learner import Batch, Learner
from coterie.training.parameters import Layout
from coterie.training.tiles import Tiles

TILE = 16
"""Records per tile: what a matrix unit takes at least, and few beside the batches that suit heads."""


ROWS_AT_ONCE = 4096
"""Of the table, whose squares are taken in float64 together."""


@dataclass(frozen=True)
class StackedHead:
    """One dense layer for many clients, on the records of a table.

    Args:
        weight, bias: names of its parameters; a layer may have no bias.
        gradients: from outputs and targets to the gradient of the losses' sum at the outputs.
        rows: every record's features, one record after the other.
        squares: the squared norms of these rows in float64, which no step changes.
    """

    layout: Layout
    weight: str
    bias: str | None
    gradients: Callable[[Tensor, Tensor], Tensor]
    rows: Tensor
    targets: Tensor
    squares: Tensor

    @classmethod
    def of(cls, learner: Learner, table: Batch) -> Self | None:
        """The learner's model on these records as a wide head, if it is one."""
        layer = None if learner.book is None else learner.book.head
        if layer is None:
            return None
        shapes, weight, bias = learner.layout.shapes, layer.trained.get("weight"), layer.trained.get("bias")
        if weight is None or shapes[weight][1] <= WIDE or layer.frozen:
            return None
        rows = table.features.flatten(1)
        squares = torch.cat([part.double().square().sum(dim=1) for part in torch.split(rows, ROWS_AT_ONCE)])
        return cls(learner.layout, weight, bias, learner.output_gradients, rows, table.targets, squares)

    @torch.no_grad()
    def clipped_sum(
        self,
        stacked: Tensor,
        places: Tensor,
        tiles: Tiles,
        clips: Tensor,
        present: Tensor,
        into: Tensor | None = None,
    ) -> Tensor:
        """What `stacked_clipped_sum` finds for the table's records at these places."""
        own = self.layout.split_stacked(stacked)
        outputs = kernels.head_outputs(self.rows, places, own[self.weight].contiguous(), tiles)
        squares = self.squares.index_select(0, places)
        if self.bias is not None:
            outputs = outputs + tiles.by_record(own[self.bias])
            squares = squares + 1.0
        gradient = self.gradients(outputs, self.targets.index_select(0, places)).contiguous()
        squares = squares * gradient.double().square().sum(dim=1)
        scales, usable = kernels.clip_scales([squares], clips, present, MARGIN)
        sums = torch.zeros_like(stacked, dtype=torch.float64) if into is None else into
        parts = dict(zip(self.layout.shapes, torch.split(sums, self.layout.sizes, dim=1), strict=True))
        kernels.add_products(self.rows, gradient, scales, usable, tiles, parts[self.weight], places)
        if self.bias is not None:
            kernels.add_by_client(gradient, scales, usable, tiles, parts[self.bias])
        return sums
