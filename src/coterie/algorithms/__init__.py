"""What each side does in a round: one file per algorithm, readable beside the paper's pseudo-code.

`record/`, `client/` and `worker/` hold the algorithms by their privacy unit, in files named as the algorithms
are registered; every file in them is imported here, so a new one needs no list. Beside them stand the
protocol (what a round may ask for) and what several units share. Nothing here sees a record, adds noise or
computes an epsilon.
"""

from importlib import import_module
from pkgutil import walk_packages

from coterie.algorithms.registry import AnyAlgorithm, algorithm_names, find_algorithm

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)

__all__ = ["AnyAlgorithm", "algorithm_names", "find_algorithm"]
