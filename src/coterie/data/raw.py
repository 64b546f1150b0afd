"""Whatever people hold records in (arrays, data frames, rows, text) as the raw values a model takes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from coterie.data.client_files import Clipped, check_numbers, read_rows
from coterie.data.columns import Column
from coterie.data.dataset_files import refuse_rows
from coterie.data.preprocessing import Preprocessing, TableInputs, TokenInputs
from coterie.data.records import Array
from coterie.data.tables import ClientTable
from coterie.errors import DataError

_SOURCE = Path("X")
"""What messages call records that came from no file."""


def raw_records(values: object, preprocessing: Preprocessing) -> Array:
    """Records as the model of a run takes them: (records, *raw shape).

    Of a table: a data frame, a mapping of columns, a list of rows that name their columns, or an array of
    numbers in the declared order of columns, with categories by their positions and NaN for missing values.
    Of text: a list of texts. Of anything else: an array, whose records may be flat.
    """
    inputs = preprocessing.inputs
    if isinstance(inputs, TableInputs) and (table := _table(values, inputs)) is not None:
        return read_rows(table, inputs, Clipped())
    if isinstance(inputs, TokenInputs) and inputs.alphabet and _are_texts(values):
        return _windows(values, inputs)
    try:
        array = np.asarray(values)
    except (ValueError, TypeError):
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "biuf":
        more = ", a data frame or rows by name" if isinstance(inputs, TableInputs) else ""
        raise DataError(f"X: a {type(values).__name__} of other things than numbers; allowed: an array{more}")
    array = _shaped(array, inputs.raw_shape)
    if isinstance(inputs, TableInputs):
        array = array.astype(np.float64)
        _check_rows(array, inputs.columns)
        return array
    check_numbers(array, preprocessing, Clipped(), "X: row {}")
    return array.astype(np.int64 if isinstance(inputs, TokenInputs) else np.float32)


def _shaped(array: Array, shape: tuple[int, ...]) -> Array:
    if array.shape[1:] != shape and array.shape[1:] != (math.prod(shape),):
        raise DataError(f"X: an array of shape {array.shape}; allowed: (records, {str(shape).strip('(,)')})")
    return array.reshape(-1, *shape)


def _check_rows(rows: Array, columns: Sequence[Column]) -> None:
    """Refuse rows of numbers that no table could have led to."""
    for values, column in zip(rows.T, columns, strict=True):
        name, missing = column.column, np.isnan(values)
        wrong, allowed = np.isinf(values), "finite numbers"
        if column.categories is not None:
            known = np.isin(values, np.arange(len(column.categories)))
            wrong, allowed = ~known & ~missing, f"0 to {len(column.categories) - 1}, places among categories"
        if column.missing == "refuse":
            wrong = wrong | missing
        line = f"X: row {{}}, column {name}: {{}}; allowed: {allowed}"
        refuse_rows(wrong, lambda row, line=line, values=values: line.format(row, values[row]))  # type: ignore[misc]


# --- tables -----------------------------------------------------------------------------------------


def _table(values: object, inputs: TableInputs) -> ClientTable | None:
    """Columns by name; None where nothing is named."""
    names = [column.column for column in inputs.columns]
    if isinstance(values, Mapping) or hasattr(values, "columns"):
        found = {name: _column(values[name]) for name in names if name in values}  # type: ignore[index,operator]
    elif isinstance(values, Sequence) and values and all(isinstance(row, Mapping) for row in values):
        found = {
            name: _column([row.get(name) for row in values])
            for name in names
            if any(name in row for row in values)
        }
    else:
        return None
    lengths = {len(column) for column in found.values()}
    if len(lengths) > 1:
        raise DataError(f"X: columns of different lengths, {', '.join(map(str, sorted(lengths)))}")
    rows = lengths.pop() if lengths else 0
    return ClientTable(_SOURCE, found, "row", range(rows))


def _column(values: object) -> list[str] | Array:
    """A column as a file would have it: numbers, or text that is empty where a value is missing."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise DataError(f"X: a column of shape {array.shape}; allowed: one value for each record")
    if array.dtype.kind == "M":  # nanoseconds would come out as numbers
        array = array.astype("datetime64[us]")
    if array.dtype.kind in "iuf":
        return array.astype(np.float64)
    if array.dtype.kind == "M":
        return ["" if day == "NaT" else day for day in np.datetime_as_string(array, unit="s").tolist()]
    if array.dtype.kind == "b":
        return [str(value).lower() for value in array.tolist()]  # as JSON writes truth values
    return [_word(value) for value in array.tolist()]


def _word(value: object) -> str:
    if value is None or value != value:  # not a number, or what a library has for nothing
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # a column with missing values turned integers into floats
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


# --- text -------------------------------------------------------------------------------------------


def _are_texts(values: object) -> bool:
    return isinstance(values, Sequence | np.ndarray) and all(isinstance(text, str) for text in values)


def _windows(values: object, inputs: TokenInputs) -> Array:
    """The last characters of every text: what comes next is asked for."""
    assert isinstance(values, Sequence | np.ndarray)
    found = [inputs.tokens(text) for text in ([values] if isinstance(values, str) else values)]
    for row, tokens in enumerate(found):
        if len(tokens) < inputs.length:
            raise DataError(f"X: text {row} of {len(tokens)} characters; allowed: {inputs.length} or more")
    return np.stack([tokens[-inputs.length :] for tokens in found])
