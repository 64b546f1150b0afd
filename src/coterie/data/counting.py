"""Of a folder only what is public: the declaration and how many records each client has.

No value is looked at, beside identifiers of persons where they are the unit. The number of records comes from
the header of an array, from the metadata of a parquet file, or from the number of lines of a CSV file."""

import csv
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from coterie.data.client_files import DECLARATION, client_files, formats
from coterie.data.dataset_files import reading
from coterie.data.folder import read_declaration
from coterie.data.records import Dataset, Persons, Records, Task
from coterie.data.tables import read_table
from coterie.errors import DataError
from coterie.files import regular


def blank_records(task: Task, count: int) -> Records:
    """So many records of the task's shape that are nobody's: zeros, of the first class."""
    kind = np.float32 if task.vocabulary is None else np.int64
    labels = np.int64 if task.kind == "classification" else np.float32
    # One row of memory, however many there are.
    features = np.broadcast_to(np.zeros(1, dtype=kind), (count, *task.shape))
    return Records(features, np.zeros(count, dtype=labels))


def count_folder(path: Path, *, persons: bool = False) -> Dataset:
    """A folder's clients with as many blank records as each has.

    Args:
        persons: whether it matters whose each record is.
    """
    if not path.is_dir():
        raise DataError(f"data.path: {path}; allowed: a folder with {DECLARATION} and a file per client")
    declaration = read_declaration(path / DECLARATION)
    task, preprocessing = declaration.as_task(), declaration.preprocessing()
    files = client_files(path, formats(preprocessing))
    counts = {file.stem: _count(file) for file in files}
    dataset = Dataset.of_owners(
        path.resolve().name,
        {client: blank_records(task, count) for client, count in counts.items()},
        task,
        f"blank records, as many as the files of {path} have",
        preprocessing=preprocessing,
        caveats=declaration.caveats,
    )
    if not persons or declaration.person is None:
        return dataset
    whose = [name for file in files for name in _persons(file, declaration.person)]
    return replace(dataset, persons=Persons(np.unique(whose, return_inverse=True)[1]))


def _persons(path: Path, column: str) -> list[str]:
    """Whose each record is."""
    if path.suffix != ".npz":
        return read_table(path).words(column)
    with (
        reading(path, ValueError, KeyError, zipfile.BadZipFile),
        np.load(path, allow_pickle=False) as content,
    ):
        return list(map(str, content[column].tolist()))


def _count(path: Path) -> int:
    count = {".npz": _count_array, ".csv": _count_lines}.get(path.suffix, _count_rows)(path)
    if not count:
        raise DataError(f"{path}: no records")
    return count


def _count_array(path: Path) -> int:
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with (
        reading(path, ValueError, KeyError, zipfile.BadZipFile),
        zipfile.ZipFile(path) as archive,
        archive.open("x.npy") as stream,
    ):
        shape: tuple[int, ...] = headers[np.lib.format.read_magic(stream)](stream)[0]
    return shape[0] if shape else 0


def _count_lines(path: Path) -> int:
    with (
        reading(path, UnicodeDecodeError, csv.Error),
        regular(path).open(newline="", encoding="utf-8-sig") as stream,
    ):
        return max(0, sum(1 for fields in csv.reader(stream, strict=True) if fields) - 1)


def _count_rows(path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = [part for part in sorted(path.iterdir()) if part.name[0] not in "._"] if path.is_dir() else [path]
    with reading(path, pa.ArrowException, ValueError):
        return sum(pq.ParquetFile(part).metadata.num_rows for part in parts)
