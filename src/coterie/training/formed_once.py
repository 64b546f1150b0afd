"""Gradients of large convolutions on few places, which a processor forms for their sum alone.

A record's gradient of such a layer has millions of numbers, each the sum over a few dozen places. To write it
down and to read it again, for its norm and for the sum, takes longer than all else. So a kernel
(`llvm_rows.py`) forms it block by block in registers, in float32, and adds it up when the scales are known.
They are known from the norm, and that from Gram matrices of what the layer saw and of the gradient at its
outputs, in float64 (as in `contributions.Products`).

What is clipped is then not the number that the norm was taken of, so the norm is a bound on what the kernel
forms, whatever it rounds. Over L places, with u = 2^-24:

* Each number is a sum of L products in float32, by fused operations: it is off by at most
  L u / (1 - L u) times the sum of the products' magnitudes, in whatever order. So the whole gradient is off
  by at most that times A, the sum over places of |patch| |slopes|, in Euclidean norms. Products of bfloat16
  come two at a time, rounded twice at most.
* What is smaller than 2^-126 may be taken for zero, as the instruction for bfloat16 does: factors, whose
  products count with the length of the other factor, and sums, at most L of them a number.
* The squared norm by Gram matrices is off by at most K 2^-53 A^2, where K counts the roundings: numbers of a
  patch and of outputs, and pairs of places.
* Partial sums stay below A. Where A is too large for that, a number might be infinite: so is the norm then,
  and the record does not count.

For gradients that do not cancel between places, A is about sqrt(L) times the norm: the bound exceeds the norm
by 2^-15 of it, for 64 places.

Four scaled gradients (`llvm_rows.TOGETHER`, t) at a time are summed in float32, the scale rounded to it, and
then in float64: with and without a record that is off by (2 t^2 + 1) 2^-24 clip at most, far inside the
margin of 2^-16 by which the clip is shrunk.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from coterie.training import cpu_kernels
from coterie.training.contributions import Contribution, Rows
from coterie.training.kernels import Geometry
from coterie.training.tiles import Tiles

MOST_PIXELS = 2**8
"""Of all views of a record, padding included, up to which their Gram matrix is small beside the gradient."""
_HALF_A_STEP, _SMALLEST = 2.0**-24, 2.0**-126
_FINITE = 2.0**127


@dataclass(frozen=True)
class FormedOnce(Contribution):
    """One convolution's weight, for records of one client on a processor.

    Args:
        images: what the convolution saw, with zeros around and its channels in blocks: (records, views,
            blocks, lines, columns, channels of a block). The gradient of a record is the sum over its views.
        gradient: at what came out of it, (records, views, blocks, lines, columns, outputs of a block); both
            are float32, or both bfloat16.
    """

    images: Tensor
    gradient: Tensor
    geometry: Geometry

    compiled = True

    @classmethod
    def of(cls, images: Tensor, gradient: Tensor, geometry: Geometry) -> "FormedOnce":
        """Of a convolution that saw (records, channels, height, width), one view of each record."""
        seen = cpu_kernels.image_blocks(images, geometry.padding)
        return cls(seen[:, None], cpu_kernels.slope_blocks(gradient)[:, None], geometry)

    def squared_norms(self) -> Tensor:
        products, outputs = self._patch_products(), _pixel_products(self.gradient).flatten(4).flatten(1, 3)
        patches, places = products.flatten(4).flatten(1, 3), outputs.shape[1]
        squares = (patches * outputs).sum(dim=(1, 2)).clamp(min=0.0)
        lengths = [matrix.diagonal(dim1=1, dim2=2).clamp(min=0.0).sqrt() for matrix in (patches, outputs)]
        magnitudes = torch.linalg.vecdot(*lengths, dim=1)
        roundings = math.prod(self._shape) // self._outer + self._outer + places**2
        exact = (squares + roundings * 2.0**-52 * magnitudes.square()).sqrt()
        formed = places * _HALF_A_STEP / (1.0 - places * _HALF_A_STEP) * magnitudes
        numbers = math.prod(self._shape)
        of_patches, of_outputs = (own.sum(dim=1) for own in lengths)
        lost = math.sqrt(self._outer) * of_patches + math.sqrt(numbers / self._outer) * of_outputs
        formed += _SMALLEST * (lost + places * math.sqrt(numbers))
        return torch.where(magnitudes < _FINITE, (exact + formed).square(), math.inf)

    def scaled_sum(self, scales: Tensor, usable: Tensor | None, tiles: Tiles) -> Tensor:
        if not tiles.single:
            return Rows(self.rows()).scaled_sum(scales, usable, tiles)
        sums = torch.zeros(1, math.prod(self._shape), dtype=torch.float64)
        self.add_to(sums, scales, usable, tiles)
        return sums

    def add_to(self, sums: Tensor, scales: Tensor, usable: Tensor | None, tiles: Tiles) -> None:
        if not tiles.single:
            return super().add_to(sums, scales, usable, tiles)
        if usable is not None:  # a scale of zero leaves a record out
            scales = torch.where(usable, scales, 0.0)
        return cpu_kernels.add_row_sums(self.images, self.gradient, scales, self.geometry, sums[0])

    def rows(self) -> Tensor:
        one, formed = (
            torch.ones(1, dtype=torch.float64),
            torch.empty(len(self.images), *self._shape, dtype=torch.float32),
        )
        for at, row in enumerate(formed):
            sums = torch.zeros(row.numel(), dtype=torch.float64)
            own = self.images[at : at + 1], self.gradient[at : at + 1]
            cpu_kernels.add_row_sums(*own, one, self.geometry, sums)
            row.copy_(sums.view(self._shape))
        return formed.flatten(1)

    def averaged(self, copies: int) -> Contribution:
        whole = replace(self, images=self.images.float())
        return whole._joined(copies, self.gradient.float() / copies)

    def summed(self, present: Tensor) -> Contribution:
        there = present.reshape(-1, *(1,) * (self.images.dim() - 1))
        whole = replace(self, images=torch.where(there, self.images, 0.0))
        return whole._joined(present.shape[1], torch.where(there, self.gradient, 0.0))

    def _joined(self, views: int, gradient: Tensor) -> Contribution:
        """Each run of so many records as views of one, whose rows are formed where these are too many."""
        if views * _places(self.images) > MOST_PIXELS:
            rows = replace(self, gradient=gradient).rows()
            return Rows(rows.view(len(rows) // views, views, -1).sum(dim=1))
        images, gradient = (
            part.reshape(len(part) // views, views * part.shape[1], *part.shape[2:])
            for part in (self.images, gradient)
        )
        return replace(self, images=images, gradient=gradient)

    @property
    def numbers(self) -> int:
        """Gram matrices of float64 count twice."""
        squares = sum(_places(part) ** 2 for part in (self.images, self.gradient))
        return self.images.numel() + self.gradient.numel() + 2 * len(self.images) * squares

    @property
    def _outer(self) -> int:
        return self.gradient.shape[2] * self.gradient.shape[5]

    @property
    def _shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return (self._outer, self.images.shape[2] * self.images.shape[5], *self.geometry.kernel)

    def _patch_products(self) -> Tensor:
        """Inner products of every two patches, (records, views, lines, columns, views, lines, columns).

        A patch is a kernel's pixels: the sum over these of inner products of pixels.
        """
        (high, wide), (height, width) = self.geometry.padding, self.images.shape[3:5]
        inside = _pixel_products(self.images[:, :, :, high : height - high, wide : width - wide])
        around = (wide, wide, high, high)
        pixels, (lines, columns) = functional.pad(inside, (*around, 0, 0, *around)), self.gradient.shape[3:5]
        (down, across), (lower, further) = self.geometry.stride, self.geometry.dilation
        total = pixels.new_zeros(())
        for line in range(self.geometry.kernel[0]):
            for column in range(self.geometry.kernel[1]):
                top, left = line * lower, column * further
                rows = slice(top, top + down * (lines - 1) + 1, down)
                places = slice(left, left + across * (columns - 1) + 1, across)
                total = total + pixels[:, :, rows, places, :, rows, places]
        return total


def _places(images: Tensor) -> int:
    """Of all views of a record: (records, views, blocks, lines, columns, channels of a block)."""
    _, views, _, lines, columns, _ = images.shape
    return views * lines * columns


def _pixel_products(images: Tensor) -> Tensor:
    """Inner products in float64 of a record's pixels: (records, views, lines, columns, views, ...).

    Args:
        images: (records, views, blocks, lines, columns, channels of a block).
    """
    records, views, blocks, lines, columns, channels = images.shape
    flat = images.permute(0, 1, 3, 4, 2, 5).reshape(records, -1, blocks * channels).double()
    return (flat @ flat.mT).view(records, views, lines, columns, views, lines, columns)
