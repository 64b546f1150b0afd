"""CIFAR-10 as parquet files of encoded images."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from coterie.data.files import dataset_files, unreadable
from coterie.data.images import PixelScale, scaled_pixels
from coterie.data.records import Dataset, Records, Task
from coterie.errors import DataError

# Published per-channel statistics of the 50,000 original training images.
_MEAN = (0.4914, 0.4822, 0.4465)
_STD = (0.2470, 0.2435, 0.2616)


def read_cifar10(pixels: PixelScale = "unit") -> Dataset:
    """50,000 + 10,000 colour images, of shape (3, 32, 32)."""
    train_path, test_path = dataset_files("cifar10", ("train.parquet", "test.parquet"))
    train, scaling = read_part(train_path, pixels)
    test, _ = read_part(test_path, pixels)
    task = Task("classification", (3, 32, 32), 10)
    # Re-encoded pixels: accuracies are not those of the original files.
    return Dataset("cifar10", train, test, task, note=f"CIFAR-10 (JPEG); {scaling}")


def read_part(path: Path, pixels: PixelScale) -> tuple[Records, str]:
    """One file: column `img.bytes` holds an encoded image, column `label` its class; and the scaling."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    try:
        table = pq.ParquetFile(path).read(columns=["img", "label"])
        encoded = table["img"].combine_chunks().field("bytes")
        targets = table["label"].to_numpy().astype(np.int64)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise unreadable(path, error) from error
    images = np.empty((len(encoded), 32, 32, 3), dtype=np.uint8)
    for row, scalar in enumerate(encoded):
        try:
            with Image.open(io.BytesIO(scalar.as_py())) as image:
                picture = np.asarray(image.convert("RGB"))
        except (OSError, ValueError, TypeError, SyntaxError) as error:  # what Pillow raises on broken files
            raise DataError(f"{path}: row {row}: not an image ({type(error).__name__})") from error
        if picture.shape != (32, 32, 3):
            raise DataError(f"{path}: row {row}: an image of {picture.shape[:2]} pixels; allowed: (32, 32)")
        images[row] = picture
    wrong = np.flatnonzero((targets < 0) | (targets > 9))
    if len(wrong):
        raise DataError(f"{path}: row {wrong[0]}: label {targets[wrong[0]]}; allowed: 0 to 9")
    features, scaling = scaled_pixels(np.moveaxis(images, 3, 1), pixels, _MEAN, _STD)
    return Records(np.ascontiguousarray(features), targets), scaling
