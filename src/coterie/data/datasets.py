"""Datasets by name: the `data` section of an experiment, and the reader behind each name."""

from __future__ import annotations

from coterie.data.digits import read_digits
from coterie.data.records import Dataset
from coterie.errors import InputError
from coterie.settings import Settings

__all__ = ["DataSettings", "Dataset", "dataset_names", "load_dataset"]


class DataSettings(Settings):
    """Which dataset."""

    name: str = "digits"


def dataset_names() -> tuple[str, ...]:
    """Every name that `data.name` may take."""
    return ("digits",)


def load_dataset(settings: DataSettings, seed: int) -> Dataset:
    """Read, or draw under the seed, the dataset that the settings name."""
    if settings.name != "digits":
        raise InputError(f"data.name: {settings.name!r}; allowed: {', '.join(dataset_names())}")
    return read_digits()
