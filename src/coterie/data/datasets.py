"""Datasets by name: the `data` section of an experiment, and the reader behind each name."""

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Self, TypeAlias

from pydantic import Discriminator, Field, PositiveInt, Tag, model_validator

from coterie.data.cifar10 import read_cifar10
from coterie.data.cifar100 import read_cifar100
from coterie.data.columns import PublicSettings
from coterie.data.digits import read_digits
from coterie.data.folder import read_folder
from coterie.data.glyphs import draw_glyphs
from coterie.data.heart_disease import read_heart_disease
from coterie.data.identity import identified
from coterie.data.idx import EmnistSplit, read_emnist, read_fashion_mnist, read_mnist
from coterie.data.images import PixelScale
from coterie.data.lines import Scenario, draw_lines
from coterie.data.own import OwnDataSettings
from coterie.data.r_tables import TABLES, read_table_of
from coterie.data.records import Dataset
from coterie.data.school import read_school
from coterie.data.shakespeare import WINDOW, read_shakespeare
from coterie.data.tiny_imagenet import read_tiny_imagenet
from coterie.plugins import DATA
from coterie.privacy.ranges import RECORDS
from coterie.settings import NamedSettings, tag_of

log = logging.getLogger(__name__)

# A reader takes the options that are its own, and `seed` if it draws its records, and `blank` if it can do so
# without what is in them.
_READERS: dict[str, Callable[..., Dataset]] = {
    "digits": read_digits,
    "glyphs": draw_glyphs,
    "lines": draw_lines,
    "mnist": read_mnist,
    "fashion-mnist": read_fashion_mnist,
    "emnist": read_emnist,
    "cifar10": read_cifar10,
    "cifar100": read_cifar100,
    "tiny-imagenet": read_tiny_imagenet,
    "shakespeare": read_shakespeare,
    "school": read_school,
    "heart-disease": read_heart_disease,
    **{name: partial(read_table_of, name) for name in TABLES},
    "folder": read_folder,
}
_COPIES = "augment|copies|replicat|oversampl|mixup|views"
_NO_COPIES = (
    "copies of a record in the data would each be clipped alone, so that one record moves a sum by as many "
    "clips as it has copies, and the guarantee would not be for it; schedule.augmentation averages the "
    "copies of a record before the clip"
)


class DataSettings(PublicSettings, NamedSettings):
    """Which dataset, and the options that are its own."""

    functions, plugin = _READERS, DATA
    refused: ClassVar = {**PublicSettings.refused, _COPIES: _NO_COPIES}

    name: str = Field("digits", description=" | ".join([*_READERS, DATA.form]))
    path: Path | None = Field(None, description="folder: holds federation.yaml and one file per client")
    pixels: PixelScale | None = Field(
        None, description="image datasets with files: unit (/ 255) | standard (published mean, deviation)"
    )
    split: EmnistSplit | None = Field(
        None, description="emnist: balanced | letters | digits | byclass | bymerge | mnist (balanced)"
    )
    scenario: Scenario | None = Field(
        None, description="lines: balanced-easy (default) | balanced-hard | imbalanced-easy | imbalanced-hard"
    )
    size: PositiveInt | None = Field(
        None, le=RECORDS.most, description="glyphs: training records to draw (12000)"
    )
    classes: int | None = Field(
        None, ge=2, le=62, description="glyphs: characters to tell apart, of 0-9, A-Z, a-z in this order (10)"
    )
    fonts: int | None = Field(None, ge=1, le=20, description="glyphs: fonts to draw from (20)")
    length: PositiveInt | None = Field(
        None, le=RECORDS.most, description="shakespeare: characters in a window (80)"
    )
    stride: PositiveInt | None = Field(
        None,
        le=RECORDS.most,
        description="shakespeare: characters from one window to the next (length + 1: none in common)",
    )

    per_client: PositiveInt | None = Field(
        None,
        le=RECORDS.most,
        description=f"{', '.join(TABLES)}: records of each client at most, evenly spaced in the table (all)",
    )

    @model_validator(mode="after")
    def _has_path(self) -> Self:
        if self.name == "folder" and self.path is None:
            raise ValueError("path: missing; name the folder with federation.yaml and one file per client")
        return self

    @property
    def own_records(self) -> bool:
        """Whether the records are the user's own, and not published ones that anybody may look at."""
        return self.name == "folder"

    @property
    def undivided(self) -> bool:
        """Whether the source has no test records of its own."""
        return self.name in ("digits", "school", "heart-disease", "folder", *TABLES)

    @property
    def windows_per_character(self) -> int:
        """How many records one character of a text may be in; 1 for data that are no windows of a text."""
        if self.name != "shakespeare" or self.stride is None:
            return 1
        return math.ceil(((self.length or WINDOW) + 1) / self.stride)


OwnDataSettings.ours = _READERS
AnyData: TypeAlias = Annotated[
    Annotated[DataSettings, Tag("ours")] | Annotated[OwnDataSettings, Tag("own")],
    Discriminator(lambda section: "ours" if tag_of(section, "name", "digits") in _READERS else "own"),
]
"""The `data` section: data by a name of ours, or a user's own."""


def load_dataset(settings: DataSettings | OwnDataSettings, seed: int, *, counted: bool = False) -> Dataset:
    """Read, or draw under the seed, the dataset that the settings name.

    Args:
        counted: records will only be counted, so that none need be drawn.
    """
    log.info("reading %s", settings.name)
    if isinstance(settings, OwnDataSettings):
        found = settings.load(seed)
        return identified(found) if settings.own_records else found
    options = settings.given()
    if settings.takes(settings.name, "seed"):
        options["seed"] = seed
    if counted and settings.takes(settings.name, "blank"):
        options["blank"] = True
    return _READERS[settings.name](**options)
