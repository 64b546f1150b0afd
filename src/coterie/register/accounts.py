"""What was charged to which records, composed: the arithmetic of the register, without its file.

Divergences of releases add up, experiment by experiment, at orders that are fixed for ever
(`privacy.filters`). They are compared in one unit and between one kind of neighbours. A plan for the same
unit is bounded between any neighbours by its own events. A plan for a larger unit (a client, of a record's
account) covers the smaller one as replaced: whatever happens to a record, it is another client afterwards. A
plan for a smaller unit says nothing of a larger one: there, nothing bounds what it spends.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from dp_accounting import DpEvent

from coterie.privacy import Adjacency, Unit
from coterie.privacy.divergences import INTEGER_ORDERS, Floats
from coterie.privacy.filters import composed_epsilon, main_order
from coterie.privacy.rdp import divergences_of
from coterie.register.lines import ChargedGroup, Entered, Lifetime, Reserved
from coterie.register.records import Fingerprints, Histories, RecordFiles, RecordGroups

_SIZES = {Unit.RECORD: 0, Unit.PERSON: 1, Unit.WORKER: 2, Unit.CLIENT: 2}
"""A record is one of a person's, whose records are some of a client's; a worker is as much as a client."""


def size_of(unit: Unit) -> int:
    """How much a unit is of what one holds: a larger one covers a smaller."""
    return _SIZES[unit]


@dataclass(frozen=True)
class Basis:
    """In which unit, and between which neighbours, charges are compared."""

    unit: Unit
    adjacency: Adjacency

    @classmethod
    def of(cls, plans: Iterable[tuple[Unit, Adjacency]]) -> "Basis":
        """The smallest unit; its neighbours, if all plans have the same, and else replaced ones."""
        known = set(plans)
        unit = min((each for each, _ in known), key=lambda each: (size_of(each), each.value))
        same = len({(size_of(each), between) for each, between in known}) == 1
        return cls(unit, next(iter(known))[1] if same else Adjacency.REPLACE_ONE)

    def divergences(self, event: DpEvent, unit: Unit) -> Floats:
        """What an event of a plan for some unit spends here."""
        if size_of(unit) < size_of(self.unit):
            return np.full_like(INTEGER_ORDERS, np.inf)
        between = self.adjacency if size_of(unit) == size_of(self.unit) else Adjacency.REPLACE_ONE
        return divergences_of(event, between)

    def largest(self, events: Sequence[DpEvent], unit: Unit) -> Floats:
        """The largest of several at each order: nobody says which of them a record pays."""
        found: Floats = np.max([self.divergences(event, unit) for event in events], axis=0)
        return found


@dataclass(frozen=True)
class ChargedSet:
    """A part of a file of fingerprints; all that was ever charged to it counts."""

    records: str
    start: int
    end: int


@dataclass(frozen=True)
class MemberOf:
    """A record that was said to be new in a data set."""

    data: str


@dataclass(frozen=True)
class AnyOf:
    """A record that was new in a known data set: it counts as if it had paid most in each experiment there.

    Args:
        first: so many experiments there had been before it came.
    """

    data: str
    first: int


@dataclass(frozen=True)
class Own:
    """A group of what is about to be charged."""

    place: int


@dataclass(frozen=True)
class Spending:
    """What one group of records has paid: for each experiment, the events of which the largest counts."""

    charges: tuple[tuple[Reserved, tuple[DpEvent, ...]], ...]
    data: frozenset[str]

    def divergences(self, basis: Basis) -> Floats:
        """Everything together."""
        total = np.zeros_like(INTEGER_ORDERS)
        for plan, events in self.charges:
            total = total + basis.largest(events, plan.unit)
        return total


@dataclass(frozen=True)
class Spent:
    """What the records of one data set have paid at most.

    Args:
        epsilon: of all experiments, composed as if they had been planned together.
        adaptive: by the filter of the lifetime budget, for experiments that were chosen one after the other;
            None without a budget.
        experiments: those that any of the records took part in, in their order.
    """

    epsilon: float
    delta: float
    basis: Basis
    experiments: tuple[Reserved, ...]
    lifetime: Lifetime | None = None
    adaptive: float | None = None

    @property
    def weak(self) -> tuple[str, ...]:
        """What voids or weakens one of the promises."""
        return tuple(dict.fromkeys(label for each in self.experiments for label in each.weak))


class Accounts:
    """All charges that count, and who has paid which of them."""

    def __init__(
        self,
        charges: Sequence[tuple[Reserved, str, Sequence[ChargedGroup]]],
        entered: Sequence[tuple[int, Entered]],
        limits: Mapping[str, Lifetime],
        files: RecordFiles,
    ) -> None:
        """Args:
        charges: for each experiment, the file of its fingerprints and what each group of them pays.
        entered: records that were said to be new, and how many experiments there had been before.
        limits: lifetime budgets by data set.
        """
        self._charges, self._entered, self._limits, self._files = charges, entered, limits, files
        self._by_set: dict[ChargedSet, list[tuple[Reserved, tuple[DpEvent, ...]]]] = {}
        for plan, records, groups in charges:
            start = 0
            for group in groups:
                end = start + group.count
                self._by_set.setdefault(ChargedSet(records, start, end), []).append((plan, group.events))
                start = end

    def known(self, data: str) -> bool:
        """Whether anything was ever charged to a data set."""
        return any(plan.data == data for plan, _, _ in self._charges)

    def members(self, data: str) -> Fingerprints:
        """All records that a data set ever had, in ascending order."""
        files = [records for plan, records, _ in self._charges if plan.data == data]
        files += [each.records for _, each in self._entered if each.data == data]
        return np.unique(
            np.concatenate(
                [np.empty(0, np.uint64), *(self._files.read(each) for each in dict.fromkeys(files))]
            )
        )

    def histories(self, prints: Fingerprints, data: str | None) -> Histories:
        """Records in groups of the same history.

        Args:
            data: the data set that they are in; those that are new there count as known.
        """
        found = Histories(prints)
        for part in self._by_set:
            found.add(found.places(self._files.read(part.records)[part.start : part.end]), part)
        for _, entered in self._entered:
            found.add(found.places(self._files.read(entered.records)), MemberOf(entered.data))
        for each in dict.fromkeys([*(plan.data for plan, _, _ in self._charges), *([data] if data else [])]):
            self._add_newcomers(found, each, all_of_them=each == data)
        return found

    def _add_newcomers(self, found: Histories, data: str, *, all_of_them: bool) -> None:
        """Let records pay for what came before them in a data set, unless they were said to be new.

        Args:
            all_of_them: whether records that were never in the data set are about to be.
        """
        known, before = np.zeros(len(found.prints), dtype=np.bool_), 0
        entered = [(at, each.records) for at, each in self._entered if each.data == data]
        for place, (plan, records, _) in enumerate(self._charges):
            if plan.data != data:
                continue
            for _, said in (each for each in entered if each[0] <= place):
                known[found.places(self._files.read(said))] = True
            entered = [each for each in entered if each[0] > place]
            where = found.places(self._files.read(records))
            if before:
                found.add(where[~known[where]], AnyOf(data, before))
            known[where] = True
            before += 1
        for _, said in entered:
            known[found.places(self._files.read(said))] = True
        if all_of_them and before:
            found.add(np.flatnonzero(~known), AnyOf(data, before))

    def spending(
        self, history: Iterable[object], own: tuple[Reserved, Sequence[ChargedGroup]] | None = None
    ) -> Spending:
        """What records with this history have paid, and will pay by a reservation of their own."""
        charges: list[tuple[Reserved, tuple[DpEvent, ...]]] = []
        data: set[str] = set()
        for part in history:
            match part:
                case ChargedSet():
                    charges += self._by_set[part]
                case AnyOf(data=name, first=first):
                    there = [(plan, groups) for plan, _, groups in self._charges if plan.data == name]
                    charges += [
                        (plan, tuple(event for group in groups for event in group.events))
                        for plan, groups in there[:first]
                    ]
                case MemberOf(data=name):
                    data.add(name)
                case Own(place=place) if own is not None:
                    charges.append((own[0], own[1][place].events))
        return Spending(tuple(charges), frozenset(data | {plan.data for plan, _ in charges}))

    def after(self, groups: RecordGroups, wanted: Reserved) -> list[Spending]:
        """What each group of records will have paid with one more reservation."""
        found = self.histories(groups.together, wanted.data)
        for place, own in enumerate(groups.fingerprints):
            found.add(found.places(own), Own(place))
        return [self.spending(history, (wanted, groups.groups)) for history in found.groups()]

    def ordered(self, limit: Lifetime, spendings: Sequence[Spending], wanted: Reserved) -> Lifetime:
        """The budget with the main order of its filter fixed, before anything is released under it.

        The first plan decides, where none of its records has paid anything before; else Gaussian noise does.
        """
        if limit.order is not None:
            return limit
        basis, order = Basis(limit.unit, limit.adjacency), main_order(limit.budget)
        if all(plan.id == wanted.id for spending in spendings for plan, _ in spending.charges):
            curves = [spending.divergences(basis) for spending in spendings]
            if curves:
                first = max(curves, key=lambda curve: composed_epsilon(curve, limit.delta))
                order = main_order(limit.budget, first)
        return replace(limit, order=order)

    def exceeded(
        self, spendings: Sequence[Spending], limits: Mapping[str, Lifetime]
    ) -> tuple[Lifetime, float, float] | None:
        """The first lifetime budget that some records would pass, their composed and filtered epsilon."""
        for data in sorted({data for spending in spendings for data in spending.data} & set(limits)):
            limit = limits[data]
            basis, passing = Basis(limit.unit, limit.adjacency), limit.filter
            curves = [each.divergences(basis) for each in spendings if data in each.data]
            if not all(map(passing.admits, curves)):
                worst = max(composed_epsilon(curve, limit.delta) for curve in curves)
                return limit, worst, max(map(passing.epsilon, curves))
        return None

    def spent(self, prints: Fingerprints, data: str | None) -> Spent | None:
        """What these records have paid at most; None where they have paid nothing."""
        spendings = [self.spending(history) for history in self.histories(prints, data).groups()]
        involved = {plan.id for spending in spendings for plan, _ in spending.charges}
        plans = tuple(plan for plan, _, _ in self._charges if plan.id in involved)
        limit = self._limits.get(data) if data is not None else None
        if not plans:
            return None
        if limit is not None:
            basis, delta = Basis(limit.unit, limit.adjacency), limit.delta
        else:
            basis = Basis.of((plan.unit, plan.adjacency) for plan in plans)
            delta = max(plan.delta for plan in plans)
        curves = [spending.divergences(basis) for spending in spendings]
        adaptive = None if limit is None else max(map(limit.filter.epsilon, curves))
        return Spent(
            max(composed_epsilon(curve, delta) for curve in curves), delta, basis, plans, limit, adaptive
        )

    def alone(self, plan: Reserved, basis: Basis, delta: float) -> float:
        """Epsilon of one experiment, of the record that pays most in it."""
        [groups] = [groups for each, _, groups in self._charges if each.id == plan.id]
        curves = [basis.largest(group.events, plan.unit) for group in groups]
        return max((composed_epsilon(curve, delta) for curve in curves), default=0.0)
