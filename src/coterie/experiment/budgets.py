"""What the records of a data set have paid over their lifetime, for whoever holds them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dp_accounting as dp

from coterie.data.client_files import DECLARATION
from coterie.data.folder import read_folder
from coterie.data.identity import of_records
from coterie.errors import InputError
from coterie.privacy import Adjacency, Budget, ChainHead, Unit
from coterie.privacy.ranges import DELTA, EVALUATION_EPSILON
from coterie.privacy.units import number_to_json
from coterie.register import DataSet, Lifetime, Register, RegisterView, Use, place
from coterie.register.accounts import Basis, Spent
from coterie.register.lines import Reserved


def lifetime_of(epsilon: float | None, delta: float | None) -> Budget | None:
    """The lifetime budget that two options set together, or none."""
    if (epsilon is None) != (delta is None):
        raise InputError("--lifetime-epsilon and --lifetime-delta: needed together, or neither")
    if epsilon is None or delta is None:
        return None
    InputError.unless_within(EVALUATION_EPSILON, "--lifetime-epsilon", epsilon)
    InputError.when(
        delta not in DELTA or delta == 1, f"--lifetime-delta: {delta} is not allowed, {DELTA} (but not 1) is"
    )
    return Budget(epsilon, delta)


@dataclass(frozen=True)
class ExperimentCost:
    """One experiment on the records.

    Args:
        epsilon: of it alone, for the record that paid most in it.
        here: whether it was on this data set, and not on another that has some of its records.
    """

    plan: Reserved
    epsilon: float
    finished: bool
    here: bool

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "kind": plan.kind,
            "name": plan.name,
            "time": plan.time,
            "state": "finished" if self.finished else "reserved",
            "unit": plan.unit.value,
            "adjacency": plan.adjacency.value,
            "epsilon": number_to_json(self.epsilon),
            "weak": list(plan.weak),
        }


@dataclass(frozen=True)
class Account:
    """Everything that was ever charged to the records of a data set here.

    Args:
        spent: None where nothing was.
        elsewhere: other registers in which they were entered.
    """

    data: DataSet
    register: Path
    head: ChainHead | None
    limit: Lifetime | None
    spent: Spent | None
    experiments: tuple[ExperimentCost, ...]
    elsewhere: int

    def to_json(self, *, outside: bool = False) -> dict[str, Any]:
        """As data.

        Args:
            outside: for others: without experiments on other data sets that share records with this one, and
                without any place on this machine.
        """
        limit, spent = self.limit, self.spent
        shown = [each.to_json() for each in self.experiments if each.here or not outside]
        if outside:
            shown = [{**each, "name": Path(each["name"]).name} for each in shown]
        figures = {
            "lifetime_epsilon": None if limit is None else limit.epsilon,
            "lifetime_delta": None if limit is None else limit.delta,
            "spent_epsilon": 0.0 if spent is None else number_to_json(spent.epsilon),
            "spent_epsilon_adaptive": None
            if spent is None or spent.adaptive is None
            else number_to_json(spent.adaptive),
            "delta": None if spent is None else spent.delta,
            "unit": None if spent is None else spent.basis.unit.value,
            "adjacency": None if spent is None else spent.basis.adjacency.value,
            "experiments": shown,
            "other_registers": self.elsewhere,
            "register_head": None if self.head is None else self.head.to_json(),
        }
        if outside:
            return {"data": self.data.folder.name if self.data.folder else str(self.data), **figures}
        return {"data": str(self.data), "register": str(self.register), **figures}


def account_of(source: str) -> Account:
    """The account of a folder of records, or of a function that makes them (package.module:function)."""
    register, folder = RegisterView.read(), place()
    data = _named(source, register)
    # A newcomer's folder is not declared: what it has was entered when it chose.
    declared = data.folder is not None and (data.folder / DECLARATION).exists()
    current = _records(data.folder) if data.folder is not None and declared else ()
    if register is None:
        return Account(data, folder, None, None, None, (), len(data.marks()))
    known = register.data_of(data)
    if known is None and not current:
        raise InputError(f"--data: {source}; allowed: a folder of records, or data that a run was made on")
    spent, accounts = register.spent(data, current), register.accounts
    experiments = () if spent is None else spent.experiments
    costs = tuple(
        ExperimentCost(
            plan,
            accounts.alone(plan, spent.basis, spent.delta) if spent else 0.0,
            plan.id in register.settled,
            plan.data == known,
        )
        for plan in experiments
    )
    limit = register.limits.get(known or "")
    return Account(data, folder, register.head, limit, spent, costs, len(register.elsewhere(data)))


def set_lifetime(
    source: str,
    budget: Budget,
    unit: Unit | None = None,
    adjacency: Adjacency | None = None,
    *,
    reason: str | None = None,
    unknown_history: bool = False,
) -> Lifetime:
    """Set, lower or raise the lifetime budget of a data set; why it is raised is kept for ever."""
    with Register.open() as register:
        data = _named(source, register)
        before = register.limits.get(register.data_of(data) or "")
        basis = Basis(unit or Unit.RECORD, adjacency or Adjacency.ZERO_OUT)
        if before is not None and (unit or adjacency):
            asked = (unit or before.unit, adjacency or before.adjacency)
            InputError.when(
                asked != (before.unit, before.adjacency),
                f"--unit, --adjacency: the budget of {data} is for one {before.unit}, {before.adjacency}, "
                "and stays that; allowed: the same",
            )
        return register.limit(data, budget, basis, reason=reason, unknown_history=unknown_history)


def _named(source: str, register: RegisterView | None) -> DataSet:
    path = Path(source)
    if path.is_dir() or ":" not in source:
        data = DataSet.of_folder(path)
        known = register is not None and register.data_of(data) is not None
        InputError.when(
            not path.is_dir() and not known, f"--data: {source}; allowed: a folder of records that is there"
        )
        return data
    keys = [key for key in (register.sources if register else {}) if key.startswith(f"function {source} ")]
    if len(keys) != 1:
        several = (
            f"{len(keys)} data sets of this name (by their options)" if keys else "nothing entered of it"
        )
        raise InputError(
            f"--data: {source}: {several}; allowed: a folder, or a function with one set of options"
        )
    return DataSet(keys[0])


def _records(folder: Path) -> tuple[Use, ...]:
    return (Use(folder.name, of_records(read_folder(folder).train), dp.NoOpDpEvent()),)
