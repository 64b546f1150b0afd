"""Where the files of published datasets lie, and what to say when they do not."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.data.records import Array
from coterie.errors import DataError


def data_root() -> Path:
    """The folder of the datasets: `$COTERIE_DATA`, or `~/.cache/coterie`."""
    return Path(os.environ.get("COTERIE_DATA") or Path.home() / ".cache" / "coterie")


def dataset_files(dataset: str, names: tuple[str, ...]) -> tuple[Path, ...]:
    """The dataset's files, all of them present."""
    folder = data_root() / dataset
    paths = tuple(folder / name for name in names)
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise DataError(
            f"data.name: {dataset}: {folder} lacks {', '.join(missing)}; put {', '.join(names)} there, or "
            f"set COTERIE_DATA to the folder that has {dataset}/"
        )
    return paths


@contextmanager
def reading(path: Path, *mistakes: type[Exception]) -> Iterator[None]:
    """Refuse a file in one line where reading it raises any of these, or an OSError."""
    try:
        yield
    except (OSError, *mistakes) as error:  # type: ignore[misc]
        # What a library says may quote the records; COTERIE_DEBUG=1 shows it to whoever wants to know.
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise DataError(f"{path}: cannot be read, it may be truncated or corrupt ({reason})") from error


def refuse_rows(wrong: Array, line: Callable[[int], str]) -> None:
    """Refuse the first of the rows that are wrong, if any are, in the line for its number."""
    if wrong.any():
        raise DataError(line(int(wrong.argmax())))
