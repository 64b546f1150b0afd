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
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from coterie.training import cpu_kernels, kernels
from coterie.training.chain import Chain, Flatten, MaxPool, Relu, Stage, flat_sequence, hooked, masked
from coterie.training.contributions import Contribution, Rows
from coterie.training.layers import ConvRule, LayerRule, LinearRule, UnsupportedLayer, Weights, find_rule
from coterie.training.parameters import Layout
from coterie.training.tiles import Tiles

_BYTES_PER_NUMBER = 4
Losses = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets to one loss per record."""


class Bookkeeping:
    """A model's twin that notes what its layers saw."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        losses: Losses,
        gradients: Losses | None = None,
        *,
        compiled: bool = True,
    ) -> None:
        """Raises `UnsupportedLayer` when some layer has no rule.

        Args:
            gradients: of the losses' sum at the outputs, where a formula is known.
            compiled: whether to use the kernels of `cpu_kernels.py` where they apply.
        """
        self.layout = layout
        self._losses = losses
        self._notes = _Notes()
        holder = nn.ModuleDict({"model": copy.deepcopy(model)})  # the model itself may be a layer to replace
        self._layers = list(_record_layers(holder, self._notes))
        _replace_pools(holder, self._notes)
        self._model = holder["model"]
        stages = _stages_of(self._model, compiled and cpu_kernels.available())
        gradients = gradients or partial(_differentiate, losses)
        self._chain = None if stages is None else Chain(stages, gradients)
        self.compiled = any(isinstance(stage, _PooledConvolution) for stage in stages or ())
        missing = layout.shapes.keys() - {name for layer in self._layers for name in layer.trained.values()}
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
            if self._chain is not None and tiles.single and features.device.type == "cpu":
                self._chain.run(features, targets)
            else:
                with torch.enable_grad():
                    losses = self._losses(self._model(features), targets)
                    torch.autograd.grad(losses.sum(), notes.anchor, allow_unused=True)
            found: dict[str, Contribution] = {}
            for layer in self._layers:
                found |= layer.contributions()
            return found
        finally:
            notes.end()

    @property
    def chained(self) -> bool:
        """Whether the model is a plain sequence, for which `total_gradient` needs no graph."""
        return self._chain is not None

    def total_gradient(self, parameters: Tensor, features: Tensor, targets: Tensor) -> Tensor:
        """Gradient of the sum of the losses of one client's records, flat; of a chained model only."""
        assert self._chain is not None, "a model that is no plain sequence needs autograd"
        self._notes.begin(self.layout.split_stacked(parameters[None]), Tiles(1, len(features)))
        try:
            self._chain.run(features, targets)
            found: dict[str, Tensor] = {}
            for layer in self._layers:
                found |= layer.totals()
        finally:
            self._notes.end()
        return torch.cat([found[name].flatten() for name in self.layout.shapes])

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
        self.unfolded: dict[str, tuple[Tensor, Tensor]] = {}
        self.formed: dict[str, dict[str, Rows]] = {}
        self.numbers = 0
        """How many numbers were noted and formed, since somebody set it to zero."""

    def begin(self, weights: Mapping[str, Tensor], tiles: Tiles) -> None:
        self._weights, self._tiles = weights, tiles
        self.uses, self.unfolded, self.formed = {}, {}, {}

    def end(self) -> None:
        self._weights, self._tiles, self.uses, self.unfolded, self.formed = {}, None, {}, {}, {}

    @property
    def tiles(self) -> Tiles:
        assert self._tiles is not None, "a recording layer was called outside of a pass"
        return self._tiles

    def weights(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        return {local: self._weights[name] for local, name in names.items()}


class RecordingLayer(nn.Module):
    """Stands in a layer's place: same outputs, but from stacked weights, and notes taken.

    Args:
        where: the layer's name in the model.
        parameters: by the name the rule uses, each with its name in the model.
    """

    def __init__(
        self, where: str, parameters: Mapping[str, tuple[str, nn.Parameter]], rule: LayerRule, notes: _Notes
    ) -> None:
        super().__init__()
        self.where = where
        self.rule = rule
        self.notes = notes
        self.trained = {local: name for local, (name, value) in parameters.items() if value.requires_grad}
        self._frozen = {
            local: value.detach()[None] for local, (_, value) in parameters.items() if not value.requires_grad
        }

    def forward(self, inputs: Tensor) -> Tensor:
        self.check(inputs)
        outputs: Tensor = _Record.apply(self.notes.anchor, self.rule.before(inputs), self)  # type: ignore[no-untyped-call]
        return outputs

    def check(self, inputs: Tensor) -> None:
        if len(inputs) != self.notes.tiles.records:
            raise UnsupportedLayer(f"layer {self.where} does not count records in its first dimension")

    def weights(self) -> Weights:
        weights = self.notes.weights(self.trained)
        if self._frozen:
            some = next(iter(weights.values()))
            for name, value in self._frozen.items():
                weights[name] = value.to(some.device).expand(len(some), *value.shape[1:])
        return weights

    def note(self, inputs: Tensor, gradient: Tensor) -> None:
        self.notes.uses.setdefault(self.where, []).append((inputs, gradient))

    def contributions(self) -> dict[str, Contribution]:
        """From the notes of the pass that just ended; a layer that no output depends on adds nothing."""
        notes = self.notes
        found: Mapping[str, Contribution]
        if self.where in notes.formed:
            found = notes.formed.pop(self.where)
        elif self.where in notes.unfolded:
            assert isinstance(self.rule, ConvRule)
            patches, gradient = notes.unfolded.pop(self.where)
            found = self.rule.contributions_from_patches(patches, gradient)
            kept = patches.numel() + gradient.numel()
            notes.numbers += 3 * (kept + sum(part.numbers for part in found.values()))
        else:
            uses = notes.uses.pop(self.where, [])
            if not uses:
                return {}
            found = self._contributions(uses)
        return dict(self._own(found))

    def _own(self, found: Mapping[str, Contribution]) -> Iterator[tuple[str, Contribution]]:
        """The parts that are trained, each with a norm that counts for itself.

        Squares that came with several parts are those of all of them, under the name of one. Where one is
        frozen, the others have theirs taken anew: they must not go unclipped under the name of another.
        """
        whole = found.keys() <= self.trained.keys()
        for local, name in self.trained.items():
            part = found[local]
            yield name, part if whole or not isinstance(part, Rows) else replace(part, squares=None)

    def totals(self) -> dict[str, Tensor]:
        """The gradient of the sum over records, from the same notes."""
        found: Mapping[str, Tensor]
        if self.where in self.notes.formed:
            found = {name: rows.total() for name, rows in self.notes.formed.pop(self.where).items()}
        elif self.where in self.notes.unfolded:
            assert isinstance(self.rule, ConvRule)
            found = self.rule.totals_from_patches(*self.notes.unfolded.pop(self.where))
        else:
            uses = self.notes.uses.pop(self.where, [])
            if not uses:
                return {}
            ((inputs, gradient),) = uses  # a chain uses every layer once
            found = self.rule.totals(inputs, gradient, self.notes.tiles)
        return {name: found[local] for local, name in self.trained.items()}

    def _contributions(self, uses: list[tuple[Tensor, Tensor]]) -> Mapping[str, Contribution]:
        tiles = self.notes.tiles
        noted = sum(inputs.numel() + gradient.numel() for inputs, gradient in uses)
        if len(uses) == 1:
            at_once = self.rule.contributions_at_once(*uses[0], tiles)
            if at_once is not None:
                self.notes.numbers += 3 * (noted + sum(part.numbers for part in at_once.values()))
                return at_once
        factors = [self.rule.factors(inputs, gradient, tiles) for inputs, gradient in uses]
        if len(factors) == 1:
            left, right = factors[0]
        else:
            left, right = (torch.cat(part, dim=1) for part in zip(*factors, strict=True))
        found = self.rule.contributions(left, right, tiles)
        formed = sum(part.numbers for part in found.values())
        self.notes.numbers += noted + left.numel() + right.numel() + 2 * formed
        return found


class _Recording(Stage):
    """A recording layer as part of a chain."""

    trained = True

    def __init__(self, layer: RecordingLayer) -> None:
        self._layer = layer
        self._seen: tuple[Tensor, Weights] | None = None

    def forward(self, values: Tensor) -> Tensor:
        layer = self._layer
        layer.check(values)
        weights = layer.rule.laid_out(layer.weights())
        self._seen = values, weights
        return layer.rule.forward(values, weights, layer.notes.tiles)

    def backward(self, gradient: Tensor, *, needed: bool) -> Tensor:
        layer = self._layer
        assert self._seen is not None
        (inputs, weights), self._seen = self._seen, None
        layer.note(inputs, gradient)
        if not needed:
            return gradient
        return layer.rule.backward(inputs, gradient, weights, layer.notes.tiles)


class _FirstConvolution(Stage):
    """A convolution of the records themselves: its patches serve forwards and for its own gradient."""

    trained = True

    def __init__(self, layer: RecordingLayer, rule: ConvRule) -> None:
        self._layer = layer
        self._rule = rule
        self._patches: Tensor | None = None

    def forward(self, values: Tensor) -> Tensor:
        self._layer.check(values)
        self._patches = self._rule.unfolded(values)
        return self._rule.forward_from_patches(self._patches, values, self._layer.weights())

    def backward(self, gradient: Tensor, *, needed: bool) -> Tensor:
        patches, self._patches = self._patches, None
        assert patches is not None
        assert not needed
        self._layer.notes.unfolded[self._layer.where] = patches, gradient
        return gradient


class _PooledConvolution(Stage):
    """A convolution and the max pool after it, whose way back skips what the pool left zero."""

    trained = True

    def __init__(self, layer: RecordingLayer, rule: ConvRule, pool: "PoolingLayer") -> None:
        self._layer = layer
        self._rule = rule
        self._pool = pool
        self._seen: tuple[Tensor, Tensor, Tensor, int] | None = None

    def forward(self, values: Tensor) -> Tensor:
        layer, rule = self._layer, self._rule
        layer.check(values)
        weights, window = layer.weights(), self._pool.window
        columns = rule.geometry.output_size(*values.shape[2:])[1]
        if rule.suits_fused_pool(weights, window):
            pooled, places = rule.forward_pooled(values, weights, window, relu=self._pool.relu)
        else:
            outputs = rule.forward(values, rule.laid_out(weights), layer.notes.tiles)
            pooled, places = torch.ops.aten.max_pool2d_with_indices(outputs, window)
            pooled = pooled.relu_() if self._pool.relu else pooled
        self._seen = values, pooled, places, columns
        layer.notes.numbers += 3 * pooled.numel() * math.prod(window)
        return pooled

    def backward(self, gradient: Tensor, *, needed: bool) -> Tensor:
        layer, rule = self._layer, self._rule
        assert self._seen is not None
        (inputs, pooled, places, columns), self._seen = self._seen, None
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        if self._pool.relu:
            gradient = masked(gradient, pooled)
        if gradient.dtype != torch.float32 or not rule.forms_rows(inputs):  # kernels know nothing else
            whole = rule.put_back(inputs, gradient, places, columns)
            layer.note(inputs, whole)
            return rule.backward(inputs, whole, layer.weights(), layer.notes.tiles) if needed else gradient
        found = rule.contributions_from_places(inputs, gradient, places, columns, self._pool.window)
        layer.notes.formed[layer.where] = found
        layer.notes.numbers += 3 * (inputs.numel() + sum(part.numbers for part in found.values()))
        if not needed:
            return gradient
        return rule.backward_from_places(
            inputs, gradient, places, columns, self._pool.window, layer.weights()
        )


def _differentiate(losses: Losses, outputs: Tensor, targets: Tensor) -> Tensor:
    with torch.enable_grad():
        leaves = outputs.detach().requires_grad_()
        return torch.autograd.grad(losses(leaves, targets).sum(), leaves)[0]


def _stages_of(model: nn.Module, compiled: bool) -> list[Stage] | None:
    """The twin as a chain, if it is a plain sequence of layers that have a stage."""
    layers = [layer for layer in flat_sequence(model) if type(layer) is not nn.Identity or hooked(layer)]
    stages: list[Stage] = []
    while layers:
        layer = layers.pop(0)
        after = layers[0] if layers else None
        if hooked(layer):
            return None
        if isinstance(layer, RecordingLayer) and type(layer.rule).before is LayerRule.before:
            rule = layer.rule
            if not isinstance(rule, ConvRule):
                stages.append(_Recording(layer))
            elif compiled and rule.suits_places and isinstance(after, PoolingLayer):
                stages.append(_PooledConvolution(layer, rule, after))
                layers.pop(0)
            elif rule.suits_patches and not stages:
                stages.append(_FirstConvolution(layer, rule))
            else:
                stages.append(_Recording(layer))
        elif isinstance(layer, PoolingLayer):
            stages.append(MaxPool(layer.window, relu=layer.relu))
        elif type(layer) is nn.ReLU:
            stages.append(Relu())
        elif type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            stages.append(Flatten())
        else:
            return None
    return stages


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


def _record_layers(holder: nn.ModuleDict, notes: _Notes) -> Iterator[RecordingLayer]:
    """Replace every layer that owns trained parameters."""
    seen: dict[int, str] = {}
    for name, layer in list(holder.named_modules(remove_duplicate=False)):
        own = [parameter for parameter in layer.parameters(recurse=False) if parameter.requires_grad]
        if not own:
            continue
        for parameter in own:
            if seen.setdefault(id(parameter), name) != name:
                raise UnsupportedLayer(f"layers {seen[id(parameter)]} and {name} share a parameter")
        _check_untouched(layer)
        where = name.removeprefix("model").removeprefix(".")
        twin: RecordingLayer | RecordingLstm
        if type(layer) is nn.LSTM:
            twin = RecordingLstm(where, layer, notes)
            yield from (*twin.input_maps, *twin.recurrent_maps)
        else:
            twin = RecordingLayer(where, _named(where, layer), find_rule(layer), notes)
            yield twin
        parent, _, child = name.rpartition(".")
        setattr(holder.get_submodule(parent), child, twin)


def _named(where: str, layer: nn.Module) -> dict[str, tuple[str, nn.Parameter]]:
    prefix = f"{where}." if where else ""
    return {name: (prefix + name, value) for name, value in layer.named_parameters(recurse=False)}


class RecordingLstm(nn.Module):
    """Stands in an LSTM's place: the same function, as a linear map of the inputs and one of the state."""

    def __init__(self, where: str, layer: nn.LSTM, notes: _Notes) -> None:
        super().__init__()
        if layer.bidirectional or layer.proj_size or layer.dropout:
            raise UnsupportedLayer("no rule for an LSTM with two directions, projections or dropout")
        self.batch_first = layer.batch_first
        self.width = layer.hidden_size
        named = _named(where, layer)
        rule = LinearRule(biased=layer.bias)

        def maps(kind: str) -> nn.ModuleList:
            names = ("weight", "bias") if layer.bias else ("weight",)
            return nn.ModuleList(
                RecordingLayer(
                    f"{where}.{kind}_l{level}",
                    {name: named[f"{name}_{kind}_l{level}"] for name in names},
                    rule,
                    notes,
                )
                for level in range(layer.num_layers)
            )

        self.input_maps, self.recurrent_maps = maps("ih"), maps("hh")

    def forward(
        self, inputs: Tensor, start: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if not isinstance(inputs, Tensor) or inputs.dim() != 3:
            raise UnsupportedLayer("an LSTM on anything but a batch of sequences of equal length")
        values = inputs if self.batch_first else inputs.transpose(0, 1)
        states, cells = [], []
        for level, (input_map, recurrent_map) in enumerate(
            zip(self.input_maps, self.recurrent_maps, strict=True)
        ):
            driven = input_map(values)
            state = cell = values.new_zeros(len(values), self.width)
            if start is not None:
                state, cell = start[0][level], start[1][level]
            steps = []
            for step in range(values.shape[1]):
                gates = driven[:, step] + recurrent_map(state)
                opened, kept, candidate, shown = gates.chunk(4, dim=1)
                cell = torch.sigmoid(kept) * cell + torch.sigmoid(opened) * torch.tanh(candidate)
                state = torch.sigmoid(shown) * torch.tanh(cell)
                steps.append(state)
            values = torch.stack(steps, dim=1)
            states.append(state)
            cells.append(cell)
        outputs = values if self.batch_first else values.transpose(0, 1)
        return outputs, (torch.stack(states), torch.stack(cells))


class PoolingLayer(nn.Module):
    """Stands in a max pool's place and lets a kernel do its work where that applies.

    Args:
        relu: whether a ReLU that stood before the pool happens here, after it: on a quarter of the numbers,
            and to the same effect, because it keeps the order of the numbers in a window.
    """

    def __init__(self, layer: nn.MaxPool2d, window: tuple[int, int], notes: _Notes, *, relu: bool) -> None:
        super().__init__()
        self.layer = layer
        self.window = window
        self.notes = notes
        self.relu = relu

    def forward(self, images: Tensor) -> Tensor:
        pooled = self._pool(images)
        return torch.relu(pooled) if self.relu else pooled

    def _pool(self, images: Tensor) -> Tensor:
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
        if type(layer) is not nn.MaxPool2d or layer.return_indices or layer.ceil_mode or hooked(layer):
            continue
        window, stride, padding, dilation = (
            (value, value) if isinstance(value, int) else (value[0], value[1])
            for value in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        )
        if stride == window and padding == (0, 0) and dilation == (1, 1) and math.prod(window) < 128:
            parent, _, child = name.rpartition(".")
            owner = holder.get_submodule(parent)
            relu = _take_relu_before(owner, child)
            setattr(owner, child, PoolingLayer(layer, window, notes, relu=relu))


def _take_relu_before(owner: nn.Module, child: str) -> bool:
    """Take out the ReLU that stands right before this layer in a plain sequence, if one does."""
    if type(owner) is not nn.Sequential:
        return False
    names = [name for name, _ in owner.named_children()]
    position = names.index(child)
    before = names[position - 1] if position else None
    if before is None or type(owner[position - 1]) is not nn.ReLU or hooked(owner[position - 1]):
        return False
    setattr(owner, before, nn.Identity())
    return True


def _check_untouched(layer: nn.Module) -> None:
    """Hooks and children change what a layer computes; its rule would not know."""
    if hooked(layer) or any(True for _ in layer.children()):
        raise UnsupportedLayer(f"a {type(layer).__name__} with hooks or parts of its own")
