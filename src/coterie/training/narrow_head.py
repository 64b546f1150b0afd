"""A model of one dense layer on few inputs, on a processor: a step's clipped sum in one call of a kernel.

Tables make such models, and batches of some dozen records: there a step of layer rules takes its time for
calls, not for arithmetic. The gradient of a record is the product of its inputs and of the
gradient at the outputs, so that its norm is known from both norms. The kernel (`llvm_head.py`) takes one
record after the other in float64: outputs, gradient, norm, and what the clip leaves of it, added to the sum.
Of a record with n inputs and outputs the norm is off by at most n 2^-52 of itself (if its squares are normal
numbers: gradients below 1e-154 are far below any clip), and what is added by 2^-51: far inside the margin.
The layer rules (`stacked_clipped_sum`) compute the same, and are the twin of this, in tests and before a
learner relies on it; without the kernels they do its work.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from coterie.training import cpu_kernels
from coterie.training.bookkeeping import Bookkeeping
from coterie.training.contributions import WIDE
from coterie.training.parameters import Layout


@dataclass(frozen=True)
class NarrowHead:
    """Where the parameters of the layer lie, and what its outputs are.

    Args:
        weight, bias: their places among the parameters; a layer may have no bias.
        shape: outputs and inputs.
        classes: whether outputs are logits of classes; else the one output is a number.
    """

    weight: slice
    bias: slice | None
    shape: tuple[int, int]
    classes: bool

    @classmethod
    def of(cls, book: Bookkeeping, layout: Layout, *, classes: bool) -> Self | None:
        """The model as a narrow head, if it is one."""
        layer = book.head
        weight, bias = (None, None) if layer is None else map(layer.trained.get, ("weight", "bias"))
        if layer is None or weight is None or layer.frozen or not book.compiled:
            return None
        outer, inner = layout.shapes[weight]
        if inner > WIDE:
            return None
        ends = np.cumsum([0, *layout.sizes]).tolist()
        places = {name: slice(*ends[at : at + 2]) for at, name in enumerate(layout.shapes)}
        return cls(places[weight], None if bias is None else places[bias], (outer, inner), classes)

    def clipped_sum(self, parameters: Tensor, features: Tensor, targets: Tensor, most: float) -> Tensor:
        """Sum over records of the clipped gradient, in float64: (parameters,).

        A record whose gradient is not finite, or whose class there is none of, adds nothing.

        Args:
            parameters: float32 (parameters,).
            features, targets: as the model takes them.
            most: the norm that a record adds at most; infinite for gradients as they are.
        """
        total = torch.zeros(len(parameters), dtype=torch.float64)
        own, biases = (parameters[self.weight], total[self.weight]), None
        if self.bias is not None:
            biases = parameters[self.bias], total[self.bias]
        table = features.flatten(1)
        cpu_kernels.add_head_sum(table, targets, self.shape, own, biases, most, classes=self.classes)
        return total
