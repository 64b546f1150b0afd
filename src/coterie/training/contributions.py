"""What each record adds to a layer's gradient: its squared norm, and the scaled sum over records.

Where the unit is a person, what is clipped is the sum of its records' gradients: norms of single records say
nothing of it. `Rows` adds the rows up first; for `Products` and `Lookups` a person's records are positions of
one record, as the steps of a sequence are, and all that follows holds of them.

The sum that is released must not move by more than the clip when one record's contribution becomes zero, in
the arithmetic of the machine. That is why norms and sums are float64 here, although activations and
gradients are float32 or coarser (kernels of a GPU add a few numbers in float32 first: `kernels.WeighedRows`
counts what that rounds):

* `Rows` forms every record's gradient once, as float32 numbers. Norm and sum are taken of those very
  numbers, so whatever rounding went into them does not matter.
* `Recomputed` forms them, too, but keeps none: a kernel forms a record's gradient once for its norm and once
  more for the sum. It is one compiled program that does the same operations in the same order on that
  record's own inputs and gradients, so the numbers are the same. What those were rounded to before (bits that
  matrix units keep of their factors) does not matter, as for `Rows`.
* `Products` never forms them: a record's gradient is the product of two factors over L positions, its norm
  comes from Gram matrices and the sum from one matrix product (Li et al. 2022; Bu et al. 2023). In float64
  the products of float32 numbers are exact, and sums of n terms are off by at most n 2^-53 times the sum of
  magnitudes. Factors that cancel over positions could make that large beside the norm, so the norm that
  clips is sqrt(norm^2 + (2^-12 A)^2), where A = sum over positions of |left| |right| bounds the magnitudes:
  a clipped record has A <= 2^12 clip. With T^2 L at most 2^23 for T records (`LARGEST_PRODUCT`), the matrix
  product is off by at most T L 2^-53 T 2^12 clip = 2^-18 clip, with the record and without it: together half
  of the margin of 2^-16 by which the clip is shrunk. Gram matrices are off by far less than (2^-12 A)^2.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from coterie.training import cpu_kernels, kernels
from coterie.training.parameters import Layout
from coterie.training.tiles import Tiles

LARGEST_PRODUCT = 2**23
"""Most records squared times positions in one `Products`: keeps its rounding within the margin."""
_CANCELLATION = 2.0**-24
WIDE, FEW_OUTPUTS = 2**11, 2**6
"""Inputs beyond which, and outputs up to which, a dense layer is a head on features."""


class Contribution(ABC):
    """One layer's parameters (some of them), for all records of a batch.

    Attributes:
        compiled: whether the kernels of `cpu_kernels.py` may take norms and sums.
    """

    compiled: bool = False

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Upper bound on the squared norm of each record's gradient, in float64: (records,)."""

    @abstractmethod
    def scaled_sum(self, scales: Tensor, usable: Tensor | None, tiles: Tiles) -> Tensor:
        """Sum over each tile of scale times gradient, in float64: (tiles, parameters).

        Args:
            scales: float64 (records,), zero where a record must not count.
            usable: bool (records,), false where a gradient may hold infinities, which zero does not cancel;
                None where there are none.
        """

    def add_to(self, sums: Tensor, scales: Tensor, usable: Tensor | None, tiles: Tiles) -> None:
        """Add the same, summed over each client's tiles, to sums in float64: (clients, parameters)."""
        sums += tiles.by_client(self.scaled_sum(scales, usable, tiles), len(sums))

    @abstractmethod
    def rows(self) -> Tensor:
        """Every record's gradient: float32 (records, parameters)."""

    def total(self) -> Tensor:
        """The sum over all records, in float32: (parameters,)."""
        return self.rows().sum(dim=0)

    @abstractmethod
    def averaged(self, copies: int) -> "Contribution":
        """The mean over each run of so many records, which are views of one."""

    @abstractmethod
    def summed(self, present: Tensor) -> "Contribution":
        """The sum over each row of places, (persons, places), that are present: those of one person."""

    @property
    @abstractmethod
    def numbers(self) -> int:
        """How many float32 numbers are kept until scales are known (and once more as float64)."""

    @property
    def positions(self) -> int:
        """How many positions one record has in a product; bounds the records that it may hold."""
        return 1


