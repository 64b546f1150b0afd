"""What a layer rule is, and which rule a layer has."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from coterie.training.contributions import Contribution
from coterie.training.tiles import Tiles

Weights = dict[str, Tensor]
"""A layer's parameters by their names in the layer, each stacked by client: (clients, *shape). For the time
of one pass, a rule may keep in it, under other names, what it derived from them."""
WayBack = Callable[[Tensor, bool], tuple[Tensor | None, Mapping[str, Contribution]]]
"""From the gradient at the outputs, and whether that at the inputs is needed, to that one, and to what each
record adds to the gradient of each parameter."""


class LayerRule(ABC):
    """How one layer computes, for many clients at once.

    The first dimension of every input and output counts records, in the order of the tiles.
    """

    def before(self, inputs: Tensor) -> Tensor:
        """What happens to the inputs ahead of the parameters; differentiated by torch."""
        return inputs

    def whole(
        self, inputs: Tensor, weights: Weights, tiles: Tiles, compiled: bool
    ) -> tuple[Tensor, WayBack] | None:
        """Outputs and the way back of the layer in one piece (`before` included), where kernels do that.

        Args:
            inputs: may be bfloat16, and the gradient at them then is, too.
            compiled: whether kernels may be those of `cpu_kernels.py`.
        """
        return None

    @abstractmethod
    def forward(self, inputs: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        """The layer's outputs."""

    @abstractmethod
    def backward(self, inputs: Tensor, gradient: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        """The gradient at the inputs, from the gradient at the outputs."""

    @abstractmethod
    def factors(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
        """Inputs and gradient of one use as (records, positions, ...); uses are joined by position."""

    @abstractmethod
    def contributions(self, left: Tensor, right: Tensor, tiles: Tiles) -> Mapping[str, Contribution]:
        """What each record adds to the gradient of each parameter, from the joined factors."""

    def contributions_at_once(
        self, inputs: Tensor, gradient: Tensor, tiles: Tiles, compiled: bool
    ) -> Mapping[str, Contribution] | None:
        """The same from a single use, where a kernel does it without factors; None where there is none.

        Args:
            compiled: whether it may be one of `cpu_kernels.py`.
        """
        return None

    def totals(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> Mapping[str, Tensor]:
        """The ordinary gradient of each parameter: the sum over all records of one client's single use."""
        found = self.contributions(*self.factors(inputs, gradient, tiles), tiles)
        return {name: part.rows().sum(dim=0) for name, part in found.items()}


def in_full(values: Tensor) -> Tensor:
    """Values as they are, but for those that were handed on in bfloat16: in float32."""
    return values.float() if values.dtype == torch.bfloat16 else values


class UnsupportedLayer(Exception):
    """A layer, or a way of using it, that no rule covers; the message says which."""


M = TypeVar("M", bound=Callable[..., LayerRule])
_RULES: dict[type[nn.Module], Callable[..., LayerRule]] = {}


def rule_for(*kinds: type[nn.Module]) -> Callable[[M], M]:
    """Register the rule of layer types (of exactly those: a subclass may compute something else)."""

    def register(make: M) -> M:
        _RULES.update(dict.fromkeys(kinds, make))
        return make

    return register


def find_rule(layer: nn.Module) -> LayerRule:
    """The rule of a layer, or the reason why it has none."""
    make = _RULES.get(type(layer))
    if make is None:
        raise UnsupportedLayer(f"no rule for {type(layer).__name__}")
    return make(layer)
