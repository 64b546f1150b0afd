"""Bytes to features: pixels scaled by constants that were public before any client was asked."""

from __future__ import annotations

from typing import Literal

import numpy as np

from coterie.data.records import Array

PixelScale = Literal["unit", "standard"]


def scaled_pixels(
    images: Array, pixels: PixelScale, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[Array, str]:
    """Images (n, channels, height, width) of bytes as float32, and how they were scaled.

    Args:
        pixels: `unit` divides by 255; `standard` then takes the published mean and deviation of each channel.
    """
    features = images.astype(np.float32)
    features /= 255.0
    if pixels == "unit":
        return features, "pixels / 255"
    features -= np.asarray(mean, dtype=np.float32)[:, None, None]
    features /= np.asarray(std, dtype=np.float32)[:, None, None]
    return features, f"pixels / 255, less the published mean {mean}, by the published deviation {std}"
