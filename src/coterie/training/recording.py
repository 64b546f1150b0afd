"""Layers that note what a pass shows them: inputs, and the gradient at their outputs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from coterie.training.contributions import Contribution, Rows
from coterie.training.layers.base import LayerRule, UnsupportedLayer, WayBack, Weights, in_full
from coterie.training.tiles import Tiles

Backward = Callable[[Tensor, bool], Tensor]
"""From the gradient at the outputs to that at the inputs (anything where that is not needed); called once."""


class Notes:
    """What one pass reads and writes: weights and tiles in, inputs and gradients out, by layer.

    Args:
        compiled: whether the kernels of `cpu_kernels.py` may be used.
    """

    def __init__(self, compiled: bool = False) -> None:
        self.compiled, self.hands_on = compiled, True
        self.anchor = torch.zeros((), requires_grad=True)
        self.weights: Mapping[str, Tensor] = {}
        self._tiles: Tiles | None = None
        self.held: dict[str, Weights] = {}
        """Weights by layer, with what rules derived from them."""
        self.uses: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.formed: dict[str, Mapping[str, Contribution]] = {}
        """Gradients that the way back formed itself, from less than inputs and gradients."""
        self.numbers = 0
        """How many numbers were noted and formed, since somebody set it to zero."""

    @contextmanager
    def of_pass(self, weights: Mapping[str, Tensor], tiles: Tiles) -> Iterator[None]:
        """To be entered for the time of one pass."""
        self.weights, self._tiles = weights, tiles
        try:
            yield
        finally:
            self.weights, self._tiles, self.held, self.uses, self.formed = {}, None, {}, {}, {}

    @property
    def tiles(self) -> Tiles:
        assert self._tiles is not None, "a recording layer was called outside of a pass"
        return self._tiles


class RecordingLayer(nn.Module):
    """Stands in a layer's place: same outputs, but from stacked weights, and notes taken.

    Args:
        where: the layer's name in the model.
        parameters: by the name the rule uses, each with its name in the model.
    """

    def __init__(
        self, where: str, parameters: Mapping[str, tuple[str, nn.Parameter]], rule: LayerRule, notes: Notes
    ) -> None:
        super().__init__()
        self.where, self.rule, self.notes = where, rule, notes
        self.trained = {local: name for local, (name, value) in parameters.items() if value.requires_grad}
        self.frozen = {
            local: value.detach()[None] for local, (_, value) in parameters.items() if not value.requires_grad
        }

    def forward(self, inputs: Tensor) -> Tensor:
        self.check(inputs)
        anchor, whole = self.notes.anchor, self.whole(inputs.detach())
        if whole is not None:
            outputs: Tensor = _Whole.apply(anchor, inputs, self, *whole)  # type: ignore[no-untyped-call]
        else:
            inputs = self.rule.before(in_full(inputs))
            outputs = _Record.apply(anchor, inputs, self)  # type: ignore[no-untyped-call]
        return outputs

    def whole(self, inputs: Tensor) -> tuple[Tensor, WayBack] | None:
        """What the rule computes in one piece, if it does, as the next layer is to find it."""
        notes = self.notes
        found = self.rule.whole(inputs, self.weights(), notes.tiles, notes.compiled)
        return found if found is None or notes.hands_on else (in_full(found[0]), found[1])

    def check(self, inputs: Tensor) -> None:
        if len(inputs) != self.notes.tiles.records:
            raise UnsupportedLayer(f"layer {self.where} does not count records in its first dimension")

    def weights(self) -> Weights:
        if self.where in self.notes.held:
            return self.notes.held[self.where]
        weights = {local: self.notes.weights[name] for local, name in self.trained.items()}
        self.notes.held[self.where] = weights
        if self.frozen:
            some = next(iter(weights.values()))
            for name, value in self.frozen.items():
                weights[name] = value.to(some.device).expand(len(some), *value.shape[1:])
        return weights

    def note(self, inputs: Tensor, gradient: Tensor) -> None:
        self.notes.uses.setdefault(self.where, []).append((inputs, gradient))

    def keep(self, formed: Mapping[str, Contribution]) -> None:
        """Gradients that the way back formed of one use, to which those of earlier uses are added."""
        before = self.notes.formed.get(self.where)
        if before is not None:
            formed = {name: Rows(part.rows() + before[name].rows()) for name, part in formed.items()}
        self.notes.formed[self.where] = formed

    def contributions(self) -> dict[str, Contribution]:
        """From the notes of the pass that just ended; a layer that no output depends on adds zeros."""
        notes, tiles, uses = self.notes, self.notes.tiles, self.notes.uses.pop(self.where, [])
        found: Mapping[str, Contribution] | None = notes.formed.pop(self.where, None)
        assert found is None or not uses, f"layer {self.where} formed only some of its gradients"
        if len(uses) == 1:
            found = self.rule.contributions_at_once(*uses[0], tiles, notes.compiled)
        # Numbers that a pass holds at one time: what is kept and formed, and copies in other orders.
        kept = sum(inputs.numel() + gradient.numel() for inputs, gradient in uses)
        if uses and found is None:
            factors = [self.rule.factors(inputs, gradient, tiles) for inputs, gradient in uses]
            joined = (torch.cat(part, dim=1) for part in zip(*factors, strict=True))
            left, right = factors[0] if len(factors) == 1 else joined
            found = self.rule.contributions(left, right, tiles)
            kept += left.numel() + right.numel()
            notes.numbers += kept + 2 * sum(part.numbers for part in found.values())
        else:
            found = found or {
                name: Rows(value.new_zeros(tiles.records, value[0].numel()))
                for name, value in self.weights().items()
                if name in self.trained
            }
            notes.numbers += 3 * (kept + sum(part.numbers for part in found.values()))
        # Squares that came with several parts are those of all of them, under the name of one. Where one is
        # frozen, the others have theirs taken anew: they must not go unclipped under the name of another.
        if not found.keys() <= self.trained.keys():
            found = {
                local: replace(part, squares=None) if isinstance(part, Rows) else part
                for local, part in found.items()
            }
        if notes.compiled and tiles.single:
            found = {
                local: replace(part, compiled=part.gradients.device.type == "cpu")
                if isinstance(part, Rows)
                else part
                for local, part in found.items()
            }
        return {name: found[local] for local, name in self.trained.items()}

    def totals(self) -> dict[str, Tensor]:
        """The gradient of the sum over records, from the notes of a pass that used the layer once."""
        formed = self.notes.formed.pop(self.where, None)
        if formed is not None:
            return {name: formed[local].total() for local, name in self.trained.items()}
        (use,) = self.notes.uses.pop(self.where)
        found = self.rule.totals(*use, self.notes.tiles)
        return {name: found[local] for local, name in self.trained.items()}


class _Record(torch.autograd.Function):
    """A layer whose weights are constants: backward hands on the gradient at the inputs and notes the rest.

    The anchor is a scalar that needs a gradient, so that even the first layer has a backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, inputs: Tensor, layer: RecordingLayer) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(inputs)
        # `.data`: the same numbers without a base, because torch forbids work in place on a function's views.
        return layer.rule.forward(inputs, layer.weights(), layer.notes.tiles).data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None]:
        layer: RecordingLayer = ctx.layer
        (inputs,), (gradient,) = ctx.saved_tensors, gradients
        layer.note(inputs, gradient)
        if not ctx.needs_input_grad[1]:
            return None, None, None
        return None, layer.rule.backward(inputs, gradient, layer.weights(), layer.notes.tiles), None


class _Whole(torch.autograd.Function):
    """A layer that was computed in one piece, whose way back forms its records' gradients itself."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, inputs: Tensor, layer: RecordingLayer, outputs: Tensor, back: WayBack
    ) -> Tensor:
        ctx.layer, ctx.back = layer, back
        return outputs.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None, None, None]:
        gradient, formed = ctx.back(gradients[0], ctx.needs_input_grad[1])
        ctx.back = None
        ctx.layer.keep(formed)
        return None, gradient, None, None, None


def named_parameters(where: str, layer: nn.Module) -> dict[str, tuple[str, nn.Parameter]]:
    """A layer's own parameters by their names in it, each with its name in the model."""
    return {
        name: (f"{where}.{name}" if where else name, value)
        for name, value in layer.named_parameters(recurse=False)
    }


def masked(gradient: Tensor, outputs: Tensor) -> Tensor:
    """The gradient where a ReLU let something through."""
    passed: Tensor = torch.ops.aten.threshold_backward(gradient, outputs, 0)
    return passed


def hooked(layer: nn.Module) -> bool:
    """Whether somebody looks at, or changes, what the layer computes."""
    return any(value for name, value in vars(layer).items() if name.endswith("_hooks"))
