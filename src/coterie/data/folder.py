"""A user's own data: a folder with one file per client and a declaration of what is public about them.

`federation.yaml` declares the task, the label and the features; every `.csv`, `.parquet` or `.npz` file
beside it is a client, named like the file, and so is a folder NAME.parquet of part files. For tables:

    task: classification
    label: {column: diagnosis, classes: [healthy, ill]}
    features:
      - {column: age, range: [18, 100]}
      - {column: smoker, categories: ["no", "yes"]}
      - {column: cholesterol, range: [100, 400], missing: indicator, missing_values: [0]}

For `.npz` files with arrays `x` (records first) and `y`:

    task: classification
    label: {classes: 10}
    features: {shape: [1, 28, 28], range: [0, 255]}

For regression the label has a range instead of classes, mapped to [0, 1]: `task: regression`,
`label: {column: score, range: [0, 70]}`. There `error_cap` (default 0.1) bounds the squared error on that
scale, in the score by which a client privately selects a model.

Ranges and categories must be known without looking at the records. Values outside a range are clipped to it;
how many is told on stderr to whoever reads the folder, and nowhere else: the number is private.
A column's range is mapped to [-1, 1]; arrays are divided by the largest absolute value of their range, so
that zero stays zero.
"""

import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Discriminator, Field, PositiveInt, Tag, ValidationError, model_validator

from coterie.data.columns import (
    Column,
    Names,
    PublicSettings,
    Range,
    encode,
    finite_numbers,
    label_index,
    outside,
    unit_interval,
)
from coterie.data.dataset_files import reading, refuse_rows
from coterie.data.records import Array, Dataset, Records, Task
from coterie.data.tables import ClientTable, read_csv, read_parquet
from coterie.errors import DataError, check_memory
from coterie.files import parse_yaml, regular
from coterie.notices import tell_here
from coterie.settings import Settings, explain

DECLARATION = "federation.yaml"
CLASSES = 10**6
"""As many as a label may have."""
_ERROR_CAP = 0.1
# Files that may lie in the folder without being a client's.
_BESIDE = frozenset({".md", ".txt", ".yaml", ".yml", ".rst"})
_RECORDS = frozenset({".csv", ".parquet", ".npz"})
_DEFLATED = 1032
"""The most bytes that one byte of an archive can stand for."""


class Label(Settings):
    """What is predicted.

    Args:
        column: its column, for tables.
        classes: the classes by name, or how many if labels are 0, 1, 2, ...
        range: the values a regression target may take.
    """

    column: str | None = None
    classes: Annotated[int, Field(ge=1, le=CLASSES)] | Names | None = None
    range: Range | None = None


class ArrayFeatures(PublicSettings):
    """Features that come as one array per client: the shape of a record and the range of its values."""

    shape: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    range: Range


class Declaration(PublicSettings):
    """The content of `federation.yaml`."""

    task: Literal["classification", "regression"]
    label: Label
    features: Annotated[
        Annotated[ArrayFeatures, Tag("array")] | Annotated[tuple[Column, ...], Tag("table")],
        Discriminator(lambda declared: "table" if isinstance(declared, list | tuple) else "array"),
    ]
    error_cap: Annotated[float, Field(gt=0, le=1e6)] | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        label, classification = self.label, self.task == "classification"
        if classification and (
            label.classes is None or label.range is not None or self.error_cap is not None
        ):
            raise ValueError("label: classification needs classes, and neither range nor error_cap")
        if not classification and (label.range is None or label.classes is not None):
            raise ValueError("label: regression needs a range, and no classes")
        if label.classes == 1:
            raise ValueError("label.classes: 1; allowed: 2 or more")
        if isinstance(self.features, ArrayFeatures):
            if label.column is not None or isinstance(label.classes, tuple):
                raise ValueError("label: beside arrays it has no column, and classes is a number")
            return self
        names = [column.column for column in self.features]
        if not names or label.column is None:
            raise ValueError("label, features: a table needs label.column and at least one feature")
        if label.column in names:
            raise ValueError(f"features: {label.column} is the label, a model must not see it")
        if len(set(names)) < len(names):
            raise ValueError(f"features: {max(names, key=names.count)} is declared twice")
        return self

    def as_task(self) -> Task:
        """The task it poses."""
        features, classes = self.features, self.label.classes
        shape = (
            features.shape
            if isinstance(features, ArrayFeatures)
            else (sum(column.width for column in features),)
        )
        if self.task == "regression":
            return Task("regression", shape, 0, error_cap=self.error_cap or _ERROR_CAP)
        return Task("classification", shape, len(classes) if isinstance(classes, tuple) else classes or 0)


