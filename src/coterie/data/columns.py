"""Columns of a table as features, by what was declared about them and never by what they hold.

A mean, a maximum or a list of categories taken from a client's own records would let one record move the
features of all others, and clipping each record's gradient would no longer bound what one record can do.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from coterie.data.dataset_files import refuse_rows
from coterie.data.records import Array
from coterie.data.tables import EXACT, ClientTable, day_number
from coterie.privacy.ranges import VALUE
from coterie.settings import Settings

_REASON = (
    "features may be scaled by public constants only: statistics of a client's own records let one record "
    "change all others, which breaks the per-record sensitivity; declare range: [low, high]"
)
_TRUTH = {"false", "true"}
_PRIVATE_SCALING = "scal|standardi[sz]|normali[sz]|min.?max|z.?score|mean|std|cent(er|re)|whiten"


def public_range(value: Any) -> Any:
    """A range as it may be declared, or why not."""
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


def _in_order(value: tuple[date, date]) -> tuple[date, date]:
    if not value[0] < value[1]:
        raise ValueError("should be two dates, the earlier first")
    return value


Range = Annotated[tuple[float, float], BeforeValidator(public_range)]
Span = Annotated[tuple[date, date], AfterValidator(_in_order)]
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
        categories: its possible values, for a column of names or of integer codes; each becomes an indicator.
        dates: the first and the last day that it may hold; they are mapped to [-1, 1] like a range.
        missing: `indicator` adds a feature that is 1 where the value is missing, the others then being 0;
            `refuse` takes a missing value for a mistake.
        missing_values: numbers that mean "missing".
    """

    column: str
    range: Range | None = None
    categories: Names | None = None
    dates: Span | None = None
    missing: Literal["refuse", "indicator"] = "refuse"
    missing_values: tuple[float, ...] = ()

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if [self.range, self.categories, self.dates].count(None) != 2:
            raise ValueError(f"column {self.column}: declare either range or categories or dates")
        if self.missing_values and self.missing == "refuse":
            raise ValueError(f"column {self.column}: missing_values needs missing: indicator")
        if self.missing_values and not all(isinstance(name, int | float) for name in self.categories or ()):
            raise ValueError(f"column {self.column}: missing_values are numbers, its categories are names")
        if self.missing_values and self.dates is not None:
            raise ValueError(f"column {self.column}: missing_values are numbers, its values are dates")
        return self

    @property
    def width(self) -> int:
        """How many features it becomes."""
        return (1 if self.categories is None else len(self.categories)) + (self.missing == "indicator")

    @property
    def limits(self) -> tuple[float, float] | None:
        """The ends that are mapped to -1 and 1, dates as days; None for categories."""
        return self.range if self.dates is None else (day_number(self.dates[0]), day_number(self.dates[1]))


def read_columns(table: ClientTable, columns: Sequence[Column]) -> Array:
    """The declared columns, float64: numbers, days, positions among the categories, NaN for missing."""
    found = []
    for column in columns:
        if column.dates is not None:
            values = table.days(column.column)
        elif column.categories is None:
            values = finite_numbers(table, column.column)
        else:
            index = category_index(table, column.column, column.categories, column.missing_values)
            values = np.where(index < 0, np.nan, index)
        found.append(values)
        refuse_rows(
            np.isnan(values) & (column.missing == "refuse"),
            partial(_no_value, table, column.column),
        )
    return np.stack(found, 1)


def _no_value(table: ClientTable, column: str, row: int) -> str:
    return f"{table.where(row, column)}: no value; declare missing: indicator if that may be"


def count_clipped(raw: Array, columns: Sequence[Column], clipped: Counter[str]) -> None:
    """Add how many values lie outside the range of their column."""
    for values, column in zip(raw.T, columns, strict=True):
        if column.limits is not None:
            missing = np.isnan(values) | np.isin(values, column.missing_values)
            clipped[column.column] += outside(values[~missing], column.limits)


def encode(raw: Any, columns: Sequence[Column], maths: Any) -> Any:
    """Float64 rows as `read_columns` gives them as features side by side.

    The same lines serve for numpy and for torch: `maths` is the one that the rows are of.
    """
    features = []
    for place, column in enumerate(columns):
        values = raw[:, place]
        ones = maths.ones_like(values)  # so that truth becomes a number of the same type
        missing = values != values  # not a number
        if column.limits is not None:
            for stands_for_none in column.missing_values:
                missing = missing | (values == stands_for_none)
            features.append(maths.where(missing, 0.0, 2.0 * unit_interval(values, column.limits) - 1.0))
        else:
            features += [ones * (values == position) for position in range(len(column.categories or ()))]
        if column.missing == "indicator":
            features.append(ones * missing)
    return maths.stack(features, 1)


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


def unit_interval(numbers: Any, limits: tuple[float, float]) -> Any:
    """The range mapped to [0, 1], what lies outside clipped; of numpy or torch."""
    low, high = limits
    return (numbers.clip(low, high) - low) / (high - low)


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
        words = table.words(name)
        if {category.lower() for category in map(str, categories)} == _TRUTH:  # True, TRUE and true are one
            categories, words = tuple(map(str.lower, map(str, categories))), list(map(str.lower, words))
        values = np.array(words)
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
