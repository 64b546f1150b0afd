"""What a site enters in the register of what its records have paid: each contract, before it is signed.

A contract that a lifetime budget does not allow is refused as any that spends too much: the server hears
"over budget", and neither how much was spent, nor where, nor on how many of the records.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import dp_accounting as dp
from dp_accounting import DpEvent

from coterie.data import Federation
from coterie.data.identity import of_records
from coterie.engines.flower.contract import Contract
from coterie.engines.flower.messages import site_log
from coterie.errors import BudgetError, LedgerError
from coterie.files import read_json, sync, write_json
from coterie.privacy import Adjacency, Budget, ChainHead, Ledger, Unit, UnitPlan
from coterie.privacy.wording import SIMULATION
from coterie.register import DataSet, Register, Reservation, Use
from coterie.register.accounts import Basis

log = site_log(__name__)
FILE = "register.json"
"""In a site's folder: under which name its contract is entered."""


@dataclass(frozen=True)
class SiteBooking:
    """The records of a site, as the register knows them."""

    data: DataSet
    alone: Federation

    def prepare(self, lifetime: Budget | None, basis: Basis, *, new_records: bool) -> None:
        """Keep what the operator allows, and says of the records, before anything is offered."""
        if lifetime is None and not new_records:
            return
        with Register.open() as register:
            if new_records:
                register.enter(self.data, self._uses(lambda unit: dp.NoOpDpEvent(), None))
            if lifetime is not None:
                register.limit(self.data, lifetime, basis)

    def reserve(self, contract: Contract, folder: Path, *, seeded: bool) -> None:
        """Enter the whole plan of a contract, or find it entered.

        Raises:
            BudgetError: a lifetime budget does not allow it.
        """
        path = folder / FILE
        kept = read_json(path) if path.exists() else {}
        known = kept.get("contract") == contract.digest
        wanted = self._reservation(
            str(kept["reservation"]) if known else Reservation.new_id(), contract, seeded=seeded
        )
        with Register.open() as register:
            if known and "head" in kept:
                LedgerError.when(
                    kept.get("register") != register.id,
                    f"{path}: the contract was entered in register {str(kept.get('register'))[:12]}, the one "
                    f"at {register.folder} is another; put that back, or name it in $COTERIE_REGISTER",
                )
                register.check_seen(ChainHead.from_json(kept["head"]), str(path))
            entered = {"register": register.id, "reservation": wanted.id, "contract": contract.digest}
            if not known:
                self._keep(path, entered)
            try:
                head = register.reserve(wanted)
            except BudgetError as refusal:
                log.warning("%s", refusal)
                raise
        self._keep(path, {**entered, "head": head.to_json()})

    def settle(self, contract: Contract, folder: Path, ledger: Ledger) -> None:
        """Return what a contract allowed and was not executed; a trusted server may have used all of it."""

        def executed(unit: UnitPlan) -> DpEvent:
            trusted = contract.trusted is not None
            return unit.event if trusted else unit.executed(ledger.executed(unit.subject))

        kept = read_json(folder / FILE)
        wanted = self._reservation(str(kept["reservation"]), contract, seeded=False)
        with Register.open() as register:
            register.settle(replace(wanted, uses=self._uses(executed, contract)))

    def _reservation(self, name: str, contract: Contract, *, seeded: bool) -> Reservation:
        return Reservation(
            id=name,
            kind="contract",
            name=contract.experiment,
            data=self.data,
            unit=contract.plan.unit,
            adjacency=contract.plan.adjacency,
            delta=contract.delta,
            uses=self._uses(lambda unit: unit.event, contract),
            weak=(SIMULATION,) if seeded else (),
            seeded=seeded,
            members=of_records(self.alone.clients[0].test),
        )

    def _uses(self, cost: Callable[[UnitPlan], DpEvent], contract: Contract | None) -> tuple[Use, ...]:
        [client] = self.alone.clients
        train, test = of_records(client.train), of_records(client.test)
        if contract is None:
            nothing = dp.NoOpDpEvent()
            return Use(client.name, train, nothing), Use(client.name, test, nothing)
        found = [Use(client.name, train, cost(contract.own))]
        if contract.scored is not None:
            found.append(Use(client.name, test, cost(contract.scored)))
        elif contract.plan.unit in (Unit.CLIENT, Unit.WORKER):
            found.append(Use(client.name, test, cost(contract.own)))
        return tuple(found)

    def _keep(self, path: Path, content: Mapping[str, object]) -> None:
        write_json(path, dict(content))
        sync(path.parent)


def basis_of(unit: Unit, adjacency: Adjacency | None = None) -> Basis:
    """What a lifetime budget that is set when joining is for; by default the unit's usual neighbours."""
    usual = Adjacency.ADD_REMOVE if unit is Unit.CLIENT else Adjacency.ZERO_OUT
    return Basis(unit, adjacency or usual)
