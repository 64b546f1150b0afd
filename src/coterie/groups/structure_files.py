"""Structures and requirements that people name or write down: JSON, YAML, or CSV of worker-group pairs."""

import csv
import json
import re
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import NewType

from coterie.errors import InputError
from coterie.files import parse_yaml, regular
from coterie.groups.design import Relation, Requirement
from coterie.groups.structures import Structure, clustered, global_structure, label, ring, string
from coterie.privacy.errors import RangeError
from coterie.privacy.plain import MalformedError, Plain, from_plain, register
from coterie.privacy.ranges import CLIENTS, GROUPS, Range

_TREES = (".json", ".yaml", ".yml")
_NUMBER = re.compile(r"-?[0-9]{1,18}")
Amount = NewType("Amount", float)
"""A number as a person writes it: an infinite one is .inf, and no text is one."""
Called = NewType("Called", str)
"""A worker as a person calls it: by a whole number, or a name."""


def _amount(data: object) -> float:
    try:
        if isinstance(data, int | float) and not isinstance(data, bool):
            return float(data)
    except OverflowError:  # an integer of hundreds of digits
        pass
    raise MalformedError(f"{reprlib.repr(data)} is not allowed, a number is")


def _called(data: object) -> str:
    if isinstance(data, bool) or not isinstance(data, int | str) or not str(data).strip():
        raise MalformedError(f"worker {reprlib.repr(data)} is not allowed, a whole number or a name is")
    return str(data).strip()


register(Amount, float, _amount)
register(Called, str, _called)


@dataclass(frozen=True)
class _WrittenStructure(Plain):
    """A structure as a file has it, its groups by name."""

    groups: dict[str, tuple[Called, ...]]
    workers: int | tuple[Called, ...] | None


@dataclass(frozen=True)
class _WrittenRequirement(Plain):
    """A requirement as a file has it."""

    epsilon: Amount
    target: Called
    observer: Called
    distance: int


def read_structure(path: Path, workers: int | None = None) -> Structure:
    """The structure in a file.

    JSON and YAML: `groups`, a list of lists of workers or a mapping of names to such lists, and optionally
    `workers`, their number or their names. CSV: one worker and one group in each line, with or without
    the heading `worker,group`. Workers are numbered from 0, or named.

    Args:
        path: the file.
        workers: how many there must be, where the caller knows.
    """
    is_csv = path.suffix.lower() == ".csv"
    content = {"groups": _read_pairs(path)} if is_csv else _read_tree(path, (*_TREES, ".csv"))
    if not isinstance(content, Mapping) or "groups" not in content:
        raise InputError(
            f"{path}: groups is missing, an object like {{'groups': [[0, 1], [1, 2]]}} is needed"
        )
    groups = content["groups"]
    if isinstance(groups, list):
        groups = {str(number): members for number, members in enumerate(groups)}
    with _blaming(path):
        return _built(path, _WrittenStructure.read({"workers": None, **content, "groups": groups}), workers)


def read_requirements(path: Path, structure: Structure) -> list[Requirement]:
    """Trust requirements in a JSON or YAML file: a list of {target, observer, distance, epsilon}.

    `target` is a worker or `any`; `observer` a worker, `any`, `in-group` or `out-of-group`; `distance` the
    least hops between their groups; `epsilon` the most that such an observer may learn.
    """
    content = _read_tree(path)
    entries = content.get("requirements") if isinstance(content, Mapping) else content
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path}: a list of requirements is needed, each with an epsilon")
    found = []
    for number, entry in enumerate(entries, 1):
        with _blaming(f"{path}: requirement {number}"):
            found.append(_requirement(entry, structure))
    return found


def read_labels(path: Path) -> list[frozenset[int]]:
    """The labels each worker holds: a JSON or YAML list with one list of labels for every worker."""
    content = _read_tree(path)
    with _blaming(f"{path}: a list with one list of labels (integers) for every worker is needed"):
        labels = from_plain(list[list[int]], content)
        if not all(labels):
            raise MalformedError("a worker has none")
    return list(map(frozenset, labels))


class Shape(StrEnum):
    """Structures that need no file."""

    GLOBAL = "global"
    RING = "ring"
    STRING = "string"
    CLUSTERED = "clustered"
    LABEL = "label"


def is_file(name: str) -> bool:
    """Does this name a file that holds a structure, rather than a shape?"""
    return name not in tuple(Shape) and "." in Path(name).name


