"""Finished runs of a reproduction: what each charged against its plan, and the figures that tables print."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coterie.algorithms import find_algorithm
from coterie.errors import InputError
from coterie.experiment.folder import RunFolder
from coterie.experiment.result import Fairness, RunResult, Spread, fairness
from coterie.privacy import LedgerView, Unit
from coterie.privacy.units import round_up
from coterie.report.record import RunRecord
from coterie.reproduce.central import central_scores
from coterie.table import NONE
from coterie.training.scoring import Score


@dataclass(frozen=True)
class Charged:
    """What a run executed, from its ledger, against what its plan declared.

    Args:
        exact: every release of every client exactly as often as planned.
        within: none more often than planned.
    """

    planned: int
    executed: int
    exact: bool
    within: bool
    spent: float
    promised: float

    @property
    def holds(self) -> bool:
        return self.within and self.spent <= self.promised * (1 + 1e-9)

    def __str__(self) -> str:
        if not self.holds:
            spent = f"spent {self.spent:.4g} of {self.promised:.4g}"
            return f"BROKEN: {self.executed:,} of {self.planned:,}, {spent}"
        return f"{self.executed:,} of {self.planned:,}" + ("" if self.exact else ", fewer than planned")

    @classmethod
    def of(cls, run: RunRecord) -> "Charged":
        """The ledger of a finished run against its plan."""
        ledger = LedgerView.read(RunFolder(run.outcome.folder).ledger, run.plan)
        pairs = [
            (release.times, ledger.executed(unit.subject)[release.name])
            for unit in run.plan.units
            for release in unit.releases
        ]
        return cls(
            planned=sum(times for times, _ in pairs),
            executed=sum(done for _, done in pairs),
            exact=all(times == done for times, done in pairs),
            within=all(done <= times for times, done in pairs),
            spent=run.rounds[-1].epsilon,
            promised=run.outcome.epsilon,
        )


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, how even it is beside central models, and what its ledger says."""

    record: RunRecord
    fairness: Fairness
    charged: Charged

    @classmethod
    def read(cls, run: RunRecord, out: Path) -> "FinishedRun":
        """With the central scores of the reproduction under `out`."""
        fair = run.outcome.fairness or Fairness(math.nan, None, None)
        best = central_scores(out, run.experiment) if fair.f_acc is None else None
        if best is not None:
            reached, loss = _exact(run).per_client, run.outcome.loss
            assert loss is not None
            fair = fairness({name: Score(own, loss.per_client[name]) for name, own in reached.items()}, best)
        return cls(run, fair, Charged.of(run))

    @property
    def result(self) -> RunResult:
        return self.record.outcome

    @property
    def accuracy(self) -> Spread:
        return _exact(self.record)


def _exact(run: RunRecord) -> Spread:
    """Published experiments are on published records, and judged exactly."""
    if run.outcome.reached is None:
        raise InputError(f"{run.outcome.folder}: was not evaluated; allowed here: evaluation.kind exact")
    return run.outcome.reached


@dataclass(frozen=True)
class Quantity:
    """A figure of the table.

    Args:
        is_promise: an epsilon, never to be rounded down.
        unit: the unit of privacy that papers which print it are about; None: any.
        base: what needs no learning, of a figure that is a score.
    """

    key: str
    heading: str
    of: Callable[[FinishedRun], float | None]
    more_is_better: bool
    scale: float = 100.0
    digits: int = 1
    is_promise: bool = False
    unit: Unit | None = None
    base: Callable[[FinishedRun], float | None] | None = None

    def base_rate(self, run: FinishedRun) -> float | None:
        """What this would be without learning, in the figure's own scale, where it is a score."""
        found = self.base(run) if self.base and self.value(run) is not None else None
        return None if found is None else self.scale * found

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
    tests, chosen = run.result.whole_tests, run.record.experiment
    personal = find_algorithm(chosen.privacy.unit, chosen.algorithm.name).personal
    return min(tests.values()) if tests and not personal else None


def _base_rate(run: FinishedRun) -> float | None:
    """Of always giving the most frequent label of all held-out records."""
    score = run.result.scores.get("base_rate")
    return score.value if score else None


def _one_cluster(run: FinishedRun) -> float | None:
    """Of putting all clients into one cluster: the share of the largest."""
    truth = run.record.truth
    return max(Counter(truth.values()).values()) / len(truth) if truth else None


CLIENT, WORKER = Unit.CLIENT, Unit.WORKER
QUANTITIES = (
    Quantity("mean", "average", lambda run: run.accuracy.mean, True, base=_base_rate),
    Quantity("majority", "majority", _of_group("majority"), True, base=_base_rate),
    Quantity("minority", "minority", _of_group("minority"), True, base=_base_rate),
    Quantity("min", "worst client", lambda run: run.accuracy.min, True, base=_base_rate),
    Quantity("disparity", "disparity", lambda run: run.fairness.disparity, False),
    Quantity("f_acc", "F_acc", lambda run: run.fairness.f_acc, False),
    Quantity("f_loss", "F_loss", lambda run: run.fairness.f_loss, False, scale=1.0, digits=2),
    Quantity("max", "best client", lambda run: run.accuracy.max, True, unit=CLIENT, base=_base_rate),
    Quantity("worst_cluster", "worst cluster, whole test set", _worst_cluster, True, base=_base_rate),
    Quantity(
        "clustering",
        "clustered right",
        lambda run: run.result.clustering_accuracy,
        True,
        unit=CLIENT,
        base=_one_cluster,
    ),
    Quantity("live", "live clusters", lambda run: run.result.live_clusters, True, scale=1.0, unit=CLIENT),
    Quantity(
        "loss",
        "loss",
        lambda run: getattr(run.result.loss, "mean", None),
        False,
        scale=1.0,
        digits=3,
        unit=WORKER,
    ),
    Quantity(
        "epsilon",
        "epsilon of the worst pair",
        lambda run: run.result.epsilon,
        False,
        scale=1.0,
        is_promise=True,
        unit=WORKER,
    ),
    Quantity(
        "mean_epsilon",
        "of workers on average",
        _mean_of_workers,
        False,
        scale=1.0,
        is_promise=True,
        unit=WORKER,
    ),
)
