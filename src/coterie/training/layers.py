"""One rule per kind of layer: its output from stacked weights, and what each record adds to its gradient.

A rule is all that a new kind of layer needs, registered under the layer's type with `@rule_for`. Layers
without parameters need none; they run as they are.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.training import kernels
from coterie.training.contributions import Contribution, Lookups, Products, Rows
from coterie.training.cpu_kernels import PooledConvolution, SparseConvolution
from coterie.training.tiles import Tiles

Weights = Mapping[str, Tensor]
"""A layer's parameters by their names in the layer, each stacked by client: (clients, *shape)."""


class LayerRule(ABC):
    """How one layer computes, for many clients at once.

    The first dimension of every input and output counts records, in the order of the tiles.
    """

    def before(self, inputs: Tensor) -> Tensor:
        """What happens to the inputs ahead of the parameters; differentiated by torch."""
        return inputs

    def laid_out(self, weights: Weights) -> Weights:
        """One client's weights as `forward` and `backward` like them best, arranged once for both."""
        return weights

    @abstractmethod
    def forward(self, inputs: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        """The layer's outputs."""

    @abstractmethod
    def backward(self, inputs: Tensor, gradient: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        """The gradient at the inputs, from the gradient at the outputs."""

    @abstractmethod
    def factors(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
        """Inputs and gradient of one use as (records, positions, ...); uses are joined by position."""

    @abstractmethod
    def contributions(self, left: Tensor, right: Tensor, tiles: Tiles) -> Mapping[str, Contribution]:
        """What each record adds to the gradient of each parameter, from the joined factors."""

    def contributions_at_once(
        self, inputs: Tensor, gradient: Tensor, tiles: Tiles
    ) -> Mapping[str, Contribution] | None:
        """The same from a single use, where a kernel does it without factors; None where there is none."""
        return None

    def totals(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> Mapping[str, Tensor]:
        """The ordinary gradient of each parameter: the sum over all records of one client's single use."""
        found = self.contributions(*self.factors(inputs, gradient, tiles), tiles)
        return {name: part.rows().sum(dim=0) for name, part in found.items()}


class UnsupportedLayer(Exception):
    """A layer, or a way of using it, that no rule covers; the message says which."""


M = TypeVar("M", bound=Callable[..., LayerRule])
_RULES: dict[type[nn.Module], Callable[..., LayerRule]] = {}


def rule_for(*kinds: type[nn.Module]) -> Callable[[M], M]:
    """Register the rule of layer types (of exactly those: a subclass may compute something else)."""

    def register(make: M) -> M:
        for kind in kinds:
            _RULES[kind] = make
        return make

    return register


def find_rule(layer: nn.Module) -> LayerRule:
    """The rule of a layer, or the reason why it has none."""
    make = _RULES.get(type(layer))
    if make is None:
        raise UnsupportedLayer(f"no rule for {type(layer).__name__}")
    return make(layer)


# --- layers that are matrix products ----------------------------------------------------------------


def products_are_cheaper(positions: int, inner: int, outer: int, device: torch.device) -> bool:
    """Whether to leave gradients as products (ghost norms) instead of forming a row for every record.

    In units of one float32 operation: rows cost one product and about thirty bytes of traffic for each of
    their numbers, products cost two Gram matrices and one product in float64, at half speed on a CPU.
    """
    half_speed = 2 if device.type == "cpu" else 1
    rows = inner * outer * (2 * positions + 130)
    products = half_speed * 2 * (positions**2 * (inner + outer) + positions * inner * outer)
    return products < rows


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


class LinearRule(LayerRule):
    """A dense layer, on vectors or at every position of a sequence."""

    def __init__(self, *, biased: bool) -> None:
        self.biased = biased

    def forward(self, inputs: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        if tiles.single:
            return functional.linear(
                inputs, weights["weight"][0], weights["bias"][0] if self.biased else None
            )
        flat = inputs.reshape(tiles.count, -1, inputs.shape[-1])
        matrix = tiles.gather(weights["weight"]).mT
        if self.biased:
            outputs = torch.baddbmm(tiles.gather(weights["bias"])[:, None], flat, matrix)
        else:
            outputs = flat @ matrix
        return outputs.view(*inputs.shape[:-1], -1)

    def backward(self, inputs: Tensor, gradient: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        if tiles.single:
            return gradient @ weights["weight"][0]
        flat = gradient.reshape(tiles.count, -1, gradient.shape[-1])
        return (flat @ tiles.gather(weights["weight"])).view(*gradient.shape[:-1], -1)

    def factors(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
        return (
            inputs.reshape(len(inputs), -1, inputs.shape[-1]),
            gradient.reshape(len(gradient), -1, gradient.shape[-1]),
        )

    def contributions(self, left: Tensor, right: Tensor, tiles: Tiles) -> Mapping[str, Contribution]:
        return product_contributions(left, right)

    def totals(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> Mapping[str, Tensor]:
        flat = gradient.reshape(-1, gradient.shape[-1])
        return {"weight": flat.mT @ inputs.reshape(len(flat), -1), "bias": flat.sum(dim=0)}


@rule_for(nn.Linear)
def linear_rule(layer: nn.Linear) -> LayerRule:
    """A weight for every pair of an input and an output."""
    return LinearRule(biased=layer.bias is not None)


_MANY_CHANNELS = 8
_BLOCK = 16
_LARGEST_GROUP = 2**17


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
        self.kernel = self._pair(layer.kernel_size, 1)
        self.stride = self._pair(layer.stride, 1)
        self.dilation = self._pair(layer.dilation, 1)
        self.padding = self._padding(layer)
        self.geometry = kernels.Geometry(self.kernel, self.stride, self.padding, self.dilation)

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

    def laid_out(self, weights: Weights) -> Weights:
        arranged = _channels_last(self._stacked(weights["weight"])[0])
        return {**weights, "weight": (arranged.squeeze(2) if self.flat else arranged)[None]}

    def forward(self, inputs: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        images = self._images(inputs)
        stacked = self._stacked(weights["weight"])
        bias = weights["bias"] if self.biased else None
        if tiles.single:
            return self._plain(self._convolve(images, stacked[0], None if bias is None else bias[0]))
        if self._fused(tiles):
            laid_out = stacked.permute(0, 1, 3, 4, 2).contiguous()
            own_bias = None if bias is None else bias.contiguous()
            return self._plain(kernels.convolve(images, laid_out, own_bias, tiles, self.geometry))
        stacked = tiles.gather(stacked)
        bias = None if bias is None else tiles.gather(bias)
        if self.groups > 1:
            outputs = [
                self._convolve(part, stacked[tile], None if bias is None else bias[tile])
                for tile, part in enumerate(torch.split(images, tiles.size))
            ]
            return self._plain(torch.cat(outputs))
        patches = self._patches(images, channels_last=True)
        flat = patches.reshape(tiles.count, -1, patches.shape[2])
        matrix = stacked.permute(0, 3, 4, 2, 1).reshape(tiles.count, patches.shape[2], -1)
        product = flat @ matrix if bias is None else torch.baddbmm(bias[:, None], flat, matrix)
        height, width = self.geometry.output_size(*images.shape[2:])
        return self._plain(product.view(len(images), height, width, -1).permute(0, 3, 1, 2))

    def backward(self, inputs: Tensor, gradient: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        images, gradient = self._images(inputs), self._images(gradient)
        stacked = self._stacked(weights["weight"])
        if tiles.single:
            return self._plain(self._convolve_back(images, gradient, stacked[0]))
        if self._fused(tiles) and self.stride == (1, 1):
            turned = stacked.flip(3, 4).permute(0, 2, 3, 4, 1).contiguous()
            return self._plain(kernels.convolve(gradient, turned, None, tiles, self.geometry.turned_around()))
        stacked = tiles.gather(stacked)
        if self.groups > 1:
            parts = zip(
                torch.split(images, tiles.size), torch.split(gradient, tiles.size), stacked, strict=True
            )
            return self._plain(torch.cat([self._convolve_back(*part) for part in parts]))
        outer = gradient.shape[1]
        flat = gradient.permute(0, 2, 3, 1).reshape(tiles.count, -1, outer)
        product = flat @ stacked.permute(0, 1, 3, 4, 2).reshape(tiles.count, outer, -1)
        return self._plain(self._fold(product.view(len(images), -1, product.shape[2]), images))

    def contributions_at_once(
        self, inputs: Tensor, gradient: Tensor, tiles: Tiles
    ) -> Mapping[str, Contribution] | None:
        images, gradient = self._images(inputs), self._images(gradient)
        positions, outer = math.prod(gradient.shape[2:]), gradient.shape[1]
        inner = self.channels * math.prod(self.kernel)
        if self.groups > 1 or products_are_cheaper(positions, inner, outer, images.device):
            return None
        if self._fused(tiles):
            formed, bias_rows, squares = kernels.form_rows(
                images, gradient, self.geometry, biased=self.biased
            )
            weight = Rows(formed, (0, 3, 1, 2), squares)
            if bias_rows is None:
                return {"weight": weight}
            counted = torch.zeros_like(squares)  # the squares are those of both
            return {"weight": weight, "bias": Rows(bias_rows, squares=counted)}
        if not tiles.single:
            return None
        if not self._by_channel(tiles):
            return self.contributions_from_patches(self.unfolded(images), gradient)
        if self._suits_groups(outer):
            formed, planes = self._rows_by_group(images, gradient)
            return {"weight": Rows(formed), "bias": Rows(planes.sum(dim=2))}
        right = gradient.flatten(2)
        weight = Rows(self._rows_by_line(images, right), (0, 3, 1, 2))
        return {"weight": weight, "bias": Rows(right.sum(dim=2))}

    def totals(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> Mapping[str, Tensor]:
        images, gradient = self._images(inputs), self._images(gradient)
        outer = gradient.shape[1]
        _, weight, bias = torch.ops.aten.convolution_backward(
            gradient,
            images,
            images.new_empty(outer, self.channels // self.groups, *self.kernel),  # its values do not matter
            (outer,),
            self.stride,
            self.padding,
            self.dilation,
            False,
            (0, 0),
            self.groups,
            (False, True, True),
        )
        return {"weight": weight, "bias": bias}

    # A convolution of few channels may keep its patches from the way forwards for its own gradient.

    @property
    def suits_patches(self) -> bool:
        """Whether products with patches are as fast as a convolution: where channels are few."""
        return self.groups == 1 and self.channels < _MANY_CHANNELS

    def unfolded(self, inputs: Tensor) -> Tensor:
        """Every patch that a kernel sees, in lines of pixels: (records, channels x kernel, positions)."""
        return self._patches(self._images(inputs), channels_last=False).mT

    def forward_from_patches(self, patches: Tensor, inputs: Tensor, weights: Weights) -> Tensor:
        """One client's outputs, from the patches of its inputs."""
        records = len(patches)
        matrix = weights["weight"][0].flatten(1).mT.expand(records, -1, -1)
        if self.biased:
            product = torch.baddbmm(weights["bias"][0], patches.mT, matrix)
        else:
            product = torch.bmm(patches.mT, matrix)
        height, width = self.geometry.output_size(*self._images(inputs).shape[2:])
        return self._plain(product.view(records, height, width, -1).permute(0, 3, 1, 2))

    def contributions_from_patches(self, patches: Tensor, gradient: Tensor) -> Mapping[str, Contribution]:
        """What each record adds to the gradients, from the patches of the inputs."""
        gradient = self._images(gradient)
        outer = gradient.shape[1]
        right = gradient.permute(0, 2, 3, 1).reshape(len(patches), -1, outer)
        if products_are_cheaper(patches.shape[2], patches.shape[1], outer, patches.device):
            return product_contributions(patches.mT, right)
        formed = (patches @ right).view(-1, self.channels, *self.kernel, outer)
        return {"weight": Rows(formed, (3, 0, 1, 2)), "bias": Rows(right.sum(dim=1))}

    def totals_from_patches(self, patches: Tensor, gradient: Tensor) -> Mapping[str, Tensor]:
        """The ordinary gradients, from the patches of the inputs."""
        gradient = self._images(gradient)
        right = gradient.permute(0, 2, 3, 1).reshape(len(patches), -1, gradient.shape[1])
        return {"weight": (patches @ right).sum(dim=0).mT, "bias": right.sum(dim=(0, 1))}

    # Behind a max pool, a gradient is zero but at the places that the pool chose.

    @property
    def suits_places(self) -> bool:
        """Whether a kernel goes back from the places that a pool chose: a row of weights is small."""
        numbers = self.channels * self.outer * math.prod(self.kernel)
        plain = not self.flat and self.groups == 1 and self.stride == (1, 1) and self.dilation == (1, 1)
        return plain and numbers <= _LARGEST_GROUP

    def forms_rows(self, inputs: Tensor) -> bool:
        """Whether forming a row for every record is cheaper than leaving it a product."""
        positions = math.prod(self.geometry.output_size(*inputs.shape[2:]))
        inner = self.channels * math.prod(self.kernel)
        return not products_are_cheaper(positions, inner, self.outer, inputs.device)

    def suits_fused_pool(self, weights: Weights, window: tuple[int, int]) -> bool:
        """Whether a kernel convolves and pools at once: where channels are few."""
        weight = weights["weight"]
        fits = PooledConvolution.suits(self.kernel, self.channels, self.outer, window)
        return self.channels < _MANY_CHANNELS and fits and weight.dtype == torch.float32

    def forward_pooled(
        self, inputs: Tensor, weights: Weights, window: tuple[int, int], *, relu: bool
    ) -> tuple[Tensor, Tensor]:
        """One client's outputs after a max pool, and the place of each within the outputs of its image."""
        weight, bias = weights["weight"][0], weights["bias"][0] if self.biased else None
        size = (inputs.shape[2], inputs.shape[3])
        kernel = PooledConvolution(
            self.kernel, self.channels, len(weight), self.padding, window, size, relu=relu
        )
        (images,) = _by_pixel(self._images(inputs))
        pooled, places = kernel.run(images, weight, bias)
        return pooled.permute(0, 3, 1, 2), places.permute(0, 3, 1, 2)

    def contributions_from_places(
        self, inputs: Tensor, gradient: Tensor, places: Tensor, columns: int, window: tuple[int, int]
    ) -> dict[str, Rows]:
        """What each record adds to the gradients.

        Args:
            gradient: at the pooled outputs.
            places: of the outputs that were chosen, within their image.
            columns: of the outputs.
            window: of the pool.
        """
        kernel = SparseConvolution(self.kernel, self.channels, columns, self.padding, window)
        by_pixel = _by_pixel(self._images(inputs), gradient, places)
        weight = Rows(kernel.rows(*by_pixel), (0, 3, 1, 2), compiled=True)
        return {"weight": weight, "bias": Rows(gradient.sum(dim=(2, 3)))}

    def backward_from_places(
        self,
        inputs: Tensor,
        gradient: Tensor,
        places: Tensor,
        columns: int,
        window: tuple[int, int],
        weights: Weights,
    ) -> Tensor:
        """The gradient at the inputs; arguments as before, and one client's weights."""
        kernel = SparseConvolution(self.kernel, self.channels, columns, self.padding, window)
        weight = weights["weight"][0]
        if not kernel.goes_back(len(weight)):
            whole = self.put_back(inputs, gradient, places, columns)
            return self._convolve_back(self._images(inputs), whole, weight)
        images, by_pixel, where, taps = _by_pixel(self._images(inputs), gradient, places, weight)
        return kernel.back(images, by_pixel, where, taps).permute(0, 3, 1, 2)

    def put_back(self, inputs: Tensor, gradient: Tensor, places: Tensor, columns: int) -> Tensor:
        """The gradient at all outputs, zero where the pool chose another."""
        rows = inputs.shape[2] + 2 * self.padding[0] - self.kernel[0] + 1
        whole = gradient.new_zeros(*gradient.shape[:2], rows * columns)
        whole.scatter_(2, places.flatten(2), gradient.flatten(2))
        return _channels_last(whole.view(*gradient.shape[:2], rows, columns))

    # Many channels.

    def _suits_groups(self, outer: int) -> bool:
        """Whether torch's convolution by groups is the fastest: whole blocks of channels, small gradients."""
        numbers = self.channels * outer * math.prod(self.kernel)
        whole = self.channels % _BLOCK == 0 and outer % _BLOCK == 0
        return whole and self.stride == (1, 1) and self.kernel != (1, 1) and numbers <= _LARGEST_GROUP

    def _rows_by_group(self, images: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Every record's gradient, as that of one image's convolution in which each record is a group.

        Returns rows, (records, parameters), and the planes of the gradient, (records, outer, positions).
        """
        records, outer = gradient.shape[:2]
        planes = gradient.contiguous()
        formed: Tensor = torch.ops.aten.convolution_backward(
            planes.view(1, records * outer, *gradient.shape[2:]),
            images.contiguous().view(1, -1, *images.shape[2:]),
            images.new_empty(records * outer, self.channels, *self.kernel),  # its values do not matter
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            (0, 0),
            records,
            (False, True, False),
        )[1]
        return formed.view(records, -1), planes.flatten(2)

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

    def factors(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
        patches = self._patches(self._images(inputs), self._by_channel(tiles))
        return patches, gradient.flatten(2).mT

    def contributions(self, left: Tensor, right: Tensor, tiles: Tiles) -> Mapping[str, Contribution]:
        if self.groups > 1:
            return self._grouped_contributions(left, right, tiles)
        if self._by_channel(tiles):
            return product_contributions(left, right, (*self.kernel, self.channels), (0, 3, 1, 2))
        return product_contributions(left, right)

    def _grouped_contributions(self, left: Tensor, right: Tensor, tiles: Tiles) -> Mapping[str, Contribution]:
        """Each group of outputs sees its own channels; such layers are small, so rows are formed."""
        records, positions, _ = left.shape
        members = self.channels // self.groups
        if self._by_channel(tiles):
            grouped = left.view(records, positions, math.prod(self.kernel), self.groups, members)
            grouped = grouped.permute(0, 3, 1, 4, 2)
        else:
            grouped = left.view(records, positions, self.groups, members, math.prod(self.kernel))
            grouped = grouped.permute(0, 2, 1, 3, 4)
        outer = right.view(records, positions, self.groups, -1).transpose(1, 2)
        formed = outer.mT @ grouped.reshape(records, self.groups, positions, -1)
        return {"weight": Rows(formed.flatten(1)), "bias": Rows(right.sum(dim=1))}

    # --- pieces ---------------------------------------------------------------------------------------

    def _by_channel(self, tiles: Tiles) -> bool:
        """Whether patches hold their channels last: with few channels, copying rows of pixels is faster."""
        return not tiles.single or self.channels >= _MANY_CHANNELS

    def _images(self, values: Tensor) -> Tensor:
        return _channels_last(values.unsqueeze(2) if self.flat else values)

    def _fused(self, tiles: Tiles) -> bool:
        """Whether kernels that need no patches apply."""
        return tiles.bounds is not None and self.groups == 1

    def _stacked(self, weights: Tensor) -> Tensor:
        return weights.unsqueeze(3) if self.flat else weights

    def _plain(self, images: Tensor) -> Tensor:
        return images.squeeze(2) if self.flat else images

    def _convolve(self, images: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        return functional.conv2d(
            images, _channels_last(weights), bias, self.stride, self.padding, self.dilation, self.groups
        )

    def _convolve_back(self, images: Tensor, gradient: Tensor, weights: Tensor) -> Tensor:
        back: Tensor = torch.ops.aten.convolution_backward(
            gradient,
            images,
            _channels_last(weights),
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            (0, 0),
            self.groups,
            (True, False, False),
        )[0]
        return back

    def _patches(self, images: Tensor, channels_last: bool) -> Tensor:
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
        records, channels, height, width = images.shape
        (high, wide), (rows, columns) = self.padding, self.geometry.output_size(*images.shape[2:])
        if self.stride != (1, 1):
            by_channel = patches.view(records, rows * columns, math.prod(self.kernel), channels)
            return functional.fold(
                by_channel.permute(0, 3, 2, 1).reshape(records, -1, rows * columns),
                (height, width),
                self.kernel,
                self.dilation,
                self.padding,
                self.stride,
            )
        # Written as one sum of shifted images, which a compiler turns into one pass over the patches.
        shaped = patches.view(records, rows, columns, *self.kernel, channels)
        total: Tensor | None = None
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                above, before = i * self.dilation[0] - high, j * self.dilation[1] - wide
                margins = (before, width - columns - before, above, height - rows - above)
                shifted = functional.pad(shaped[:, :, :, i, j], (0, 0, *margins))
                total = shifted if total is None else total + shifted
        assert total is not None
        return total.permute(0, 3, 1, 2)


def _by_pixel(*images: Tensor) -> list[Tensor]:
    """The same numbers, with the channels as their last dimension."""
    return [part.permute(0, 2, 3, 1) for part in images]


def _channels_last(images: Tensor) -> Tensor:
    """In channels-last order, with strides that say so even where a single channel leaves them open."""
    if images.shape[1] == 1:
        count, _, height, width = images.shape
        return images.reshape(count, height, width, 1).permute(0, 3, 1, 2)
    return images.contiguous(memory_format=torch.channels_last)


# --- layers that scale and shift --------------------------------------------------------------------


class AffineRule(LayerRule):
    """The scale and shift of a norm; the normalisation before it has no parameters.

    Args:
        normalise: the layer without its parameters.
        channels_first: whether parameters belong to the second dimension, or to the last ones.
        dimensions: how many dimensions the parameters have.
    """

    def __init__(
        self,
        normalise: Callable[[Tensor], Tensor],
        *,
        channels_first: bool,
        dimensions: int,
        biased: bool,
    ) -> None:
        self.normalise = normalise
        self.channels_first = channels_first
        self.dimensions = dimensions
        self.biased = biased

    def before(self, inputs: Tensor) -> Tensor:
        return self.normalise(inputs)

    def forward(self, inputs: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        scaled = inputs * self._spread(weights["weight"], inputs, tiles)
        return scaled + self._spread(weights["bias"], inputs, tiles) if self.biased else scaled

    def backward(self, inputs: Tensor, gradient: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        return gradient * self._spread(weights["weight"], inputs, tiles)

    def factors(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
        return self._by_position(inputs), self._by_position(gradient)

    def contributions(self, left: Tensor, right: Tensor, tiles: Tiles) -> Mapping[str, Contribution]:
        return {"weight": Rows((left * right).sum(dim=1)), "bias": Rows(right.sum(dim=1))}

    def _by_position(self, values: Tensor) -> Tensor:
        if self.channels_first:
            return values.flatten(2).mT if values.dim() > 2 else values[:, None]
        return values.reshape(len(values), -1, math.prod(values.shape[-self.dimensions :]))

    def _spread(self, stacked: Tensor, inputs: Tensor, tiles: Tiles) -> Tensor:
        """A parameter of each record's client, in a shape that broadcasts over its inputs."""
        if self.channels_first:
            shape = (inputs.shape[1], *(1,) * (inputs.dim() - 2))
        else:
            shape = (*(1,) * (inputs.dim() - 1 - self.dimensions), *stacked.shape[1:])
        if tiles.single:
            return stacked[0].reshape(shape)
        values = tiles.gather(stacked).reshape(tiles.count, 1, *shape)
        return values.expand(-1, tiles.size, *shape).reshape(tiles.records, *shape)


@rule_for(nn.GroupNorm)
def group_norm_rule(layer: nn.GroupNorm) -> LayerRule:
    """Scale and shift of every channel."""
    groups, eps = layer.num_groups, layer.eps
    return AffineRule(
        lambda inputs: functional.group_norm(inputs, groups, eps=eps),
        channels_first=True,
        dimensions=1,
        biased=True,
    )


@rule_for(nn.LayerNorm)
def layer_norm_rule(layer: nn.LayerNorm) -> LayerRule:
    """Scale and shift of every entry of the normalised dimensions."""
    shape, eps = list(layer.normalized_shape), layer.eps
    return AffineRule(
        lambda inputs: functional.layer_norm(inputs, shape, eps=eps),
        channels_first=False,
        dimensions=len(shape),
        biased=layer.bias is not None,
    )


# --- tables -----------------------------------------------------------------------------------------


@rule_for(nn.Embedding)
class EmbeddingRule(LayerRule):
    """A table looked up by token."""

    def __init__(self, layer: nn.Embedding) -> None:
        if layer.max_norm is not None or layer.scale_grad_by_freq:
            raise UnsupportedLayer("Embedding with max_norm or scale_grad_by_freq")
        self.size = layer.num_embeddings
        self.padding = layer.padding_idx

    def forward(self, inputs: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        table = weights["weight"]
        if tiles.single:
            return functional.embedding(inputs, table[0])
        client = torch.arange(tiles.count, device=inputs.device) if tiles.owner is None else tiles.owner
        rows = inputs.view(tiles.count, -1) + self.size * client[:, None]
        return functional.embedding(rows, table.reshape(-1, table.shape[2])).view(*inputs.shape, -1)

    def backward(self, inputs: Tensor, gradient: Tensor, weights: Weights, tiles: Tiles) -> Tensor:
        raise UnsupportedLayer("Embedding of values that need a gradient")

    def factors(self, inputs: Tensor, gradient: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
        if self.padding is not None:
            gradient = torch.where((inputs == self.padding)[..., None], 0.0, gradient)
        return inputs.reshape(len(inputs), -1), gradient.reshape(len(inputs), -1, gradient.shape[-1])

    def contributions(self, left: Tensor, right: Tensor, tiles: Tiles) -> Mapping[str, Contribution]:
        return {"weight": Lookups(left, right, self.size)}
