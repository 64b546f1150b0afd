"""One table of everybody's records, from a file or from memory, dealt to the clients that a column names."""

import unicodedata
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import numpy as np

from coterie.data.client_files import TABLES, client_files
from coterie.data.records import Array
from coterie.data.tables import ClientTable, as_day, from_arrow, is_missing, read_table
from coterie.errors import DataError, InputError

IN_MEMORY = Path("table")
"""Where messages say that a value stands, of a table that is in no file."""
TRUTH_VALUES = ["false", "true"]
_LONGEST_NAME = 180
"""Bytes of a client's name: with an ending, and a draft beside it, it must be a file's."""


class Exportable(Protocol):
    """A table of any library that hands its columns on by Arrow's interface: pandas, pyarrow, polars, ..."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


Tabular = str | Path | Exportable | Mapping[str, object]
"""A CSV or parquet file, a folder of such files, a data frame, an Arrow table, or arrays by column."""


class ValueKind(StrEnum):
    """What the values of a column look like, to whoever has to declare them."""

    NUMBERS = "numbers"
    TRUTH = "true or false"
    DATES = "dates"
    WORDS = "words"
    NOTHING = "nothing"


def read_whole(source: Tabular) -> ClientTable:
    """The one table of a file or of something in memory."""
    if isinstance(source, str | Path):
        path = Path(source)
        if path.suffix not in (".csv", ".parquet") or not path.exists():
            there = "no such file" if not path.exists() else "not a table"
            raise DataError(f"{path}: {there}; allowed: a .csv or .parquet file, or a folder of them")
        return read_table(path)
    return _from_memory(source)


def _from_memory(source: Exportable | Mapping[str, object]) -> ClientTable:
    import pyarrow as pa

    try:
        if isinstance(source, Mapping):
            content = pa.table({str(name): pa.array(np.asarray(values)) for name, values in source.items()})
        else:
            # Of a data frame the columns count; its index would become one more.
            reset = getattr(source, "reset_index", None)
            content = pa.table(source if reset is None else reset(drop=True))
    except (pa.ArrowException, TypeError, ValueError) as mistake:
        reason = " ".join(str(mistake).split())[:200]
        kinds = "a path, a data frame, an Arrow table, or arrays by column"
        raise DataError(
            f"data: a {type(source).__name__} is not a table ({reason}); allowed: {kinds}"
        ) from None
    if not content.num_rows:
        raise DataError("data: no records")
    return from_arrow(IN_MEMORY, content)


def deal(table: ClientTable, column: str) -> dict[str, ClientTable]:
    """The rows of each client, under the name that its file will have, and without the column."""
    owners = table.words(column)
    rows: dict[str, list[int]] = {}
    for row, owner in enumerate(owners):
        if not owner:
            raise DataError(f"{table.where(row, column)}: no client; leave such rows out, or name one")
        rows.setdefault(owner, []).append(row)
    named = file_names(list(rows))
    others = table.only([name for name in table.columns if name != column])
    return {named[owner]: others.take(own) for owner, own in rows.items()}


def read_clients(folder: Path) -> dict[str, ClientTable]:
    """The table of every client, of a folder with a file for each."""
    tables = {path.stem: read_table(path) for path in client_files(folder, TABLES)}
    first = next(iter(tables.values()))
    for table in tables.values():
        if set(table.columns) != set(first.columns):
            odd = min(set(table.columns) ^ set(first.columns))
            raise DataError(
                f"{table.source}: column {odd!r} is in one of {first.source.name} and this file only"
            )
    return tables


def file_names(clients: Sequence[str]) -> dict[str, str]:
    """A file's name for each client, two of which no system takes for the same.

    Letters and digits of every script, spaces and -_.,+=@() stay; all else, and a dot in front, becomes %XX,
    as does the % itself, so that different clients have different names.
    """
    names: dict[str, str] = {}
    folded: dict[str, str] = {}
    for client in clients:
        plain = "".join(
            letter if letter.isalnum() or letter in " -_.,+=@()" else quote(letter, safe="")
            for letter in client
        )
        name = f"%2E{plain[1:]}" if plain.startswith(".") else plain
        if len(name.encode()) > _LONGEST_NAME:
            raise InputError(f"client {client[:40]}...: too long for a file; allowed: {_LONGEST_NAME} bytes")
        alike = unicodedata.normalize("NFKC", name).casefold()
        if (other := folded.setdefault(alike, client)) != client:
            raise InputError(
                f"clients {other!r} and {client!r}: their files would have the same name on some systems; "
                "rename one of them"
            )
        names[client] = name
    return names


# --- what a column holds, for whoever declares it --------------------------------------------------------


class ColumnValues:
    """The values of a column in everybody's tables: as private as they are."""

    def __init__(self, tables: Mapping[str, ClientTable], name: str) -> None:
        self.name = name
        self.tables = [table.only([name]) for table in tables.values()]
        self.words = [word for table in self.tables for word in table.words(name)]
        self.present = [word for word in self.words if word]
        self.missing = len(self.words) - len(self.present)
        self.kind = self._kind()

    def _kind(self) -> ValueKind:
        if not self.present:
            return ValueKind.NOTHING
        if set(map(str.lower, self.present)) <= set(TRUTH_VALUES):
            return ValueKind.TRUTH
        if all(isinstance(table.columns[self.name], np.ndarray) for table in self.tables):
            return ValueKind.NUMBERS
        if all(map(_is_number, self.present)):
            return ValueKind.NUMBERS
        return ValueKind.DATES if all(map(_is_date, self.present)) else ValueKind.WORDS

    @property
    def distinct(self) -> list[str]:
        """Each value once, as text, in the order of the alphabet."""
        return sorted(set(self.present))

    @property
    def whole(self) -> bool:
        """Whether all are integers, codes perhaps."""
        return self.kind is ValueKind.NUMBERS and bool((self.numbers == np.floor(self.numbers)).all())

    @property
    def numbers(self) -> Array:
        """Those that are there, as numbers; dates as days."""
        read = ClientTable.days if self.kind is ValueKind.DATES else ClientTable.numbers
        found: Array = np.concatenate([read(table, self.name) for table in self.tables])
        present: Array = found[~np.isnan(found)]
        return present

    @property
    def identifies(self) -> bool:
        """Whether every row has another value, as names and numbers of patients do."""
        single = len(set(self.present)) == len(self.present) >= 20
        return single and (self.whole or self.kind is ValueKind.WORDS)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    # 007 is a name, not the number 7.
    digits = text.lstrip("+-")
    return not (len(digits) > 1 and digits[0] == "0" and digits.isdecimal()) and not is_missing(text)


def _is_date(text: str) -> bool:
    return text[4:5] == "-" and as_day(text) is not None
