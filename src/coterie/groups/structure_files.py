"""Structures and requirements that people name or write down: JSON, YAML, or CSV of worker-group pairs."""

import csv
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from coterie.errors import InputError
from coterie.files import parse_yaml
from coterie.groups.design import Relation, Requirement
from coterie.groups.structures import Structure, clustered, global_structure, label, ring, string

_TREES = (".json", ".yaml", ".yml")
_NUMBER = re.compile(r"-?[0-9]{1,18}")


def read_structure(path: Path, workers: int | None = None) -> Structure:
    """The structure in a file.

    JSON and YAML: `groups`, a list of lists of workers or a mapping of names to such lists, and optionally
    `workers`, their number or their names. CSV: one worker and one group in each line, with or without
    the heading `worker,group`. Workers are numbered from 0, or named.

    Args:
        path: the file.
        workers: how many there must be, where the caller knows.
    """
    if path.suffix.lower() == ".csv":
        return _built(path, *_read_pairs(path), workers)
    content = _read_tree(path, (*_TREES, ".csv"))
    if not isinstance(content, Mapping) or "groups" not in content:
        raise InputError(
            f"{path}: groups is missing, an object like {{'groups': [[0, 1], [1, 2]]}} is needed"
        )
    odd = sorted(str(key) for key in content if key not in ("groups", "workers"))
    if odd:
        raise InputError(f"{path}: {odd[0]} is unknown, groups and workers are allowed")
    groups, declared = content["groups"], content.get("workers")
    names: list[str] | int | None
    if declared is None or (isinstance(declared, int) and not isinstance(declared, bool)):
        names = declared
    elif isinstance(declared, list):
        names = [_text(path, name) for name in declared]
    else:
        raise InputError(f"{path}: workers: {declared!r} is not allowed, a number or a list of names is")
    group_names: list[str] = []
    if isinstance(groups, Mapping):
        group_names, groups = [str(name) for name in groups], list(groups.values())
    if not isinstance(groups, list) or not all(isinstance(members, list) for members in groups):
        raise InputError(f"{path}: groups: {_short(groups)} is not allowed, a list of lists of workers is")
    listed = [[_text(path, worker) for worker in members] for members in groups]
    return _built(path, listed, group_names, names, workers)


def read_requirements(path: Path, structure: Structure) -> list[Requirement]:
    """Trust requirements in a JSON or YAML file: a list of {target, observer, distance, epsilon}.

    `target` is a worker or `any`; `observer` a worker, `any`, `in-group` or `out-of-group`; `distance` the
    least hops between their groups; `epsilon` the most that such an observer may learn.
    """
    content = _read_tree(path)
    entries = content.get("requirements") if isinstance(content, Mapping) else content
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path}: a list of requirements is needed, each with an epsilon")
    return [_requirement(f"{path}: requirement {n}", entry, structure) for n, entry in enumerate(entries, 1)]


def read_labels(path: Path) -> list[frozenset[int]]:
    """The labels each worker holds: a JSON or YAML list with one list of labels for every worker."""
    content = _read_tree(path)
    labels = []
    for row in content if isinstance(content, list) else [content]:
        if not isinstance(row, list) or not row or not all(type(label) is int for label in row):
            raise InputError(f"{path}: a list with one list of labels (integers) for every worker is needed")
        labels.append(frozenset(row))
    return labels


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
    workers = _given(f"{prefix}workers", workers)
    if name == Shape.GLOBAL:
        if groups not in (None, 1):
            raise InputError(f"{prefix}groups: {groups} is not allowed with structure global, 1 is")
        return global_structure(workers)
    groups = _given(f"{prefix}groups", groups)
    if name == Shape.LABEL:
        if labels is None:
            raise InputError(f"{prefix}structure: label is not allowed, nobody knows the workers' labels")
        return label(labels(), groups)
    build = {Shape.RING: ring, Shape.STRING: string, Shape.CLUSTERED: clustered}[Shape(name)]
    return build(workers, groups)


def _given(key: str, value: int | None) -> int:
    if value is None:
        raise InputError(f"{key}: nothing was given, a number is needed for this structure")
    if value < 1:
        raise InputError(f"{key}: {value} is not allowed, at least 1 is")
    return value


