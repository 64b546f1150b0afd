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
from coterie.experiment.composition import total_of
from coterie.experiment.folder import RunFolder
from coterie.experiment.memory import RunMemory
from coterie.experiment.recorded import RecordedRun
from coterie.experiment.recount import recount_checks
from coterie.experiment.seal import Check, Seal
from coterie.experiment.sweep import Sweep
from coterie.privacy import ChainHead
from coterie.privacy.units import number_to_json

T = TypeVar("T")
HOLDS, BROKEN = "holds", "broken"


@dataclass(frozen=True)
class Verification:
    """What was found.

    Args:
        epsilon_claimed: what is promised; of several runs, the largest.
        epsilon_recounted: of a run, what was charged so far, counted again; of a page, what follows from the
            plan that it embeds; None where nothing was charged yet, or a problem is in the way.
        epsilon_total: of a comparison, what all its runs that have begun spend together; None where none has,
            or a problem is in the way.
        models_dropped: of how many runs the models were removed on purpose, as their seals say.
    """

    finished: bool
    epsilon_claimed: float | None
    epsilon_recounted: float | None
    ledger_head: ChainHead | None
    problems: tuple[str, ...]
    runs: Mapping[str, "Verification"] = field(default_factory=dict)
    epsilon_total: float | None = None
    models_dropped: int = 0

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
        if self.models_dropped:
            content["models_dropped"] = self.models_dropped
        if self.runs:
            content["epsilon_total"] = _number(self.epsilon_total)
            content["runs"] = {name: run.to_json() for name, run in self.runs.items()}
        return content


def verify(path: Path) -> Verification:
    """Check a run folder, the folder of a comparison, or a page.

    Raises:
        InputError: the path is none of these.
    """
    if (path / "sweep.yaml").exists() or (path / "cells").is_dir():
        return _verify_comparison(path)
    if _is_run(path):
        return _verify_run(path)
    if is_page(path):
        return _verify_page(path)
    raise InputError(f"{path}: not a run folder, the folder of a comparison, or a report.html of either")


def _is_run(path: Path) -> bool:
    files = RunFolder(path)
    return any(file.exists() for file in (files.experiment, files.plan, files.ledger))


# --- a run ------------------------------------------------------------------------------------------


def _verify_run(path: Path) -> Verification:
    run = RecordedRun.of_this_version(path)
    problems = _problems(run.checks())
    problems += _problems([run.check_models], known=bool(problems))
    begun = _found(lambda: run.begun)
    if begun is not False:
        problems += _problems(recount_checks(run), known=bool(problems))
    problems += _problems_of_pages(path, run)
    return Verification(
        finished=run.files.finished,
        epsilon_claimed=_found(lambda: run.guarantee.epsilon),
        epsilon_recounted=_found(lambda: run.spent) if begun else None,
        ledger_head=_found(lambda: run.ledger.head) if begun else None,
        problems=tuple(dict.fromkeys(problems)),
        models_dropped=int(_found(lambda: run.checkpoint is None and run.seal.models_dropped) or False),
    )


# --- a comparison -----------------------------------------------------------------------------------


def _verify_comparison(path: Path) -> Verification:
    problems = _problems(_comparison_checks(path))
    problems += _problems([partial(check_tables, path)], known=bool(problems))
    planned = _found(lambda: [cell.name for cell in Sweep.read(path / "sweep.yaml").cells()]) or []
    runs = {name: _verify_run(run.files.path) for name, run in _cells_of(path).items()}
    problems += [line for run in runs.values() for line in run.problems]
    problems += _problems_of_pages(path, _cells_of(path))
    total = None if problems else total_of(path / "cells" / name for name in runs)
    return Verification(
        finished=bool(planned) and all(name in runs and runs[name].finished for name in planned),
        epsilon_claimed=_largest(run.epsilon_claimed for run in runs.values()),
        epsilon_recounted=_largest(run.epsilon_recounted for run in runs.values()),
        ledger_head=None,
        problems=tuple(dict.fromkeys(problems)),
        runs=runs,
        epsilon_total=None if total is None else total.epsilon,
        models_dropped=sum(run.models_dropped for run in runs.values()),
    )


def _comparison_checks(path: Path) -> Iterator[Check]:
    yield lambda: Seal(path)
    with suppress(CoterieError):  # said by the check before
        yield from Seal(path).checks()
        yield from RunMemory(Seal(path)).checks()


def _cells_of(path: Path) -> dict[str, RecordedRun]:
    """The runs of a comparison, by name."""
    cells = sorted(path.glob("cells/*"))
    return {cell.name: RecordedRun.of_this_version(cell) for cell in cells if _is_run(cell)}


# --- a page -----------------------------------------------------------------------------------------


def _verify_page(path: Path) -> Verification:
    folder, claims = path.parent, _found(lambda: read_claim(path)) or {}
    beside = RecordedRun.of_this_version(folder) if _is_run(folder) else _cells_of(folder)
    heads = [claim.ledger for claim in claims.values()]
    return Verification(
        finished=bool(claims) and all(claim.finished for claim in claims.values()),
        epsilon_claimed=_largest(claim.epsilon for claim in claims.values()),
        epsilon_recounted=_largest(_found(claim.recounted) for claim in claims.values()),
        ledger_head=heads[0] if len(heads) == 1 else None,
        problems=tuple(dict.fromkeys(_problems(_page_checks(path, beside)))),
    )


def _problems_of_pages(folder: Path, beside: Mapping[str, RecordedRun] | RecordedRun) -> list[str]:
    pages = (folder / name for name in ("report.html", "public.html"))
    return [line for page in pages if page.exists() for line in _problems(_page_checks(page, beside))]


def _page_checks(path: Path, beside: Mapping[str, RecordedRun] | RecordedRun) -> Iterator[Check]:
    """Checks of a page by itself and against the run, or the runs by name, beside it."""
    yield lambda: read_claim(path)
    with suppress(CoterieError):  # said by the check before
        for name, claim in read_claim(path).items():
            yield partial(claim.check, str(path))
            if beside:
                run = beside if isinstance(beside, RecordedRun) else beside.get(name)
                yield partial(_check_beside, path, name, claim, run)


def _check_beside(path: Path, name: str, claim: RunClaim, run: RecordedRun | None) -> None:
    if run is None:
        raise LedgerError(f"{path.parent / 'cells' / name}: missing; {path.name} tells of this run")
    claim.check_against(str(path), run)


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


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _number(value: float | None) -> object:
    return None if value is None else number_to_json(value)
