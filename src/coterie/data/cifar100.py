"""CIFAR-100 in its binary version: fixed-size rows of two labels and 3,072 pixels (Krizhevsky 2009)."""

from pathlib import Path

import numpy as np

from coterie.data.dataset_files import dataset_files, reading
from coterie.data.images import ImageFormat, LabelledImages, PixelScale
from coterie.data.records import Dataset
from coterie.errors import DataError

# Statistics of the 50,000 training images.
_FORMAT = ImageFormat(100, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762))
_ROW = 2 + 3 * 32 * 32


def read_cifar100(pixels: PixelScale = "unit") -> Dataset:
    """50,000 + 10,000 colour images of 100 fine classes, of shape (3, 32, 32)."""
    parts = map(_part, dataset_files("cifar100", ("train.bin", "test.bin")))
    return _FORMAT.dataset("cifar100", parts, pixels, "CIFAR-100, fine labels")


def _part(path: Path) -> LabelledImages:
    with reading(path):
        content = path.read_bytes()
    if not content or len(content) % _ROW:
        raise DataError(f"{path}: {len(content)} bytes; allowed: rows of {_ROW} (coarse, fine, pixels)")
    rows = np.frombuffer(content, np.uint8).reshape(-1, _ROW)
    return rows[:, 2:].reshape(-1, 3, 32, 32), _FORMAT.classified(rows[:, 1], f"{path}: fine labels")
