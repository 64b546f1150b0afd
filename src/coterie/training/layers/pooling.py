"""Max pools whose windows do not overlap."""

import math

import torch
from torch import Tensor, nn

from coterie.training import kernels
from coterie.training.recording import Backward, Notes, hooked, masked


class PoolingLayer(nn.Module):
    """Stands in a max pool's place and lets a kernel do its work where that applies.

    Args:
        relu: whether a ReLU that stood before the pool happens here, after it: on a quarter of the numbers,
            and to the same effect, because it keeps the order of the numbers in a window.
    """

    def __init__(self, layer: nn.MaxPool2d, window: tuple[int, int], notes: Notes, *, relu: bool) -> None:
        super().__init__()
        self.layer, self.window, self.notes, self.relu = layer, window, notes, relu

    def forward(self, images: Tensor) -> Tensor:
        by_channel = _order(images) is torch.channels_last
        if by_channel and self.notes.tiles.bounds is not None:
            pooled: Tensor = kernels.MaxPool.apply(images, self.window)  # type: ignore[no-untyped-call]
        else:
            pooled = self.layer(images)
            if by_channel and pooled.requires_grad:
                # A gradient in another order (after a flatten) costs the pool's backward five times the time.
                pooled.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: gradient.contiguous(memory_format=torch.channels_last)
                )
        return torch.relu(pooled) if self.relu else pooled

    def with_way_back(self, values: Tensor) -> tuple[Tensor, Backward]:
        """The same as part of a chain."""
        pooled, places = self.pool_with_places(values)

        def backward(gradient: Tensor, needed: bool) -> Tensor:
            # In the order of the outputs: with another one, the way back takes five times as long.
            gradient = gradient.contiguous(memory_format=_order(pooled))
            if self.relu:
                gradient = masked(gradient, pooled)
            back: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
                gradient, values, self.window, self.window, (0, 0), (1, 1), False, places
            )
            return back

        return pooled, backward

    def pool_with_places(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of every window (after a ReLU, if there is one), and its place in its image."""
        pooled, places = torch.ops.aten.max_pool2d_with_indices(values, self.window)
        return pooled.relu_() if self.relu else pooled, places


def _order(images: Tensor) -> torch.memory_format:
    by_channel = images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if by_channel else torch.contiguous_format


def replace_pools(holder: nn.ModuleDict, notes: Notes) -> None:
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
    if position == 0 or type(owner[position - 1]) is not nn.ReLU or hooked(owner[position - 1]):
        return False
    setattr(owner, names[position - 1], nn.Identity())
    return True
