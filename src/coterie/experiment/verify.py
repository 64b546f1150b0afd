"""Does a run folder, a comparison or a page hold: every byte as it was written, every figure as it follows?

All problems are collected, each as one line that names the file. What is found are accidents and edits;
whoever rewrites everything consistently, ledger and seal and all, is not found by looking at the files.

What a page claims is inside the page: the plan that proves it, the ledger's head, a hash of the page. The
claim is one JSON object in a comment before the end of the page. It is enough to count the epsilon again
without the run's folder. Its last entry is the hash of the whole page with that entry left empty, so a page
of which one byte was changed is found.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from coterie.errors import CoterieError, InputError, LedgerError
from coterie.experiment.card import check_card
from coterie.experiment.comparison import check_tables
from coterie.experiment.composition import total_of
from coterie.experiment.folder import RunFolder
from coterie.experiment.proven import ProvenPlan
from coterie.experiment.recorded import RecordedRun, close_to
from coterie.experiment.registered import check_entered
from coterie.experiment.seal import Check, Seal, require
from coterie.experiment.sweep import Sweep
from coterie.files import digest_bytes, read_json, regular
from coterie.privacy import ChainHead
from coterie.privacy.plain import Plain
from coterie.privacy.units import number_to_json
from coterie.register import RegisterView

T = TypeVar("T")
HOLDS, BROKEN = "holds", "broken"
FORMAT = 1
_BLOCK = re.compile(rb"<!-- coterie-claim (\{.*\}) -->\n")
_OURS = re.compile(rb"coterie (run|comparison)</title>|<!-- coterie-claim ")


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
        dropped = {"models_dropped": self.models_dropped} if self.models_dropped else {}
        runs = {name: run.to_json() for name, run in self.runs.items()}
        return {
            "verdict": self.verdict,
            "finished": self.finished,
            "epsilon_claimed": _number(self.epsilon_claimed),
            "epsilon_recounted": _number(self.epsilon_recounted),
            "ledger_head": None if self.ledger_head is None else self.ledger_head.to_json(),
            "problems": list(self.problems),
            **dropped,
            **({"epsilon_total": _number(self.epsilon_total), "runs": runs} if runs else {}),
        }


def verify(path: Path) -> Verification:
    """Check a run folder, the folder of a comparison, or a page; an InputError where it is none of these."""
    if (path / "sweep.yaml").exists() or (path / "cells").is_dir():
        return _verify_comparison(path)
    if _is_run(path):
        return _verify_run(path)
    if is_page(path):
        return _verify_page(path)
    raise InputError(f"{path}: not a run folder, the folder of a comparison, or a report.html of either")


def _is_run(path: Path) -> bool:
    files = RunFolder(path)
    return files.exists or files.plan.exists() or files.ledger.exists()


# --- a run ------------------------------------------------------------------------------------------


def _verify_run(path: Path) -> Verification:
    run = RecordedRun.of_this_version(path)
    problems = _problems(run.checks())
    problems += _problems([run.check_models], known=bool(problems))
    begun = _found(lambda: run.begun)
    if begun is not False:
        problems += _problems(run.recount_checks(), known=bool(problems))
    problems += _problems([partial(_check_register, run)], known=bool(problems))
    problems += _problems([partial(check_card, run)], known=bool(problems))
    problems += _problems_of_pages(path, run)
    return Verification(
        finished=run.files.finished,
        epsilon_claimed=_found(lambda: run.guarantee.epsilon),
        epsilon_recounted=_found(lambda: run.spent) if begun else None,
        ledger_head=_found(lambda: run.ledger.head) if begun else None,
        problems=tuple(dict.fromkeys(problems)),
        models_dropped=int(_found(lambda: run.checkpoint is None and run.seal.models_dropped) or False),
    )


def _check_register(run: RecordedRun) -> None:
    """Whether the register in which the run is entered still has it, where that register is here."""
    if not run.files.register.exists():
        return
    register = RegisterView.read()
    if register is not None and read_json(run.files.register).get("register") == register.id:
        check_entered(register, run.files, run.seal)


# --- a comparison -----------------------------------------------------------------------------------


def _verify_comparison(path: Path) -> Verification:
    sealed: list[Check] = []
    with suppress(CoterieError):  # said by the first check
        sealed += Seal(path).checks()
    problems = _problems([lambda: Seal(path), *sealed])
    problems += _problems([partial(check_tables, path)], known=bool(problems))
    planned = _found(lambda: [cell.name for cell in Sweep.read_recorded(path / "sweep.yaml").cells()]) or []
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


def _cells_of(path: Path) -> dict[str, RecordedRun]:
    """The runs of a comparison, by name."""
    cells = filter(_is_run, sorted(path.glob("cells/*")))
    return {cell.name: RecordedRun.of_this_version(cell) for cell in cells}


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
    for name, claim in (_found(lambda: read_claim(path)) or {}).items():
        yield partial(claim.check, path)
        run = beside if isinstance(beside, RecordedRun) else beside.get(name)
        if run is not None:
            yield partial(claim.check_against, path, run)
        elif beside:
            lost = path.parent / "cells" / name
            yield partial(require, False, lost, f"missing; {path.name} tells of this run")


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


# --- the claim inside a page --------------------------------------------------------------------------


@dataclass(frozen=True)
class RunClaim(Plain):
    """What a page says about one run.

    Args:
        epsilon: as the page prints it.
        basis: what it follows from; None before the ledger was opened.
        ledger: where the ledger stood when the page was written.
    """

    called = "claim"
    mistake = LedgerError
    epsilon: float
    finished: bool
    basis: ProvenPlan | None
    ledger: ChainHead | None

    @classmethod
    def of(cls, path: Path) -> "RunClaim":
        """The claim that a run folder supports as it is now."""
        run = RecordedRun.of_this_version(path)
        begun = run.files.ledger.exists()
        proven, head = (run.proven, run.ledger.head) if begun else (None, None)
        return cls(run.guarantee.epsilon, run.files.finished, proven, head)

    def recounted(self) -> float | None:
        """Epsilon as it follows from what the page embeds."""
        return None if self.basis is None else self.basis.prove().epsilon

    def check(self, page: Path) -> None:
        """Refuse an epsilon that does not follow from what is embedded beside it."""
        counted = self.recounted()
        problem = f"claims epsilon {self.epsilon}; counted again it is {counted}"
        require(counted is None or close_to(self.epsilon, counted), page, problem)

    def check_against(self, page: Path, run: RecordedRun) -> None:
        """Refuse a page that is not about the run folder beside it."""
        files, stated = run.files, run.guarantee.epsilon
        problem = f"claims epsilon {self.epsilon}, {files.guarantee} states {stated}"
        require(close_to(self.epsilon, stated), page, problem)
        problem = f"is the page of a finished run, {files.result} is missing"
        require(files.finished or not self.finished, page, problem)
        same = self.basis is None or self.basis.plan.digest() == run.plan.digest()
        require(same, page, f"its plan is not {files.plan}")
        if self.ledger is not None:
            run.ledger.check_seen(self.ledger, str(page))


def with_claim(page: str, runs: Mapping[str, RunClaim]) -> str:
    """The page with the claims that it makes about runs, by their names, and its own hash inside."""
    content = {"claim": FORMAT, "runs": {name: run.to_json() for name, run in runs.items()}, "page": ""}
    # Inside a comment nothing may look like its end.
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")
    body, end, rest = page.rpartition("</body>")
    if not end:
        raise ValueError("a page ends with its body")
    whole = f"{body}<!-- coterie-claim {text} -->\n{end}{rest}"
    return whole.replace('"page":""} -->', f'"page":"{digest_bytes(whole.encode())}"}} -->')


def is_page(path: Path) -> bool:
    """Whether a file is a page of ours, whatever became of it."""
    return path.is_file() and _OURS.search(path.read_bytes()) is not None


def read_claim(path: Path) -> dict[str, RunClaim]:
    """The claims of a page, by the names of its runs; a LedgerError where one byte of it was changed."""
    content = regular(path).read_bytes()
    blocks = _BLOCK.findall(content)
    require(len(blocks) == 1, path, "embeds no claim; it was changed, or written by an earlier version")
    try:
        data = json.loads(blocks[0])
        version, digest = data["claim"], data["page"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise LedgerError(f"{path}: its claim is not readable; the page was changed") from None
    entry = f'"page":"{digest}"}} -->'.encode()
    empty = content.replace(entry, b'"page":""} -->')
    whole = content.count(entry) == 1 and digest_bytes(empty) == digest
    require(whole, path, "changed since it was written; its hash does not fit")
    problem = f"its claim is of another version (format {version}, ours is {FORMAT})"
    require(version == FORMAT, path, problem)
    try:
        return {str(name): RunClaim.read(run) for name, run in data["runs"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, CoterieError) as mistake:
        raise LedgerError(f"{path}: its claim is not one of this version ({mistake!r})") from None
