"""CIFAR-10 as parquet files of encoded images."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from coterie.data.dataset_files import dataset_files, unreadable
from coterie.data.images import PixelScale, decoded, scaled_pixels
from coterie.data.records import Array, Dataset, Records, Task
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
    encoded, targets = _columns(path)
    images = np.empty((len(encoded), 32, 32, 3), dtype=np.uint8)
    for row, content in enumerate(encoded):
        images[row] = decoded(io.BytesIO(content), 32, f"{path}: row {row}")
    wrong = np.flatnonzero((targets < 0) | (targets > 9))
    if len(wrong):
        raise DataError(f"{path}: row {wrong[0]}: label {targets[wrong[0]]}; allowed: 0 to 9")
    features, scaling = scaled_pixels(np.moveaxis(images, 3, 1), pixels, _MEAN, _STD)
    return Records(np.ascontiguousarray(features), targets), scaling


def _columns(path: Path) -> tuple[list[bytes], Array]:
    """The encoded images, nothing where one is missing, and the labels."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read(columns=["img", "label"])
    except (pa.ArrowException, OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if set(table.column_names) != {"img", "label"} or not len(table):
        raise DataError(f"{path}: {len(table)} rows of {table.column_names}; allowed: rows of img and label")
    image, label = (table.schema.field(name).type for name in ("img", "label"))
    if not pa.types.is_struct(image) or image.get_field_index("bytes") < 0:
        raise DataError(f"{path}: column img holds {image}; allowed: a struct with an encoded image in bytes")
    if not pa.types.is_integer(label) or table["label"].null_count:
        raise DataError(
            f"{path}: column label holds {label}, {table['label'].null_count} missing; allowed: integers"
        )
    encoded = table["img"].combine_chunks().field("bytes").cast(pa.binary()).to_pylist()
    return [content or b"" for content in encoded], table["label"].to_numpy().astype(np.int64)
