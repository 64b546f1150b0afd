"""Tables of one client, from CSV or parquet, with the place of every row for messages."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coterie.data.dataset_files import reading
from coterie.data.records import Array
from coterie.errors import DataError, check_memory
from coterie.files import regular

if TYPE_CHECKING:
    import pyarrow as pa

EXACT = 2**53
"""The largest integer up to which a float tells all integers apart."""
# How people write that a value is missing.
_MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})


@dataclass(frozen=True)
class ClientTable:
    """Columns by name; a column is text as found in the file, or numbers with NaN for missing values.

    Args:
        source: the file.
        unit: what `places` counts, "line" or "row".
        places: where each row stands in the file.
    """

    source: Path
    columns: dict[str, list[str] | Array]
    unit: str
    places: Sequence[int]

    def __len__(self) -> int:
        return len(self.places)

    def where(self, row: int, column: str) -> str:
        """The file, row and column, as a message begins."""
        return f"{self.source}: {self.unit} {self.places[row]}, column {column}"

    def column(self, name: str) -> list[str] | Array:
        """The column, or an error that lists the columns there are."""
        if name not in self.columns:
            raise DataError(f"{self.source}: no column {name!r}; it has {', '.join(self.columns)}")
        return self.columns[name]

    def numbers(self, name: str) -> Array:
        """The column as float64, NaN where a value is missing."""
        values = self.column(name)
        if isinstance(values, np.ndarray):
            return values
        filled = ["nan" if is_missing(value) else value for value in values]
        try:
            return np.array(filled, dtype=np.str_).astype(np.float64)
        except ValueError:
            for row, value in enumerate(filled):
                try:
                    float(value)
                except ValueError:
                    raise DataError(
                        f"{self.where(row, name)}: {value!r} is no number; declare categories if it is text"
                    ) from None
            raise

    def words(self, name: str) -> list[str]:
        """The column as text, empty where a value is missing."""
        values = self.column(name)
        if isinstance(values, np.ndarray):
            return ["" if np.isnan(v) else np.format_float_positional(v, trim="-") for v in values]
        return ["" if is_missing(value) else value for value in values]

    def days(self, name: str) -> Array:
        """The column's dates as days, times as parts of a day; NaN where a value is missing."""
        found = np.full(len(self), np.nan)
        for row, value in enumerate(self.words(name)):
            if value:
                day = as_day(value)
                if day is None:
                    raise DataError(f"{self.where(row, name)}: {value!r} is no date; allowed: 2001-12-31")
                found[row] = day
        return found

    def take(self, rows: Sequence[int] | Array) -> "ClientTable":
        """These rows, in this order."""
        columns: dict[str, list[str] | Array] = {
            name: values[np.asarray(rows)]
            if isinstance(values, np.ndarray)
            else [values[row] for row in rows]
            for name, values in self.columns.items()
        }
        return ClientTable(self.source, columns, self.unit, [self.places[row] for row in rows])

    def only(self, names: Sequence[str]) -> "ClientTable":
        """These columns, in this order."""
        return ClientTable(self.source, {name: self.column(name) for name in names}, self.unit, self.places)

    def write(self, path: Path) -> None:
        """As a file that reads as this table does, in the format that the file's name ends in."""
        if path.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.table(dict(self.columns)), path)
            return
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(self.columns)
        cells = (
            ["" if np.isnan(value) else repr(float(value)) for value in values]
            if isinstance(values, np.ndarray)
            else values
            for values in self.columns.values()
        )
        lines.writerows(zip(*cells, strict=True))
        path.write_text(text.getvalue(), encoding="utf-8")


def day_number(day: date) -> float:
    """Days since the first of the calendar; a time is a part of its day."""
    if not isinstance(day, datetime):
        return float(day.toordinal())
    utc = day if day.tzinfo is None else day.astimezone(UTC)
    return utc.toordinal() + (utc.hour * 3600 + utc.minute * 60 + utc.second) / 86400.0


