"""Text and JSON on disk, replaced in one step or appended line by line."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from coterie.errors import InputError

Json = Mapping[str, Any]


def write_text(path: Path, text: str) -> None:
    """Replace a file's content in one step."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    scratch.replace(path)


def write_json(path: Path, content: Json) -> None:
    write_text(path, json.dumps(finite(content), indent=1, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """JSON has no infinities and no NaN: a figure that is none (a diverged loss) is null."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as JSON ({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: should hold a JSON object")
    return content


def append_line(path: Path, content: Json) -> None:
    with path.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(finite(content), allow_nan=False) + "\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """JSON lines of a file; a last line torn by a crash is not one."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            return
        try:
            yield json.loads(line)
        except ValueError:
            raise InputError(f"{path}: not readable as JSON lines") from None


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Replace a file of named arrays in one step."""
    scratch = path.with_name(f".{path.name}")
    save_file({name: np.ascontiguousarray(value) for name, value in arrays.items()}, scratch)
    os.replace(scratch, path)


def read_arrays(path: Path) -> dict[str, NDArray[Any]] | None:
    """What `write_arrays` wrote; None where it never did, or the file is damaged."""
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError):
        return None


def forget_rounds(folder: Path, before: int) -> None:
    """Delete the files of arrays whose names begin with an earlier round, in six digits."""
    for path in folder.glob("*.safetensors"):
        if int(path.name[:6]) < before:
            path.unlink()
