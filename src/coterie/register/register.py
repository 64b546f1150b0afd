"""The register: a chain of what was reserved, settled and allowed, which one process at a time may extend.

A line is on the disk before anything is released under it. A reservation counts whole until its end is
written; a run that is killed and goes on names its reservation again, and one that is abandoned keeps it. The
folder of the records and the run folder keep the head of the chain at which they were entered: a register
that was cut or put back from a copy since then is found by them.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from coterie.errors import BudgetError, InputError, LedgerError
from coterie.privacy import Adjacency, Budget, ChainHead, Unit
from coterie.privacy.chain import HashChain, WritableChain
from coterie.privacy.filters import main_order
from coterie.privacy.locked_file import create, explained
from coterie.privacy.plain import Json
from coterie.privacy.units import round_up, short_number
from coterie.register.accounts import Accounts, Basis, Spent
from coterie.register.data_sets import DataSet, Mark
from coterie.register.lines import (
    FORMAT,
    KINDS,
    NAMES,
    ChargedGroup,
    DataSource,
    Entered,
    Header,
    Lifetime,
    RegisterLine,
    Reopened,
    Reserved,
    Settled,
    now,
)
from coterie.register.place import CHAIN, OWNER_ALONE, fingerprint, make_key, open_waiting, place, read_key
from coterie.register.records import (
    Fingerprints,
    RecordFiles,
    RecordGroups,
    Use,
    fingerprints_of,
    grouped,
)


@dataclass(frozen=True)
class Reservation:
    """What somebody is about to do with records.

    Args:
        id: drawn once for a run, and kept with it.
        kind, name: what it is, and how people call it.
        uses: everything that it may ever compute from the records.
        shared: whether a record that several clients hold is the same one, and pays for all of them.
        delta: at which it states its own epsilon.
        weak: what voids or weakens its promise.
        seeded: whether its noise can be repeated by others.
        members: digests of all records of the data, also of those that are not used: where the data are
            entered for the first time, none of them is new later.
    """

    id: str
    kind: Literal["run", "contract", "choice"]
    name: str
    data: DataSet
    unit: Unit
    adjacency: Adjacency
    delta: float
    uses: tuple[Use, ...]
    shared: bool = False
    weak: tuple[str, ...] = ()
    seeded: bool = False
    members: NDArray[Any] | None = None

    @staticmethod
    def new_id() -> str:
        """A name that no other reservation has."""
        return secrets.token_hex(16)


class RegisterView(HashChain):
    """What a register says, read without a lock and without a write."""

    def __init__(self, folder: Path, content: bytes, lines: int | None = None) -> None:
        """Check the whole chain and what it says.

        Args:
            lines: read as if it had only so many.
        """
        super().__init__(folder / CHAIN, "register")
        self.folder = folder
        self.sources: dict[str, str] = {}
        self.reserved: dict[str, Reserved] = {}
        self.settled: dict[str, Settled] = {}
        self.limits: dict[str, Lifetime] = {}
        self._entered: list[tuple[int, Entered]] = []
        self._elsewhere: dict[str, set[str]] = {}
        self._files = RecordFiles(folder)
        self.header: Header | None = None
        for number, body in enumerate(self.follow(content), start=1):
            if lines is None or number <= lines:
                self._take(self._line(number, body))
        if self.header is None or self.header.format != FORMAT:
            raise LedgerError(f"{self.path}: line 1 is not the header of a register of format {FORMAT}")
        self.key: bytes = read_key(folder)
        LedgerError.when(
            fingerprint(self.key) != self.header.key,
            f"{folder / 'key'}: not the key that this register was begun with; put it back",
        )

    @classmethod
    def read(cls, folder: Path | None = None, lines: int | None = None) -> "RegisterView | None":
        """The register as it is now, or was; None where there is none yet."""
        folder = folder or place()
        path = folder / CHAIN
        if not path.exists():
            return None
        with explained(path):
            return RegisterView(folder, path.read_bytes(), lines)

    @property
    def id(self) -> str:
        assert self.header is not None
        return self.header.id

    def _line(self, number: int, body: Json) -> RegisterLine:
        [(name, content)] = body.items() if len(body) == 1 else [("", None)]
        if name not in KINDS or (name == "register") != (number == 1):
            raise LedgerError(f"{self.path}: line {number} is not a line of a register")
        try:
            return KINDS[name].from_json(content)
        except LedgerError as mistake:
            raise LedgerError(f"{self.path}: line {number}: {mistake}") from None

    def _take(self, line: RegisterLine) -> None:
        match line:
            case Header():
                self.header = line
            case DataSource():
                self.sources[line.key] = line.data
                self._elsewhere.setdefault(line.data, set()).update(line.elsewhere)
            case Reserved():
                self.reserved[line.id] = line
            case Settled():
                self.settled[line.id] = line
            case Reopened():
                self.settled.pop(line.id, None)
            case Entered():
                self._entered.append((len(self.reserved), line))
            case Lifetime():
                self.limits[line.data] = line
        self.__dict__.pop("accounts", None)

    # --- what it knows ------------------------------------------------------------------------------

    @cached_property
    def accounts(self) -> Accounts:
        """All that counts: what was executed of experiments that ended, and the whole plan of all others."""
        counted: list[tuple[Reserved, str, Sequence[ChargedGroup]]] = []
        for plan in self.reserved.values():
            ended = self.settled.get(plan.id)
            charged = plan if ended is None else ended
            counted.append((plan, charged.records, charged.groups))
        return Accounts(counted, self._entered, self.limits, self._files)

    def data_of(self, data: DataSet) -> str | None:
        """As what a data set was entered; None where it never was.

        Raises:
            LedgerError: its folder has seen lines of this register that are gone.
        """
        mark = data.marks().get(self.id)
        if mark is not None:
            self.check_seen(mark.head, str(data))
            return mark.data
        return self.sources.get(data.key)

    def elsewhere(self, data: DataSet) -> set[str]:
        """Other registers in which a data set was entered: what was charged there nobody knows here."""
        known = self.data_of(data)
        return (set(data.marks()) - {self.id}) | (self.others_of(known) if known else set())

    def others_of(self, data: str) -> set[str]:
        """The same, as far as it was known when something was last entered."""
        return self._elsewhere.get(data, set())

    def spent(self, data: DataSet, identity: Sequence[Use] = ()) -> Spent | None:
        """What the records of a data set, and those that are in it now, have paid at most."""
        known = self.data_of(data)
        prints = [self._prints(use.identity) for use in identity]
        if known is not None:
            prints.append(self.accounts.members(known))
        return self.accounts.spent(_together(prints), known)

    def _prints(self, identity: NDArray[Any]) -> Fingerprints:
        return np.unique(fingerprints_of(identity, self.key))

    def spent_by(self, reservation: str) -> Spent | None:
        """What the records of one experiment have paid at most, in it and in all others."""
        plan = self.reserved.get(reservation)
        if plan is None:
            return None
        return self.accounts.spent(_together([self._files.read(plan.records)]), plan.data)

    def check(self, wanted: Reservation) -> tuple[RecordGroups, Lifetime | None]:
        """The records that a reservation charges, if every lifetime budget allows it, and theirs."""
        groups = grouped(wanted.uses, self.key, shared=wanted.shared)
        known = self.data_of(wanted.data)
        limit = self.limits.get(known or "")
        if limit is not None:
            lost = self.elsewhere(wanted.data) - set(limit.despite)
            self._refuse_unknown(wanted, lost)
            BudgetError.when(
                wanted.seeded,
                f"lifetime budget of {wanted.data}: noise from a seed can be repeated by whoever knows it; "
                "allowed: noise from the operating system (no seeds.noise, no --noise-seed)",
            )
        line = _as_line(wanted, known or "", groups)
        spendings, limits = self.accounts.after(groups, line), dict(self.limits)
        if limit is not None:
            limit = limits[limit.data] = self.accounts.ordered(limit, spendings, line)
        exceeded = self.accounts.exceeded(spendings, limits)
        if exceeded is not None:
            raise BudgetError(self._over(wanted, *exceeded))
        return groups, limit

    def _refuse_unknown(self, wanted: Reservation, lost: set[str]) -> None:
        BudgetError.when(
            bool(lost),
            f"lifetime budget of {wanted.data}: these records were entered in another register, too "
            f"({', '.join(sorted(each[:12] for each in lost))}), and what they paid there is not known here; "
            "use that register ($COTERIE_REGISTER), or accept it: coterie budget set --unknown-history",
        )

    def _over(self, wanted: Reservation, limit: Lifetime, composed: float, adaptive: float) -> str:
        other = "" if limit.data == self.data_of(wanted.data) else " of another data set with some of them"
        allowed = f"epsilon {limit.epsilon:g} at delta {short_number(limit.delta)} for their lifetime{other}"
        filtered = f" ({round_up(adaptive)} by the filter)" if composed <= limit.epsilon else ""
        if np.isinf(composed):
            spent = f"would have no bound for one {limit.unit}, {limit.adjacency}"
        else:
            spent = (
                f"would have spent epsilon {round_up(composed)}{filtered}, composed with this {wanted.kind}"
            )
        return f"lifetime budget of {wanted.data}: its records {spent}; allowed: {allowed} ({self.folder})"


class Register(WritableChain, RegisterView):
    """The register, open and locked for a moment.

    Example:
        with Register.open() as register:
            register.reserve(wanted)
    """

    @classmethod
    def open(cls, folder: Path | None = None) -> Self:
        """Begin the register, or read it back and check every line."""
        folder = folder or place()
        path = folder / CHAIN
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as problem:
            raise InputError(
                f"{folder}: the register of what records have paid cannot be there ({problem.strerror}); "
                "$COTERIE_REGISTER names another folder"
            ) from None
        with explained(path):
            if not path.exists():
                make_key(folder)
                header = Header(FORMAT, secrets.token_hex(16), fingerprint(read_key(folder)))
                first = HashChain(path, "register").link({"register": header.to_json()})[0]
                file = create(path, first, mode=OWNER_ALONE) or open_waiting(path)
            else:
                file = open_waiting(path)
            return cls._held(file, lambda content: cls(folder, content), mode=OWNER_ALONE)

    def reserve(self, wanted: Reservation) -> ChainHead:
        """Charge a whole plan before its first release, or find that it is charged already.

        Raises:
            BudgetError: a lifetime budget does not allow it; nothing was written.
        """
        before = self.reserved.get(wanted.id)
        if before is None:
            groups, limit = self.check(wanted)
            data = self._enter_source(wanted.data)
            if wanted.members is not None and not self.accounts.known(data):
                self._enter_members(data, np.setdiff1d(self._prints(wanted.members), groups.together))
            self._files.write(groups)
            if limit is not None and limit != self.limits[data]:
                self._append(replace(limit, time=now()))  # from now on its filter is fixed
            self._append(_as_line(wanted, data, groups))
        else:
            groups = grouped(wanted.uses, self.key, shared=wanted.shared)
            LedgerError.when(
                (before.records, before.groups) != (groups.digest, groups.groups),
                f"{self.path}: reservation {wanted.id} is of other records or of another plan",
            )
            self._enter_source(wanted.data)  # a folder may have moved since
            if wanted.id in self.settled:
                self._append(Reopened(wanted.id, now()))
        self._mark(wanted.data)
        return self.head

    def settle(self, wanted: Reservation) -> ChainHead:
        """Write what was executed in the end: `uses` say it. The rest of the plan is returned."""
        LedgerError.when(wanted.id not in self.reserved, f"{self.path}: no reservation {wanted.id}")
        groups = grouped(wanted.uses, self.key, shared=wanted.shared)
        ended = self.settled.get(wanted.id)
        if ended is None or (ended.records, ended.groups) != (groups.digest, groups.groups):
            self._files.write(groups)
            self._append(Settled(wanted.id, groups.digest, groups.groups, now()))
        return self.head

    def enter(self, data: DataSet, uses: Sequence[Use]) -> int:
        """Say that records which are new in a data set are new indeed; returns how many are."""
        known = self._enter_source(data)
        new = self._enter_members(known, _together([self._prints(use.identity) for use in uses]))
        self._mark(data)
        return new

    def _enter_members(self, data: str, prints: Fingerprints) -> int:
        new = np.setdiff1d(prints, self.accounts.members(data))
        if len(new):
            groups = RecordGroups((new,), ())
            self._files.write(groups)
            self._append(Entered(data, groups.digest, len(new), now()))
        return len(new)

    def limit(
        self,
        data: DataSet,
        budget: Budget,
        basis: Basis,
        *,
        reason: str | None = None,
        unknown_history: bool = False,
    ) -> Lifetime:
        """Set the lifetime budget of a data set; without a reason it may shrink, and not grow.

        Args:
            basis: of a first one; later ones keep it.
            unknown_history: accept that what was charged in other registers is not counted.
        """
        known = self._enter_source(data)
        before = self.limits.get(known)
        others = tuple(sorted(self.elsewhere(data)))
        despite = others if unknown_history else (before.despite if before else ())
        if before is not None:
            basis = Basis(before.unit, before.adjacency)
            grows = budget.epsilon > before.epsilon or budget.delta > before.delta
            BudgetError.when(
                grows and reason is None,
                f"lifetime budget of {data}: epsilon {budget.epsilon:g}, delta {short_number(budget.delta)} "
                f"is more than was set on {before.time[:10]}; allowed: at most epsilon {before.epsilon:g} at "
                f"delta {short_number(before.delta)}; coterie budget set --reason raises it, and keeps why",
            )
            if (before.budget, before.despite) == (budget, despite):
                return before
        order = before.order if before is not None else None
        if order is None and self.accounts.known(known):
            order = main_order(budget)
        unit, adjacency = basis.unit, basis.adjacency
        line = Lifetime(known, budget.epsilon, budget.delta, unit, adjacency, reason, despite, order, now())
        self._append(line)
        self._mark(data)
        return line

    def _enter_source(self, data: DataSet) -> str:
        """What a data set is called here, from now on under this name, too."""
        known, others = self.data_of(data), set(data.marks()) - {self.id}
        name = known or secrets.token_hex(8)
        if self.sources.get(data.key) != name or others - self._elsewhere.get(name, set()):
            self._append(DataSource(name, data.key, tuple(sorted(others))))
        return name

    def _append(self, line: RegisterLine) -> None:
        self.write({NAMES[type(line)]: line.to_json()})
        self._take(line)

    def _mark(self, data: DataSet) -> None:
        data.mark(self.id, Mark(self.sources[data.key], self.head))


def _as_line(wanted: Reservation, data: str, groups: RecordGroups) -> Reserved:
    return Reserved(
        wanted.id,
        wanted.kind,
        wanted.name,
        data,
        wanted.unit,
        wanted.adjacency,
        wanted.delta,
        wanted.weak,
        groups.digest,
        groups.groups,
        now(),
    )


def _together(prints: Sequence[Fingerprints]) -> Fingerprints:
    return np.unique(np.concatenate([np.empty(0, np.uint64), *prints]))
