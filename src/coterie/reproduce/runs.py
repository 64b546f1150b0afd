"""Finished runs of a reproduction, read back from their folders, and what each charged against its plan."""

import math
from dataclasses import dataclass
from pathlib import Path

from coterie.algorithms import AnyAlgorithm, find_algorithm
from coterie.errors import InputError
from coterie.experiment.folder import RunFolder
from coterie.experiment.metrics import Fairness, Spread, fairness
from coterie.experiment.result import RunResult
from coterie.experiment.sweep import Cell
from coterie.files import read_json, read_lines
from coterie.privacy import LedgerView, PrivacyPlan, Unit
from coterie.privacy.units import number_from_json
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


def charged_in(path: Path, result: RunResult) -> Charged:
    """The ledger of a run folder against its plan."""
    files = RunFolder(path)
    plan = PrivacyPlan.from_json(read_json(files.plan))
    ledger = LedgerView.read(files.ledger, plan)
    pairs = [
        (release.times, ledger.executed(unit.subject)[release.name])
        for unit in plan.units
        for release in unit.releases
    ]
    *_, last = read_lines(files.metrics)
    return Charged(
        planned=sum(times for times, _ in pairs),
        executed=sum(done for _, done in pairs),
        exact=all(times == done for times, done in pairs),
        within=all(done <= times for times, done in pairs),
        spent=number_from_json(last["epsilon"]),
        promised=result.epsilon,
    )


@dataclass(frozen=True)
class FinishedRun:
    """A finished cell and what its ledger says.

    Args:
        test_records: held-out records of the client with fewest, and of the one with most: how fine its
            accuracy can be.
    """

    cell: Cell
    result: RunResult
    fairness: Fairness
    charged: Charged
    test_records: tuple[int, int]

    @classmethod
    def read(cls, cell: Cell, path: Path, out: Path) -> "FinishedRun":
        """From a run folder, with the central scores of the reproduction under `out`."""
        result = RunResult.load(path)
        fair = result.fairness or Fairness(math.nan, None, None)
        best = central_scores(out, cell.experiment) if fair.f_acc is None else None
        if best is not None:
            assert result.loss is not None
            reached, losses = _exact(result).per_client, result.loss.per_client
            fair = fairness({name: Score(value, losses[name]) for name, value in reached.items()}, best)
        held_out = [client["test_records"] for client in read_json(RunFolder(path).federation)["clients"]]
        return cls(cell, result, fair, charged_in(path, result), (min(held_out), max(held_out)))

    @property
    def unit(self) -> Unit:
        return self.cell.experiment.privacy.unit

    @property
    def algorithm(self) -> type[AnyAlgorithm]:
        return find_algorithm(self.unit, self.cell.experiment.algorithm.name)

    @property
    def accuracy(self) -> Spread:
        return _exact(self.result)


def _exact(result: RunResult) -> Spread:
    """Published experiments are on published records, and judged exactly."""
    if result.accuracy is None:
        raise InputError(f"{result.folder}: was not evaluated; allowed here: evaluation.kind exact")
    return result.accuracy
