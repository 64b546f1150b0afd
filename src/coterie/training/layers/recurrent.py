"""LSTMs, as the linear maps that they are made of."""

import torch
from torch import Tensor, nn

from coterie.models.networks import lstm_step
from coterie.training.layers.base import UnsupportedLayer
from coterie.training.layers.simple import LinearRule
from coterie.training.recording import Notes, RecordingLayer, named_parameters


class RecordingLstm(nn.Module):
    """Stands in an LSTM's place: the same function, as a linear map of the inputs and one of the state."""

    def __init__(self, where: str, layer: nn.LSTM, notes: Notes) -> None:
        super().__init__()
        if layer.bidirectional or layer.proj_size or layer.dropout:
            raise UnsupportedLayer("no rule for an LSTM with two directions, projections or dropout")
        self.batch_first = layer.batch_first
        self.width = layer.hidden_size
        named = named_parameters(where, layer)
        rule, names = LinearRule(layer), ("weight", "bias") if layer.bias else ("weight",)

        def maps(kind: str) -> nn.ModuleList:
            ends = (f"{kind}_l{level}" for level in range(layer.num_layers))
            return nn.ModuleList(
                RecordingLayer(
                    f"{where}.{end}", {name: named[f"{name}_{end}"] for name in names}, rule, notes
                )
                for end in ends
            )

        self.input_maps, self.recurrent_maps = maps("ih"), maps("hh")

    def forward(
        self, inputs: Tensor, start: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if not isinstance(inputs, Tensor) or inputs.dim() != 3:
            raise UnsupportedLayer("an LSTM on anything but a batch of sequences of equal length")
        values = inputs if self.batch_first else inputs.transpose(0, 1)
        states, cells = [], []
        levels = zip(self.input_maps, self.recurrent_maps, strict=True)
        for level, (input_map, recurrent_map) in enumerate(levels):
            driven = input_map(values)
            state = cell = values.new_zeros(len(values), self.width)
            if start is not None:
                state, cell = start[0][level], start[1][level]
            steps = []
            for drive in driven.unbind(1):  # whose way back is one copy, not one sum for every step
                state, cell = lstm_step(drive, recurrent_map(state), cell)
                steps.append(state)
            values = torch.stack(steps, dim=1)
            states.append(state)
            cells.append(cell)
        values = values if self.batch_first else values.transpose(0, 1)
        return values, (torch.stack(states), torch.stack(cells))
