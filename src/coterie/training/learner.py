"""A model and a task, seen as functions of one flat parameter vector: losses, gradients, scores."""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from coterie.data.records import Records, Task
from coterie.models.networks import FusedLstmLayer, with_fused_lstms
from coterie.training import cpu_kernels
from coterie.training.bookkeeping import Bookkeeping
from coterie.training.contributions import LARGEST_PRODUCT
from coterie.training.isolation import (
    MOST_ROUNDED,
    MOST_ROUNDED_OF_ONE,
    Isolation,
    off_by,
    same_gradients,
    same_outputs,
)
from coterie.training.layers.base import UnsupportedLayer
from coterie.training.narrow_head import NarrowHead
from coterie.training.parameters import Layout

log = logging.getLogger(__name__)

WORKING_BYTES = {"cpu": 48 * 2**20, "cuda": 4 * 2**30}
"""Memory that one micro-batch should take beside the model; on a CPU, what caches and allocator like."""
MOST_BYTES = {"cpu": 3 * 2**29, "cuda": 4 * 2**30}
"""Memory that it may take for `FEW_RECORDS` of a large model, which is slow in smaller pieces."""
FEW_RECORDS = 48
"""As many as coins nearly always draw for batches of 32: one that is only just too large takes two pieces."""
LARGEST_MICRO_BATCH = 512


@dataclass(frozen=True)
class Batch:
    """Records on the device where they are used; or persons, a row each, with all their records.

    Args:
        features, targets: by record, or (persons, places, ...).
        present: where rows are persons, which places hold a record: bool (persons, places).
        file: of which the features are a private mapping, from its first byte on, where they are one.
    """

    features: Tensor
    targets: Tensor
    present: Tensor | None = None
    file: Path | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def tensors(self) -> "list[Tensor]":
        """All that it is made of, in the order of its fields."""
        return [part for part in (self.features, self.targets, self.present) if part is not None]

    @property
    def places(self) -> int:
        """Places of a row: as many as a person may have records, or the one of a record."""
        return 1 if self.present is None else self.present.shape[1]

    @property
    def flat(self) -> "Batch":
        """All places as records, one row after the other; empty ones, too."""
        if self.present is None:
            return self
        return Batch(self.features.flatten(0, 1), self.targets.flatten(0, 1))

    @property
    def only_present(self) -> "Batch":
        """The records alone, one after the other: how many there are is as private as they are."""
        return self if self.present is None else self.flat.take(self.present.flatten())

    def take(self, indices: Tensor | slice) -> "Batch":
        if isinstance(indices, slice) or indices.dtype == torch.bool:
            return Batch(*(part[indices] for part in self.tensors))
        # Whole records are copied: half the time of indexing on a CPU.
        return Batch(*(part.index_select(0, indices) for part in self.tensors))

    def means(self, values: Tensor) -> Tensor:
        """Of what was found for every place: of a record its own, of a person the mean of its records'."""
        if self.present is None:
            return values
        own = values.view(*self.present.shape, *values.shape[1:])
        counts = self.present.sum(dim=1).clamp(min=1).view(-1, *(1,) * (own.dim() - 2))
        kept = self.present.view(*self.present.shape, *(1,) * (own.dim() - 2))
        return torch.where(kept, own, 0.0).sum(dim=1) / counts

    def split(self, most: int) -> "Iterator[Batch]":
        """Parts of equal size (but for the last), of at most so many records; their number alone decides."""
        if 0 < len(self) <= most:
            yield self
            return
        size = math.ceil(len(self) / max(1, math.ceil(len(self) / most)))
        for first in range(0, len(self), max(1, size)):
            yield self.take(slice(first, first + size))

    @classmethod
    def of(cls, records: Records, device: torch.device) -> "Batch":
        return cls(*(on_device(array, device) for array in records.arrays.values()))


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of the array in memory that torch aligned; on a processor, one that is mapped stays where it is.

    Matrix products round differently on memory that is aligned differently, and numpy's alignment changes
    from one process to the next: without the copy, a resumed run could differ in the last bit.
    """
    # A mapping begins at a page, always: what lies in it is aligned alike in every process.
    mapped = isinstance(array, np.memmap) and device.type == "cpu"
    return torch.from_numpy(array).to(device, copy=not mapped)


@contextmanager
def precision(*, tf32: bool) -> Iterator[None]:
    """Whether a GPU's matrix units may round the factors of float32 products to ten bits."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32)
    matmul.allow_tf32 = cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@dataclass(frozen=True)
