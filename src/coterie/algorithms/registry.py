"""Algorithms by privacy unit and name: `dp-ifca` may exist for records and for clients."""

from typing import Any, TypeAlias

from coterie.algorithms.protocol import Algorithm
from coterie.errors import InputError
from coterie.privacy import Unit

# Each algorithm has a state type of its own, which only itself reads.
AnyAlgorithm: TypeAlias = Algorithm[Any]


def algorithm_names(unit: Unit) -> list[str]:
    """Names that an experiment of this privacy unit may use."""
    return sorted(name for known, name in Algorithm.known if known is unit)


def find_algorithm(unit: Unit, name: str) -> type[AnyAlgorithm]:
    """The algorithm of that unit and name."""
    found = Algorithm.known.get((unit, name))
    if found is None:
        allowed = ", ".join(algorithm_names(unit)) or "none yet"
        raise InputError(f"algorithm.name: '{name}' is not known for unit '{unit}'; allowed: {allowed}")
    return found
