"""Replies that are changed on their way, and the state in which a run ended all the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from coterie.algorithms import find_algorithm
from coterie.experiment import checkpoint
from coterie.experiment.folder import RunFolder
from coterie.experiment.schema import Experiment


def replaced(
    reply: Message, *, array: np.ndarray | None = None, plain: Mapping[str, Any] | None = None
) -> Message:
    """The reply with another value, and everything else as it was; what is None is left out."""
    content = RecordDict(dict(reply.content))
    if array is not None:
        content["arrays"] = ArrayRecord({"value": Array(array)})
    fields = {**content.config_records["coterie"], **(plain or {})}
    content["coterie"] = ConfigRecord({key: value for key, value in fields.items() if value is not None})
    reply.content = content
    return reply


def vector(reply: Message) -> np.ndarray:
    found: np.ndarray = reply.content.array_records["arrays"]["value"].numpy()
    return found


def state_of(experiment: Experiment, out: Path) -> dict[str, Any]:
    """The algorithm's state at the end of a run."""
    kind = find_algorithm(experiment.privacy.unit, experiment.algorithm.name).state_type
    saved = checkpoint.load(RunFolder(out).checkpoint, kind)
    assert saved is not None
    return vars(saved.state)


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Are two states equal, bit for bit?"""
    return all(
        np.array_equal(value, other[name]) if isinstance(value, np.ndarray) else value == other[name]
        for name, value in one.items()
    )
