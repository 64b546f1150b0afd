"""The files of clients, raw: one file or folder of parts each, read as a dataset's preprocessing says."""

import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.data import identity
from coterie.data.columns import count_clipped, finite_numbers, label_index, outside, read_columns
from coterie.data.dataset_files import reading, refuse_rows
from coterie.data.preprocessing import ArrayInputs, Label, Preprocessing, TableInputs, TokenInputs
from coterie.data.records import Array
from coterie.data.tables import ClientTable, is_missing, read_table
from coterie.errors import DataError, check_memory
from coterie.notices import tell_here

DECLARATION = "federation.yaml"
# Files that may lie in the folder without being a client's.
_BESIDE = frozenset({".md", ".txt", ".yaml", ".yml", ".rst"})
_RECORDS = frozenset({".csv", ".parquet", ".npz"})
_DEFLATED = 1032
"""The most bytes that one byte of an archive can stand for."""


@dataclass(frozen=True)
class KnownBy:
    """By what a record is known again: a column that identifies it, or its whole row."""

    column: str | None = None


@dataclass(frozen=True)
class RawRecords:
    """Records before anything was scaled.

    Args:
        targets: class indices, or targets of a regression as a model learns them; None without labels.
        persons: whose each record is, as the file says it; none where nobody asked.
        identity: a digest of each record, where they are to be known again.
    """

    raw: Array
    targets: Array | None
    persons: Sequence[str] = ()
    identity: Array | None = None

    def __len__(self) -> int:
        return len(self.raw)


class Clipped(Counter[str]):
    """How many values were clipped to their range, by column: as private as they are."""

    def tell(self, path: Path) -> None:
        """Say so to whoever reads the records, and to nobody else."""
        if self.total():
            listed = ", ".join(f"{count:,} of {name}" for name, count in self.items() if count)
            outside = f"outside the declared range and clipped: {listed}"
            tell_here(f"note, for the holder of {path} alone: {outside}")


TABLES = ".csv or .parquet"
"""How files of tables end."""


def formats(preprocessing: Preprocessing) -> str:
    """How files of such records end."""
    return TABLES if isinstance(preprocessing.inputs, TableInputs) else ".npz"


def client_files(folder: Path, allowed: str) -> list[Path]:
    """The files of a folder's clients, one for each, which end in one of those that are allowed."""
    files: dict[str, Path] = {}
    for path in filter(_is_client, sorted(folder.iterdir())):
        if path.suffix not in allowed.split(" or "):
            raise DataError(f"{path}: {DECLARATION} asks for {allowed} files; move other files elsewhere")
        if path.stem in files:
            raise DataError(f"{path}: client {path.stem} is also in {files[path.stem].name}")
        files[path.stem] = path
    if not files:
        raise DataError(f"{folder}: no clients; put one {allowed} file per client there")
    return list(files.values())


def _is_client(path: Path) -> bool:
    """Whether it holds a client's records; whatever only looks as if it did is refused, never skipped."""
    try:
        path.name.encode()
    except UnicodeEncodeError:
        raise DataError(f"{path}: its name is not UTF-8; rename it") from None
    kind = path.suffix.lower()
    if path.name.startswith("."):
        if kind in _RECORDS:
            raise DataError(f"{path}: hidden; name it without the dot, or move it elsewhere")
        return False
    if kind in _BESIDE:
        return False
    if path.is_dir() and kind != ".parquet":
        if kind or any(inner.suffix.lower() in _RECORDS for inner in path.iterdir()):
            one = "allowed: a file for each client, or a folder NAME.parquet of part files"
            raise DataError(f"{path}: a folder; {one}")
        return False
    if not path.is_dir() and not path.is_file():
        raise DataError(f"{path}: a pipe, a device or a link to nothing; allowed: a file")
    return True


