"""CIFAR-100 in its binary version: fixed-size rows of two labels and 3,072 pixels (Krizhevsky 2009)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coterie.data.dataset_files import dataset_files, unreadable
from coterie.data.images import PixelScale, scaled_pixels
from coterie.data.records import Dataset, Records, Task
from coterie.errors import DataError

# Published per-channel statistics of the 50,000 training images.
_MEAN = (0.5071, 0.4865, 0.4409)
_STD = (0.2673, 0.2564, 0.2762)
_ROW = 2 + 3 * 32 * 32


def read_cifar100(pixels: PixelScale = "unit") -> Dataset:
    """50,000 + 10,000 colour images of 100 fine classes, of shape (3, 32, 32)."""
    train_path, test_path = dataset_files("cifar100", ("train.bin", "test.bin"))
    train, scaling = _records(train_path, pixels)
    test, _ = _records(test_path, pixels)
    task = Task("classification", (3, 32, 32), 100)
    return Dataset("cifar100", train, test, task, note=f"CIFAR-100, fine labels; {scaling}")


def _records(path: Path, pixels: PixelScale) -> tuple[Records, str]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    if not content or len(content) % _ROW:
        raise DataError(f"{path}: {len(content)} bytes; allowed: rows of {_ROW} (coarse, fine, pixels)")
    rows = np.frombuffer(content, np.uint8).reshape(-1, _ROW)
    targets = rows[:, 1].astype(np.int64)
    if targets.max() > 99:
        raise DataError(f"{path}: row {targets.argmax()} has fine label {targets.max()}; allowed: 0 to 99")
    features, scaling = scaled_pixels(rows[:, 2:].reshape(-1, 3, 32, 32), pixels, _MEAN, _STD)
    return Records(features, targets), scaling
