"""A network with everything around it: raw values in, logits or values in the label's units out."""

import torch
from torch import Tensor, nn

from coterie.data.columns import encode
from coterie.data.preprocessing import ArrayInputs, Preprocessing, TableInputs
from coterie.data.records import Task
from coterie.models.features import PublicFeatures


class PreprocessedModel(nn.Module):
    """A trained network that takes raw records.

    Args:
        network: maps features to outputs.
        task: what it was trained for.
        preprocessing: what lies before its features and behind its outputs.
        public: features that lie between both, where the network takes any.
    """

    def __init__(
        self,
        network: nn.Module,
        task: Task,
        preprocessing: Preprocessing,
        public: PublicFeatures | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.public = public
        self.encoder = nn.Identity() if public is None else public.module
        self.task, self.preprocessing = task, preprocessing
        inputs = preprocessing.inputs
        self._constants: list[str | None] = []
        for place, by_channel in enumerate(inputs.constants() if isinstance(inputs, ArrayInputs) else ()):
            name = None if by_channel is None else f"step_{place}"
            self._constants.append(name)
            if by_channel is not None and name is not None:
                self.register_buffer(name, torch.from_numpy(by_channel), persistent=False)
        self.eval()

    @property
    def raw_type(self) -> torch.dtype:
        """Of what it takes: float64 rows of a table, int64 tokens, float32 arrays; others are converted."""
        match self.preprocessing.inputs.kind:
            case "table":
                return torch.float64
            case "tokens":
                return torch.int64
        return torch.float32

    def features(self, raw: Tensor) -> Tensor:
        """What the network sees of raw records."""
        made: Tensor = self.encoder(self._scaled(raw))
        return made

    def _scaled(self, raw: Tensor) -> Tensor:
        """Raw records by public constants, as they stand in a federation."""
        inputs, raw = self.preprocessing.inputs, raw.to(self.raw_type)
        if isinstance(inputs, TableInputs):
            encoded: Tensor = encode(raw, inputs.columns, torch)
            return encoded.to(torch.float32)
        if isinstance(inputs, ArrayInputs):
            constants = [None if name is None else getattr(self, name) for name in self._constants]
            scaled: Tensor = inputs.scale(raw, constants)
            return scaled
        return raw

    def forward(self, raw: Tensor) -> Tensor:
        """Logits by class, or one value for each record in the label's units."""
        outputs: Tensor = self.network(self.features(raw))
        return self.answers(outputs)

    def answers(self, outputs: Tensor) -> Tensor:
        """What the network's outputs say."""
        if self.task.kind == "classification":
            return outputs
        values: Tensor = self.preprocessing.label.in_units(outputs.squeeze(-1))
        return values

    def extra_repr(self) -> str:
        inputs, names = self.preprocessing.inputs, self.preprocessing.label.names
        said = f"{len(names)} classes" if names else "a value in the label's units"
        return f"(preprocessing): raw {inputs.kind} of shape {inputs.raw_shape}, to {said}"
