"""Group norms on a GPU, forwards and backwards, with every record's gradients; a part of `kernels.py`."""

import math
from typing import Any

import torch
from torch import Tensor

from coterie.training.kernels import power_of_two, present_of
from coterie.training.tiles import Tiles

try:
    from coterie.training import triton_norms as device_code
except ImportError:  # torch for processors comes without Triton
    device_code = None  # type: ignore[assignment]

MOST_CHANNELS = 1024
"""Channels of a record's norm that one program holds at one time."""
_LARGE, _SMALL = (16384, 8), (4096, 4)
"""Numbers of a record that one program reads at a time, and its warps: of records of so many, and of less."""


def suits_norm(images: Tensor) -> bool:
    """Whether our kernels normalise these images, in groups of channels that are powers of two."""
    if images.dim() != 4:
        return False
    channels = images.shape[1]
    return channels <= MOST_CHANNELS and channels == power_of_two(channels)


def _norm_constants(images: Tensor, groups: int, tiles: Tiles) -> dict[str, Any]:
    channels, positions = images.shape[1], math.prod(images.shape[2:])
    at_once, warps = _LARGE if channels * positions >= _LARGE[0] else _SMALL
    block = min(power_of_two(positions), max(1, at_once // channels))
    return {
        "positions": positions, "groups": groups, "each": channels // groups, "block_p": block,
        "some_absent": tiles.present is not None, "num_warps": warps,
    }  # fmt: skip


def normalise(
    images: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise groups of channels of each record, scale and shift them by its client's parameters.

    Args:
        images: (records, channels, height, width) in channels-last order, in float32 or bfloat16, as will be
            what comes out.
        weight, bias: (clients, channels), each client's contiguous.

    Returns:
        what came out; and by record and channel, the mean and the inverse of the deviation.
    """
    outputs = torch.empty_like(images, memory_format=torch.channels_last)
    means, rates = (torch.empty(images.shape[:2], device=images.device) for _ in range(2))
    device_code.normalise[(len(images),)](
        images, weight, weight if bias is None else bias, tiles.owner, present_of(tiles), outputs, means,
        rates, weight.stride(0), 0 if bias is None else bias.stride(0), tiles.size, eps,
        biased=bias is not None, **_norm_constants(images, groups, tiles),
    )  # fmt: skip
    return outputs, means, rates


def normalise_back(
    images: Tensor,
    gradient: Tensor,
    weight: Tensor,
    means: Tensor,
    rates: Tensor,
    tiles: Tiles,
    groups: int,
    *,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The way back: gradients at the images, by record at weight and bias, and the squares of both's norm.

    Args:
        images, gradient: in channels-last order.
        means, rates: of `normalise`.
    """
    outputs = torch.empty_like(images, memory_format=torch.channels_last)
    weight_rows, bias_rows = (torch.empty(images.shape[:2], device=images.device) for _ in range(2))
    squares = torch.empty(len(images), dtype=torch.float64, device=images.device)
    device_code.normalise_back[(len(images),)](
        images, gradient, weight, tiles.owner, present_of(tiles), means, rates, outputs, weight_rows,
        bias_rows, squares, weight.stride(0), tiles.size, biased=biased,
        **_norm_constants(images, groups, tiles),
    )  # fmt: skip
    return outputs, weight_rows, bias_rows if biased else None, squares