def read_folder(path: Path) -> Dataset:
    """Every client of the folder, with its features scaled as declared."""
    if not path.is_dir():
        raise DataError(f"data.path: {path}; allowed: a folder with {DECLARATION} and a file per client")
    declaration = _declaration(path / DECLARATION)
    files = _client_files(
        path, ".npz" if isinstance(declaration.features, ArrayFeatures) else ".csv or .parquet"
    )
    clipped: Counter[str] = Counter()
    records = {file.stem: _read_client(file, declaration, clipped) for file in files}
    if clipped.total():
        listed = ", ".join(f"{count:,} of {name}" for name, count in clipped.items() if count)
        tell_here(f"note, for the holder of {path} alone: outside the declared range and clipped: {listed}")
    return Dataset.of_owners(
        path.resolve().name,
        records,
        declaration.as_task(),
        f"the files of {path}; scaled by the ranges that {DECLARATION} declares",
    )


def _declaration(path: Path) -> Declaration:
    if not path.exists():
        raise DataError(f"{path.parent}: no {DECLARATION}, which declares task, label and features")
    with reading(path, UnicodeDecodeError):
        text = regular(path).read_text(encoding="utf-8")
    try:
        return Declaration.model_validate(parse_yaml(text))
    except ValidationError as error:
        raise DataError(f"{path}: {explain(error, Declaration)}") from error
    except ValueError as problem:
        raise DataError(f"{path}: not YAML, {problem}") from problem


def _client_files(folder: Path, allowed: str) -> list[Path]:
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


def _read_client(path: Path, declaration: Declaration, clipped: Counter[str]) -> Records:
    if isinstance(declaration.features, ArrayFeatures):
        return _read_arrays(path, declaration, declaration.features, clipped)
    table = read_csv(path) if path.suffix == ".csv" else read_parquet(path)
    targets = _table_targets(table, declaration.label.column or "", declaration.label, clipped)
    return Records(encode(table, declaration.features, clipped), targets)


def _table_targets(table: ClientTable, column: str, label: Label, clipped: Counter[str]) -> Array:
    if isinstance(label.classes, tuple):
        return label_index(table, column, label.classes)
    targets = finite_numbers(table, column)
    refuse_rows(np.isnan(targets), lambda row: f"{table.where(row, column)}: no label")
    return _targets(targets, label, clipped, lambda row: table.where(row, column))


def _read_arrays(
    path: Path, declaration: Declaration, declared: ArrayFeatures, clipped: Counter[str]
) -> Records:
    damages = EOFError, KeyError, ValueError, TypeError, zipfile.BadZipFile, zlib.error, NotImplementedError
    with reading(path, *damages), np.load(path, allow_pickle=False) as content:
        check_memory(str(path), sum(member.file_size for member in content.zip.infolist()))
        absent = [name for name in ("x", "y") if name not in content]
        if absent:
            raise DataError(f"{path}: no array {absent[0]!r}; it has {', '.join(content) or 'none'}")
        features, targets = (_array(path, content, name) for name in ("x", "y"))
    for name, array in (("x", features), ("y", targets)):
        # An archive may hold a member of that name that is no array at all.
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            kind = getattr(array, "dtype", type(array).__name__)
            raise DataError(f"{path}: array {name} is of type {kind}; allowed: numbers")
    if not features.ndim or not len(features):
        raise DataError(f"{path}: no records")
    if features.shape[1:] != declared.shape:
        raise DataError(
            f"{path}: records of shape {features.shape[1:]}; {DECLARATION} declares {declared.shape}"
        )
    if targets.shape != features.shape[:1]:
        raise DataError(f"{path}: {len(features)} records with targets of shape {targets.shape}")
    refuse_rows(
        ~np.isfinite(features).reshape(len(features), -1).all(axis=1),
        lambda row: f"{path}: row {row} of x has a value that is not finite",
    )
    low, high = declared.range
    clipped["x"] += outside(features, declared.range)
    scaled = np.clip(features.astype(np.float32), low, high) / np.float32(max(abs(low), abs(high)))
    rows = _targets(targets, declaration.label, clipped, lambda row: f"{path}: row {row} of y")
    return Records(scaled, rows)


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


def _targets(values: Array, label: Label, clipped: Counter[str], where: Callable[[int], str]) -> Array:
    """Class indices, or regression targets mapped to [0, 1]."""
    wrong, allowed = ~np.isfinite(values), "finite numbers"
    if isinstance(label.classes, int):
        wrong |= (values < 0) | (values >= label.classes) | (values != np.floor(values))
        allowed = f"0 to {label.classes - 1}"
    refuse_rows(wrong, lambda row: f"{where(row)}: label {values[row]}; allowed: {allowed}")
    if label.range is not None:
        clipped["the label"] += outside(values, label.range)
        return unit_interval(values.astype(np.float64), label.range).astype(np.float32)
    return values.astype(np.int64)
