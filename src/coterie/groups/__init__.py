"""Overlapping groups of workers, and who can learn how much about whom through them.

Structures, schedules and the leakage between pairs, computed without training anything; the algorithms that
train in groups are in `algorithms/worker`.
"""

from coterie.groups.design import Relation, Requirement, check, search, solve_pair
from coterie.groups.leakage import Leakage, history, leakage
from coterie.groups.observer import Observer
from coterie.groups.schedule import GroupAlgorithm, GroupSchedule, Noise, Threat
from coterie.groups.structure_files import (
    Shape,
    is_file,
    named_structure,
    read_labels,
    read_requirements,
    read_structure,
)
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
    "GroupSchedule",
    "Leakage",
    "Noise",
    "Observer",
    "Relation",
    "Requirement",
    "Shape",
    "Structure",
    "Threat",
    "check",
    "clustered",
    "drawn_labels",
    "global_structure",
    "history",
    "is_file",
    "label",
    "leakage",
    "named_structure",
    "read_labels",
    "read_requirements",
    "read_structure",
    "ring",
    "search",
    "solve_pair",
    "string",
]