def _requirement(where: str, entry: object, structure: Structure) -> Requirement:
    if not isinstance(entry, Mapping):
        raise InputError(f"{where}: {_short(entry)} is not allowed, target, observer and epsilon are")
    odd = sorted(str(key) for key in entry if key not in ("target", "observer", "distance", "epsilon"))
    if odd:
        raise InputError(f"{where}: {odd[0]} is unknown; target, observer, distance and epsilon are allowed")
    epsilon, distance = entry.get("epsilon"), entry.get("distance", 0)
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not epsilon >= 0:
        raise InputError(f"{where}: epsilon: {epsilon!r} is not allowed, a number from 0 is")
    if isinstance(distance, bool) or not isinstance(distance, int) or distance < 0:
        raise InputError(f"{where}: distance: {distance!r} is not allowed, a whole number from 0 is")
    target, observer = str(entry.get("target", "any")), str(entry.get("observer", "any"))
    relation = Relation(observer) if observer in tuple(Relation) else None
    try:
        return Requirement(
            epsilon=float(epsilon),
            target=None if target == "any" else structure.worker(target),
            observer=None if relation is not None else structure.worker(observer),
            relation=relation or Relation.ANY,
            distance=distance,
        )
    except InputError as mistake:
        raise InputError(f"{where}: {mistake}") from None


def _read_text(path: Path, kinds: Sequence[str]) -> str:
    if path.suffix.lower() not in kinds:
        raise InputError(f"{path}: this kind of file is not allowed here, {', '.join(kinds)} is")
    try:
        # Spreadsheets write a mark before the first letter.
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file, {', '.join(kinds)} is needed") from None
    except OSError as trouble:
        raise InputError(f"{path}: cannot be read ({trouble.strerror})") from None


def _read_tree(path: Path, kinds: Sequence[str] = _TREES) -> object:
    text, is_json = _read_text(path, kinds), path.suffix.lower() == ".json"
    try:
        return _parse_json(text) if is_json else parse_yaml(text)
    except ValueError as mistake:
        raise InputError(f"{path}: not {'JSON' if is_json else 'YAML'} ({mistake})") from None


def _parse_json(text: str) -> object:
    """What a JSON text says; a ValueError where it says nothing, or one thing twice."""
    try:
        content: object = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as mistake:
        raise ValueError(f"line {mistake.lineno}: {mistake.msg}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return content


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key '{key}' stands twice")
        found[key] = value
    return found


def _read_pairs(path: Path) -> tuple[list[list[str]], list[str], None]:
    rows = [
        row
        for row in csv.reader(_read_text(path, (".csv",)).splitlines())
        if any(cell.strip() for cell in row)
    ]
    order = (0, 1)
    if rows and {cell.strip().lower() for cell in rows[0]} == {"worker", "group"}:
        order = (0, 1) if rows[0][0].strip().lower() == "worker" else (1, 0)
        rows = rows[1:]
    groups: dict[str, list[str]] = {}
    for number, row in enumerate(rows, 1):
        cells = [cell.strip() for cell in row]
        if len(cells) != 2 or not all(cells):
            raise InputError(f"{path}: pair {number}: {','.join(row)!r} is not allowed, worker,group is")
        groups.setdefault(cells[order[1]], []).append(cells[order[0]])
    names = list(groups)
    if all(name.isdecimal() for name in names):
        names.sort(key=int)
    return [groups[name] for name in names], names, None


def _text(path: Path, worker: object) -> str:
    """A worker as it is called: only whole numbers and texts are names."""
    if isinstance(worker, bool) or not isinstance(worker, int | str) or not str(worker).strip():
        raise InputError(f"{path}: worker {_short(worker)} is not allowed, a whole number or a name is")
    return str(worker).strip()


def _built(
    path: Path,
    groups: list[list[str]],
    group_names: list[str],
    declared: list[str] | int | None,
    workers: int | None,
) -> Structure:
    try:
        names = declared if isinstance(declared, list) else _names(groups)
        known = {name: number for number, name in enumerate(names or [])}
        members = [tuple(_number(worker, known) for worker in group) for group in groups]
        largest = max((worker for group in members for worker in group), default=-1)
        if isinstance(declared, int) and names and declared != len(names):
            raise InputError(f"workers: {declared} is not allowed, the groups name {len(names)}")
        count = len(names) if names else declared if isinstance(declared, int) else workers or largest + 1
        if workers is not None and count != workers:
            raise InputError(f"workers: the file has {count}, {workers} were asked for")
        numbered = group_names == [str(number) for number in range(len(groups))]
        return Structure(
            path.stem,
            tuple(members),
            count,
            tuple(names or ()),
            () if numbered else tuple(group_names),
        )
    except InputError as mistake:
        raise InputError(f"{path}: {mistake}") from None


def _names(groups: list[list[str]]) -> list[str] | None:
    """Names in the order of their first appearance; None where all are numbers."""
    found = list(dict.fromkeys(worker for group in groups for worker in group))
    return None if all(_NUMBER.fullmatch(name) for name in found) else found


def _number(worker: str, known: Mapping[str, int]) -> int:
    if worker in known:
        return known[worker]
    if known or not _NUMBER.fullmatch(worker):
        raise InputError(
            f"worker {_short(worker)} is unknown, {_short(sorted(known)) or 'a number'} is allowed"
        )
    return int(worker)


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, list) else ", ".join(map(str, value))
    return text if len(text) <= 60 else f"{text[:57]}..."
