"""What was released so far, in an append-only file that no restart can reset.

Every line carries the hash of itself and the line before, so a changed, dropped, moved, doubled or
inserted line is found. Somebody who rewrites the whole chain, or cuts whole lines off its end, is found by
a head that a checkpoint, a contract or a page keeps apart. The content depends on nothing but the plan and
the charges, so an interrupted and resumed run leaves the same bytes as an uninterrupted one.
"""

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from coterie.privacy.accounting import accountant_named, epsilon_of
from coterie.privacy.chain import START, ChainHead, check_seen, check_tail, follow, link
from coterie.privacy.errors import BudgetError, LedgerError, PlanError, PrivacyInputError
from coterie.privacy.events import atoms
from coterie.privacy.locked_file import append, contents, create, cut_torn_line, explained, open_locked
from coterie.privacy.plain import MalformedError, Plain
from coterie.privacy.plan import PlannedRelease, PrivacyPlan
from coterie.privacy.units import Budget

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Charge(Plain):
    """One release of one subject in one round, on one input.

    Another input under the same names is another release: it meets other noise, and both can be seen.
    """

    called = "charge"
    subject: str
    round: int
    release: str
    input_hash: str

    def __post_init__(self) -> None:
        texts = {"subject": self.subject, "release": self.release, "input_hash": self.input_hash}
        for key, value in texts.items():
            if not isinstance(value, str) or not value:
                raise PrivacyInputError(f"charge: {key} {value!r} is not allowed, a text is")
        if type(self.round) is not int or self.round < 0:
            raise PrivacyInputError(f"charge: round {self.round!r} is not allowed, an integer from 0 is")


class _History:
    """The charges in the order of the file, held against the plan."""

    def __init__(self, plan: PrivacyPlan) -> None:
        self.plan = plan
        self.hashes: list[str] = []
        self.size = 0
        self.counts = {unit.subject: {r.name: 0 for r in unit.releases} for unit in plan.units}
        self.rounds = dict.fromkeys(self.counts, 0)
        self._known: set[Charge] = set()

    @property
    def head(self) -> ChainHead:
        return ChainHead(len(self.hashes), self.hashes[-1])

    def new(self, charges: Iterable[Charge]) -> list[Charge]:
        """The charges not yet known, each once; an error when the plan does not allow all of them."""
        fresh = [charge for charge in dict.fromkeys(charges) if charge not in self._known]
        asked: dict[tuple[str, str], int] = {}
        for charge in fresh:
            planned = self.plan.for_subject(charge.subject).release(charge.release)
            key = (charge.subject, charge.release)
            asked[key] = asked.get(key, self.counts[charge.subject][charge.release]) + 1
            if asked[key] > planned.times:
                raise BudgetError(
                    f"{charge.subject}: release {charge.release!r} in round {charge.round} would be number "
                    f"{asked[key]}, the plan allows {planned.times}"
                )
        return fresh

    def knows(self, charge: Charge) -> bool:
        return charge in self._known

    def record(self, fresh: Iterable[Charge], line: bytes, digest: str) -> None:
        for charge in fresh:
            self._known.add(charge)
            self.counts[charge.subject][charge.release] += 1
            self.rounds[charge.subject] = max(self.rounds[charge.subject], charge.round)
        self.hashes.append(digest)
        self.size += len(line)


