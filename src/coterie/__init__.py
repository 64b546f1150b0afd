"""Coterie: differentially private federated learning in clusters and groups, with guarantees that hold.

>>> import coterie as ct
>>> ct.run("experiment.yaml")          # doctest: +SKIP
>>> ct.privacy.calibrate               # usable alone, without torch  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from coterie import groups, privacy
    from coterie.api import compare, run
    from coterie.experiment.result import RunResult
    from coterie.experiment.schema import Experiment
    from coterie.reproduce.running import reproduce

__all__ = ["Experiment", "RunResult", "__version__", "compare", "groups", "privacy", "reproduce", "run"]

_HOMES = {
    "Experiment": "coterie.experiment.schema",
    "compare": "coterie.api",
    "RunResult": "coterie.experiment.result",
    "run": "coterie.api",
}


def __getattr__(name: str) -> object:
    # Loaded on first use: `coterie.privacy` must not pull in torch.
    if name in ("groups", "privacy", "reproduce"):
        return import_module(f"coterie.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'coterie' has no attribute '{name}'")