def read_client(
    path: Path,
    preprocessing: Preprocessing,
    clipped: Clipped,
    person: str | None = None,
    *,
    labelled: bool = True,
    known_by: KnownBy | None = None,
) -> RawRecords:
    """The records in one file.

    Args:
        clipped: counts the values that lie outside their range.
        person: the column, or array, that says whose each record is.
        labelled: whether every record must have a label.
        known_by: how they are to be known again; None: nobody asks.
    """
    inputs, label = preprocessing.inputs, preprocessing.label
    if not isinstance(inputs, TableInputs):
        found = _read_arrays(path, preprocessing, clipped, person, labelled=labelled)
        if known_by is None or found.targets is None:
            return found
        if found.persons:
            return replace(found, identity=identity.of_persons(found.persons))
        return replace(found, identity=identity.of_arrays(found.raw, found.targets))
    table = read_table(path)
    found = read_client_table(table, inputs, label, clipped, person, labelled=labelled)
    if known_by is None:
        return found
    if found.persons:
        return replace(found, identity=identity.of_persons(found.persons))
    return replace(found, identity=identity.of_table(table, known_by.column))


def read_client_table(
    table: ClientTable,
    inputs: TableInputs,
    label: Label,
    clipped: Clipped,
    person: str | None = None,
    *,
    labelled: bool = True,
) -> RawRecords:
    """The records in one table."""
    targets, column = None, label.column or ""
    if labelled or (column in table.columns and any(table.words(column))):
        targets = _table_targets(table, column, label, clipped)
    persons = () if person is None else _persons(table.words(person), lambda row: table.where(row, person))
    return RawRecords(read_rows(table, inputs, clipped), targets, persons)


def _persons(words: Sequence[str], where: Callable[[int], str]) -> Sequence[str]:
    """Whose each record is; a record of nobody could be anybody's."""
    missing = np.array([not word for word in words], dtype=np.bool_)
    refuse_rows(
        missing, lambda row: f"{where(row)}: no person; leave such records out, or say whose they are"
    )
    return words


def read_rows(table: ClientTable, inputs: TableInputs, clipped: Clipped) -> Array:
    """The raw rows of a table."""
    raw = read_columns(table, inputs.columns)
    count_clipped(raw, inputs.columns, clipped)
    return raw


def _table_targets(table: ClientTable, column: str, label: Label, clipped: Clipped) -> Array:
    if isinstance(label.classes, tuple):
        return label_index(table, column, label.classes)
    targets = finite_numbers(table, column)
    refuse_rows(np.isnan(targets), lambda row: f"{table.where(row, column)}: no label")
    return _targets(targets, label, clipped, lambda row: table.where(row, column))


def _read_arrays(
    path: Path, preprocessing: Preprocessing, clipped: Clipped, person: str | None, *, labelled: bool
) -> RawRecords:
    damages = EOFError, KeyError, ValueError, TypeError, zipfile.BadZipFile, zlib.error, NotImplementedError
    with reading(path, *damages), np.load(path, allow_pickle=False) as content:
        check_memory(str(path), sum(member.file_size for member in content.zip.infolist()))
        wanted = [name for name in ("x", "y") if labelled or name == "x" or name in content]
        wanted += [] if person is None else [person]
        absent = [name for name in wanted if name not in content]
        if absent:
            raise DataError(f"{path}: no array {absent[0]!r}; it has {', '.join(content) or 'none'}")
        arrays = {name: _array(path, content, name) for name in wanted}
    persons = _array_persons(path, arrays.pop(person), len(arrays["x"])) if person is not None else ()
    for name, array in arrays.items():
        # An archive may hold a member of that name that is no array at all.
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            kind = getattr(array, "dtype", type(array).__name__)
            raise DataError(f"{path}: array {name} is of type {kind}; allowed: numbers")
    features, targets = arrays["x"], arrays.get("y")
    if not features.ndim or not len(features):
        raise DataError(f"{path}: no records")
    declared = preprocessing.inputs.raw_shape
    if features.shape[1:] != declared:
        raise DataError(f"{path}: records of shape {features.shape[1:]}; {DECLARATION} declares {declared}")
    if targets is not None and targets.shape != features.shape[:1]:
        raise DataError(f"{path}: {len(features)} records with targets of shape {targets.shape}")
    check_numbers(features, preprocessing, clipped, f"{path}: row {{}} of x")
    if targets is not None:
        targets = _targets(targets, preprocessing.label, clipped, lambda row: f"{path}: row {row} of y")
    return RawRecords(features, targets, persons)


