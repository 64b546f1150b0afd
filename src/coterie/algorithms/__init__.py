"""What each side does in a round: one file per algorithm, readable beside the paper's pseudo-code.

`record/`, `client/` and `worker/` hold the algorithms by their privacy unit, in files named as the algorithms
are registered; every file in them is imported here, so a new one needs no list. Beside them stand the
protocol (what a round may ask for) and what several units share. Nothing here sees a record, adds noise or
computes an epsilon.
"""

from importlib import import_module
from pkgutil import walk_packages
from typing import Any, TypeAlias

from coterie.algorithms.protocol import Algorithm
from coterie.errors import InputError
from coterie.privacy import Unit

__all__ = ["AnyAlgorithm", "algorithm_names", "find_algorithm"]

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)

# Each algorithm has a state type of its own, which only itself reads.
AnyAlgorithm: TypeAlias = Algorithm[Any]


def algorithm_names(unit: Unit) -> list[str]:
    """Names that an experiment of this privacy unit may use."""
    return sorted(name for known, name in Algorithm.known if known is unit)


def find_algorithm(unit: Unit, name: str) -> type[AnyAlgorithm]:
    """The algorithm of that unit and name: `dp-ifca`, say, exists for records and for clients."""
    found = Algorithm.known.get((unit, name))
    if found is None:
        allowed = ", ".join(algorithm_names(unit)) or "none yet"
        raise InputError(f"algorithm.name: '{name}' is not known for unit '{unit}'; allowed: {allowed}")
    return found
