"""What was released so far, in an append-only file that no restart can reset.

Its lines are a chain (`chain`), whose head a checkpoint, a contract or a page keeps apart. The content
depends on nothing but the plan and the charges, so an interrupted and resumed run leaves the same bytes as
an uninterrupted one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from coterie.privacy.accounting import accountant_named, epsilon_of
from coterie.privacy.chain import ChainHead, HashChain, WritableChain
from coterie.privacy.errors import BudgetError, LedgerError, PlanError, PrivacyInputError
from coterie.privacy.events import atoms
from coterie.privacy.locked_file import create, explained, open_locked
from coterie.privacy.plain import Json, MalformedError, Plain, codec
from coterie.privacy.plan import PlannedRelease, PrivacyPlan, UnitPlan, canonical_json
from coterie.privacy.units import Budget, BySubject

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
        for key in ("subject", "release", "input_hash"):
            if not isinstance(value := getattr(self, key), str) or not value:
                raise PrivacyInputError(f"charge: {key} {value!r} is not allowed, a text is")
        if type(self.round) is not int or self.round < 0:
            raise PrivacyInputError(f"charge: round {self.round!r} is not allowed, an integer from 0 is")


class LedgerView(HashChain):
    """What the file of a ledger says: the charges in their order, held against the plan.

    By itself it is read without a lock and without a write; the ledger of a run goes on from it.
    """

    def __init__(self, path: Path, content: bytes, plan: PrivacyPlan, header: Json | None = None) -> None:
        """Check the whole chain, that it was written for this plan, and what it says.

        Args:
            path: The file.
            content: What is in it.
            plan: The plan that it must belong to.
            header: What its first line must say; by default anything about this plan.
        """
        super().__init__(path)
        self.plan = plan
        self.counts = {unit.subject: {r.name: 0 for r in unit.releases} for unit in plan.units}
        self._rounds = dict.fromkeys(self.counts, 0)
        self._known: set[Charge] = set()
        bodies = self.follow(content)
        first = next(bodies, None)
        if first is None:
            raise LedgerError(f"{path}: line 1 is missing: the file is no ledger")
        self.accountant, self.budgets = _terms(path, first, plan, header)
        for number, body in enumerate(bodies, start=2):
            charges = _charges(path, number, body)
            try:
                fresh = self._new(charges)
            except (PlanError, BudgetError) as mistake:
                raise LedgerError(f"{path}: line {number} breaks the plan: {mistake}") from None
            if len(fresh) != len(charges):
                raise LedgerError(f"{path}: line {number} charges a release twice")
            self._count(fresh)
        self._epsilons: dict[tuple[int, tuple[int, ...]], float] = {}
        # Subjects with equal releases and delta cost the same: a kind each, computed once for all of them.
        kinds: dict[tuple[tuple[PlannedRelease, ...], float], int] = {}
        self._kinds = {
            unit.subject: kinds.setdefault((unit.releases, self.budgets[unit.subject].delta), len(kinds))
            for unit in plan.units
        }

    @classmethod
    def read(cls, path: Path, plan: PrivacyPlan) -> "LedgerView":
        """What a file says as it is now."""
        with explained(path):
            content = path.read_bytes()
        return LedgerView(path, content, plan)

    def executed(self, subject: str) -> Mapping[str, int]:
        """How often each planned release of a subject was charged."""
        return dict(self.counts[self.plan.for_subject(subject).subject])

    def latest_round(self, subject: str) -> int:
        """The latest round in which a subject was charged; 0 before the first charge."""
        return self._rounds[self.plan.for_subject(subject).subject]

    def knows(self, charge: Charge) -> bool:
        """Whether this very release, on this very input, was charged before."""
        return charge in self._known

    def spent(self, subject: str | None = None) -> float:
        """Epsilon of what was charged so far, of one subject or of the one that spent most."""
        if subject is not None:
            return self._spent_by(self.plan.for_subject(subject))
        return max(map(self._spent_by, self.plan.units), default=0.0)

    def _spent_by(self, unit: UnitPlan) -> float:
        counts = self.counts[unit.subject]
        if not any(counts.values()):
            return 0.0
        key = (self._kinds[unit.subject], tuple(counts.values()))
        if key not in self._epsilons:
            event, delta = unit.executed(counts), self.budgets[unit.subject].delta
            self._epsilons[key] = epsilon_of(event, delta, self.accountant, self.plan.adjacency)
        return self._epsilons[key]

    def _new(self, charges: Iterable[Charge]) -> list[Charge]:
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

    def _count(self, fresh: Iterable[Charge]) -> None:
        for charge in fresh:
            self._known.add(charge)
            self.counts[charge.subject][charge.release] += 1
            self._rounds[charge.subject] = max(self._rounds[charge.subject], charge.round)


class Ledger(WritableChain, LedgerView):
    """The one door to releases: `charge` writes durably first, and only then may the noise be added.

    Example:
        with Ledger.open(path, plan, budget=Budget(8.0, 1e-3), accountant="rdp") as ledger:
            ledger.charge([Charge("client 3", round=2, release="training", input_hash=digest)])
    """

    listener: Callable[[Sequence[Charge]], None] | None = None
    """Is told what was charged, once it is written; where it raises, nothing of that is released."""

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
        header = _header(plan, _budget_of_each(plan, budget), accountant)
        # An unknown accountant and a plan without all its noise are refused now, rather than after releases.
        accountant_named(accountant)
        for release in {release for unit in plan.units for release in unit.releases}:
            atoms(release.event)
        if anchor is not None and not path.exists():
            raise LedgerError(f"{path}: the ledger is missing, {seen_by} has seen {anchor.count} lines of it")
        with explained(path):
            file = create(path, HashChain(path).link(header)[0]) or open_locked(path)
            return cls._held(file, lambda content: cls(path, content, plan, header), seen=(anchor, seen_by))

    def charge(self, charges: Sequence[Charge]) -> None:
        """Write releases that are about to happen; when this returns, they survive any crash.

        All or none are written. What was charged before, with the same input, is not charged again.
        """
        self._check_untouched()  # also where nothing is left to be written
        fresh = self._new(charges)
        if not fresh:
            return
        self.write({"charges": [charge.to_json() for charge in fresh]})
        self._count(fresh)
        if self.listener is not None:
            self.listener(fresh)

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r}, {self.head.count} lines)"


def _budget_of_each(plan: PrivacyPlan, budget: Budget | Mapping[str, Budget]) -> dict[str, Budget]:
    subjects = [unit.subject for unit in plan.units]
    if isinstance(budget, Budget):
        return dict.fromkeys(subjects, budget)
    odd = sorted(set(subjects) ^ set(budget))
    if odd:
        raise PlanError(f"budget: every subject of the plan needs one, and nobody else: {odd[0]!r}")
    return {subject: budget[subject] for subject in subjects}


def _header(plan: PrivacyPlan, budgets: Mapping[str, Budget], accountant: str) -> Json:
    """The first line: what the ledger is for. Subjects with the same releases and budget share one entry."""
    alike: dict[tuple[tuple[tuple[str, int], ...], Budget], list[str]] = {}
    for unit in plan.units:
        times = tuple((release.name, release.times) for release in unit.releases)
        alike.setdefault((times, budgets[unit.subject]), []).append(unit.subject)
    units = [
        {
            "subjects": subjects,
            "releases": [{"name": name, "times": most} for name, most in times],
            **codec(Budget).write(budget),
        }
        for (times, budget), subjects in alike.items()
    ]
    return {"ledger": _FORMAT, "plan": plan.digest(), "accountant": accountant, "units": units}


def _terms(
    path: Path, line: Mapping[str, Any], plan: PrivacyPlan, expected: Json | None
) -> tuple[str, dict[str, Budget]]:
    """The accountant and all budgets by a first line: the one expected, by default any about this plan."""
    problem = None
    try:
        if line.keys() != {"ledger", "plan", "accountant", "units"} or line["ledger"] != _FORMAT:
            raise MalformedError
        said = [{key: unit[key] for key in ("subjects", "epsilon", "delta")} for unit in line["units"]]
        accountant, budgets = line["accountant"], codec(BySubject).read(said)
        if expected is not None and accountant != expected["accountant"]:
            problem = f"was opened with accountant {accountant!r}, not {expected['accountant']!r}"
        elif line["plan"] != plan.digest():
            problem = f"belongs to another plan ({line['plan']})"
        else:
            known = expected or _header(plan, budgets, accountant_named(accountant).name)
            if canonical_json(line) != canonical_json(known):
                if expected is None:
                    raise MalformedError
                problem = "was opened with other budgets"
    except (MalformedError, KeyError, TypeError, PrivacyInputError):
        raise LedgerError(f"{path}: line 1 is not the header of a ledger of format {_FORMAT}") from None
    if problem is not None:
        raise LedgerError(f"{path}: line 1: the ledger {problem}")
    return accountant, budgets


def _charges(path: Path, number: int, body: Mapping[str, object]) -> list[Charge]:
    entries = body.get("charges")
    try:
        if body.keys() != {"charges"} or not isinstance(entries, list) or not entries:
            raise MalformedError
        return [Charge.read(entry) for entry in entries]
    except (MalformedError, PrivacyInputError):
        raise LedgerError(f"{path}: line {number} is not a list of charges") from None