def named_structure(
    name: str,
    workers: int | None,
    groups: int | None,
    labels: Callable[[], Sequence[Collection[int]]] | None = None,
    prefix: str = "",
) -> Structure:
    """The structure of that name.

    Args:
        name: a shape, or a JSON, YAML or CSV file.
        workers, groups: how many; a file says both itself, and one group needs no number.
        labels: what each worker holds, asked for the shape `label` only.
        prefix: what to write before the name of a key that is wrong.
    """
    if is_file(name):
        found = read_structure(Path(name), workers)
        if groups is not None and groups != len(found.groups):
            raise InputError(f"{prefix}groups: {groups} is not allowed, {name} has {len(found.groups)}")
        return found
    if name not in tuple(Shape):
        allowed = f"{', '.join(Shape)} or a JSON, YAML or CSV file"
        raise InputError(f"{prefix}structure: {name!r} is not allowed, {allowed} is")
    workers = _given(f"{prefix}workers", workers, CLIENTS)
    if name == Shape.GLOBAL:
        if groups not in (None, 1):
            raise InputError(f"{prefix}groups: {groups} is not allowed with structure global, 1 is")
        return global_structure(workers)
    groups = _given(f"{prefix}groups", groups, GROUPS)
    if name == Shape.LABEL:
        if labels is None:
            raise InputError(f"{prefix}structure: label is not allowed, nobody knows the workers' labels")
        return label(labels(), groups)
    build = {Shape.RING: ring, Shape.STRING: string, Shape.CLUSTERED: clustered}[Shape(name)]
    return build(workers, groups)


def _given(key: str, value: int | None, allowed: Range) -> int:
    if value is None:
        raise InputError(f"{key}: nothing was given, a number is needed for this structure")
    allowed.check(key, value)
    return value


@contextmanager
def _blaming(where: object) -> Iterator[None]:
    """Say where what is wrong was written."""
    try:
        yield
    except (InputError, RangeError, MalformedError) as mistake:
        raise InputError(f"{where}: {mistake}") from None


def _requirement(entry: object, structure: Structure) -> Requirement:
    usual = {"target": "any", "observer": "any", "distance": 0}
    written = _WrittenRequirement.read(usual | dict(entry) if isinstance(entry, Mapping) else entry)
    relation = Relation(written.observer) if written.observer in list(map(str, Relation)) else None
    return Requirement(
        written.epsilon,
        None if written.target == "any" else structure.worker(written.target),
        None if relation is not None else structure.worker(written.observer),
        relation or Relation.ANY,
        written.distance,
    )


def _read_text(path: Path, kinds: Sequence[str]) -> str:
    if path.suffix.lower() not in kinds:
        raise InputError(f"{path}: this kind of file is not allowed here, {', '.join(kinds)} is")
    try:
        # Spreadsheets write a mark before the first letter.
        return regular(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file, {', '.join(kinds)} is needed") from None
    except OSError as trouble:
        raise InputError(f"{path}: cannot be read ({trouble.strerror})") from None


def _read_tree(path: Path, kinds: Sequence[str] = _TREES) -> object:
    text, is_json = _read_text(path, kinds), path.suffix.lower() == ".json"
    try:
        content: object = json.loads(text, object_pairs_hook=_once) if is_json else parse_yaml(text)
        json.dumps(content, ensure_ascii=False).encode()  # an escape for half a character is none
    except ValueError as mistake:
        raise InputError(f"{path}: not {'JSON' if is_json else 'YAML'} ({mistake})") from None
    except RecursionError:
        raise InputError(f"{path}: it is nested too deeply") from None
    return content


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"key '{max(keys, key=keys.count)}' stands twice")
    return dict(pairs)


def _read_pairs(path: Path) -> dict[str, list[str]]:
    """Workers by group."""
    lines = csv.reader(_read_text(path, (".csv",)).splitlines())
    rows = [row for row in ([cell.strip() for cell in line] for line in lines) if any(row)]
    heading = [cell.lower() for cell in rows[0]] if rows else []
    if sorted(heading) == ["group", "worker"]:
        rows = rows[1:]
    groups: dict[str, list[str]] = {}
    for number, row in enumerate(rows, 1):
        if len(row) != 2 or not all(row):
            raise InputError(f"{path}: pair {number}: {','.join(row)!r} is not allowed, worker,group is")
        worker, group = reversed(row) if heading == ["group", "worker"] else row
        groups.setdefault(group, []).append(worker)
    in_order = sorted(groups, key=int) if all(map(str.isdecimal, groups)) else groups
    return {name: groups[name] for name in in_order}


def _built(path: Path, written: _WrittenStructure, workers: int | None) -> Structure:
    groups, declared = written.groups, written.workers
    called = tuple(dict.fromkeys(chain.from_iterable(groups.values())))
    if isinstance(declared, tuple):
        called = declared
    elif all(map(_NUMBER.fullmatch, called)):
        called = ()
    known: dict[str, int] = {name: number for number, name in enumerate(called)}
    members = tuple(tuple(_number(worker, known) for worker in group) for group in groups.values())
    if isinstance(declared, int) and called and declared != len(called):
        raise InputError(f"workers: {declared} is not allowed, the groups name {len(called)}")
    largest = max(chain.from_iterable(members), default=-1)
    count = len(called) or (declared if isinstance(declared, int) else workers or largest + 1)
    if workers is not None and count != workers:
        raise InputError(f"workers: the file has {count}, {workers} were asked for")
    numbered = list(groups) == list(map(str, range(len(groups))))
    return Structure(path.stem, members, count, called, () if numbered else tuple(groups))


def _number(worker: str, known: Mapping[str, int]) -> int:
    if worker in known:
        return known[worker]
    if known or not _NUMBER.fullmatch(worker):
        allowed = reprlib.repr(sorted(known)) if known else "a number"
        raise InputError(f"worker {reprlib.repr(worker)} is unknown, {allowed} is allowed")
    return int(worker)
