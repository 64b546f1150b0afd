"""Does a run folder, a comparison or a page hold: every byte as it was written, every figure as it follows?

All problems are collected, each as one line that names the file. What is found are accidents and edits;
whoever rewrites everything consistently, ledger and seal and all, is not found by looking at the files.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from coterie.errors import CoterieError, InputError, LedgerError
from coterie.experiment.claim import RunClaim, is_page, read_claim
from coterie.experiment.comparison import check_tables
from coterie.experiment.composition import Total, total_of
from coterie.experiment.folder import RunFolder
from coterie.experiment.memory import run_checks
from coterie.experiment.recount import Account
from coterie.experiment.seal import Check, Seal
from coterie.experiment.sweep import Sweep
from coterie.privacy import ChainHead
from coterie.privacy.units import number_to_json

T = TypeVar("T")
HOLDS, BROKEN = "holds", "broken"
PAGES = ("report.html", "public.html")


@dataclass(frozen=True)
class Verification:
    """What was found.

    Args:
        epsilon_claimed: what is promised; of several runs, the largest.
        epsilon_recounted: of a run, what was charged so far, counted again; of a page, what follows from the
            plan that it embeds; None where nothing was charged yet, or a problem is in the way.
        epsilon_total: of a comparison, what all its runs that have begun spend together; None where none has,
            or a problem is in the way.
    """

    finished: bool
    epsilon_claimed: float | None
    epsilon_recounted: float | None
    ledger_head: ChainHead | None
    problems: tuple[str, ...]
    runs: Mapping[str, "Verification"] = field(default_factory=dict)
    epsilon_total: float | None = None

    @property
    def verdict(self) -> str:
        return BROKEN if self.problems else HOLDS

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "verdict": self.verdict,
            "finished": self.finished,
            "epsilon_claimed": _number(self.epsilon_claimed),
            "epsilon_recounted": _number(self.epsilon_recounted),
            "ledger_head": None if self.ledger_head is None else self.ledger_head.to_json(),
            "problems": list(self.problems),
        }
        if self.runs:
            content["epsilon_total"] = _number(self.epsilon_total)
            content["runs"] = {name: run.to_json() for name, run in self.runs.items()}
        return content


def verify(path: Path) -> Verification:
    """Check a run folder, the folder of a comparison, or a page.

    Raises:
        InputError: the path is none of these.
    """
    if _is_comparison(path):
        return _verify_comparison(path)
    if _is_run(path):
        return _verify_run(path)
    if is_page(path):
        return _verify_page(path)
    raise InputError(f"{path}: not a run folder, the folder of a comparison, or a report.html of either")


def _is_comparison(path: Path) -> bool:
    return (path / "sweep.yaml").exists() or (path / "cells").is_dir()


def _is_run(path: Path) -> bool:
    files = RunFolder(path)
    return any(file.exists() for file in (files.experiment, files.plan, files.ledger))


# --- a run ------------------------------------------------------------------------------------------


def _verify_run(path: Path) -> Verification:
    account = Account.of(path)
    integrity = account.integrity
    problems = _problems(integrity.checks())
    problems += _problems([integrity.check_models], known=bool(problems))
    begun = _found(lambda: integrity.begun)
    if begun is not False:
        problems += _problems(account.checks(), known=bool(problems))
    for name in PAGES:
        if (path / name).exists():
            problems += _problems(_page_checks(path / name, {None: account}))
    return Verification(
        finished=account.files.finished,
        epsilon_claimed=_found(lambda: account.stored.epsilon),
        epsilon_recounted=_found(lambda: account.spent) if begun else None,
        ledger_head=_found(lambda: integrity.ledger.head) if begun else None,
        problems=_once(problems),
    )


# --- a comparison -----------------------------------------------------------------------------------


def _verify_comparison(path: Path) -> Verification:
    problems = _problems(_comparison_checks(path))
    problems += _problems([partial(check_tables, path)], known=bool(problems))
    planned = _found(lambda: [cell.name for cell in Sweep.read(path / "sweep.yaml").cells()]) or []
    there = sorted(cell.name for cell in path.glob("cells/*") if _is_run(cell))
    runs = {name: _verify_run(path / "cells" / name) for name in there}
    for run in runs.values():
        problems += run.problems
    accounts: Mapping[str | None, Account] = {name: Account.of(path / "cells" / name) for name in runs}
    for name in PAGES:
        if (path / name).exists():
            problems += _problems(_page_checks(path / name, accounts))
    total: Total | None = None if problems else total_of(path / "cells" / name for name in runs)
    return Verification(
        finished=bool(planned) and all(name in runs and runs[name].finished for name in planned),
        epsilon_claimed=_largest(run.epsilon_claimed for run in runs.values()),
        epsilon_recounted=_largest(run.epsilon_recounted for run in runs.values()),
        ledger_head=None,
        problems=_once(problems),
        runs=runs,
        epsilon_total=None if total is None else total.epsilon,
    )


def _comparison_checks(path: Path) -> Iterator[Check]:
    yield lambda: _ignore(Seal(path))
    with suppress(CoterieError):  # said by the check before
        yield from Seal(path).checks()
        yield from run_checks(path)


# --- a page -----------------------------------------------------------------------------------------


def _verify_page(path: Path) -> Verification:
    beside: Mapping[str | None, Account] = {}
    if _is_run(path.parent):
        beside = {None: Account.of(path.parent)}
    elif (path.parent / "cells").is_dir():
        beside = {cell.name: Account.of(cell) for cell in (path.parent / "cells").iterdir() if _is_run(cell)}
    problems = _problems(_page_checks(path, beside))
    claims: Mapping[str, RunClaim] = _found(lambda: read_claim(path)) or {}
    heads = [claim.ledger for claim in claims.values()]
    return Verification(
        finished=bool(claims) and all(claim.finished for claim in claims.values()),
        epsilon_claimed=_largest(claim.epsilon for claim in claims.values()),
        epsilon_recounted=_largest(_found(claim.recounted) for claim in claims.values()),
        ledger_head=heads[0] if len(heads) == 1 else None,
        problems=_once(problems),
    )


def _page_checks(path: Path, beside: Mapping[str | None, Account]) -> Iterator[Check]:
    """Checks of a page by itself and against the run folders beside it, by name; of one run without."""
    try:
        claims = read_claim(path)
    except CoterieError:
        yield lambda: _ignore(read_claim(path))
        return
    for name, claim in claims.items():
        yield partial(claim.check, str(path))
        account = beside.get(None, beside.get(name))
        if account is not None:
            yield partial(claim.check_against, str(path), account)
        elif beside:
            yield partial(_missing_run, path, name)


def _ignore(read: object) -> None:
    """A check that is passed by reading."""


def _missing_run(path: Path, name: str) -> None:
    raise LedgerError(f"{path.parent / 'cells' / name}: missing; {path.name} tells of this run")


# --- all of them ------------------------------------------------------------------------------------


def _problems(checks: Iterable[Check], *, known: bool = False) -> list[str]:
    """What the checks find.

    Args:
        known: files are known to be changed; then one that cannot be counted with has been named already.
    """
    found = []
    for check in checks:
        try:
            check()
        except CoterieError as mistake:
            found.append(" ".join(str(mistake).split()))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            if not known:
                raise
    return found


def _found(compute: Callable[[], T]) -> T | None:
    """What can be computed in spite of the problems, which are said elsewhere."""
    try:
        return compute()
    except (CoterieError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None


def _once(problems: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(problems))


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _number(value: float | None) -> object:
    return None if value is None else number_to_json(value)
