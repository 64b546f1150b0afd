"""The ledger of a run counted once more: does what the folder promises follow from what was charged?

A run folder states its epsilon several times: in the guarantee, in the result, in each round's line. All of
them follow from the plan and from the ledger, so they are computed again from these two and compared.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coterie.engines.secret import SEEDED
from coterie.errors import LedgerError
from coterie.experiment.calibrated import HELD_OUT
from coterie.experiment.recorded import RecordedRun
from coterie.experiment.schema import EvaluationKind
from coterie.experiment.seal import Check
from coterie.files import read_json
from coterie.models import code_caveats
from coterie.privacy.units import number_from_json, round_up

TOLERANCE = 1e-6
"""Relative; other versions of the numerical libraries differ by less, a rounded or edited figure by more."""


@dataclass(frozen=True)
class Recount:
    """What the ledger of a run says when it is counted again."""

    releases: int
    lines: int
    spent: float
    promised: float

    def __str__(self) -> str:
        return (
            f"{self.releases:,} releases charged in {self.lines:,} lines of an unbroken chain; counted "
            f"again, they spent epsilon {round_up(self.spent)} of {round_up(self.promised)}"
        )


def recount(path: Path) -> Recount | None:
    """Count the ledger of a run folder again; None where it was never opened.

    Raises:
        LedgerError: the chain is broken, or a figure in the folder does not follow from plan and ledger.
    """
    run = RecordedRun.of_this_version(path)
    if not run.begun:
        return None
    for check in recount_checks(run):
        check()
    releases = sum(sum(counts.values()) for counts in run.ledger.counts.values())
    return Recount(releases, run.ledger.head.count, run.spent, run.guarantee.epsilon)


def recount_checks(run: RecordedRun) -> Iterator[Check]:
    """Whether every figure of the folder follows from its plan and its ledger."""
    yield run.check_ledger
    for check in (_check_guarantee, _check_leakage, _check_said, _check_spent, _check_rounds):
        yield partial(check, run)
    if run.files.finished:
        yield partial(_check_result, run)


def _check_guarantee(run: RecordedRun) -> None:
    path, stored, proven = run.files.guarantee, run.guarantee, run.proven.prove(run.guarantee.caveats)
    says, follows = stored.to_json(), proven.to_json()
    for name in (name for name in says if name not in ("caveats", "line", "text")):
        exact = name == "event"  # what is accounted for is written, not computed
        if not (says[name] == follows[name] if exact else _alike(says[name], follows[name])):
            raise LedgerError(
                f"{path}: {name} is {_shown(says[name])}; counted again from the plan and the ledger it is "
                f"{_shown(follows[name])}"
            )
    for caveat in proven.caveats:
        if caveat not in stored.caveats:
            raise LedgerError(f"{path}: the caveat '{_shown(caveat)}' of the plan is missing")


def _check_said(run: RecordedRun) -> None:
    """What the experiment alone shows to weaken the guarantee, or to lie outside it, must be said in it."""
    experiment, said = run.experiment, list(code_caveats(run.experiment.model))
    if not run.files.sites.exists():  # there noise keys are others', and no score is exact
        said += [SEEDED] if experiment.seeds.noise is not None else []
        said += [HELD_OUT] if experiment.evaluation_kind is EvaluationKind.EXACT else []
    for caveat in said:
        if caveat not in run.guarantee.caveats:
            raise LedgerError(
                f"{run.files.guarantee}: the caveat '{_shown(caveat)}' of the experiment is missing"
            )


def _check_leakage(run: RecordedRun) -> None:
    """Each worker's epsilon, where workers observe each other."""
    counted = run.proven.per_worker()
    if counted is None:
        return
    stored = read_json(run.files.leakage).get("per_worker")
    for worker, follows in counted.items():
        says = stored.get(worker) if isinstance(stored, dict) else None
        if not close_to(says, follows):
            raise LedgerError(
                f"{run.files.leakage}: epsilon of {worker} is {says}; counted again it is {follows}"
            )


def _check_spent(run: RecordedRun) -> None:
    if not _within(run.spent, run.guarantee.epsilon):
        raise LedgerError(
            f"{run.files.ledger}: what was charged costs epsilon {run.spent}, "
            f"{run.files.guarantee.name} promises {run.guarantee.epsilon}"
        )


def _check_rounds(run: RecordedRun) -> None:
    """No round may state more than was charged by now, nor less than the one before it."""
    files, spent, before = run.files, run.spent, 0.0
    for line in run.metrics.bodies:
        stated = number_from_json(line["epsilon"])
        if not (_within(before, stated) and _within(stated, spent)):
            raise LedgerError(
                f"{files.metrics}: round {line['round']} states epsilon {stated}; counted again, "
                f"{before} to {spent} was spent by then"
            )
        before = stated
    if files.finished and not close_to(before, spent):
        raise LedgerError(
            f"{files.metrics}: the last round states epsilon {before}; counted again it is {spent}"
        )


def _check_result(run: RecordedRun) -> None:
    path, result, stored = run.files.result, read_json(run.files.result), run.guarantee
    for key, follows in (("guarantee", stored.line), ("guarantee_text", stored.text)):
        if result.get(key) != follows:
            raise LedgerError(f"{path}: its {key} is not the one of the run's plan: {stored.line}")
    if not _alike(result.get("per_client"), stored.per_client_json()):
        raise LedgerError(f"{path}: per_client is not what every client spends by the run's plan")
    for name in ("epsilon", "delta"):
        says, follows = result.get(name), getattr(stored, name)
        if says is None or not close_to(number_from_json(says), follows):
            raise LedgerError(f"{path}: {name} is {says!r}; the guarantee says {follows!r}")


def close_to(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or math.isclose(one, other, rel_tol=TOLERANCE)


def _alike(one: object, other: object) -> bool:
    """Equal plain data, but for figures inside, which may differ in the last digits."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return close_to(one, other)
    return one == other


def _within(less: float, more: float) -> bool:
    return less <= more or close_to(less, more)


def _shown(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
