"""Coterie: differentially private federated learning in clusters and groups, with guarantees that hold.

>>> import coterie as ct
>>> run = ct.run("experiment.yaml", out="runs/mine")      # doctest: +SKIP
>>> run.metrics, run.clients                              # doctest: +SKIP
>>> ct.compare("sweep.yaml").table                        # doctest: +SKIP
>>> ct.privacy.calibrate                                  # usable alone, without torch  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from coterie import groups, privacy
    from coterie.api import compare, load, run
    from coterie.audit.auditing import audit
    from coterie.estimators import ClusteredClassifier, ClusteredRegressor
    from coterie.experiment import trackers
    from coterie.experiment.callbacks import Callbacks
    from coterie.experiment.from_table import federation
    from coterie.experiment.schema import Experiment
    from coterie.reproduce.running import reproduce

_HOMES = {
    "ClusteredClassifier": "coterie.estimators",
    "ClusteredRegressor": "coterie.estimators",
    "Callbacks": "coterie.experiment.callbacks",
    "Experiment": "coterie.experiment.schema",
    "audit": "coterie.audit",
    "compare": "coterie.api",
    "federation": "coterie.experiment.from_table",
    "groups": "coterie.groups",
    "load": "coterie.api",
    "privacy": "coterie.privacy",
    "reproduce": "coterie.reproduce",
    "run": "coterie.api",
    "trackers": "coterie.experiment.trackers",
}
"""Where each name lives, or which module it is; loaded on first use: `coterie.privacy` needs no torch."""

__all__ = [
    "Callbacks",
    "ClusteredClassifier",
    "ClusteredRegressor",
    "Experiment",
    "__version__",
    "audit",
    "compare",
    "federation",
    "groups",
    "load",
    "privacy",
    "reproduce",
    "run",
    "trackers",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'coterie' has no attribute '{name}'")
    home = _HOMES[name]
    module = import_module(home)
    return module if home.rpartition(".")[2] == name else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