def _masked(values: Tensor, usable: Tensor | None) -> Tensor:
    if usable is None:
        return values
    return torch.where(usable.view(-1, *(1,) * (values.dim() - 1)), values, values.new_zeros(()))


def _ordered(values: Tensor, shape: Sequence[int], order: tuple[int, ...] | None) -> Tensor:
    """Flat rows, in the parameters' own order."""
    if order is None:
        return values.flatten(1)
    return values.view(-1, *shape).permute(0, *(1 + dim for dim in order)).flatten(1)


def _by_record(views: Tensor, copies: int) -> Tensor:
    """One dimension more: (records, copies, ...)."""
    return views.reshape(len(views) // copies, copies, *views.shape[1:])


@dataclass(frozen=True)
class Rows(Contribution):
    """Gradients formed record by record.

    Args:
        gradients: (records, ...), in any order of the parameters' dimensions.
        order: permutation of the dimensions after the first that puts them in the parameters' own order.
        squares: squared norms in float64, where they came with the gradients.
    """

    gradients: Tensor
    order: tuple[int, ...] | None = None
    squares: Tensor | None = None
    compiled: bool = False

    @cached_property
    def _exact(self) -> Tensor:
        return self.gradients.flatten(1).double()

    @property
    def _kernels_apply(self) -> bool:
        return self.compiled and cpu_kernels.suits_rows(self.gradients.flatten(1))

    def squared_norms(self) -> Tensor:
        if self.squares is not None:
            return self.squares
        if self._kernels_apply:
            return cpu_kernels.squared_norms(self.gradients.flatten(1))
        return torch.square(torch.linalg.vector_norm(self._exact, dim=1))

    def scaled_sum(self, scales: Tensor, usable: Tensor | None, tiles: Tiles) -> Tensor:
        if self._kernels_apply and usable is None and tiles.single:
            return self._ordered(cpu_kernels.scaled_sum(self.gradients.flatten(1), scales)[None])
        flat = _masked(self._exact, usable)
        if tiles.single:
            return self._ordered((scales @ flat)[None])
        return self._ordered((scales[:, None] * flat).view(tiles.count, tiles.size, -1).sum(dim=1))

    def add_to(self, sums: Tensor, scales: Tensor, usable: Tensor | None, tiles: Tiles) -> None:
        if tiles.bounds is None or usable is None or self.order not in (None, (0, 3, 1, 2)):
            return super().add_to(sums, scales, usable, tiles)
        flat, (*_, channels) = self.gradients.flatten(1).contiguous(), self.gradients.shape
        taps = 1 if self.order is None else math.prod(self.gradients.shape[2:-1])
        return kernels.add_by_client(flat, scales, usable, tiles, sums, channels, taps)

    def rows(self) -> Tensor:
        return self._ordered(self.gradients.flatten(1))

    def averaged(self, copies: int) -> "Rows":
        return Rows(_by_record(self.gradients, copies).mean(dim=1), self.order)

    def summed(self, present: Tensor) -> "Rows":
        kept = _masked(self.gradients, present.flatten())
        return Rows(_by_record(kept, present.shape[1]).sum(dim=1), self.order)

    @property
    def numbers(self) -> int:
        return self.gradients.numel()

    def total(self) -> Tensor:
        return self._ordered(self.gradients.sum(dim=0, keepdim=True).flatten(1))[0]

    @property
    def width(self) -> int:
        """Numbers of one record."""
        return math.prod(self.gradients.shape[1:])

    def _ordered(self, flat: Tensor) -> Tensor:
        return _ordered(flat, self.gradients.shape[1:], self.order)


def rows_of_both(weight: Rows, bias: Tensor | None) -> dict[str, Contribution]:
    """Rows of weight and bias, where the squares of both came under the name of the weight."""
    if bias is None or weight.squares is None:
        return {"weight": weight}
    return {"weight": weight, "bias": Rows(bias, squares=torch.zeros_like(weight.squares))}


class _Factored(Contribution):
    """Gradients left as two factors at every position: what was put in, and the gradient at what came out."""

    left: Tensor
    right: Tensor

    @property
    def positions(self) -> int:
        return self.left.shape[1]

    def averaged(self, copies: int) -> Self:
        """Views are more positions of the one record, like the steps of a sequence."""
        left, right = (_by_record(part, copies).flatten(1, 2) for part in (self.left, self.right))
        return replace(self, left=left, right=right / copies)  # type: ignore[type-var]

    def summed(self, present: Tensor) -> Self:
        """A person's records are more positions, too; where there is none, both factors are zero."""
        parts = (_masked(part, present.flatten()) for part in (self.left, self.right))
        left, right = (_by_record(part, present.shape[1]).flatten(1, 2) for part in parts)
        return replace(self, left=left, right=right)  # type: ignore[type-var]

    def _scaled(self, scales: Tensor, usable: Tensor | None, tiles: Tiles) -> Tensor:
        """The right factor in float64, times the scale of each record."""
        if tiles.size**2 * self.positions > LARGEST_PRODUCT:
            raise ValueError(
                f"{tiles.size} records of {self.positions} positions in one product round by too much"
            )
        return _masked(self.right, usable).double() * scales[:, None, None]

    def _squared_norms(self, gram: Tensor, magnitude: Tensor) -> Tensor:
        return gram.sum(dim=(1, 2)).clamp(min=0.0) + _CANCELLATION * magnitude * magnitude


@dataclass(frozen=True)
class Products(_Factored):
    """Gradients left as products: for each record, the sum over positions of right (x) left.

    Args:
        left: (records, positions, in), the layer's inputs.
        right: (records, positions, out), the gradients at its outputs.
        order: as in `Rows`, of dimensions (out, *inner).
        inner: shape into which `in` unfolds.
    """

    left: Tensor
    right: Tensor
    inner: tuple[int, ...] = ()
    order: tuple[int, ...] | None = None

    @cached_property
    def _exact_left(self) -> Tensor:
        """For norms and sum alike: of a wide head, converting what was put in takes as long as either."""
        return self.left.double()

    @property
    def _is_wide_head(self) -> bool:
        few = self.right.shape[2] <= FEW_OUTPUTS and self.positions == 1
        return few and self.left.shape[2] > WIDE and self.left.device.type == "cpu"

    def squared_norms(self) -> Tensor:
        parts = (self._exact_left if self._is_wide_head else self.left, self.right)
        norms = [torch.linalg.vector_norm(part, dim=2, dtype=torch.float64) for part in parts]
        magnitude: Tensor = (norms[0] * norms[1]).sum(dim=1)
        if self.positions == 1:
            return magnitude.square()
        left, right = self.left.double(), self.right.double()
        return self._squared_norms((left @ left.mT) * (right @ right.mT), magnitude)

    def scaled_sum(self, scales: Tensor, usable: Tensor | None, tiles: Tiles) -> Tensor:
        if self._is_wide_head and tiles.single and usable is None:
            weights = self._scaled(scales, usable, tiles)[:, 0]
            # Contiguous factors, and no batch of products: half the time for a few rows and many columns.
            return self._ordered((weights.T.contiguous() @ self._exact_left[:, 0])[None])
        right, left = self._scaled(scales, usable, tiles), _masked(self.left, usable).double()
        right, left = (part.reshape(tiles.count, -1, part.shape[2]) for part in (right, left))
        return self._ordered(right.mT @ left)

    def add_to(self, sums: Tensor, scales: Tensor, usable: Tensor | None, tiles: Tiles) -> None:
        if tiles.bounds is None or usable is None or self.positions > 1 or self.order is not None:
            return super().add_to(sums, scales, usable, tiles)
        left, right = self.left[:, 0].contiguous(), self.right[:, 0].contiguous()
        return kernels.add_products(left, right, scales, usable, tiles, sums)

    def rows(self) -> Tensor:
        return self._ordered(self.right.mT @ self.left)

    @property
    def numbers(self) -> int:
        return self.left.numel() + self.right.numel()

    def _ordered(self, products: Tensor) -> Tensor:
        return _ordered(products, (products.shape[1], *self.inner), self.order)


@dataclass(frozen=True)
class Recomputed(Contribution):
    """Gradients that a kernel forms record by record for their norms, and once more for their sum.

    Args:
        images: what a convolution saw, in channels-last order.
        gradient: at what came out of it, in channels-last order.
        geometry: of the convolution.
        tiles: in which the records lie.
    """

    images: Tensor
    gradient: Tensor
    geometry: kernels.Geometry
    tiles: Tiles

    @cached_property
    def _rows(self) -> kernels.WeighedRows:
        return kernels.WeighedRows(self.images, self.gradient, self.geometry, self.tiles)

    def squared_norms(self) -> Tensor:
        return self._rows.squares()

    def add_to(self, sums: Tensor, scales: Tensor, usable: Tensor | None, tiles: Tiles) -> None:
        usable = torch.ones_like(scales, dtype=torch.bool) if usable is None else usable
        self._rows.add(scales, usable, sums)

    def scaled_sum(self, scales: Tensor, usable: Tensor | None, tiles: Tiles) -> Tensor:
        return Rows(self.rows()).scaled_sum(scales, usable, tiles)

    def rows(self) -> Tensor:
        formed, _, _ = kernels.form_rows(self.images, self.gradient, self.geometry, self.tiles, biased=False)
        return _ordered(formed, formed.shape[1:], (0, 3, 1, 2))

    def averaged(self, copies: int) -> Contribution:
        return Rows(self.rows()).averaged(copies)

    def summed(self, present: Tensor) -> Contribution:
        return Rows(self.rows()).summed(present)

    @property
    def numbers(self) -> int:
        return self.images.numel() + self.gradient.numel()


@dataclass(frozen=True)
class Lookups(_Factored):
    """Gradients of a table of which each record used a few rows.

    Args:
        left: (records, positions), which row each position used.
        right: (records, positions, width), the gradients at what was looked up.
        size: number of rows of the table.
    """

    left: Tensor
    right: Tensor
    size: int

    def squared_norms(self) -> Tensor:
        right = self.right.double()
        same = self.left[:, :, None] == self.left[:, None, :]
        magnitude: Tensor = torch.linalg.vector_norm(right, dim=2).sum(dim=1)
        return self._squared_norms(torch.where(same, right @ right.mT, 0.0), magnitude)

    def scaled_sum(self, scales: Tensor, usable: Tensor | None, tiles: Tiles) -> Tensor:
        return self._added(self._scaled(scales, usable, tiles), tiles.count)

    def rows(self) -> Tensor:
        return self._added(self.right, len(self.right))

    @property
    def numbers(self) -> int:
        return self.right.numel()

    def _added(self, right: Tensor, tables: int) -> Tensor:
        """Add what was looked up to as many tables as there are tiles (or records)."""
        width = right.shape[2]
        table = torch.arange(tables, device=right.device).repeat_interleave(len(right) // tables)
        rows = (self.left + self.size * table[:, None]).reshape(-1)
        total = torch.zeros(tables * self.size, width, dtype=right.dtype, device=right.device)
        total.index_add_(0, rows, right.reshape(-1, width))
        return total.view(tables, -1)


def add_client_sums(
    found: Mapping[str, Contribution],
    layout: Layout,
    scales: Tensor,
    usable: Tensor | None,
    tiles: Tiles,
    sums: Tensor,
) -> Tensor:
    """Add the scaled sums of all parameters over each client's records to (clients, parameters) in float64.

    Returns:
        the sums.
    """
    for name, own in zip(layout.shapes, torch.split(sums, layout.sizes, dim=1), strict=True):
        found[name].add_to(own, scales, usable, tiles)
    return sums


def products_are_cheaper(positions: int, inner: int, outer: int, device: torch.device) -> bool:
    """Whether to leave gradients as products (ghost norms) instead of forming a row for every record.

    In units of one float32 operation: rows cost one product and about thirty bytes of traffic for each of
    their numbers, products cost two Gram matrices and one product in float64, at half speed on a CPU.
    """
    half_speed = 2 if device.type == "cpu" else 1
    rows = inner * outer * (2 * positions + 130)
    return half_speed * 2 * (positions**2 * (inner + outer) + positions * inner * outer) < rows


def product_contributions(
    left: Tensor, right: Tensor, inner: tuple[int, ...] = (), order: tuple[int, ...] | None = None
) -> dict[str, Contribution]:
    """Contributions to weight and bias of a layer that maps left to outputs at every position."""
    weight: Contribution
    if products_are_cheaper(left.shape[1], left.shape[2], right.shape[2], left.device):
        weight = Products(left, right, inner, order)
    else:
        formed = right.mT @ left
        weight = Rows(formed.view(*formed.shape[:2], *inner), order) if order else Rows(formed)
    return {"weight": weight, "bias": Rows(right[:, 0] if right.shape[1] == 1 else right.sum(dim=1))}
