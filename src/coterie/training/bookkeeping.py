"""Per-record gradients of any model in one backward pass.

A twin of the model is made in which every layer with parameters notes, whenever it is used, its inputs and
the gradient at its outputs. Both together determine what each record adds to the layer's gradient; norms are
known before any sum is formed, so that clipping needs no second pass (Bu et al. 2023). Activations, pooling,
residuals and whatever else has no parameters run as the user wrote them, on one flat batch of the records of
all clients.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from coterie.training import kernels
from coterie.training.contributions import Contribution
from coterie.training.layers import LayerRule, UnsupportedLayer, Weights, find_rule
from coterie.training.parameters import Layout
from coterie.training.tiles import Tiles

_BYTES_PER_NUMBER = 4
Losses = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets to one loss per record."""


class Bookkeeping:
    """A model's twin that notes what its layers saw."""

    def __init__(self, model: nn.Module, layout: Layout, losses: Losses) -> None:
        """Raises `UnsupportedLayer` when some layer has no rule."""
        self.layout = layout
        self._losses = losses
        self._notes = _Notes()
        holder = nn.ModuleDict({"model": copy.deepcopy(model)})  # the model itself may be a layer to replace
        self._layers = dict(_record_layers(holder, self._notes))
        _replace_pools(holder, self._notes)
        self._model = holder["model"]
        covered = {f"{prefix}{name}" for prefix, layer in self._layers.items() for name in layer.trained}
        missing = layout.shapes.keys() - covered
        if missing:
            raise UnsupportedLayer(f"parameter {min(missing)} belongs to no layer that has a rule")
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)

    def contributions(
        self, stacked: Tensor, features: Tensor, targets: Tensor, tiles: Tiles
    ) -> dict[str, Contribution]:
        """What every record adds to the gradient of each parameter.

        Args:
            stacked: parameters by client, (clients, parameters); float32 or wider.
            features, targets: the flat batch, in the order of the tiles.
        """
        notes = self._notes
        notes.begin(self.layout.split_stacked(stacked), tiles)
        try:
            with torch.enable_grad():
                losses = self._losses(self._model(features), targets)
                torch.autograd.grad(losses.sum(), notes.anchor, allow_unused=True)
            found: dict[str, Contribution] = {}
            for prefix, layer in self._layers.items():
                for name, contribution in layer.contributions().items():
                    found[f"{prefix}{name}"] = contribution
            return found
        finally:
            notes.end()

    def footprint(self, parameters: Tensor, features: Tensor, targets: Tensor) -> tuple[int, int]:
        """Bytes of memory that one record takes in a pass, and the most positions in one product."""
        records = len(features)
        self._notes.numbers = 0
        found = self.contributions(parameters[None], features, targets, Tiles(1, records))
        positions = max((part.positions for part in found.values()), default=1)
        return math.ceil(_BYTES_PER_NUMBER * self._notes.numbers / records), positions

    @torch.no_grad()
    def outputs(self, parameters: Tensor, features: Tensor) -> Tensor:
        """The model's outputs under one client's parameters, without a gradient."""
        self._notes.begin(self.layout.split_stacked(parameters[None]), Tiles(1, len(features)))
        try:
            outputs: Tensor = self._model(features)
            return outputs
        finally:
            self._notes.end()

    @torch.no_grad()
    def rows(self, parameters: Tensor, features: Tensor, targets: Tensor) -> Tensor:
        """Gradient of each record's loss, one flat row per record."""
        records = len(features)
        found = self.contributions(parameters[None], features, targets, Tiles(1, records))
        zeros = {name: (records, shape.numel()) for name, shape in self.layout.shapes.items()}
        return torch.cat(
            [
                found[name].rows() if name in found else parameters.new_zeros(shape)
                for name, shape in zeros.items()
            ],
            dim=1,
        )


class _Notes:
    """What one pass reads and writes: weights and tiles in, inputs and gradients out."""

    def __init__(self) -> None:
        self.anchor = torch.zeros((), requires_grad=True)
        self._weights: Mapping[str, Tensor] = {}
        self._tiles: Tiles | None = None
        self.uses: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.numbers = 0
        """How many numbers were noted and formed, since somebody set it to zero."""

    def begin(self, weights: Mapping[str, Tensor], tiles: Tiles) -> None:
        self._weights, self._tiles = weights, tiles
        self.uses = {}

    def end(self) -> None:
        self._weights, self._tiles, self.uses = {}, None, {}

    @property
    def tiles(self) -> Tiles:
        assert self._tiles is not None, "a recording layer was called outside of a pass"
        return self._tiles

    def weights(self, prefix: str, names: tuple[str, ...]) -> dict[str, Tensor]:
        return {name: self._weights[prefix + name] for name in names}