def _array_persons(path: Path, array: Any, records: int) -> Sequence[str]:
    kind = getattr(array, "dtype", np.dtype(object)).kind
    if kind not in "iuU" or array.shape != (records,):
        raise DataError(f"{path}: persons: allowed: an integer or a text for each of {records} records")
    words = [str(each).strip() for each in array.tolist()]
    words = ["" if is_missing(word) else word for word in words]
    return _persons(words, lambda row: f"{path}: row {row}")


def check_numbers(raw: Array, preprocessing: Preprocessing, clipped: Clipped, where: str) -> None:
    """Refuse arrays that no network could take, and count what lies outside the range.

    Args:
        where: begins a message, with {} for the number of a row.
    """
    inputs = preprocessing.inputs
    refuse_rows(
        ~np.asarray(np.isfinite(raw).all(axis=tuple(range(1, raw.ndim)))),
        lambda row: f"{where.format(row)} has a value that is not finite",
    )
    if isinstance(inputs, TokenInputs):
        wrong = (raw < 0) | (raw >= inputs.vocabulary) | (raw != np.floor(raw))
        allowed = f"tokens, 0 to {inputs.vocabulary - 1}"
        refuse_rows(wrong.any(axis=1), lambda row: f"{where.format(row)} is no window; allowed: {allowed}")
    for step in inputs.steps[:1] if isinstance(inputs, ArrayInputs) else ():
        if step.do == "clip":
            clipped["x"] += outside(raw, (step.by[0], step.by[1]))


def _array(path: Path, content: Mapping[str, Any], name: str) -> Any:
    """An array of an archive; before memory is taken, its header must claim what the archive holds."""
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(name if name in archive.namelist() else f"{name}.npy")
        stream = archive.open(member)
        if stream.read(6) == np.lib.format.MAGIC_PREFIX:
            stream.seek(0)
            shape, _, kind = headers[np.lib.format.read_magic(stream)](stream)
            claimed, held = math.prod(shape) * kind.itemsize, member.file_size - stream.tell()
            possible = claimed == held <= _DEFLATED * path.stat().st_size
            if kind.hasobject:
                raise DataError(f"{path}: array {name} holds pickled objects; allowed: numbers")
            if not possible:
                raise DataError(f"{path}: array {name} claims shape {shape}, not what the file holds")
    return content[name]


def _targets(values: Array, label: Label, clipped: Clipped, where: Callable[[int], str]) -> Array:
    """Class indices, or regression targets mapped to [0, 1]."""
    wrong, allowed = ~np.isfinite(values), "finite numbers"
    if label.classes is not None:
        # Of classes that have names, an array of numbers holds the places.
        numbered = all(isinstance(name, int | float) for name in label.names)
        names = np.array(label.names if numbered else range(len(label.names)))
        wrong = ~np.isin(values, names)
        allowed = f"{names[0]} to {names[-1]}" if np.all(np.diff(names) == 1) else ", ".join(map(str, names))
    refuse_rows(wrong, lambda row: f"{where(row)}: label {values[row]}; allowed: {allowed}")
    if label.classes is not None:
        order = np.argsort(names)
        found: Array = order[np.searchsorted(names[order], values)].astype(np.int64)
        return found
    if label.range is not None:
        clipped["the label"] += outside(values, label.range)
    return label.unit(values)