class Ledger:
    """The one door to releases: `charge` writes durably first, and only then may the noise be added.

    Example:
        with Ledger.open(path, plan, budget=Budget(8.0, 1e-3), accountant="rdp") as ledger:
            ledger.charge([Charge("client 3", round=2, release="training", input_hash=digest)])
    """

    def __init__(
        self,
        path: Path,
        file: io.FileIO,
        history: _History,
        header: "_Header",
        deltas: Mapping[str, float],
    ) -> None:
        self._path = path
        self._file = file
        self._history = history
        self._header = header
        self._accountant = header.accountant
        self._deltas = deltas
        self._epsilons: dict[tuple[int, tuple[int, ...]], float] = {}
        # Subjects with equal releases and delta cost the same: a kind each, computed once for all of them.
        kinds: dict[tuple[tuple[PlannedRelease, ...], float], int] = {}
        self._kinds = {
            unit.subject: kinds.setdefault((unit.releases, deltas[unit.subject]), len(kinds))
            for unit in history.plan.units
        }

    @classmethod
    def open(
        cls,
        path: Path,
        plan: PrivacyPlan,
        *,
        budget: Budget | Mapping[str, Budget],
        accountant: str,
        anchor: ChainHead | None = None,
        seen_by: str = "the checkpoint",
    ) -> Self:
        """Start the ledger of this plan, or read it back and check every line.

        Args:
            path: The file; its directory exists.
            plan: The calibrated plan; a file of any other plan is refused.
            budget: One for all subjects, or one for each.
            accountant: The accountant that proved the plan.
            anchor: A head that was kept apart; the file must contain it.
            seen_by: Who kept it.
        """
        budgets = _budget_of_each(plan, budget)
        deltas = {subject: each.delta for subject, each in budgets.items()}
        header = _Header.of(plan, budgets, accountant)
        _check_accountable(plan, accountant)
        if anchor is not None and not path.exists():
            raise LedgerError(f"{path}: the ledger is missing, {seen_by} has seen {anchor.count} lines of it")
        with explained(path):
            file = create(path, link(header.to_json(), START)[0]) or open_locked(path)
            try:
                history = _replay(path, contents(file), plan, header)
                if anchor is not None:
                    check_seen(path, history.hashes, anchor, seen_by)
                cut_torn_line(file, history.size)
            except BaseException:
                file.close()
                raise
        return cls(path, file, history, header, deltas)

    @property
    def head(self) -> ChainHead:
        """Where the ledger stands, for a checkpoint to keep."""
        return self._history.head

    def check_seen(self, head: ChainHead, seen_by: str) -> None:
        """Refuse to go on where the file does not contain a head that somebody kept."""
        check_seen(self._path, self._history.hashes, head, seen_by)

    def executed(self, subject: str) -> Mapping[str, int]:
        """How often each planned release of a subject was charged."""
        self._history.plan.for_subject(subject)
        return dict(self._history.counts[subject])

    def latest_round(self, subject: str) -> int:
        """The latest round in which a subject was charged; 0 before the first charge."""
        self._history.plan.for_subject(subject)
        return self._history.rounds[subject]

    def knows(self, charge: Charge) -> bool:
        """Whether this very release, on this very input, was charged before."""
        return self._history.knows(charge)

    def charge(self, charges: Sequence[Charge]) -> None:
        """Write releases that are about to happen; when this returns, they survive any crash.

        All or none are written. What was charged before, with the same input, is not charged again.
        """
        self._check_untouched()
        fresh = self._history.new(charges)
        if not fresh:
            return
        line, digest = link({"charges": [charge.to_json() for charge in fresh]}, self.head.hash)
        try:
            with explained(self._path):
                append(self._file, line)
        except BaseException:
            # What reached the disk is cut as torn or counted at the next opening; this process is done.
            self.close()
            raise
        self._history.record(fresh, line, digest)

    def spent(self, subject: str | None = None) -> float:
        """Epsilon of what was charged so far, of one subject or of the one that spent most."""
        if subject is not None:
            self._history.plan.for_subject(subject)
            return self._spent_by(subject)
        return max((self._spent_by(each) for each in self._kinds), default=0.0)

    def verify(self) -> None:
        """Read the whole file again and check it as `open` does."""
        self._check_untouched()
        with explained(self._path):
            content = contents(self._file)
        history = _replay(self._path, content, self._history.plan, self._header)
        check_seen(self._path, history.hashes, self.head, "this process")

    def close(self) -> None:
        """Let go of the file; another process may open it now."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        mistake: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ledger({str(self._path)!r}, {self.head.count} lines)"

    def _spent_by(self, subject: str) -> float:
        counts = self._history.counts[subject]
        key = (self._kinds[subject], tuple(counts.values()))
        if key not in self._epsilons:
            plan = self._history.plan
            event = plan.for_subject(subject).executed(counts)
            self._epsilons[key] = (
                epsilon_of(event, self._deltas[subject], self._accountant, plan.adjacency)
                if any(counts.values())
                else 0.0
            )
        return self._epsilons[key]

    def _check_untouched(self) -> None:
        """Refuse to go on when the file was removed, replaced, cut or extended under this process."""
        if self._file.closed:
            raise LedgerError(f"{self._path}: the ledger is closed")
        with explained(self._path):
            held = os.fstat(self._file.fileno())
            same = self._path.exists() and os.path.samestat(held, self._path.stat())
        if not same or held.st_size != self._history.size:
            what = "changed" if same else "removed or replaced"
            raise LedgerError(f"{self._path}: the ledger was {what} by somebody else during the run")


@dataclass(frozen=True)
class LedgerView:
    """What the file of a ledger says, read without a lock and without a write."""

    plan: PrivacyPlan
    accountant: str
    budgets: Mapping[str, Budget]
    counts: Mapping[str, Mapping[str, int]]
    path: Path
    hashes: tuple[str, ...]
    """Of every line."""

    @classmethod
    def read(cls, path: Path, plan: PrivacyPlan) -> Self:
        """Check the whole chain as `Ledger.open` does, that it was written for this plan, and what it says.

        Args:
            path: The file.
            plan: The plan that it must belong to.
        """
        with explained(path):
            content = path.read_bytes()
        found, _ = follow(path, 1, content.partition(b"\n")[0], START)
        budgets, accountant = _Header.found(path, found).budgets(path, plan)
        history = _replay(path, content, plan, _Header.of(plan, budgets, accountant))
        return cls(plan, accountant, budgets, history.counts, path, tuple(history.hashes))

    @property
    def head(self) -> ChainHead:
        return ChainHead(len(self.hashes), self.hashes[-1])

    def check_seen(self, head: ChainHead, seen_by: str) -> None:
        """Refuse a file that does not contain a head that somebody kept."""
        check_seen(self.path, self.hashes, head, seen_by)

    def executed(self, subject: str) -> Mapping[str, int]:
        """How often each planned release of a subject was charged."""
        return self.counts[subject]

    def spent(self) -> float:
        """Epsilon of what was charged, of the subject that spent most, computed anew."""
        alike = {
            (unit.releases, tuple(self.counts[unit.subject].items()), self.budgets[unit.subject].delta): unit
            for unit in self.plan.units
        }
        return max(
            (
                epsilon_of(unit.executed(dict(counts)), delta, self.accountant, self.plan.adjacency)
                for (_, counts, delta), unit in alike.items()
                if any(times for _, times in counts)
            ),
            default=0.0,
        )


def _budget_of_each(plan: PrivacyPlan, budget: Budget | Mapping[str, Budget]) -> dict[str, Budget]:
    subjects = [unit.subject for unit in plan.units]
    if isinstance(budget, Budget):
        return dict.fromkeys(subjects, budget)
    odd = sorted(set(subjects) ^ set(budget))
    if odd:
        raise PlanError(f"budget: every subject of the plan needs one, and nobody else: {odd[0]!r}")
    return {subject: budget[subject] for subject in subjects}


def _check_accountable(plan: PrivacyPlan, accountant: str) -> None:
    """Refuse an unknown accountant and a plan without all its noise now, rather than after releases."""
    accountant_named(accountant)
    for release in {release for unit in plan.units for release in unit.releases}:
        atoms(release.event)


@dataclass(frozen=True)
class _Times:
    name: str
    times: int


@dataclass(frozen=True)
class _ChargedAlike:
    """Subjects with the same releases and the same budget."""

    subjects: tuple[str, ...]
    releases: tuple[_Times, ...]
    epsilon: float
    delta: float


@dataclass(frozen=True)
class _Header(Plain):
    """The first line: what the ledger is for."""

    called = "header"
    ledger: int
    plan: str
    accountant: str
    units: tuple[_ChargedAlike, ...]

    @classmethod
    def of(cls, plan: PrivacyPlan, budgets: Mapping[str, Budget], accountant: str) -> Self:
        alike: dict[tuple[tuple[_Times, ...], Budget], list[str]] = {}
        for unit in plan.units:
            times = tuple(_Times(release.name, release.times) for release in unit.releases)
            alike.setdefault((times, budgets[unit.subject]), []).append(unit.subject)
        units = (
            _ChargedAlike(tuple(subjects), times, budget.epsilon, budget.delta)
            for (times, budget), subjects in alike.items()
        )
        return cls(_FORMAT, plan.digest(), accountant, tuple(units))

    @classmethod
    def found(cls, path: Path, line: object) -> Self:
        try:
            header = cls.read(line)
            if header.ledger == _FORMAT:
                return header
        except MalformedError:
            pass
        raise LedgerError(f"{path}: line 1 is not the header of a ledger of format {_FORMAT}")

    def budgets(self, path: Path, plan: PrivacyPlan) -> tuple[dict[str, Budget], str]:
        """Of every subject of this plan, and the accountant."""
        self.check_plan(path, plan.digest())
        try:
            found = {name: Budget(unit.epsilon, unit.delta) for unit in self.units for name in unit.subjects}
            return {unit.subject: found[unit.subject] for unit in plan.units}, accountant_named(
                self.accountant
            ).name
        except (KeyError, PrivacyInputError):
            raise LedgerError(f"{path}: line 1 is not the header of a ledger of format {_FORMAT}") from None

    def check_plan(self, path: Path, digest: str) -> None:
        if self.plan != digest:
            raise LedgerError(f"{path}: line 1: the ledger belongs to another plan ({self.plan})")

    def check(self, path: Path, expected: Self) -> None:
        """Refuse the header of a ledger that was opened for something else."""
        if self.accountant != expected.accountant:
            raise LedgerError(
                f"{path}: line 1: the ledger was opened with accountant {self.accountant!r}, "
                f"not {expected.accountant!r}"
            )
        self.check_plan(path, expected.plan)
        if self != expected:
            raise LedgerError(f"{path}: line 1: the ledger was opened with other budgets")


def _replay(path: Path, content: bytes, plan: PrivacyPlan, header: _Header) -> _History:
    """The history that the complete lines of a file tell."""
    *lines, torn = content.split(b"\n")
    if not lines:
        raise LedgerError(f"{path}: line 1 is missing: the file is no ledger")
    history = _History(plan)
    found, digest = follow(path, 1, lines[0], START)
    _Header.found(path, found).check(path, header)
    history.record([], lines[0] + b"\n", digest)
    for number, line in enumerate(lines[1:], start=2):
        body, digest = follow(path, number, line, history.head.hash)
        charges = _charges(path, number, body)
        try:
            fresh = history.new(charges)
        except (PlanError, BudgetError) as mistake:
            raise LedgerError(f"{path}: line {number} breaks the plan: {mistake}") from None
        if len(fresh) != len(charges):
            raise LedgerError(f"{path}: line {number} charges a release twice")
        history.record(fresh, line + b"\n", digest)
    if torn:
        check_tail(path, len(lines) + 1, torn, history.head.hash)
    return history


def _charges(path: Path, number: int, body: Mapping[str, object]) -> list[Charge]:
    entries = body.get("charges")
    try:
        if body.keys() != {"charges"} or not isinstance(entries, list) or not entries:
            raise MalformedError
        return [Charge.read(entry) for entry in entries]
    except (MalformedError, PrivacyInputError):
        raise LedgerError(f"{path}: line {number} is not a list of charges") from None
