"""A model of one dense layer on few inputs, on a processor: a step's sum in a dozen calls.

Tables make such models, and batches of some dozen records: there a step of layer rules takes its time for
calls, not for arithmetic. The gradient of a record is the product of its inputs and of the
gradient at the outputs, so that its norm is known from both norms. The layer rules (`stacked_clipped_sum`)
compute the same, and are the twin of this, in tests and before a learner relies on it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.training.bookkeeping import Bookkeeping
from coterie.training.contributions import WIDE
from coterie.training.parameters import Layout

Floats = NDArray[np.float64]
Scales = Callable[[Tensor, float], Tensor]


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
        if layer is None or weight is None or layer.frozen:
            return None
        outer, inner = layout.shapes[weight]
        if inner > WIDE:
            return None
        ends = np.cumsum([0, *layout.sizes]).tolist()
        places = {name: slice(*ends[at : at + 2]) for at, name in enumerate(layout.shapes)}
        return cls(places[weight], None if bias is None else places[bias], (outer, inner), classes)

    def clipped_sum(
        self, parameters: Tensor, features: Tensor, targets: Tensor, clip: float, scales_of: Scales
    ) -> Tensor:
        """Sum over records of the clipped gradient, in float64: (parameters,).

        Args:
            parameters: float32 (parameters,).
            features, targets: as the model takes them.
            scales_of: from norms in float64 and a clip to what gradients are multiplied by.
        """
        inputs, weight = features.flatten(1), parameters[self.weight].view(self.shape)
        if self.bias is None:
            outputs = inputs @ weight.T
        else:
            outputs = torch.addmm(parameters[self.bias], inputs, weight.T)
        with np.errstate(all="ignore"):  # what is not finite contributes zero
            gradient = self._gradients(outputs.numpy(), targets.numpy())
            squares = self.squared_norms(inputs.numpy(), gradient)
            scales = scales_of(torch.from_numpy(np.sqrt(squares)), clip).numpy()
            gradient = gradient * scales[:, None]
        exact = inputs.double()
        if not squares.max(initial=0.0) < np.inf:  # not a number is the maximum of all it is among
            wrong = ~(squares < np.inf)
            gradient[wrong], exact[torch.from_numpy(wrong)] = 0.0, 0.0
        total = torch.zeros(len(parameters), dtype=torch.float64)
        torch.mm(torch.from_numpy(gradient).T, exact, out=total[self.weight].view(self.shape))
        if self.bias is not None:
            total[self.bias] = torch.from_numpy(gradient.sum(axis=0))
        return total

    def _gradients(self, outputs: NDArray[np.float32], targets: NDArray[Any]) -> Floats:
        """Gradient of each record's loss at its outputs: float32 numbers, in float64."""
        if not self.classes:
            errors: Floats = (outputs[:, 0] - targets).astype(np.float64)
            return errors[:, None]
        outputs = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        outputs /= outputs.sum(axis=1, keepdims=True)
        outputs[np.arange(len(outputs)), targets] -= np.float32(1.0)
        return outputs.astype(np.float64)

    def squared_norms(self, inputs: NDArray[np.float32], gradient: Floats) -> Floats:
        """The squared norm of each record's gradient, in float64, where products of float32 are exact."""
        longer = np.einsum("ni,ni->n", inputs, inputs, dtype=np.float64, casting="unsafe")
        if self.bias is not None:
            longer += 1.0
        squares: Floats = longer * np.einsum("no,no->n", gradient, gradient)
        return squares
