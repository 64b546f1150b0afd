"""TinyImageNet as it is published: a folder of JPEG files for each of 200 classes, and one for validation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coterie.data.files import data_root, unreadable
from coterie.data.images import PixelScale, scaled_pixels
from coterie.data.records import Dataset, Records, Task
from coterie.errors import DataError

# Published per-channel statistics of the training images.
_MEAN = (0.4802, 0.4481, 0.3975)
_STD = (0.2770, 0.2691, 0.2821)
_SIDE = 64


def read_tiny_imagenet(pixels: PixelScale = "unit") -> Dataset:
    """100,000 + 10,000 colour images of 200 classes, of shape (3, 64, 64); `val` is the test set."""
    root = data_root() / "tiny-imagenet"
    classes = {name: index for index, name in enumerate(_lines(root / "wnids.txt"))}
    train = [
        (path, label)
        for name, label in classes.items()
        for path in sorted((root / "train" / name / "images").glob("*.JPEG"))
    ]
    test = _validation(root / "val", classes)
    if not train or not test:
        raise DataError(f"{root}: no training images under train/ or no images under val/")
    task = Task("classification", (3, _SIDE, _SIDE), len(classes))
    records, scaling = _records(train, pixels)
    return Dataset("tiny-imagenet", records, _records(test, pixels)[0], task, f"TinyImageNet; {scaling}")


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise DataError(
            f"data.name: tiny-imagenet: {path.parent} lacks {path.name}; put the unpacked tiny-imagenet-200 "
            "there, or set COTERIE_DATA to the folder that has tiny-imagenet/"
        )
    return path.read_text(encoding="utf-8").splitlines()


def _validation(folder: Path, classes: dict[str, int]) -> list[tuple[Path, int]]:
    """Images of the validation folder, labelled by the second column of its annotations."""
    found = []
    for number, line in enumerate(_lines(folder / "val_annotations.txt"), start=1):
        file, _, rest = line.partition("\t")
        label = rest.partition("\t")[0]
        if label not in classes:
            raise DataError(
                f"{folder / 'val_annotations.txt'}: line {number}: class {label!r} is not in wnids.txt"
            )
        found.append((folder / "images" / file, classes[label]))
    return found


def _records(labelled: Sequence[tuple[Path, int]], pixels: PixelScale) -> tuple[Records, str]:
    from PIL import Image

    images = np.empty((len(labelled), _SIDE, _SIDE, 3), dtype=np.uint8)
    for row, (path, _) in enumerate(labelled):
        try:
            with Image.open(path) as image:
                picture = np.asarray(image.convert("RGB"))
        except (OSError, ValueError, SyntaxError) as error:
            raise unreadable(path, error) from error
        if picture.shape != (_SIDE, _SIDE, 3):
            raise DataError(f"{path}: an image of {picture.shape[:2]} pixels; allowed: ({_SIDE}, {_SIDE})")
        images[row] = picture
    features, scaling = scaled_pixels(np.moveaxis(images, 3, 1), pixels, _MEAN, _STD)
    targets = np.array([label for _, label in labelled], dtype=np.int64)
    return Records(np.ascontiguousarray(features), targets), scaling
