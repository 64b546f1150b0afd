"""Where the files of published datasets lie, and what to say when they do not."""

import os
from pathlib import Path

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


def unreadable(path: Path, error: Exception) -> DataError:
    """One line for a file that is truncated, corrupt or not what its name says."""
    reason = " ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    return DataError(f"{path}: cannot be read, it may be truncated or corrupt ({reason})")
