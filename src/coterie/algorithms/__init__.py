"""What each side does in a round: one file per algorithm, readable beside the paper's pseudo-code.

`record/`, `client/` and `worker/` hold the algorithms by their privacy unit, in files named as the algorithms
are registered; every file in them is imported here, so a new one needs no list. Beside them stand the
protocol (what a round may ask for) and what several units share. Nothing here sees a record, adds noise or
computes an epsilon. An algorithm of a user's own lives in a package of its own and is found by its name.
"""

import inspect
from importlib import import_module
from pkgutil import walk_packages
from typing import Any, TypeAlias

from coterie.algorithms.protocol import Algorithm, State
from coterie.algorithms.settings import AlgorithmSettings
from coterie.errors import InputError
from coterie.plugins import ALGORITHM
from coterie.privacy import Unit

__all__ = ["AnyAlgorithm", "algorithm_names", "find_algorithm", "is_own"]

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)

# Each algorithm has a state type of its own, which only itself reads.
AnyAlgorithm: TypeAlias = Algorithm[Any]


def _family(unit: Unit) -> Unit:
    """The unit under which algorithms are known: those for records serve persons as they are.

    They ask for updates and choices of each client, and what one unit adds to those is the engine's affair.
    """
    return Unit.RECORD if unit.within_client else unit


def algorithm_names(unit: Unit) -> list[str]:
    """Names that an experiment of this privacy unit may use."""
    return sorted(name for known, name in Algorithm.known if known is _family(unit))


def is_own(unit: Unit, name: str) -> bool:
    """Whether a name is not one of ours, and so can only be a user's own."""
    return (_family(unit), name) not in Algorithm.known


def find_algorithm(unit: Unit, name: str) -> type[AnyAlgorithm]:
    """The algorithm of that unit and name: `dp-ifca`, say, exists for records and for clients."""
    found = Algorithm.known.get((_family(unit), name))
    return _find_own(unit, name) if found is None else found


def _find_own(unit: Unit, name: str) -> type[AnyAlgorithm]:
    if ALGORITHM.target(name) is None:
        units = sorted(str(known) for known, other in Algorithm.known if other == name)
        where = f" (it is for privacy.unit {', '.join(units)})" if units else ""
        told = ALGORITHM.unknown(name, algorithm_names(unit)).removeprefix(repr(name))
        raise InputError(f"{ALGORITHM.key}: '{name}' is not known for unit '{unit}'{where}{told}")
    found = ALGORITHM.find(name)
    problems = {"not a subclass of coterie.algorithms.protocol.Algorithm": not _is_a(found, Algorithm)}
    if not any(problems.values()):
        missing, theirs = sorted(getattr(found, "__abstractmethods__", ())), getattr(found, "unit", None)
        options, state = (getattr(found, kind, None) for kind in ("settings_type", "state_type"))
        problems |= {
            f"it lacks {', '.join(missing)}": bool(missing),
            "it does not say its unit; allowed: unit = Unit.RECORD, say": not isinstance(theirs, Unit),
            f"it is for privacy.unit {theirs}, the experiment says {unit}": (theirs is not _family(unit)),
            "its settings are not annotated as a subclass of AlgorithmSettings": not _is_a(
                options, AlgorithmSettings
            ),
            "start is not annotated to return a State": not _is_a(state, State),
        }
    for problem in (said for said, holds in problems.items() if holds):
        raise InputError(f"{ALGORITHM.key}: {name}: {problem}")
    return found  # type: ignore[no-any-return]


def _is_a(found: object, kind: type) -> bool:
    return inspect.isclass(found) and issubclass(found, kind)
