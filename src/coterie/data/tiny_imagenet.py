"""TinyImageNet as it is published: a folder of JPEG files for each of 200 classes, and one for validation."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coterie.data.dataset_files import data_root, reading
from coterie.data.images import ImageFormat, LabelledImages, PixelScale, decoded
from coterie.data.records import Dataset
from coterie.errors import DataError

_SIDE = 64


def read_tiny_imagenet(pixels: PixelScale = "unit") -> Dataset:
    """100,000 + 10,000 colour images of 200 classes, of shape (3, 64, 64); `val` is the test set."""
    root = data_root() / "tiny-imagenet"
    names = [name for _, name in _lines(root / "wnids.txt")]
    classes = {name: index for index, name in enumerate(names)}
    if len(classes) < len(names):
        raise DataError(f"{root / 'wnids.txt'}: {len(names) - len(classes)} classes stand there twice")
    train = [(path, label) for name, label in classes.items() for path in _images(root / "train" / name)]
    test = _validation(root / "val", classes)
    if not train or not test:
        raise DataError(f"{root}: no training images under train/ or no images under val/")
    # Statistics of the training images.
    common = ImageFormat(len(classes), mean=(0.4802, 0.4481, 0.3975), std=(0.2770, 0.2691, 0.2821))
    return common.dataset("tiny-imagenet", map(_part, (train, test)), pixels, "TinyImageNet")


def _lines(path: Path) -> list[tuple[int, str]]:
    """The lines that say anything, by their numbers."""
    if not path.is_file():
        raise DataError(
            f"data.name: tiny-imagenet: {path.parent} lacks {path.name}; put the unpacked tiny-imagenet-200 "
            "there, or set COTERIE_DATA to the folder that has tiny-imagenet/"
        )
    with reading(path, UnicodeDecodeError):
        lines = path.read_text(encoding="utf-8").splitlines()
    return [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]


def _images(folder: Path) -> list[Path]:
    """The training images of one class."""
    found = sorted((folder / "images").glob("*.JPEG"))
    if not found:
        raise DataError(f"{folder / 'images'}: no .JPEG files, but wnids.txt names the class {folder.name}")
    return found


def _validation(folder: Path, classes: dict[str, int]) -> list[tuple[Path, int]]:
    """Images of the validation folder, labelled by the second column of its annotations."""
    found = []
    for number, line in _lines(folder / "val_annotations.txt"):
        file, label, *_ = f"{line}\t".split("\t")
        if label not in classes:
            raise DataError(
                f"{folder / 'val_annotations.txt'}: line {number}: class {label!r} is not in wnids.txt"
            )
        found.append((folder / "images" / file, classes[label]))
    return found


def _part(labelled: Sequence[tuple[Path, int]]) -> LabelledImages:
    images = decoded(((path, str(path)) for path, _ in labelled), len(labelled), _SIDE)
    return images, np.array([label for _, label in labelled], dtype=np.int64)
