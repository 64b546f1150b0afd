"""Per-record gradients of any model in one backward pass.

A twin of the model is made in which every layer with parameters notes, whenever it is used, its inputs and
the gradient at its outputs. Both together determine what each record adds to the layer's gradient; norms are
known before any sum is formed, so that clipping needs no second pass (Bu et al. 2023). Activations, pooling,
residuals and whatever else has no parameters run as the user wrote them, on one flat batch of the records of
all clients.
"""

import copy
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from coterie.training import cpu_kernels, kernels
from coterie.training.chain import Chain, flat_sequence, steps_of
from coterie.training.contributions import Contribution
from coterie.training.layers.base import UnsupportedLayer, find_rule, in_full
from coterie.training.layers.conv import ConvRule
from coterie.training.layers.pooling import replace_pools
from coterie.training.layers.recurrent import RecordingLstm
from coterie.training.layers.simple import LinearRule
from coterie.training.parameters import Layout
from coterie.training.recording import Notes, RecordingLayer, hooked, named_parameters
from coterie.training.tiles import Tiles

_BYTES_PER_NUMBER = 4
_NEARLY_ONE = 1.0 - 2.0**-20
Losses = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets to one loss per record."""


class Bookkeeping:
    """A model's twin that notes what its layers saw."""

    def __init__(
        self, model: nn.Module, layout: Layout, losses: Losses, gradients: Losses, *, compiled: bool = True
    ) -> None:
        """Raises `UnsupportedLayer` when some layer has no rule.

        Args:
            gradients: of the losses' sum at the outputs.
            compiled: whether to use the kernels of `cpu_kernels.py` where they apply.
        """
        compiled = compiled and cpu_kernels.available()
        self.layout, self._losses, self._notes, self.compiled = layout, losses, Notes(compiled), compiled
        holder = nn.ModuleDict({"model": copy.deepcopy(model)})  # the model itself may be a layer to replace
        self._layers = list(_record_layers(holder, self._notes))
        replace_pools(holder, self._notes)
        self._model = holder["model"]
        steps = steps_of(self._model, compiled)
        self._chain = None if steps is None else Chain(steps, gradients)
        self.chained = steps is not None
        """Whether the model is a plain sequence, for which `total_gradient` needs no graph."""
        missing = layout.shapes.keys() - {name for layer in self._layers for name in layer.trained.values()}
        if missing:
            raise UnsupportedLayer(f"parameter {min(missing)} belongs to no layer that has a rule")
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)

    @property
    def hands_on(self) -> bool:
        """Whether layers hand on what they round as it is; else the next find float32, whatever they are."""
        return self._notes.hands_on

    @hands_on.setter
    def hands_on(self, value: bool) -> None:
        self._notes.hands_on = value

    @property
    def head(self) -> RecordingLayer | None:
        """The only layer of a model that is one dense layer on its flattened records."""
        if not self.chained:
            return None
        layers = [one for one in flat_sequence(self._model) if not isinstance(one, nn.Flatten | nn.Identity)]
        only = layers[0] if len(layers) == 1 else None
        return only if isinstance(only, RecordingLayer) and type(only.rule) is LinearRule else None

    @property
    def many_channels(self) -> bool:
        """Whether images of many channels go from layer to layer."""
        rules = [layer.rule for layer in self._layers if isinstance(layer.rule, ConvRule)]
        return any(rule.groups == 1 and kernels.many(rule.channels, rule.outer) for rule in rules)

    def contributions(
        self, stacked: Tensor, features: Tensor, targets: Tensor, tiles: Tiles
    ) -> dict[str, Contribution]:
        """What every record adds to the gradient of each parameter.

        Args:
            stacked: parameters by client, (clients, parameters); float32 or wider.
            features, targets: the flat batch, in the order of the tiles.
        """
        with self._notes.of_pass(self.layout.split_stacked(stacked), tiles):
            if self._chain is not None and tiles.single and features.device.type == "cpu":
                self._chain.run(features, targets)
            else:
                with torch.enable_grad():
                    losses = self._losses(in_full(self._model(features)), targets)
                    torch.autograd.grad(losses.sum(), self._notes.anchor, allow_unused=True)
            return {name: part for layer in self._layers for name, part in layer.contributions().items()}

    def total_gradient(self, parameters: Tensor, features: Tensor, targets: Tensor) -> Tensor:
        """Gradient of the sum of the losses of one client's records, flat; of a chained model only."""
        assert self._chain is not None, "a model that is no plain sequence needs autograd"
        with self._notes.of_pass(self.layout.split_stacked(parameters[None]), Tiles(1, len(features))):
            self._chain.run(features, targets)
            found = {name: part for layer in self._layers for name, part in layer.totals().items()}
        return torch.cat([found[name].flatten() for name in self.layout.shapes])

    def footprint(self, parameters: Tensor, features: Tensor, targets: Tensor) -> tuple[int, int]:
        """Bytes of memory that one record takes in a pass, and the most positions in one product."""
        self._notes.numbers = 0
        found = self.contributions(parameters[None], features, targets, Tiles(1, len(features)))
        numbers = math.ceil(_BYTES_PER_NUMBER * self._notes.numbers / len(features))
        return numbers, max((part.positions for part in found.values()), default=1)

    @torch.no_grad()
    def outputs(self, parameters: Tensor, features: Tensor) -> Tensor:
        """The model's outputs under one client's parameters, without a gradient."""
        with self._notes.of_pass(self.layout.split_stacked(parameters[None]), Tiles(1, len(features))):
            outputs: Tensor = self._model(features)
            return outputs

    @torch.no_grad()
    def rows(self, parameters: Tensor, features: Tensor, targets: Tensor, *, coarse: bool = False) -> Tensor:
        """Gradient of each record's loss, one flat row per record; `coarse` as in `Tiles`."""
        tiles = Tiles(1, len(features), coarse=coarse)
        found = self.contributions(parameters[None], features, targets, tiles)
        return torch.cat([found[name].rows() for name in self.layout.shapes], dim=1)

    @torch.no_grad()
    def weighs_what_it_adds(
        self, parameters: Tensor, features: Tensor, targets: Tensor, *, coarse: bool = False
    ) -> bool:
        """Whether kernels of ours find norms no shorter than gradients are, and add each by its own scale."""
        tiles = Tiles(1, len(features), coarse=coarse)
        found = self.contributions(parameters[None], features, targets, tiles)
        scales = torch.arange(len(features), dtype=torch.float64)  # the first record is left out
        for part in found.values():
            if part.compiled:
                rows = part.rows().double()
                weighs = part.squared_norms() >= rows.square().sum(dim=1) * _NEARLY_ONE
                scale, total = scales @ rows.abs(), part.scaled_sum(scales, None, tiles)[0]
                adds = (total - scales @ rows).abs() <= scale * (1.0 - _NEARLY_ONE)
                if not (weighs.all() and adds.all()):
                    return False
        return True


def _record_layers(holder: nn.ModuleDict, notes: Notes) -> Iterator[RecordingLayer]:
    """Replace every layer that owns trained parameters."""
    seen: dict[int, str] = {}
    for name, layer in list(holder.named_modules(remove_duplicate=False)):
        own = [parameter for parameter in layer.parameters(recurse=False) if parameter.requires_grad]
        if not own:
            continue
        for parameter in own:
            if seen.setdefault(id(parameter), name) != name:
                raise UnsupportedLayer(f"layers {seen[id(parameter)]} and {name} share a parameter")
        # Hooks and children change what a layer computes; its rule would not know.
        if hooked(layer) or any(True for _ in layer.children()):
            raise UnsupportedLayer(f"a {type(layer).__name__} with hooks or parts of its own")
        where = name.removeprefix("model").removeprefix(".")
        twin: RecordingLayer | RecordingLstm
        if type(layer) is nn.LSTM:
            twin = RecordingLstm(where, layer, notes)
            yield from (*twin.input_maps, *twin.recurrent_maps)
        else:
            twin = RecordingLayer(where, named_parameters(where, layer), find_rule(layer), notes)
            yield twin
        parent, _, child = name.rpartition(".")
        setattr(holder.get_submodule(parent), child, twin)