class RecordingLayer(nn.Module):
    """Stands in a layer's place: same outputs, but from stacked weights, and notes taken."""

    def __init__(self, prefix: str, layer: nn.Module, rule: LayerRule, notes: _Notes) -> None:
        super().__init__()
        self.prefix = prefix
        self.rule = rule
        self.notes = notes
        parameters = dict(layer.named_parameters(recurse=False))
        self.trained = tuple(name for name, parameter in parameters.items() if parameter.requires_grad)
        self._frozen = {n: p.detach()[None] for n, p in parameters.items() if not p.requires_grad}

    def forward(self, inputs: Tensor) -> Tensor:
        tiles = self.notes.tiles
        if len(inputs) != tiles.records:
            raise UnsupportedLayer(f"layer {self.prefix[:-1]} does not count records in its first dimension")
        outputs: Tensor = _Record.apply(self.notes.anchor, self.rule.before(inputs), self)  # type: ignore[no-untyped-call]
        return outputs

    def weights(self) -> Weights:
        weights = self.notes.weights(self.prefix, self.trained)
        if self._frozen:
            clients = len(next(iter(weights.values())))
            for name, value in self._frozen.items():
                weights[name] = value.to(weights[self.trained[0]].device).expand(clients, *value.shape[1:])
        return weights

    def contributions(self) -> dict[str, Contribution]:
        """From the notes of the pass that just ended; a layer that no output depends on adds nothing."""
        tiles = self.notes.tiles
        uses = self.notes.uses.pop(self.prefix, [])
        if not uses:
            return {}
        if len(uses) == 1:
            at_once = self.rule.contributions_at_once(*uses[0], tiles)
            if at_once is not None:
                formed = sum(part.numbers for part in at_once.values())
                self.notes.numbers += 3 * (sum(part.numel() for part in uses[0]) + formed)
                return {name: at_once[name] for name in self.trained}
        factors = [self.rule.factors(inputs, gradient, tiles) for inputs, gradient in uses]
        if len(factors) == 1:
            left, right = factors[0]
        else:
            left, right = (torch.cat(part, dim=1) for part in zip(*factors, strict=True))
        found = self.rule.contributions(left, right, tiles)
        noted = sum(inputs.numel() + gradient.numel() for inputs, gradient in uses)
        formed = sum(part.numbers for part in found.values())
        self.notes.numbers += noted + left.numel() + right.numel() + 2 * formed
        return {name: found[name] for name in self.trained}


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
        layer.notes.uses.setdefault(layer.prefix, []).append((inputs, gradient))
        if not ctx.needs_input_grad[1]:
            return None, None, None
        return None, layer.rule.backward(inputs, gradient, layer.weights(), layer.notes.tiles), None


def _record_layers(holder: nn.ModuleDict, notes: _Notes) -> Iterator[tuple[str, RecordingLayer]]:
    """Replace every layer that owns trained parameters, in the order of the flat vector."""
    seen: dict[int, str] = {}
    for name, layer in list(holder.named_modules(remove_duplicate=False)):
        own = [parameter for parameter in layer.parameters(recurse=False) if parameter.requires_grad]
        if not own:
            continue
        for parameter in own:
            if seen.setdefault(id(parameter), name) != name:
                raise UnsupportedLayer(f"layers {seen[id(parameter)]} and {name} share a parameter")
        _check_untouched(layer)
        prefix = f"{name}.".removeprefix("model.")
        recording = RecordingLayer(prefix, layer, find_rule(layer), notes)
        parent, _, child = name.rpartition(".")
        setattr(holder.get_submodule(parent), child, recording)
        yield prefix, recording


class PoolingLayer(nn.Module):
    """Stands in a max pool's place and lets a kernel do its work where that applies."""

    def __init__(self, layer: nn.MaxPool2d, window: tuple[int, int], notes: _Notes) -> None:
        super().__init__()
        self.layer = layer
        self.window = window
        self.notes = notes

    def forward(self, images: Tensor) -> Tensor:
        by_channel = images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last)
        if by_channel and self.notes.tiles.bounds is not None:
            outputs: Tensor = kernels.MaxPool.apply(images, self.window)  # type: ignore[no-untyped-call]
            return outputs
        outputs = self.layer(images)
        if by_channel and outputs.requires_grad:
            # A gradient in another order (after a flatten) costs the pool's backward five times the time.
            outputs.register_hook(_in_channels_last_order)  # type: ignore[no-untyped-call]
        return outputs


def _in_channels_last_order(gradient: Tensor) -> Tensor:
    return gradient.contiguous(memory_format=torch.channels_last)


def _replace_pools(holder: nn.ModuleDict, notes: _Notes) -> None:
    """Max pools whose windows neither overlap nor reach over the edge have a kernel."""
    for name, layer in list(holder.named_modules()):
        if type(layer) is not nn.MaxPool2d or layer.return_indices or layer.ceil_mode:
            continue
        window, stride, padding, dilation = (
            (value, value) if isinstance(value, int) else (value[0], value[1])
            for value in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        )
        if stride == window and padding == (0, 0) and dilation == (1, 1) and math.prod(window) < 128:
            parent, _, child = name.rpartition(".")
            setattr(holder.get_submodule(parent), child, PoolingLayer(layer, window, notes))


def _check_untouched(layer: nn.Module) -> None:
    """Hooks and children change what a layer computes; its rule would not know."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
    if hooked or layer._backward_pre_hooks or any(True for _ in layer.children()):
        raise UnsupportedLayer(f"a {type(layer).__name__} with hooks or parts of its own")
