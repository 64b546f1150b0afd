"""MNIST, Fashion-MNIST and EMNIST: gzipped IDX files (LeCun, Cortes, Burges)."""

import gzip
import math
import zlib
from pathlib import Path
from typing import Literal

import numpy as np

from coterie.data.dataset_files import dataset_files, reading
from coterie.data.images import ImageFormat, PixelScale
from coterie.data.records import Array, Dataset
from coterie.errors import DataError

EmnistSplit = Literal["balanced", "letters", "digits", "byclass", "bymerge", "mnist"]
_EMNIST_CLASSES = {"balanced": 47, "letters": 26, "digits": 10, "byclass": 62, "bymerge": 47, "mnist": 10}


def read_mnist(pixels: PixelScale = "unit") -> Dataset:
    """60,000 + 10,000 handwritten digits."""
    return _read("mnist", ImageFormat(10, (0.1307,), (0.3081,)), pixels, "mnist as published")


def read_fashion_mnist(pixels: PixelScale = "unit") -> Dataset:
    """60,000 + 10,000 pictures of clothes."""
    return _read("fashion-mnist", ImageFormat(10, (0.2860,), (0.3530,)), pixels, "fashion-mnist as published")


def read_emnist(pixels: PixelScale = "unit", split: EmnistSplit = "balanced") -> Dataset:
    """Handwritten characters (Cohen et al. 2017), turned upright: the files hold them transposed."""
    first = 1 if split == "letters" else 0
    common = ImageFormat(_EMNIST_CLASSES[split], (0.1751,), (0.3332,), first)
    prefixes = (f"emnist-{split}-train", f"emnist-{split}-test")
    source = f"EMNIST {split} as published, upright"
    return _read("emnist", common, pixels, source, prefixes, transposed=True)


def _read(
    name: str,
    common: ImageFormat,
    pixels: PixelScale,
    source: str,
    prefixes: tuple[str, str] = ("train", "t10k"),
    *,
    transposed: bool = False,
) -> Dataset:
    files = [f"{prefix}-{kind}-ubyte.gz" for prefix in prefixes for kind in ("images-idx3", "labels-idx1")]
    paths = dataset_files(name, tuple(files))
    parts = []
    for images, labels in (paths[:2], paths[2:]):
        pictures, targets = read_idx(images, dimensions=3), read_idx(labels, dimensions=1)
        if pictures.shape[1:] != (28, 28):
            raise DataError(f"{images}: images of {pictures.shape[1:]}; allowed: (28, 28)")
        if len(pictures) != len(targets):
            raise DataError(
                f"{labels}: {len(targets)} labels for the {len(pictures)} images of {images.name}"
            )
        upright = pictures.swapaxes(1, 2) if transposed else pictures
        parts.append((upright[:, None], common.classified(targets, labels)))
    return common.dataset(name, parts, pixels, source)


def read_idx(path: Path, dimensions: int) -> Array:
    """The bytes of a gzipped IDX file in the shape that its header declares."""
    with reading(path, EOFError, zlib.error), gzip.open(path) as stream:
        content = stream.read()
    # Two zero bytes, 8 for unsigned bytes, the number of dimensions; then each dimension, big-endian.
    magic = bytes([0, 0, 8, dimensions])
    header = 4 + 4 * dimensions
    if content[:4] != magic or len(content) < header:
        raise DataError(
            f"{path}: starts with {content[:4].hex()}; an IDX file of this kind with {magic.hex()}"
        )
    shape = tuple(np.frombuffer(content, ">u4", count=dimensions, offset=4).tolist())
    if len(content) - header != math.prod(shape):
        raise DataError(
            f"{path}: {len(content) - header} bytes of data; its header declares {math.prod(shape)}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
