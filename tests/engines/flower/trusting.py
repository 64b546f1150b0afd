"""Experiments whose sites trust the server: small populations of clients, and workers in groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memory_federation import MemoryFederation

from coterie.engines.flower.contract import Limits
from coterie.experiment.schema import Experiment
from coterie.privacy import Budget, HeldOut

TRUSTING = Limits(Budget(30.0, 0.05), reported=HeldOut(0, 30.0, 9), trust_server=True)
COMMON: dict[str, Any] = {
    "schedule": {"rounds": 3, "batch": 15, "lr": 0.1},
    "seeds": {"simulation": 3, "noise": 5},
}
CLIENTS = {"kind": "clusters", "sizes": [2, 2], "shift": "rotation", "records_per_client": 30}
WORKERS = {"kind": "groups", "structure": "ring", "workers": 6, "groups": 3, "records_per_client": 30}
CLIP = 0.05
"""Shorter than every update of these sites, so that all of them are clipped."""


def trusting(
    unit: str, algorithm: dict[str, Any], *, clip: float = CLIP, rate: float = 0.7, **sections: Any
) -> Experiment:
    """An experiment whose unit is a client or a worker."""
    return Experiment.model_validate(
        {
            **COMMON,
            "federation": CLIENTS if unit == "client" else WORKERS,
            # What a group's model does on a worker's records cannot be told privately.
            "evaluation": {"kind": "private" if unit == "client" else "none"},
            "privacy": {"unit": unit, "epsilon": 30.0, "delta": 0.05, "clip": clip},
            "algorithm": {"rate": rate, **algorithm},
            **sections,
        }
    )


def sites_of(experiment: Experiment, folder: Path, limits: Limits = TRUSTING) -> MemoryFederation:
    return MemoryFederation(experiment, folder, limits=limits, noise_seed=None)
