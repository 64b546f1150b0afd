"""Which records are the same, whoever holds them, in whichever file, in whichever order.

A record is known again by a digest of its raw row, all columns of it, before anything is scaled; or by the
column that a folder declares to identify it, whatever else changed. Numbers count by their value, so that 1,
1.0 and a parquet file's 1 are the same. A digest without a key would tell whoever guesses the row: these stay
in memory, and what is written down is made of them under a secret key (`coterie.register`).
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from coterie.data.records import Array, Dataset, Records
from coterie.data.tables import ClientTable, is_missing
from coterie.errors import DataError

SIZE = 16
"""Bytes of a digest."""


def of_table(table: ClientTable, identifier: str | None = None) -> Array:
    """Digests of the rows of a table: of all their columns, in whatever order, or of the one that counts."""
    if identifier is None:
        names = sorted(table.columns)
        kind = "\0".join(["row", *names])
    else:
        names, kind = [identifier], "identifier"
    codes = [_codes(table, name) for name in names]
    for row in np.flatnonzero(codes[0][:, 0] == _MISSING)[:1] if identifier is not None else ():
        raise DataError(f"{table.where(row, names[0])}: no value, though it identifies records")
    return _digests(kind, np.concatenate(codes, axis=1))


def of_arrays(features: Array, targets: Array) -> Array:
    """Digests of records that are arrays: of their values, however many bytes each takes."""
    rows = features.reshape(len(features), -1)
    both = np.concatenate([rows, targets[:, None]], axis=1, dtype=np.float64, casting="unsafe")
    return _digests("array", _bytes_of(both))


def of_persons(persons: Sequence[object]) -> Array:
    """Digests of records whose persons are to be known again: the same for all records of one."""
    words = [str(person) for person in persons]
    return of_table(ClientTable(Path("persons"), {"person": words}, "row", range(len(words))), "person")


def of_records(records: Records) -> Array:
    """The digests that came with the records, or those of what is left of them."""
    if records.identity is not None:
        return records.identity
    return of_arrays(records.features, records.targets)


def identified(dataset: Dataset) -> Dataset:
    """The same records, each with its digest from now on, however they will be dealt and shifted."""
    parts = {"train": dataset.train} | ({} if dataset.test is None else {"test": dataset.test})
    known = {}
    for name, records in parts.items():
        whose = None if dataset.persons is None else getattr(dataset.persons, name)
        digests = of_records(records) if whose is None else of_persons(whose.tolist())
        known[name] = records.identified(digests)
    return dataset.with_parts(**known)


def _digests(kind: str, rows: Array) -> Array:
    """A digest for each row of bytes."""
    start = hashlib.blake2b(kind.encode("utf-8", "surrogatepass"), digest_size=SIZE)
    whole, width, found = rows.tobytes(), rows.shape[1], bytearray()
    for place in range(0, len(whole), width):
        one = start.copy()
        one.update(whole[place : place + width])
        found += one.digest()
    return np.frombuffer(bytes(found), dtype=np.uint8).reshape(-1, SIZE)


_NUMBER, _TEXT, _MISSING = 0, 1, 2
"""What the first byte of a cell's code says."""


def _codes(table: ClientTable, name: str) -> Array:
    """Nine bytes for each cell of a column, the same for equal values: a number's own, or a text's digest."""
    values = table.column(name)
    if isinstance(values, np.ndarray):
        numbers = values.astype(np.float64)
        kinds = np.where(np.isnan(numbers), _MISSING, _NUMBER).astype(np.uint8)
        coded = _bytes_of(np.nan_to_num(numbers, nan=0.0, posinf=np.inf, neginf=-np.inf)[:, None])
        return np.concatenate([kinds[:, None], coded], axis=1)
    known = {value: _code(value) for value in set(values)}
    return np.frombuffer(b"".join([known[value] for value in values]), dtype=np.uint8).reshape(-1, 9)


def _code(text: str) -> bytes:
    if is_missing(text):
        return bytes([_MISSING]) + bytes(8)
    if not (text[0] == "0" and text.isdecimal() and len(text) > 1):  # 007 is a name, not the number 7
        with suppress(ValueError):
            return bytes([_NUMBER]) + _bytes_of(np.array([[float(text)]])).tobytes()
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return bytes([_TEXT]) + digest


def _bytes_of(numbers: Array) -> Array:
    """Rows of numbers as rows of bytes, the same on every machine; -0 is 0."""
    return np.ascontiguousarray(numbers + 0.0, dtype="<f8").view(np.uint8).reshape(len(numbers), -1)
