"""Structures by name: what a command line or an experiment file says in one word, or the file it names."""

from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from pathlib import Path

from coterie.errors import InputError
from coterie.groups.files import read_structure
from coterie.groups.structures import Structure, clustered, global_structure, label, ring, string

Labels = Sequence[Collection[int]]


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
    labels: Callable[[], Labels] | None = None,
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
