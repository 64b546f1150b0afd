"""Bytes to features: pixels scaled by constants that were public before any client was asked."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np

from coterie.data.dataset_files import refuse_rows
from coterie.data.preprocessing import Label, Preprocessing
from coterie.data.records import Array, Dataset, Records, Task
from coterie.errors import DataError
from coterie.files import regular

PixelScale = Literal["unit", "standard"]
LabelledImages = tuple[Array, Array]
"""Bytes (n, channels, height, width), and a class for each."""


@dataclass(frozen=True)
class ImageFormat:
    """What all images of a published dataset have in common.

    Args:
        mean, std: of each channel of the training images, as published.
        first: the label of class 0.
    """

    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    first: int = 0

    def preprocessing(self, task: Task, pixels: PixelScale) -> Preprocessing:
        """How bytes become features.

        `unit` divides by 255; `standard` then takes the published mean and deviation of each channel.
        """
        steps: list[tuple[str, tuple[float, ...]]] = [("divide", (255.0,))]
        if pixels == "standard":
            steps += [("subtract", self.mean), ("divide", self.std)]
        names = tuple(range(self.first, self.first + self.classes))
        return Preprocessing.of_array(task, *steps, label=Label(classes=names))

    def classified(self, labels: Array, where: object) -> Array:
        """Labels as classes, counted from 0; `where` begins the line by which others are refused."""
        last = self.first + self.classes - 1
        refuse_rows(
            (labels < self.first) | (labels > last),
            lambda row: f"{where}: row {row} has label {labels[row]}; allowed: {self.first} to {last}",
        )
        return labels.astype(np.int64) - self.first

    def dataset(self, name: str, parts: Iterable[LabelledImages], pixels: PixelScale, source: str) -> Dataset:
        """Training and test images, scaled; the note says from which source, and by which constants."""
        scaling = "pixels / 255"
        if pixels == "standard":
            scaling += f", less the published mean {self.mean}, by the published deviation {self.std}"
        (bytes_, labels), tests = parts
        task = Task("classification", bytes_.shape[1:], self.classes)
        described = self.preprocessing(task, pixels)
        train = Records(described.inputs.features(bytes_), labels)
        test = Records(described.inputs.features(tests[0]), tests[1])
        note = f"{source}; {scaling}"
        return Dataset(name, train, test, task, note, preprocessing=described)


def decoded(sources: Iterable[tuple[Path | IO[bytes], str]], count: int, side: int) -> Array:
    """Encoded images as bytes (count, 3, side, side), each with what names it in the line that refuses it."""
    from PIL import Image

    images = np.empty((count, side, side, 3), dtype=np.uint8)
    for row, (source, where) in enumerate(sources):
        try:
            with Image.open(regular(source) if isinstance(source, Path) else source) as image:
                picture = np.asarray(image.convert("RGB"))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # on broken files
            raise DataError(f"{where}: not an image ({type(error).__name__})") from error
        if picture.shape != (side, side, 3):
            raise DataError(f"{where}: an image of {picture.shape[:2]} pixels; allowed: ({side}, {side})")
        images[row] = picture
    return np.moveaxis(images, 3, 1)
