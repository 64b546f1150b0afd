"""Algorithms by privacy unit and name: `dp-ifca` may exist for records and for clients."""

from typing import Any, TypeAlias, TypeVar

from coterie.algorithms.protocol import Algorithm
from coterie.errors import InputError
from coterie.privacy import Unit

# Each algorithm has a state type of its own, which only itself reads.
AnyAlgorithm: TypeAlias = Algorithm[Any]
A = TypeVar("A", bound=type[AnyAlgorithm])

_ALGORITHMS: dict[tuple[Unit, str], type[AnyAlgorithm]] = {}


def register(algorithm: A) -> A:
    """Class decorator: make an algorithm available in experiment files."""
    key = (algorithm.unit, algorithm.name)
    if key in _ALGORITHMS:
        raise ValueError(f"an algorithm named {algorithm.name} for unit {algorithm.unit} exists already")
    _ALGORITHMS[key] = algorithm
    return algorithm


def algorithm_names(unit: Unit) -> list[str]:
    """Names that an experiment of this privacy unit may use."""
    return sorted(name for known, name in _ALGORITHMS if known is unit)


def find_algorithm(unit: Unit, name: str) -> type[AnyAlgorithm]:
    """The algorithm of that unit and name."""
    found = _ALGORITHMS.get((unit, name))
    if found is None:
        allowed = ", ".join(algorithm_names(unit)) or "none yet"
        raise InputError(f"algorithm.name: '{name}' is not known for unit '{unit}'; allowed: {allowed}")
    return found
