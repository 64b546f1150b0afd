"""One file per algorithm, readable beside the paper's pseudo-code."""

from coterie.algorithms import federated, ifca, isolated, mrmtl, myopic, ogl, oracle, rcdpfl, rdpcfl
from coterie.algorithms.registry import AnyAlgorithm, algorithm_names, find_algorithm

__all__ = [
    "AnyAlgorithm",
    "algorithm_names",
    "federated",
    "find_algorithm",
    "ifca",
    "isolated",
    "mrmtl",
    "myopic",
    "ogl",
    "oracle",
    "rcdpfl",
    "rdpcfl",
]
