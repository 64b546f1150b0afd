"""MNIST, Fashion-MNIST and EMNIST: gzipped IDX files (LeCun, Cortes, Burges)."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Literal

import numpy as np

from coterie.data.dataset_files import dataset_files, unreadable
from coterie.data.images import PixelScale, scaled_pixels
from coterie.data.records import Array, Dataset, Records, Task
from coterie.errors import DataError

_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def read_mnist(pixels: PixelScale = "unit") -> Dataset:
    """60,000 + 10,000 handwritten digits."""
    return _read("mnist", pixels, mean=0.1307, std=0.3081)


def read_fashion_mnist(pixels: PixelScale = "unit") -> Dataset:
    """60,000 + 10,000 pictures of clothes."""
    return _read("fashion-mnist", pixels, mean=0.2860, std=0.3530)


EmnistSplit = Literal["balanced", "letters", "digits", "byclass", "bymerge", "mnist"]
_EMNIST_CLASSES = {"balanced": 47, "letters": 26, "digits": 10, "byclass": 62, "bymerge": 47, "mnist": 10}


def read_emnist(pixels: PixelScale = "unit", split: EmnistSplit = "balanced") -> Dataset:
    """Handwritten characters (Cohen et al. 2017), turned upright: the files hold them transposed."""
    prefix = f"emnist-{split}"
    names = tuple(
        f"{prefix}-{part}-{kind}-ubyte.gz"
        for part in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    )
    train_images, train_labels, test_images, test_labels = dataset_files("emnist", names)
    classes = _EMNIST_CLASSES[split]
    first = 1 if split == "letters" else 0
    parts = [
        _records(images, labels, pixels, 0.1751, 0.3332, classes, first)
        for images, labels in ((train_images, train_labels), (test_images, test_labels))
    ]
    (train, scaling), (test, _) = (
        (Records(np.ascontiguousarray(part.features.swapaxes(2, 3)), part.targets), said)
        for part, said in parts
    )
    task = Task("classification", (1, 28, 28), classes)
    return Dataset("emnist", train, test, task, note=f"EMNIST {split} as published, upright; {scaling}")


def _read(name: str, pixels: PixelScale, mean: float, std: float) -> Dataset:
    train_images, train_labels, test_images, test_labels = dataset_files(name, _FILES)
    train, scaling = _records(train_images, train_labels, pixels, mean, std)
    test, _ = _records(test_images, test_labels, pixels, mean, std)
    return Dataset(
        name, train, test, Task("classification", (1, 28, 28), 10), note=f"{name} as published; {scaling}"
    )


def _records(
    images: Path,
    labels: Path,
    pixels: PixelScale,
    mean: float,
    std: float,
    classes: int = 10,
    first: int = 0,
) -> tuple[Records, str]:
    """Images with labels that count from `first`."""
    pictures, targets = read_idx(images, dimensions=3), read_idx(labels, dimensions=1)
    if pictures.shape[1:] != (28, 28):
        raise DataError(f"{images}: images of {pictures.shape[1:]}; allowed: (28, 28)")
    if len(pictures) != len(targets):
        raise DataError(f"{labels}: {len(targets)} labels for the {len(pictures)} images of {images.name}")
    last = first + classes - 1
    wrong = np.flatnonzero((targets < first) | (targets > last))
    if len(wrong):
        row = wrong[0]
        raise DataError(f"{labels}: row {row} has label {targets[row]}; allowed: {first} to {last}")
    features, scaling = scaled_pixels(pictures[:, None], pixels, (mean,), (std,))
    return Records(features, targets.astype(np.int64) - first), scaling


def read_idx(path: Path, dimensions: int) -> Array:
    """The bytes of a gzipped IDX file in the shape that its header declares."""
    try:
        with gzip.open(path) as stream:
            content = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from error
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