def as_day(text: str) -> float | None:
    """The day of a date, or of a date and a time, as ISO 8601 writes them; None where it is none."""
    try:
        return day_number(datetime.fromisoformat(text))
    except (ValueError, OverflowError):
        return None


def is_missing(value: str) -> bool:
    """Whether this text stands for no value."""
    return value.lower() in _MISSING


def read_table(path: Path) -> ClientTable:
    """The table in a file, or in a folder of parquet parts."""
    return read_csv(path) if path.suffix == ".csv" else read_parquet(path)


def read_csv(path: Path, header: tuple[str, ...] | None = None) -> ClientTable:
    """A comma-separated table; its first line names the columns unless `header` does."""
    rows: list[list[str]] = []
    places: list[int] = []
    names = None if header is None else list(header)
    with (
        reading(path, UnicodeDecodeError, csv.Error),
        regular(path).open(newline="", encoding="utf-8-sig") as stream,
    ):
        reader = csv.reader(stream, strict=True)
        for fields in filter(None, reader):
            row = [field.strip() for field in fields]
            if names is None:
                names = row
                continue
            if len(row) != len(names):
                raise DataError(f"{path}: line {reader.line_num}: {len(row)} values for {len(names)} columns")
            rows.append(row)
            places.append(reader.line_num)
    if not rows or names is None:
        raise DataError(f"{path}: no records")
    if len(set(names)) < len(names):
        raise DataError(f"{path}: column {max(names, key=names.count)!r} occurs twice")
    return ClientTable(
        path, dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)), "line", places
    )


def _fits(integers: "pa.ChunkedArray") -> bool:
    """Whether floats hold these integers exactly; longer ones, as of identifiers, stay text."""
    import pyarrow.compute as pc

    limits = pc.min_max(integers).as_py()
    return all(value is None or abs(value) <= EXACT for value in limits.values())


def read_parquet(path: Path) -> ClientTable:
    """A parquet table of numbers, truth values and text; of a folder, all its parts in the order of names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = [part for part in sorted(path.iterdir()) if part.name[0] not in "._"] if path.is_dir() else [path]
    for part in parts:
        if part.suffix != ".parquet" or not part.is_file():
            raise DataError(f"{part}: beside parts of a table; allowed: parquet files")
    with reading(path, pa.ArrowException, ValueError):
        files = [pq.ParquetFile(part) for part in parts]
        check_memory(str(path), sum(8 * file.metadata.num_rows * file.metadata.num_columns for file in files))
        content = pa.concat_tables([file.read() for file in files]) if files else None
    if content is None or not content.num_rows:
        raise DataError(f"{path}: no records")
    return from_arrow(path, content)


def from_arrow(source: Path, content: "pa.Table") -> ClientTable:
    """A table in memory: columns of numbers as they are, all others as text."""
    import pyarrow as pa

    # Names and texts are bytes until they are looked at, and those of a damaged file are no UTF-8.
    with reading(source, pa.ArrowException, UnicodeDecodeError):
        return ClientTable(source, _columns(source, content), "row", range(1, content.num_rows + 1))


def _columns(source: Path, content: "pa.Table") -> dict[str, list[str] | Array]:
    import pyarrow as pa

    columns: dict[str, list[str] | Array] = {}
    for field, values in zip(content.schema, content.columns, strict=True):
        if field.name in columns:
            raise DataError(f"{source}: column {field.name!r} occurs twice")
        if pa.types.is_timestamp(field.type):  # nanoseconds are more than a date of ours can hold
            values = values.cast(pa.timestamp("us", field.type.tz), safe=False)
        if pa.types.is_floating(field.type) or (pa.types.is_integer(field.type) and _fits(values)):
            columns[field.name] = np.asarray(values.cast(pa.float64()).to_numpy(), dtype=np.float64)
        else:
            words = ["" if value is None else str(value).strip() for value in values.to_pylist()]
            # As people write truth values, and JSON.
            columns[field.name] = list(map(str.lower, words)) if pa.types.is_boolean(field.type) else words
    return columns
