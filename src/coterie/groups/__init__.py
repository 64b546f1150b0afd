"""Overlapping groups of workers, and who can learn how much about whom through them."""

from coterie.groups.leakage import (
    Leakage,
    Threat,
    coalition_leakage,
    history,
    leakage,
    pair_epsilon,
    pair_guarantee,
)
from coterie.groups.schedule import GroupAlgorithm, Noise, Schedule
from coterie.groups.structures import (
    Structure,
    clustered,
    drawn_labels,
    global_structure,
    label,
    ring,
    string,
)

__all__ = [
    "GroupAlgorithm",
    "Leakage",
    "Noise",
    "Schedule",
    "Structure",
    "Threat",
    "clustered",
    "coalition_leakage",
    "drawn_labels",
    "global_structure",
    "history",
    "label",
    "leakage",
    "pair_epsilon",
    "pair_guarantee",
    "ring",
    "string",
]