class LearnerShape:
    """What a learner found out about its model, so that another process need not find it out again."""

    fast: bool
    micro_batch: int
    row_batch: int
    bytes_per_record: int
    compiled: bool = False
    mapped: bool = True
    known: bool = True
    coarse: bool = False
    full_precision: bool = False
    hands_on: bool = True


class Learner:
    """What the engine needs of a model: everything takes the parameters as a flat vector."""

    listener: Callable[[Tensor], None] | None = None
    """Is told every noisy step as it is taken: the accounting lets an attacker see all of them, and so do
    audits."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        device: torch.device,
        *,
        fast: bool = True,
        max_memory: int | None = None,
        mapped: bool | None = None,
        full_precision: bool = False,
    ) -> None:
        """Args:
        fast: pass whole batches, and use layer rules where the model allows it. For models that are known
            to keep records apart; any other sees one record at a time, whatever it is made of.
        max_memory: bytes that one micro-batch may take beside the model and the records; one record at a
            time is the least.
        mapped: whether `vmap` takes the model, where that is known.
        full_precision: round no factors of products, though matrix units would be faster with fewer bits.
        """
        self._max_memory, self.known, self.full_precision = max_memory, fast, full_precision
        self.layout, self.task, self.device = Layout.of(model), task, device
        # Evaluation mode throughout: a layer that draws at random (dropout) would not repeat on resume.
        self.model = model.to(device).eval()
        self._alone = Isolation(self.model, self.layout, self.output_losses, task.outputs)
        self.book = self._bookkeeping() if fast else None
        if mapped is not None:
            self._alone.mapped = mapped
        elif self.book is None:
            probe = self.random_batch(9)
            reason = self._alone.why_not_mapped(self.initial(), probe.features, probe.targets)
            self._alone.mapped = reason is None
            if reason is not None:
                log.warning("records go through the model one after the other: %s", reason)
        self.bytes_per_record = 8 * self.layout.size  # a row, and the gradients that it is joined from
        self.row_batch = self.micro_batch = self._affordable(self.bytes_per_record)
        if self.book is not None:
            probe = self.random_batch(1)
            given = (self.initial(), probe.features, probe.targets)
            self.bytes_per_record, positions = self.book.footprint(*given)
            exact = math.isqrt(LARGEST_PRODUCT // positions)
            self.micro_batch = min(self._affordable(self.bytes_per_record), exact, LARGEST_MICRO_BATCH)
            self.row_batch = min(self.row_batch, self.micro_batch)
        self.narrow_head = self._narrow_head()
        self.coarse = self._may_be_coarse()
        """Whether clipped sums on a processor round what layers of many channels read (`Tiles.coarse`)."""

    @cached_property
    def _forward(self) -> nn.Module:
        """The model as a whole batch goes through it; on a processor, LSTMs of ours in one call each."""
        # A GPU's kernels for the layer rules are faster still.
        if not self.known or self.device.type != "cpu":
            return self.model
        probe = self.random_batch(3).features
        try:
            fused = with_fused_lstms(self.model)
            with torch.no_grad():
                same = fused is self.model or same_outputs(fused(probe), self.model(probe))
        except Exception as reason:  # a user's model may raise anything when its layers are replaced
            log.info("LSTMs step by step: %s", " ".join(str(reason).split()))
            return self.model
        return fused if same else self.model

    def precisely(self) -> AbstractContextManager[None]:
        """Within, a GPU rounds no factors of products where an experiment asks for that."""
        return precision(tf32=False) if self.full_precision else nullcontext()

    @property
    def shape(self) -> LearnerShape:
        compiled = self.book is not None and self.book.compiled
        sizes = (self.micro_batch, self.row_batch, self.bytes_per_record)
        found = (compiled, self._alone.mapped, self.known, self.coarse, self.full_precision)
        return LearnerShape(self.book is not None, *sizes, *found, self.book is None or self.book.hands_on)

    @classmethod
    def from_shape(cls, model: nn.Module, task: Task, shape: LearnerShape) -> "Learner":
        """The same learner in another process, on its processor."""
        learner = cls(model, task, torch.device("cpu"), fast=False, mapped=shape.mapped)
        learner.known = shape.known
        if shape.fast:
            learner.book = learner._new_book(compiled=shape.compiled)
            learner.book.hands_on = shape.hands_on
            learner.narrow_head = learner._narrow_head()
        learner.micro_batch, learner.row_batch = shape.micro_batch, shape.row_batch
        learner.bytes_per_record = shape.bytes_per_record
        learner.coarse, learner.full_precision = shape.coarse, shape.full_precision
        return learner

    def fingerprint(self) -> str:
        """Digest of how the model behaves beside its trained parameters: frozen ones, buffers, and its code.

        Code is told apart by what it computes on a public probe at fixed parameters: of both signs, or behind
        the first ReLU nothing might be left to tell it by.
        """
        digest = hashlib.sha256()
        for name, value in sorted(self.model.state_dict().items()):
            if name not in self.layout.shapes:
                digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
        count = math.prod(self.task.shape) * 3
        if self.task.vocabulary is not None:
            features = (torch.arange(count) % self.task.vocabulary).view(3, *self.task.shape)
        else:
            features = torch.linspace(-1.0, 1.0, count).view(3, *self.task.shape)
        fixed = torch.randn(self.layout.size, generator=torch.Generator().manual_seed(self.layout.size))
        parameters = 0.1 * fixed.to(self.device)
        with torch.no_grad():
            digest.update(self.outputs(parameters, features.to(self.device)).cpu().numpy().tobytes())
        return digest.hexdigest()

    def outputs(self, parameters: Tensor, features: Tensor) -> Tensor:
        """Outputs of each record, which no other record can reach."""
        with self.precisely():
            if not self.known:
                return self._alone.outputs(parameters, features)
            outputs: Tensor = functional_call(self._forward, self.layout.split(parameters), (features,))
            return outputs

    def client_losses(self, parameters: Tensor, batch: Batch) -> Tensor:
        """Loss of each record of one client; inside the batch, a user's model may mix them.

        For what is private by client only: there nothing needs to keep a client's own records apart.
        """
        forward = self.outputs if self.known else self._alone.together
        return self.output_losses(forward(parameters, batch.features), batch.targets)

    def gradients(self, parameters: Tensor, batch: Batch) -> Tensor:
        """Gradient of each record's loss, one flat row per record."""
        with self.precisely():
            if self.book is not None:
                return self.book.rows(parameters, batch.features, batch.targets)
            return self._alone.gradients(parameters, batch.features, batch.targets)

    @torch.no_grad()
    def predict(self, parameters: Tensor, features: Tensor) -> Tensor:
        """Outputs without a gradient, by the faster of both twins."""
        # Torch's recurrent layers are fused; the rules go step by step.
        fused = any(isinstance(layer, nn.RNNBase | FusedLstmLayer) for layer in self._forward.modules())
        if self.book is not None and not fused:
            with self.precisely():
                return self.book.outputs(parameters, features)
        return self.outputs(parameters, features)

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Score of each record in [0, 1]: right or wrong, or the bounded squared error of a regression."""
        if self.task.kind == "classification":
            return (outputs.argmax(dim=-1) == targets).to(torch.float64)
        cap = self.task.error_cap
        if cap is None:
            raise ValueError("a regression task needs an error cap to have bounded scores")
        errors = (outputs.squeeze(-1) - targets).double().square()
        return 1.0 - torch.nan_to_num(errors, nan=cap, posinf=cap).clamp(max=cap) / cap

    def output_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Loss of each record, from the model's outputs."""
        if self.task.kind == "classification":
            return functional.cross_entropy(outputs, targets, reduction="none")
        return 0.5 * (outputs.squeeze(-1) - targets).square()

    def output_gradients(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Gradient of the losses' sum at the outputs."""
        if self.task.kind == "classification":
            gradient = torch.softmax(outputs, dim=1)
            return gradient.scatter_add_(
                1, targets[:, None], gradient.new_full((1, 1), -1.0).expand(len(targets), 1)
            )
        return (outputs.squeeze(-1) - targets).view(outputs.shape)

    # --- how gradients are found ----------------------------------------------------------------------

    def _bookkeeping(self) -> Bookkeeping | None:
        """The model's twin of layer rules, if it gives the gradients that single records have."""
        # Not by vmap, which brings torch's compiler: 65 MB, and seconds, that nothing else needs.
        single = Isolation(self.model, self.layout, self.output_losses, self.task.outputs, mapped=False)
        for compiled in (True, False):
            try:
                book = self._new_book(compiled=compiled)
                # Two sizes: a model that keeps some other dimension first cannot pass for both.
                with precision(tf32=False):
                    for probe in map(self.random_batch, (3, 5)):
                        given = (self.initial(), probe.features, probe.targets)
                        if not same_gradients(book.rows(*given), single.gradients(*given)):
                            raise UnsupportedLayer("a parameter is used outside of the layer it belongs to")
                    if compiled and not book.weighs_what_it_adds(*given):
                        raise UnsupportedLayer("a kernel finds shorter gradients than it adds")
            except Exception as reason:  # a user's model may raise anything when its layers are replaced
                text = " ".join(str(reason).split())
                log.info("no layer rules%s: %s", " with kernels" if compiled else "", text)
            else:
                log.info("per-record gradients by layer rules%s", ", compiled" if book.compiled else "")
                return book
        log.warning("per-record gradients by torch.func, several times slower: %s", text)
        return None

    def _narrow_head(self) -> NarrowHead | None:
        """The shorter way that a model of one small layer has on a processor."""
        if self.book is None or self.device.type != "cpu":
            return None
        head = NarrowHead.of(self.book, self.layout, classes=self.task.kind == "classification")
        if head is None:
            return None
        probe = self.random_batch(5)
        given, alone = (self.initial(), probe.features, probe.targets), probe.take(slice(0, 1))
        rows, most = self.book.rows(*given), 2.0**-10
        found = head.clipped_sum(*given, math.inf)
        clipped = head.clipped_sum(given[0], alone.features, alone.targets, most)
        same = same_gradients(found[None].float(), rows.sum(dim=0, keepdim=True))
        if not (same and float(clipped.norm()) <= most * (1.0 + 2.0**-20)):
            log.warning("sums by layer rules: those of one small layer are others")
            return None
        return head

    def _may_be_coarse(self) -> bool:
        """Whether factors of bfloat16 are faster here, and gradients with them those of the model still."""
        book, start = self.book, self.initial()
        possible = book is not None and book.compiled and book.many_channels and self.device.type == "cpu"
        wanted = start.dtype == torch.float32 and not self.full_precision
        if book is None or not (possible and wanted and cpu_kernels.multiplies_bfloat16()):
            return False
        probe = self.random_batch(5)
        given = (start, probe.features, probe.targets)
        for book.hands_on in (True, False):
            try:
                exact, rounded = (book.rows(*given, coarse=coarse) for coarse in (False, True))
                weighed = book.weighs_what_it_adds(*given, coarse=True)
                error, worst = off_by(rounded, exact, self.layout.sizes)
                break
            except Exception as reason:  # torch has no such kernel, or layers that are not ours meet bfloat16
                log.info("bfloat16 does not run here: %s", " ".join(str(reason).split()))
        else:
            log.warning("bfloat16 does not run here, not even within a layer")
            return False
        if not (error < MOST_ROUNDED and worst < MOST_ROUNDED_OF_ONE):
            log.warning("bfloat16 is off by %.1e here, a parameter by %.1e, and not used", error, worst)
            return False
        if not weighed:
            log.warning("bfloat16 is not used: a kernel finds shorter gradients than it adds")
            return False
        log.info("convolutions of many channels read and write bfloat16; gradients are off by %.1e", error)
        return True

    def _new_book(self, *, compiled: bool) -> Bookkeeping:
        return Bookkeeping(
            self.model, self.layout, self.output_losses, self.output_gradients, compiled=compiled
        )

    def _affordable(self, bytes_each: int) -> int:
        most = math.inf if self._max_memory is None else self._max_memory
        liked, allowed = (
            int(min(limits[self.device.type], most)) // bytes_each for limits in (WORKING_BYTES, MOST_BYTES)
        )
        return max(1, min(FEW_RECORDS, allowed), min(LARGEST_MICRO_BATCH, liked))

    def initial(self) -> Tensor:
        """The parameters with which the model came."""
        return torch.cat([p.detach().flatten() for p in self.model.parameters() if p.requires_grad])

    def random_batch(self, records: int) -> Batch:
        """Records of the task's shape that are nobody's."""
        return random_batch(self.task, records, self.device)


def random_batch(task: Task, records: int, device: torch.device | None = None) -> Batch:
    """Records of a task's shape that are nobody's."""
    generator = torch.Generator().manual_seed(records)
    if task.vocabulary is not None:
        features = torch.randint(task.vocabulary, (records, *task.shape), generator=generator)
    else:
        features = torch.rand(records, *task.shape, generator=generator)
    targets = torch.arange(records) % task.classes if task.classes else torch.ones(records)
    return Batch(features.to(device), targets.to(device))
