"""A model as a function of one flat vector of parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a model's trainable parameters, in the order of the flat vector.

    Frozen parameters stay in the model as they were initialised.
    """

    shapes: Mapping[str, torch.Size]

    @classmethod
    def of(cls, model: nn.Module) -> "Layout":
        return cls({name: p.shape for name, p in model.named_parameters() if p.requires_grad})

    @cached_property
    def sizes(self) -> list[int]:
        """Numbers in each parameter."""
        return [shape.numel() for shape in self.shapes.values()]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Views into the vector, by parameter name."""
        return {name: stacked[0] for name, stacked in self.split_stacked(vector[None]).items()}

    def split_stacked(self, stacked: Tensor) -> dict[str, Tensor]:
        """Views into vectors stacked by client, by parameter name: (clients, *shape)."""
        clients = len(stacked)
        pieces = torch.split_with_sizes(stacked, self.sizes, dim=1)
        return {
            name: piece.view(clients, *shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }


def flatten(model: nn.Module) -> NDArray[np.float32]:
    """The model's trainable parameters as one vector."""
    pieces = [p.detach().reshape(-1) for p in model.parameters() if p.requires_grad]
    return torch.cat(pieces).to("cpu", torch.float32).numpy().copy()
