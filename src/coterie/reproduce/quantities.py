"""The figures that published tables print, each as a function of a finished run."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from coterie.privacy import Unit
from coterie.privacy.units import round_up
from coterie.reproduce.runs import FinishedRun
from coterie.table import NONE


@dataclass(frozen=True)
class Quantity:
    """A figure of the table.

    Args:
        is_promise: an epsilon, never to be rounded down.
        unit: the unit of privacy that papers which print it are about; None: any.
    """

    key: str
    heading: str
    of: Callable[[FinishedRun], float | None]
    more_is_better: bool
    scale: float = 100.0
    digits: int = 1
    is_promise: bool = False
    unit: Unit | None = None

    def value(self, run: FinishedRun) -> float | None:
        found = self.of(run) if self.unit in (None, run.record.plan.unit) else None
        return None if found is None else self.scale * found

    def text(self, value: float | None, spread: float | None = None) -> str:
        if value is None:
            return NONE
        if self.is_promise:
            return round_up(value)
        return f"{value:.{self.digits}f}" + ("" if spread is None else f" ± {spread:.{self.digits}f}")


def _of_group(name: str) -> Callable[[FinishedRun], float | None]:
    return lambda run: getattr(run.result.groups, name, None)


def _mean_of_workers(run: FinishedRun) -> float | None:
    """Mean epsilon of workers, each against the one that learns most about it."""
    known = [value for value in (run.result.per_worker or {}).values() if value is not None]
    return float(np.mean(known)) if known else None


def _worst_cluster(run: FinishedRun) -> float | None:
    """None where clients keep parts of their own: a cluster then has no model to be tested."""
    tests = run.result.whole_tests
    return min(tests.values()) if tests and not run.record.algorithm.personal else None


CLIENT, WORKER = Unit.CLIENT, Unit.WORKER
QUANTITIES = (
    Quantity("mean", "average", lambda run: run.accuracy.mean, True),
    Quantity("majority", "majority", _of_group("majority"), True),
    Quantity("minority", "minority", _of_group("minority"), True),
    Quantity("min", "worst client", lambda run: run.accuracy.min, True),
    Quantity("disparity", "disparity", lambda run: run.fairness.disparity, False),
    Quantity("f_acc", "F_acc", lambda run: run.fairness.f_acc, False),
    Quantity("f_loss", "F_loss", lambda run: run.fairness.f_loss, False, scale=1.0, digits=2),
    Quantity("max", "best client", lambda run: run.accuracy.max, True, unit=CLIENT),
    Quantity("worst_cluster", "worst cluster, whole test set", _worst_cluster, True),
    Quantity("clustering", "clustered right", lambda run: run.result.clustering_accuracy, True, unit=CLIENT),
    Quantity("live", "live clusters", lambda run: run.result.live_clusters, True, scale=1.0, unit=CLIENT),
    Quantity(
        "loss", "loss", lambda run: getattr(run.result.loss, "mean", None), False, 1.0, digits=3, unit=WORKER
    ),
    Quantity(
        "epsilon",
        "epsilon of the worst pair",
        lambda run: run.result.epsilon,
        False,
        1.0,
        is_promise=True,
        unit=WORKER,
    ),
    Quantity(
        "mean_epsilon", "of workers on average", _mean_of_workers, False, 1.0, is_promise=True, unit=WORKER
    ),
)
