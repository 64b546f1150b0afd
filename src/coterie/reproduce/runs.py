"""Finished runs of a reproduction, read back from their folders, and what each charged against its plan."""

import math
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import InputError
from coterie.experiment.folder import RunFolder
from coterie.experiment.metrics import Fairness, Spread, fairness
from coterie.experiment.result import RunResult
from coterie.privacy import LedgerView
from coterie.report.record import RunRecord
from coterie.reproduce.central import central_scores
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
    if run.outcome.accuracy is None:
        raise InputError(f"{run.outcome.folder}: was not evaluated; allowed here: evaluation.kind exact")
    return run.outcome.accuracy
