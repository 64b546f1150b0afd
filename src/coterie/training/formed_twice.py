"""Gradients of large convolutions on few places, which a processor forms twice and never keeps.

A record's gradient of such a layer has millions of numbers, each the sum over a few dozen places. To write it
down and to read it again, for its norm and for the sum, takes longer than to form it once more from what is
in the nearest caches. The kernels (`llvm_rows.py`) form it block by block in registers: first for the norm,
and, when the scales are known, for the sum. Both run the same instructions in the same order on the same
float32 numbers of that record alone, so that what is clipped is the very gradient that is summed, whatever
rounding went into it; as in `Rows`, norms and sums over records are float64.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.training import cpu_kernels
from coterie.training.contributions import Contribution, Rows
from coterie.training.kernels import Geometry
from coterie.training.tiles import Tiles


@dataclass(frozen=True)
class FormedTwice(Contribution):
    """One convolution's weight, for records of one client on a processor.

    Args:
        images: what the convolution saw, with zeros around and its channels in blocks: (records, views,
            blocks, lines, columns, channels of a block). The gradient of a record is the sum over its views.
        gradient: at what came out of it, (records, views, blocks, lines, columns, outputs of a block).
    """

    images: Tensor
    gradient: Tensor
    geometry: Geometry

    compiled = True

    @classmethod
    def of(cls, images: Tensor, gradient: Tensor, geometry: Geometry) -> "FormedTwice":
        """Of a convolution that saw (records, channels, height, width), one view of each record."""
        seen = cpu_kernels.image_blocks(images, geometry.padding)
        return cls(seen[:, None], cpu_kernels.slope_blocks(gradient)[:, None], geometry)

    def squared_norms(self) -> Tensor:
        return cpu_kernels.row_norms(self.images, self.gradient, self.geometry)

    def scaled_sum(self, scales: Tensor, usable: Tensor | None, tiles: Tiles) -> Tensor:
        if not tiles.single:
            return Rows(self.rows()).scaled_sum(scales, usable, tiles)
        if usable is not None:  # a scale of zero leaves a record out
            scales = torch.where(usable, scales, 0.0)
        total = cpu_kernels.row_sums(self.images, self.gradient, scales, self.geometry)
        return total.permute(0, 3, 1, 2).reshape(1, -1)

    def rows(self) -> Tensor:
        one, formed = torch.ones(1, dtype=torch.float64), []
        for at in range(len(self.images)):
            own = self.images[at : at + 1], self.gradient[at : at + 1]
            formed.append(cpu_kernels.row_sums(*own, one, self.geometry).float())
        channels, outer = (part.shape[2] * part.shape[5] for part in (self.images, self.gradient))
        width = math.prod(self.geometry.kernel) * channels * outer
        if not formed:
            return self.images.new_empty(0, width)
        return torch.stack(formed).permute(0, 1, 4, 2, 3).reshape(-1, width)

    def averaged(self, copies: int) -> "FormedTwice":
        return self._joined(copies, self.gradient / copies)

    def summed(self, present: Tensor) -> "FormedTwice":
        there = present.reshape(-1, *(1,) * (self.images.dim() - 1))
        whole = replace(self, images=torch.where(there, self.images, 0.0))
        return whole._joined(present.shape[1], torch.where(there, self.gradient, 0.0))

    def _joined(self, views: int, gradient: Tensor) -> "FormedTwice":
        """Each run of so many records as views of one."""
        images, gradient = (
            part.reshape(len(part) // views, views * part.shape[1], *part.shape[2:])
            for part in (self.images, gradient)
        )
        return replace(self, images=images, gradient=gradient)

    @property
    def numbers(self) -> int:
        return self.images.numel() + self.gradient.numel()
