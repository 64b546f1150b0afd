"""Text, JSON and YAML on disk: replaced in one step or appended line by line, and read without surprises."""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from coterie.errors import InputError

Json = Mapping[str, Any]


def write_text(path: Path, text: str) -> None:
    """Replace a file's content in one step."""
    with _replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write, which takes the other's place once it is on the disk."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    yield scratch
    sync(scratch)
    scratch.replace(path)


def beside(path: Path, suffix: str) -> Path:
    """The file that stands beside a folder."""
    return path.parent / f"{path.name}{suffix}"


def write_json(path: Path, content: Json) -> None:
    write_text(path, json_text(content))


def json_text(content: Json) -> str:
    """How an object is written into a file of its own."""
    return json.dumps(finite(content), indent=1, allow_nan=False) + "\n"


def hashed_text(content: Json) -> str:
    """An object as text, with a hash of all the rest as its last entry; numbers stay as they are."""
    digest = digest_bytes(json.dumps(content, indent=1).encode())
    return json.dumps({**content, "hash": digest}, indent=1) + "\n"


def read_hashed(path: Path) -> dict[str, Any]:
    """What `hashed_text` wrote, byte for byte; an error where a byte was changed."""
    rest = {key: value for key, value in read_json(path).items() if key != "hash"}
    if path.read_bytes() != hashed_text(rest).encode():
        raise InputError(
            f"{path}: changed since it was written, or of another version: its hash does not fit"
        )
    return rest


def digest_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest_file(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def finite(value: Any) -> Any:
    """JSON has no infinities and no NaN: a diverged loss is null."""
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
    # By newlines alone: a text has other line ends, which JSON allows inside.
    *lines, _torn = path.read_bytes().split(b"\n")
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            raise InputError(f"{path}: not readable as JSON lines") from None


def write_arrays(
    path: Path, arrays: Mapping[str, NDArray[Any]], notes: Mapping[str, str] | None = None
) -> None:
    """Replace a file of named arrays, and of texts that are kept with them, in one step."""
    kept = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    with _replacing(path) as scratch:
        save_file(kept, scratch, {**(notes or {}), "hash": _arrays_hash(kept, notes or {})})
    sync(path.parent)


def _arrays_hash(arrays: Mapping[str, NDArray[Any]], notes: Mapping[str, str]) -> str:
    found = hashlib.sha256(json.dumps(notes, sort_keys=True).encode())
    for name, value in sorted(arrays.items()):
        found.update(f"{name} {value.dtype.str} {value.shape} ".encode())
        found.update(value.tobytes())
    return found.hexdigest()


def sync(path: Path) -> None:
    """Return once a file, or what a folder names, is on the disk itself."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_arrays(path: Path) -> dict[str, NDArray[Any]] | None:
    """What `write_arrays` wrote; None where it never did, or a bit of the file was changed."""
    return _read_arrays(path)[0]


def read_notes(path: Path) -> dict[str, str]:
    """The texts kept with arrays; none where the file is missing or damaged."""
    return _read_arrays(path)[1]


def _read_arrays(path: Path) -> tuple[dict[str, NDArray[Any]] | None, dict[str, str]]:
    try:
        with safe_open(path, framework="numpy") as file:
            notes = dict(file.metadata() or {})
        arrays = dict(load_file(path))
    except (OSError, SafetensorError):
        return None, {}
    return (arrays, notes) if notes.pop("hash", None) == _arrays_hash(arrays, notes) else (None, {})


def forget_rounds(folder: Path, before: int) -> None:
    """Delete the files of arrays whose names begin with an earlier round, in six digits."""
    for path in folder.glob("*.safetensors"):
        if int(path.name[:6]) < before:
            path.unlink()


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML whose keys are names, each given once: no silent overwrite, no number for a name."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Before merge keys (<<) are replaced by what they stand for, which may well be overwritten.
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"):
            if key.tag != "tag:yaml.org,2002:str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
                problem = f"key {shown or 'null'} must be a string; quote it"
            elif key.value in seen:
                problem = f"key '{key.value}' stands twice"
            else:
                seen.add(key.value)
                continue
            raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        return node


def parse_yaml(text: str) -> Any:
    """What a YAML text says; a ValueError that names the line where it says nothing, or one thing twice."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it is not valid"
        hint = "; indent with spaces" if "'\\t'" in problem else ""
        raise ValueError(f"{where}{problem}{hint}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
