"""Text, JSON and YAML on disk: replaced in one step or appended line by line, and read without surprises."""

import fcntl
import hashlib
import json
import math
import os
import re
import reprlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from coterie.errors import CoterieError, InputError

Json = Mapping[str, Any]
T = TypeVar("T")
LONGEST = 255 - 16
"""Bytes in the name of something whose draft lies beside it."""
DEEPEST = 4096 - 200
"""Bytes in the path of a folder with files in it."""


def regular(path: Path) -> Path:
    """A path to read from: a pipe may never end and a device has no end, so neither is opened."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: a folder, a pipe or a device; allowed: a file")
    return path


def check_place(path: Path, option: str, *, file: bool = False) -> None:
    """Refuse a folder that cannot be made, or written into, before anything is read or spent for it.

    Args:
        file: it names a file, in a folder that is there.
    """
    try:
        whole = Path(os.path.realpath(path))
        text = str(whole).encode()
        there = next(each for each in (whole, *whole.parents) if os.path.lexists(each))
        if file and not whole.is_dir():
            there = whole.parent
        if not there.is_dir() or (file and there == whole):
            problem = "it is a folder" if there == whole and file else f"{there} is no folder"
        elif max(map(len, text.split(b"/"))) > LONGEST or len(text) > DEEPEST:
            problem = f"names of at most {LONGEST} bytes, and {DEEPEST} in all, leave room for files"
        else:
            tempfile.TemporaryFile(dir=there).close()
            return
    except UnicodeEncodeError:
        problem = "its name is not UTF-8"
    except (OSError, ValueError) as mistake:
        problem = getattr(mistake, "strerror", None) or str(mistake)
    raise InputError(f"{option}: {str(path)!r} cannot be written ({problem}); name another")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A disk that is full, or fails, is one line that names the file."""
    try:
        yield
    except (OSError, SafetensorError) as mistake:
        reason = getattr(mistake, "strerror", None) or str(mistake)
        raise CoterieError(f"{path}: cannot be written ({reason})") from mistake


def write_text(path: Path, text: str) -> None:
    """Replace a file's content in one step."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content in one step."""
    with replacing(path) as draft:
        draft.write_bytes(content)


def copy_file(source: Path, target: Path) -> None:
    """Let a copy take a file's place in one step; what its owner alone may read is never anybody else's."""
    with replacing(target, mode=0o600) as draft:
        shutil.copyfile(source, draft)
        shutil.copymode(source, draft)


@contextmanager
def replacing(path: Path, *, folder: bool = False, mode: int = 0o666) -> Iterator[Path]:
    """A draft to fill, which takes its place once it is on the disk; where that fails, it is gone.

    Whoever fills a draft holds it locked, so one that nobody holds was left by a process that was killed.

    Args:
        folder: it is one, and no file.
        mode: of a new file, from its first byte on.
    """
    with writing(path):
        draft, handle = _draft(path, None if folder else mode)
        try:
            yield draft
            sync(draft)
            draft.replace(path)
        except BaseException:
            _remove(draft)
            raise
        finally:
            os.close(handle)


_AT_ONCE = 4
"""Drafts of one file that are looked for: so many processes may write it at once, and be killed."""


def _draft(path: Path, mode: int | None) -> tuple[Path, int]:
    """A new draft, held by us; those that killed processes left are gone.

    Drafts are numbered: to find all there may be takes no look at the other files of a folder.
    """

    def numbered(number: int) -> Path:
        return path.with_name(f".{path.name}.draft-{number}")

    for number in range(_AT_ONCE):
        _forget(numbered(number))
    drafts = map(numbered, count())
    return next((draft, handle) for draft in drafts if (handle := _held(draft, mode)) is not None)


def _held(draft: Path, mode: int | None) -> int | None:
    """A new draft under this name, locked; None where it is another's."""
    try:
        if mode is None:
            draft.mkdir()
        handle = os.open(draft, os.O_RDONLY | (0 if mode is None else os.O_CREAT | os.O_EXCL), mode or 0)
    except FileExistsError:
        return None
    except FileNotFoundError:
        if mode is None and draft.parent.exists():
            return None  # somebody took the folder for left, before we held it
        raise
    fcntl.flock(handle, fcntl.LOCK_EX)
    if _names(draft, handle):
        return handle
    os.close(handle)
    return None


def _forget(left: Path) -> None:
    """Remove a draft, unless somebody holds it."""
    with suppress(OSError):
        handle = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _names(left, handle):
                _remove(left)
        finally:
            os.close(handle)


def _names(path: Path, handle: int) -> bool:
    """Whether what was opened is still what stands there: its name may be another draft's by now."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
    if regular(path).read_bytes() != hashed_text(rest).encode():
        raise InputError(
            f"{path}: changed since it was written, or of another version: its hash does not fit"
        )
    return rest


def digest_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest_file(path: Path) -> str:
    with regular(path).open("rb") as handle:
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
        # `int` refuses NaN and Infinity, which Python reads and JSON does not know.
        content = json.loads(regular(path).read_text(encoding="utf-8"), parse_constant=int)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: should hold a JSON object")
    return content


def typed(kind: type[T], fields: Json) -> T:
    """A dataclass from a file's fields, each of its declared type; a ValueError names one that is not."""
    found = kind(**fields)  # refuses names that it does not know
    try:
        TypeAdapter(kind).validate_python(fields)
    except ValidationError as mistakes:
        first = mistakes.errors()[0]
        wrong = reprlib.repr(first["input"])
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {wrong} is of another type") from None
    return found


