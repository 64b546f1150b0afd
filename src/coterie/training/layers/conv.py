"""Convolutions, of one client or of many."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.training import contributions, cpu_kernels, kernels
from coterie.training.contributions import (
    Contribution,
    Recomputed,
    Rows,
    product_contributions,
    rows_of_both,
)
from coterie.training.formed_once import MOST_PIXELS, FormedOnce
from coterie.training.layers.base import LayerRule, UnsupportedLayer, WayBack, Weights, in_full, rule_for
from coterie.training.tiles import Tiles

MANY_CHANNELS = 8
LARGEST_ROW = 2**17
"""Numbers in a record's weight gradient up to which a kernel of ours forms it faster."""
LARGE_PRODUCT = 2**22
"""Multiplications in a record's weight gradient from which a call of its own for it does not matter."""

FEW_POSITIONS = 64
"""Outputs of a channel up to which forming a large gradient once more is cheaper than keeping it."""


@rule_for(nn.Conv1d, nn.Conv2d)
class ConvRule(LayerRule):
    """A convolution: a matrix product over patches of its input.

    Everything is in channels-last order, in which torch's kernels (convolution, pooling) and the copying of
    patches are several times faster on a CPU. A one-dimensional convolution has images of height one.
    """

    def __init__(self, layer: nn.Conv1d | nn.Conv2d) -> None:
        if layer.padding_mode != "zeros":
            raise UnsupportedLayer(f"{type(layer).__name__} with padding_mode={layer.padding_mode!r}")
        self.flat = isinstance(layer, nn.Conv1d)
        self.biased = layer.bias is not None
        self.groups = layer.groups
        self.channels, self.outer = layer.in_channels, layer.out_channels
        sides = (layer.kernel_size, layer.stride, layer.dilation)
        self.kernel, self.stride, self.dilation = (self._pair(pair, 1) for pair in sides)
        self.padding = self._padding(layer)
        self.geometry = kernels.Geometry(self.kernel, self.stride, self.padding, self.dilation)
        self.inner = self.channels * math.prod(self.kernel)
        """Numbers in a patch."""

    def _pair(self, values: tuple[int, ...], filler: int) -> tuple[int, int]:
        return (filler, values[0]) if self.flat else (values[0], values[1])

    def _padding(self, layer: nn.Conv1d | nn.Conv2d) -> tuple[int, int]:
        if layer.padding == "valid":
            return (0, 0)
        if layer.padding == "same":
            total = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
            if any(pixels % 2 for pixels in total):
                raise UnsupportedLayer(f"{type(layer).__name__} with uneven padding='same'")
            return (total[0] // 2, total[1] // 2)
        return self._pair(layer.padding, 0)  # type: ignore[arg-type]

    def whole(
        self, inputs: Tensor, weights: Weights, tiles: Tiles, compiled: bool
    ) -> tuple[Tensor, WayBack] | None:
        if self.groups > 1 or (tiles.bounds is None and not tiles.single):
            return None
        if tiles.single:
            many = kernels.many(self.channels, self.outer)
            return self._rounded(inputs, weights, tiles) if tiles.coarse and many else None
        factors = kernels.factors_of(self.channels, self.outer)
        images, stacked = self.images(inputs).to(factors), self._stacked(weights["weight"])
        bias, forms_rows = weights["bias"] if self.biased else None, self.forms_rows(inputs)
        laid_out = kernels.aligned(stacked.permute(0, 1, 3, 4, 2), factors)
        rounded = kernels.handed_on(self.outer, tiles)
        outputs = kernels.convolve(images, laid_out, bias, tiles, self.geometry, rounded=rounded)

        def back(gradient: Tensor, needed: bool) -> tuple[Tensor | None, Mapping[str, Contribution]]:
            whole = self.images(gradient)
            slopes, at_inputs = whole.to(factors), None
            if needed:
                other, turned = stacked.permute(0, 2, 3, 4, 1), self.geometry.turned_around()
                other, size = kernels.aligned(other, factors), (images.shape[2], images.shape[3])
                there = kernels.convolve(slopes, other, None, tiles, turned, size, rounded=inputs.dtype)
                at_inputs = self.plain(there)
            if forms_rows:
                rows = kernels.form_rows(images, slopes, self.geometry, tiles, biased=self.biased)
                return at_inputs, rows_of_both(Rows(rows[0], (0, 3, 1, 2), rows[2]), rows[1])
            found: dict[str, Contribution] = {"weight": Recomputed(images, slopes, self.geometry, tiles)}
            if self.biased:
                found["bias"] = Rows(whole.sum(dim=(2, 3), dtype=torch.float32))
            return at_inputs, found

        return self.plain(outputs), back

    def _rounded(self, inputs: Tensor, weights: Weights, tiles: Tiles) -> tuple[Tensor, WayBack]:
        """Of one client, on a processor that multiplies bfloat16: torch's kernels read that, and write it."""
        images, own = self.images(inputs).bfloat16(), self._laid_out(weights, torch.bfloat16)
        outputs = self._convolve(images, own, None)
        if self.biased:  # no constant is rounded
            outputs = outputs.float()
            outputs += weights["bias"][0][:, None, None]

        def back(gradient: Tensor, needed: bool) -> tuple[Tensor | None, Mapping[str, Contribution]]:
            slopes, at_inputs = self.images(gradient).bfloat16(), None
            if needed:
                at_inputs = self.plain(self._convolve_back(images, slopes, own).to(inputs.dtype))
            seen, slopes = self.plain(images), self.plain(slopes)
            found = self.contributions_at_once(seen, slopes, tiles, compiled=True)
            if found is None:
                found = self.contributions(*self.factors(seen.float(), slopes.float(), tiles), tiles)
            return at_inputs, found

        return self.plain(outputs), back

    def forward(self, inputs: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        images, bias = self.images(inputs), weights["bias"] if self.biased else None
        if tiles.single:
            own = None if bias is None else bias[0]
            return self.plain(self._convolve(images, self._laid_out(weights), own))
        stacked = tiles.gather(self._stacked(weights["weight"]))
        bias = None if bias is None else tiles.gather(bias)
        if self.groups > 1:
            outputs = [
                self._convolve(part, stacked[tile], None if bias is None else bias[tile])
                for tile, part in enumerate(torch.split(images, tiles.size))
            ]
            return self.plain(torch.cat(outputs))
        flat = self.patches(images, channels_last=True).reshape(tiles.count, -1, self.inner)
        matrix = stacked.permute(0, 3, 4, 2, 1).reshape(tiles.count, self.inner, -1)
        product = flat @ matrix if bias is None else torch.baddbmm(bias[:, None], flat, matrix)
        height, width = self.geometry.output_size(*images.shape[2:])
        return self.plain(product.view(len(images), height, width, -1).permute(0, 3, 1, 2))

    def backward(self, inputs: Tensor, gradient: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        images, gradient = self.images(inputs), self.images(gradient)
        if tiles.single:
            return self.plain(self._convolve_back(images, gradient, self._laid_out(weights)))
        stacked = tiles.gather(self._stacked(weights["weight"]))
        if self.groups > 1:
            parts = zip(
                torch.split(images, tiles.size), torch.split(gradient, tiles.size), stacked, strict=True
            )
            return self.plain(torch.cat([self._convolve_back(*part) for part in parts]))
        flat = gradient.permute(0, 2, 3, 1).reshape(tiles.count, -1, self.outer)
        product = flat @ stacked.permute(0, 1, 3, 4, 2).reshape(tiles.count, self.outer, -1)
        return self.plain(self._fold(product.view(len(images), -1, self.inner), images))

    # --- gradients ------------------------------------------------------------------------------------

    def factors(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
        return self.patches(self.images(inputs), self._by_channel(tiles)), gradient.flatten(2).mT

    def contributions(self, left: Tensor, right: Tensor, tiles: Tiles) -> Mapping[str, Contribution]:
        if self.groups > 1:
            return self._grouped_contributions(left, right)
        if self._by_channel(tiles):
            return product_contributions(left, right, (*self.kernel, self.channels), (0, 3, 1, 2))
        return product_contributions(left, right)

    def _grouped_contributions(self, left: Tensor, right: Tensor) -> Mapping[str, Contribution]:
        """Each group of outputs sees its own channels; such layers are small, so rows are formed."""
        records, positions, _ = left.shape
        grouped = left.view(records, positions, math.prod(self.kernel), self.groups, -1).permute(
            0, 3, 1, 4, 2
        )
        outer = right.view(records, positions, self.groups, -1).transpose(1, 2)
        formed = outer.mT @ grouped.reshape(records, self.groups, positions, -1)
        return {"weight": Rows(formed.flatten(1)), "bias": Rows(right.sum(dim=1))}

    def contributions_at_once(
        self, inputs: Tensor, gradient: Tensor, tiles: Tiles, compiled: bool
    ) -> Mapping[str, Contribution] | None:
        images, gradient = self.images(inputs), self.images(gradient)
        if compiled and tiles.single and self._suits_blocks(images, gradient):
            weight = FormedOnce.of(images, gradient, self.geometry)
            return {"weight": weight, "bias": Rows(in_full(gradient).sum(dim=(2, 3)))}
        if self.groups > 1 or not tiles.single or not self._forms_rows(images):
            return None
        if math.prod(gradient.shape[2:]) * self.inner * self.outer >= LARGE_PRODUCT:
            return {
                "weight": Rows(self._rows_one_by_one(images, gradient), (0, 3, 1, 2)),
                "bias": Rows(in_full(gradient).sum(dim=(2, 3))),
            }
        images, gradient = in_full(images), in_full(gradient)
        if not self._by_channel(tiles):
            patches = self.patches(images, channels_last=False).mT
            right = gradient.permute(0, 2, 3, 1).reshape(len(patches), -1, self.outer)
            formed = (patches @ right).view(-1, self.channels, *self.kernel, self.outer)
            return {"weight": Rows(formed, (3, 0, 1, 2)), "bias": Rows(right.sum(dim=1))}
        right = gradient.flatten(2)
        return {
            "weight": Rows(self._rows_by_line(images, right), (0, 3, 1, 2)),
            "bias": Rows(right.sum(dim=2)),
        }

    def _suits_blocks(self, images: Tensor, gradient: Tensor) -> bool:
        """Whether a kernel forms every record's gradient for the sum, and keeps none."""
        single = gradient.dtype in (torch.float32, torch.bfloat16)
        plain = gradient.device.type == "cpu" and single and self.groups == 1
        positions = math.prod(gradient.shape[2:])
        large = positions <= FEW_POSITIONS and positions * self.inner * self.outer >= LARGE_PRODUCT
        high, wide = (size + 2 * side for size, side in zip(images.shape[2:], self.padding, strict=True))
        few = high * wide <= MOST_PIXELS
        return plain and large and few and cpu_kernels.suits_blocks(self.channels, self.outer)

    def totals(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> Mapping[str, Tensor]:
        images, gradient = self.images(inputs), self.images(gradient)
        shape = (self.outer, self.channels // self.groups, *self.kernel)
        found = self._differentiate(gradient, images, images.new_empty(shape), (False, True, True))
        return {"weight": found[1], "bias": found[2]}

    def forms_rows(self, inputs: Tensor) -> bool:
        """Whether forming a row for every record is cheaper than leaving it a product."""
        return self._forms_rows(self.images(inputs))

    def _forms_rows(self, images: Tensor) -> bool:
        positions = math.prod(self.geometry.output_size(*images.shape[2:]))
        return not contributions.products_are_cheaper(positions, self.inner, self.outer, images.device)

    def _rows_one_by_one(self, images: Tensor, gradient: Tensor) -> Tensor:
        """Every record's gradient by torch's convolution: (records, outer, *kernel, channels).

        It never writes patches down, and on many processors is several times faster than a matrix product.
        """
        weights = channels_last(images.new_empty(self.outer, self.channels, *self.kernel))
        shape = (len(images), self.outer, *self.kernel, self.channels)
        formed = in_full(images[:0]).new_empty(shape)
        for at in range(len(images)):
            own = slice(at, at + 1)
            found = self._differentiate(gradient[own], images[own], weights, (False, True, False))
            formed[at] = found[1].permute(0, 2, 3, 1)
        return formed

    def _rows_by_line(self, images: Tensor, right: Tensor) -> Tensor:
        """Every record's gradient, a line of the kernel at a time: (records, outer, *kernel, channels).

        Patches that are one pixel high serve all lines of the kernel, shifted: a fifth of the memory of whole
        patches for a 5x5 kernel, and memory is what limits a processor here.
        """
        (high, wide), (down, across) = self.padding, self.stride
        height, width = self.geometry.output_size(*images.shape[2:])
        padded = functional.pad(images, (wide, wide, high, high))
        span = self.dilation[1] * (self.kernel[1] - 1) + 1
        windows = padded.unfold(3, span, across)[..., :: self.dilation[1]]
        strips = windows.permute(0, 2, 3, 4, 1).flatten(3).contiguous()
        lines = []
        for line in range(self.kernel[0]):
            first = line * self.dilation[0]
            part = strips[:, first : first + down * (height - 1) + 1 : down]
            lines.append(right @ part.reshape(len(images), height * width, -1))
        formed = torch.stack(lines, dim=2)
        return formed.view(*formed.shape[:3], self.kernel[1], self.channels)

    # --- pieces ---------------------------------------------------------------------------------------

    def images(self, values: Tensor) -> Tensor:
        return channels_last(values.unsqueeze(2) if self.flat else values)

    def plain(self, images: Tensor) -> Tensor:
        return images.squeeze(2) if self.flat else images

    def _stacked(self, weights: Tensor) -> Tensor:
        return weights.unsqueeze(3) if self.flat else weights

    def _laid_out(self, weights: Weights, dtype: torch.dtype | None = None) -> Tensor:
        """Weights of the only client in the order of torch's kernels: copied once, for both ways."""
        weight = self._stacked(weights["weight"])[0]
        name = f"laid out as {dtype or weight.dtype}"
        if name not in weights:
            weights[name] = channels_last(weight.to(dtype or weight.dtype))
        return weights[name]

    def _by_channel(self, tiles: Tiles) -> bool:
        """Whether patches hold their channels last: with few channels, copying rows of pixels is faster."""
        return not tiles.single or self.channels >= MANY_CHANNELS or self.groups > 1

    def _convolve(self, images: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        return functional.conv2d(
            images, channels_last(weights), bias, self.stride, self.padding, self.dilation, self.groups
        )

    def _convolve_back(self, images: Tensor, gradient: Tensor, weights: Tensor) -> Tensor:
        return self._differentiate(gradient, images, channels_last(weights), (True, False, False))[0]

    def _differentiate(
        self, gradient: Tensor, images: Tensor, weights: Tensor, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Torch's gradients at images, weights (whose own values then do not matter) and bias."""
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            gradient,
            images,
            weights,
            (gradient.shape[1],) if wanted[2] else None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            (0, 0),
            self.groups,
            wanted,
        )
        return found

    def patches(self, images: Tensor, channels_last: bool) -> Tensor:
        """Every patch that a kernel sees: (records, positions, kernel x channels)."""
        (high, wide), (down, right) = self.padding, self.stride
        if high or wide:
            images = functional.pad(images, (wide, wide, high, high))
        spans = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        windows = images.unfold(2, spans[0], down).unfold(3, spans[1], right)
        if self.dilation != (1, 1):
            windows = windows[..., :: self.dilation[0], :: self.dilation[1]]
        records, _, height, width = windows.shape[:4]
        if channels_last:
            return windows.permute(0, 2, 3, 4, 5, 1).reshape(records, height * width, -1)
        return windows.permute(0, 1, 4, 5, 2, 3).reshape(records, -1, height * width).mT

    def _fold(self, patches: Tensor, images: Tensor) -> Tensor:
        """The sum, at every pixel of the images, of all patches that contain it."""
        (records, positions, _), channels = patches.shape, images.shape[1]
        by_channel = patches.view(records, positions, math.prod(self.kernel), channels).permute(0, 3, 2, 1)
        flat = by_channel.reshape(records, -1, positions)
        return functional.fold(flat, images.shape[2:], self.kernel, self.dilation, self.padding, self.stride)


def channels_last(images: Tensor) -> Tensor:
    """In channels-last order, with strides that say so even where a single channel leaves them open."""
    if images.shape[1] == 1:
        count, _, height, width = images.shape
        return images.reshape(count, height, width, 1).permute(0, 3, 1, 2)
    return images.contiguous(memory_format=torch.channels_last)
