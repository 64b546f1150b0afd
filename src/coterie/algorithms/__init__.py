"""One file per algorithm, readable beside the paper's pseudo-code."""

from coterie.algorithms import (
    client_ifca,
    fedavg,
    fedcam,
    federated,
    fedper,
    fesem,
    gmfsc,
    ifca,
    isolated,
    mrmtl,
    myopic,
    ogl,
    oracle,
    rcdpfl,
    rdpcfl,
)
from coterie.algorithms.registry import AnyAlgorithm, algorithm_names, find_algorithm

__all__ = [
    "AnyAlgorithm",
    "algorithm_names",
    "client_ifca",
    "fedavg",
    "fedcam",
    "federated",
    "fedper",
    "fesem",
    "find_algorithm",
    "gmfsc",
    "ifca",
    "isolated",
    "mrmtl",
    "myopic",
    "ogl",
    "oracle",
    "rcdpfl",
    "rdpcfl",
]