def append_line(path: Path, content: Json) -> None:
    with writing(path), path.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(finite(content), allow_nan=False) + "\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """JSON lines of a file; a last line torn by a crash is not one."""
    if not path.exists():
        return
    *lines, _torn = regular(path).read_bytes().split(b"\n")  # newlines alone: JSON allows others inside
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line, parse_constant=int)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise InputError(f"{path}: line {number} is not a JSON object")
        yield content


def write_arrays(
    path: Path, arrays: Mapping[str, NDArray[Any]], notes: Mapping[str, str] | None = None
) -> None:
    """Replace a file of named arrays, and of texts that are kept with them, in one step."""
    kept = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    with replacing(path) as draft:
        save_file(kept, draft, {**(notes or {}), "hash": _arrays_hash(kept, notes or {})})
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
        with safe_open(regular(path), framework="numpy") as file:
            notes = dict(file.metadata() or {})
        arrays = dict(load_file(path))
    except (OSError, SafetensorError, InputError):
        return None, {}
    return (arrays, notes) if notes.pop("hash", None) == _arrays_hash(arrays, notes) else (None, {})


def forget_rounds(folder: Path, before: int) -> None:
    """Delete the files of arrays whose names begin with an earlier round, and what a crash left of them."""
    for path in folder.glob("*.safetensors*"):
        if int(path.name.removeprefix(".")[:6]) < before:
            path.unlink()


LARGEST_YAML = 4 * 2**20
"""Letters of a YAML text: more take longer to read than anybody waits."""
_LARGEST_COPY = 10_000
"""Entries that all aliases of a text together may stand for."""
_LONGEST_NUMBER = 64


class _StrictLoader(yaml.SafeLoader):
    """YAML by the core schema of version 1.2, whose keys are names, each given once.

    yes, no, dates and 1:30 are texts, no key is merged, nothing names its own type, and no number begins with
    a zero that one reader takes for octal and another does not.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[yaml.Node | None, int] = {}
        self._seen = self._copied = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._seen
        if getattr(event, "tag", None) is not None:
            raise _refusal(f"{event.tag} is not allowed, values without a tag are", event.start_mark)
        self._seen += 1
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            # Not known yet where it stands inside what it names.
            copied = self._sizes.get(node, _LARGEST_COPY + 1)
            self._seen, self._copied = self._seen + copied, self._copied + copied
            if self._copied > _LARGEST_COPY:
                raise _refusal(f"alias *{event.anchor} stands for too much, or for itself", event.start_mark)
        else:
            self._sizes[node] = self._seen - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
                problem = f"key {shown or 'null'} must be a string; quote it"
            elif key.value == "<<" and key.style is None:
                problem = "merge keys (<<) are not allowed; write the keys out"
            elif key.value in seen:
                problem = f"key '{key.value}' stands twice"
            else:
                seen.add(key.value)
                continue
            raise _refusal(problem, key.start_mark)
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if any("\ud800" <= letter <= "\udfff" for letter in node.value):
            raise _refusal("an escape for half a character; write the whole one", node.start_mark)
        return node

    def construct_yaml_int(self, node: Any) -> int:
        digits = node.value.lstrip("+-")
        if len(digits) > _LONGEST_NUMBER:
            raise _refusal(f"a number of {len(digits)} digits", node.start_mark)
        if digits.strip("0") and digits[0] == "0" and digits[1] not in "ox":
            meant = digits.lstrip("0")
            raise _refusal(f"{digits} begins with a zero; write {meant}, or '{digits}'", node.start_mark)
        return int(node.value, {"0o": 8, "0x": 16}.get(digits[:2], 10))

    def construct_yaml_float(self, node: Any) -> float:
        value = float(super().construct_yaml_float(node))
        if math.isinf(value) and node.value[-1] not in "fF":
            raise _refusal(f"{node.value} is too large for a number; .inf is infinite", node.start_mark)
        return value


class _StrictDumper(yaml.SafeDumper):
    """Quotes every text that is a number or a truth value to the reader above, or to one of version 1.1."""


def _refusal(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


for _tag, _pattern, _first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    for _kind in (_StrictLoader, _StrictDumper):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_yaml_int)
_StrictLoader.add_constructor("tag:yaml.org,2002:float", _StrictLoader.construct_yaml_float)


def yaml_text(content: Any, **style: Any) -> str:
    """Plain values as YAML that `parse_yaml` reads as they were."""
    return str(yaml.dump(content, Dumper=_StrictDumper, sort_keys=False, **style))


def parse_yaml(text: str) -> Any:
    """What a YAML text says; a ValueError that names the line where it says nothing, or one thing twice."""
    if len(text) > LARGEST_YAML:
        raise ValueError(f"it is too long; allowed: {LARGEST_YAML // 2**20} MiB")
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
