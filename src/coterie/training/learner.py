"""A model and a task, seen as functions of one flat parameter vector: losses, gradients, scores."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from coterie.data.records import Records, Task
from coterie.training.parameters import Layout

GRADIENT_BYTES = 256 * 2**20
"""Most memory that the per-record gradients of one micro-batch may take."""
LARGEST_MICRO_BATCH = 512


@dataclass(frozen=True)
class Batch:
    """Records on the device where they are used."""

    features: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Tensor | slice) -> "Batch":
        return Batch(self.features[indices], self.targets[indices])

    def split(self, size: int) -> "Iterator[Batch]":
        for first in range(0, len(self), size):
            yield self.take(slice(first, first + size))

    @classmethod
    def of(cls, records: Records, device: torch.device) -> "Batch":
        return cls(
            torch.from_numpy(records.features).to(device), torch.from_numpy(records.targets).to(device)
        )


class Learner:
    """What the engine needs of a model: everything takes the parameters as a flat vector."""

    def __init__(self, model: nn.Module, task: Task, device: torch.device) -> None:
        self.layout = Layout.of(model)
        # Evaluation mode throughout: a layer that draws at random (dropout) would not repeat on resume.
        self.model = model.to(device).eval()
        self.task = task
        self.device = device
        self.micro_batch = max(1, min(LARGEST_MICRO_BATCH, GRADIENT_BYTES // (4 * self.layout.size)))
        self._gradients = vmap(grad(self._loss_of_one), in_dims=(None, 0, 0), randomness="error")

    def outputs(self, parameters: Tensor, features: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self.model, self.layout.split(parameters), (features,))
        return outputs

    def losses(self, parameters: Tensor, batch: Batch) -> Tensor:
        """Loss of each record."""
        return self._losses(self.outputs(parameters, batch.features), batch.targets)

    def gradients(self, parameters: Tensor, batch: Batch) -> Tensor:
        """Gradient of each record's loss, one flat row per record."""
        gradients: Tensor = self._gradients(parameters, batch.features, batch.targets)
        return gradients

    def correct(self, parameters: Tensor, batch: Batch) -> Tensor:
        """Score of each record in [0, 1]: right or wrong, or the bounded squared error of a regression."""
        outputs = self.outputs(parameters, batch.features)
        if self.task.kind == "classification":
            return (outputs.argmax(dim=-1) == batch.targets).to(torch.float64)
        cap = self.task.error_cap
        if cap is None:
            raise ValueError("a regression task needs an error cap to have bounded scores")
        errors = (outputs.squeeze(-1) - batch.targets).double().square()
        return 1.0 - torch.nan_to_num(errors, nan=cap, posinf=cap).clamp(max=cap) / cap

    def _loss_of_one(self, parameters: Tensor, features: Tensor, target: Tensor) -> Tensor:
        outputs = self.outputs(parameters, features.unsqueeze(0))
        return self._losses(outputs, target.unsqueeze(0)).squeeze(0)

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.task.kind == "classification":
            return functional.cross_entropy(outputs, targets, reduction="none")
        return 0.5 * (outputs.squeeze(-1) - targets).square()
