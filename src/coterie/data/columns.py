"""Columns of a table as features, by what was declared about them and never by what they hold.

A mean, a maximum or a list of categories taken from a client's own records would let one record move the
features of all others, and clipping each record's gradient would no longer bound what one record can do.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from coterie.data.dataset_files import refuse_rows
from coterie.data.records import Array
from coterie.data.tables import EXACT, ClientTable
from coterie.privacy.ranges import VALUE
from coterie.settings import Settings

_REASON = (
    "features may be scaled by public constants only: statistics of a client's own records let one record "
    "change all others, which breaks the per-record sensitivity; declare range: [low, high]"
)
_PRIVATE_SCALING = "scal|standardi[sz]|normali[sz]|min.?max|z.?score|mean|std|cent(er|re)|whiten"


def _public_range(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError(_REASON)
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(v, int | float) for v in value):
        low, high = value
        if not low < high or low not in VALUE or high not in VALUE or max(-low, high) < 1 / VALUE.most:
            raise ValueError(f"should be two finite numbers, the lower first, each {VALUE}")
    return value


def _unambiguous(value: tuple[str | int | float, ...]) -> tuple[str | int | float, ...]:
    if len(set(map(str, value))) < len(value):
        raise ValueError("should have every name once")
    return value


Range = Annotated[tuple[float, float], BeforeValidator(_public_range)]
Names = Annotated[tuple[str | int | float, ...], Field(min_length=2), AfterValidator(_unambiguous)]


class PublicSettings(Settings):
    """Settings none of whose keys may ask for scaling by the data themselves, or for what else is refused.

    `refused` says by which words in a key, and why.
    """

    refused: ClassVar[Mapping[str, str]] = {_PRIVATE_SCALING: _REASON}

    @model_validator(mode="before")
    @classmethod
    def _public(cls, declared: Any) -> Any:
        for key in declared if isinstance(declared, dict) else ():
            for words, reason in cls.refused.items():
                if re.search(words, str(key).lower()):
                    raise ValueError(f"{key}: {declared[key]}; {reason}")
        return declared


class Column(PublicSettings):
    """One column of a client's table.

    Args:
        column: its name.
        range: the values it may take, known beforehand; they are mapped to [-1, 1], and what lies outside is
            clipped to the range.
        categories: its possible values, for a column of names; each becomes an indicator.
        missing: `indicator` adds a feature that is 1 where the value is missing, the others then being 0;
            `refuse` takes a missing value for a mistake.
        missing_values: numbers that mean "missing".
    """

    column: str
    range: Range | None = None
    categories: Names | None = None
    missing: Literal["refuse", "indicator"] = "refuse"
    missing_values: tuple[float, ...] = ()

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.range is None) == (self.categories is None):
            raise ValueError(f"column {self.column}: declare either range or categories")
        if self.missing_values and self.missing == "refuse":
            raise ValueError(f"column {self.column}: missing_values needs missing: indicator")
        if self.missing_values and not all(isinstance(name, int | float) for name in self.categories or ()):
            raise ValueError(f"column {self.column}: missing_values are numbers, its categories are names")
        return self

    @property
    def width(self) -> int:
        """How many features it becomes."""
        return (1 if self.categories is None else len(self.categories)) + (self.missing == "indicator")


def encode(table: ClientTable, columns: tuple[Column, ...], clipped: Counter[str]) -> Array:
    """The declared columns side by side, float32; how many values were clipped is added to `clipped`."""
    return np.concatenate([_encode(table, column, clipped) for column in columns], axis=1, dtype=np.float32)


def _encode(table: ClientTable, column: Column, clipped: Counter[str]) -> Array:
    if column.range is not None:
        numbers = finite_numbers(table, column.column)
        missing = np.isnan(numbers) | np.isin(numbers, column.missing_values)
        clipped[column.column] += outside(numbers[~missing], column.range)
        encoded = np.where(missing, 0.0, 2.0 * unit_interval(numbers, column.range) - 1.0)[:, None]
    else:
        index = category_index(table, column.column, column.categories or (), column.missing_values)
        missing = index < 0
        encoded = (index[:, None] == np.arange(len(column.categories or ()))).astype(np.float64)
    if column.missing == "indicator":
        return np.column_stack([encoded, missing])
    refuse_rows(
        missing,
        lambda row: f"{table.where(row, column.column)}: no value; declare missing: indicator if that may be",
    )
    return encoded


def finite_numbers(table: ClientTable, name: str) -> Array:
    """The column's numbers, NaN where missing; infinity is a mistake."""
    numbers = table.numbers(name)
    refuse_rows(
        np.isinf(numbers),
        lambda row: f"{table.where(row, name)}: {numbers[row]}; allowed: finite numbers",
    )
    return numbers


def outside(values: Array, limits: tuple[float, float]) -> int:
    """How many values lie outside a range; as private as they are."""
    return int(np.count_nonzero((values < limits[0]) | (values > limits[1])))


def unit_interval(numbers: Array, limits: tuple[float, float]) -> Array:
    """The range mapped to [0, 1], what lies outside clipped."""
    low, high = limits
    return (np.clip(numbers, low, high) - low) / (high - low)


def category_index(
    table: ClientTable,
    name: str,
    categories: tuple[str | int | float, ...],
    missing_values: tuple[float, ...] = (),
) -> Array:
    """For every row the position of its value among the categories, -1 where it is missing."""
    values: Array
    if all(isinstance(category, int | float) and abs(category) <= EXACT for category in categories):
        # As numbers, so that 1 and 1.0 are the same category.
        values = finite_numbers(table, name)
        missing = np.isnan(values) | np.isin(values, missing_values)
    else:
        categories = tuple(map(str, categories))
        values = np.array(table.words(name))
        missing = values == ""
    index = np.full(len(table), -1, dtype=np.int64)
    for position, category in enumerate(categories):
        index[(values == category) & ~missing] = position
    allowed = ", ".join(map(str, categories))
    refuse_rows(
        (index < 0) & ~missing,
        lambda row: f"{table.where(row, name)}: {values[row].item()!r}; allowed: {allowed}",
    )
    return index


def label_index(table: ClientTable, name: str, classes: tuple[str | int | float, ...]) -> Array:
    """For every row the position of its label among the classes."""
    index = category_index(table, name, classes)
    refuse_rows(index < 0, lambda row: f"{table.where(row, name)}: no label")
    return index
