"""Bytes to features: pixels scaled by constants that were public before any client was asked."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Literal

import numpy as np

from coterie.data.records import Array
from coterie.errors import DataError

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


def decoded(source: Path | IO[bytes], side: int, where: str) -> Array:
    """An encoded image as bytes (side, side, 3).

    Args:
        where: names it in the line by which anything else is refused.
    """
    from PIL import Image

    try:
        with Image.open(source) as image:
            picture = np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # on broken files
        raise DataError(f"{where}: not an image ({type(error).__name__})") from error
    if picture.shape != (side, side, 3):
        raise DataError(f"{where}: an image of {picture.shape[:2]} pixels; allowed: ({side}, {side})")
    return picture
