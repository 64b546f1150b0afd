"""CIFAR-10 as parquet files of encoded images."""

import io
from pathlib import Path

import numpy as np

from coterie.data.dataset_files import dataset_files, reading
from coterie.data.images import ImageFormat, LabelledImages, PixelScale, decoded
from coterie.data.records import Array, Dataset
from coterie.errors import DataError

# Statistics of the 50,000 original training images.
_FORMAT = ImageFormat(10, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


def read_cifar10(pixels: PixelScale = "unit") -> Dataset:
    """50,000 + 10,000 colour images, of shape (3, 32, 32)."""
    parts = map(_part, dataset_files("cifar10", ("train.parquet", "test.parquet")))
    # Re-encoded pixels: accuracies are not those of the original files.
    return _FORMAT.dataset("cifar10", parts, pixels, "CIFAR-10 (JPEG)")


def _part(path: Path) -> LabelledImages:
    """One file: column `img.bytes` holds an encoded image, column `label` its class."""
    encoded, labels = _columns(path)
    sources = ((io.BytesIO(content), f"{path}: row {row}") for row, content in enumerate(encoded))
    return decoded(sources, len(encoded), side=32), _FORMAT.classified(labels, path)


def _columns(path: Path) -> tuple[list[bytes], Array]:
    """The encoded images, nothing where one is missing, and the labels."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with reading(path, pa.ArrowException, ValueError):
        table = pq.ParquetFile(path).read(columns=["img", "label"])
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
