"""What a run on a user's own records enters in the register of what records have paid, and when.

Before the run's folder is written, every lifetime budget must allow its whole plan. The folder then keeps the
name of the reservation, which is written to the register before the first release, and again found there
when the run goes on after a crash. At the end, what the plan allowed and the ledger lacks is returned.
Simulations on published records are not entered: everybody may look at those.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import dp_accounting as dp
from dp_accounting import DpEvent

from coterie.data import ClustersFederation, DataSettings, OwnFederation, load_dataset
from coterie.data.client_files import DECLARATION
from coterie.data.folder import read_declaration
from coterie.data.identity import of_records
from coterie.errors import InputError, LedgerError
from coterie.experiment.calibrated import REFERENCES, CalibratedRun
from coterie.experiment.folder import RunFolder
from coterie.experiment.schema import EvaluationKind, Experiment
from coterie.experiment.seal import Seal
from coterie.files import Json, json_text, read_json
from coterie.privacy import Budget, ChainHead, Ledger, Mode, Unit, UnitPlan, held_out
from coterie.privacy.events import composed
from coterie.privacy.units import number_to_json, round_up, short_number
from coterie.privacy.wording import weaknesses
from coterie.register import DataSet, Register, RegisterView, Reservation, Use
from coterie.register.accounts import Basis, Spent
from coterie.register.lines import Reserved

REGISTER = "register"
"""Under this name a seal keeps the head of the register."""
_WHOLE = (Unit.CLIENT, Unit.WORKER)
"""Units that own all records of a client, trained on and held out."""


def data_set_of(experiment: Experiment) -> DataSet | None:
    """What the register calls the data of an experiment; None where they are published."""
    data = experiment.data
    if not data.own_records:
        return None
    if isinstance(data, DataSettings):
        assert data.path is not None
        return DataSet.of_folder(data.path)
    return DataSet.of_function(data.name, data.model_extra or {})


def uses_of(calibrated: CalibratedRun, cost: Callable[[UnitPlan], DpEvent]) -> tuple[Use, ...]:
    """What a run computes from the records of each client.

    Args:
        cost: of one subject's plan: of all of it, or of what was executed.
    """
    plan, federation, exact = calibrated.plan, calibrated.federation, dp.NonPrivateDpEvent()
    assert federation is not None
    by_exact_scores = calibrated.experiment.evaluation_kind is EvaluationKind.EXACT
    subjects = {unit.subject for unit in plan.units}
    found: list[Use] = []
    for client in federation.clients:
        [subject] = plan.subjects_of((client.name,))
        trained = cost(plan.for_subject(subject))
        if REFERENCES in calibrated.guarantee.caveats:
            trained = composed([trained, exact])
        found.append(Use(client.name, of_records(client.train), trained))
        tested = None
        if by_exact_scores:
            tested = exact
        elif plan.unit in _WHOLE:
            tested = trained
        elif held_out(client.name) in subjects:
            tested = cost(plan.for_subject(held_out(client.name)))
        if tested is not None and len(client.test):
            found.append(Use(client.name, of_records(client.test), tested))
    return tuple(found)


def _shared(experiment: Experiment) -> bool:
    """Whether records that several clients hold are the same ones, as far as anybody can say."""
    federation = experiment.federation
    if isinstance(federation, OwnFederation) or experiment.privacy.unit is Unit.PERSON:
        return True  # a person pays at every client that has records of it
    if isinstance(federation, ClustersFederation) and len(federation.sizes) > 1:
        return True  # every cluster deals the whole data anew
    path = getattr(experiment.data, "path", None)
    return path is not None and read_declaration(path / DECLARATION).identifier is not None


@dataclass(frozen=True)
class Booking:
    """The reservation of one run."""

    calibrated: CalibratedRun
    reservation: Reservation

    @classmethod
    def of(cls, calibrated: CalibratedRun, files: RunFolder) -> "Booking | None":
        """That of the run that a folder holds or will hold; None where its records are published."""
        experiment, promise = calibrated.experiment, calibrated.guarantee
        data = data_set_of(experiment)
        if data is None:
            return None
        weak = [*weaknesses(promise.caveats), *(["paper"] if calibrated.mode is Mode.PAPER else [])]
        known = read_json(files.register)["reservation"] if files.register.exists() else Reservation.new_id()
        wanted = Reservation(
            id=str(known),
            kind="run",
            name=str(files.path.resolve()),
            data=data,
            unit=calibrated.plan.unit,
            adjacency=calibrated.plan.adjacency,
            delta=promise.delta,
            uses=uses_of(calibrated, lambda unit: unit.event),
            shared=_shared(experiment),
            weak=tuple(weak),
            seeded=experiment.seeds.noise is not None,
            members=None if calibrated.federation is None else calibrated.federation.everyone,
        )
        return cls(calibrated, wanted)

    def check(self) -> None:
        """Refuse a run that a lifetime budget does not allow, before anything is written."""
        with Register.open() as register:
            register.check(self.reservation)

    def facts(self) -> Json:
        """For the run's folder: where it is entered."""
        with Register.open() as register:
            return {"register": register.id, "reservation": self.reservation.id}

    def begin(self, files: RunFolder, seal: Seal) -> None:
        """Enter the whole plan, or find it entered; when this returns, releases may follow."""
        if not files.register.exists():  # begun by a version that had no register
            seal.write_text(files.register, json_text(self.facts()))
        with Register.open() as register:
            check_entered(register, files, seal)
            head = register.reserve(self.reservation)
        if not any(seal.heads(REGISTER)):
            seal.lines.append({REGISTER: head.to_json()})

    def settle(self, ledger: Ledger) -> None:
        """Return what the plan allowed and was not executed."""

        def executed(unit: UnitPlan) -> DpEvent:
            return unit.executed(ledger.executed(unit.subject))

        with Register.open() as register:
            register.settle(replace(self.reservation, uses=uses_of(self.calibrated, executed)))


def check_entered(register: RegisterView, files: RunFolder, seal: Seal) -> None:
    """Refuse a register that is not the one that a run was entered in, or has lost lines since."""
    kept = read_json(files.register)
    if kept.get("register") != register.id:
        raise LedgerError(
            f"{files.register}: the run was entered in register {str(kept.get('register'))[:12]}, the one at "
            f"{register.folder} is another; put that back, or name it in $COTERIE_REGISTER"
        )
    heads = list(seal.heads(REGISTER))
    for head in heads:
        register.check_seen(head, str(seal.lines.path))
    lost = bool(heads) and kept.get("reservation") not in register.reserved
    LedgerError.when(lost, f"{register.path}: does not have the reservation that {files.register} names")


# --- before a run: what somebody allows, and says of the records ----------------------------------------


def prepare(
    experiments: Iterable[Experiment], lifetime: Budget | None = None, *, new_records: bool = False
) -> None:
    """Set the lifetime budget of the data of some experiments, and enter records that are new in them."""
    if lifetime is None and not new_records:
        return
    if lifetime is not None:
        InputError.unless_a(Budget, "lifetime", lifetime, "coterie.privacy.Budget(epsilon, delta)")
    option = "--new-records" if lifetime is None else "--lifetime-epsilon"
    known: dict[str, Experiment] = {}
    for experiment in experiments:
        data = data_set_of(experiment)
        if data is None:
            raise InputError(
                f"{option}: {experiment.data.name} has published records, which no register counts; it acts "
                "on records of your own (data.name: folder, or package.module:function)"
            )
        known.setdefault(data.key, experiment)
    for experiment in known.values():
        data = data_set_of(experiment)
        assert data is not None
        entered = every_record(experiment) if new_records else ()
        with Register.open() as register:
            if new_records:
                register.enter(data, entered)
            if lifetime is not None:
                basis = Basis(experiment.privacy.unit, experiment.privacy.adjacency)
                register.limit(data, lifetime, basis)


def every_record(experiment: Experiment) -> tuple[Use, ...]:
    """All records of an experiment's data, of which nothing is computed."""
    dataset = load_dataset(experiment.data, experiment.seeds.simulation)
    parts = [dataset.train] if dataset.test is None else [dataset.train, dataset.test]
    return tuple(Use(dataset.name, of_records(part), dp.NoOpDpEvent()) for part in parts)


# --- after a run: what its records have paid ------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """What the records of a run, or of a newcomer's choice, have paid in it and in everything else.

    Args:
        spent: None where the register that the run was entered in is not here.
        head: how long the register was.
        elsewhere: whether the records were entered in other registers, too.
        kind: what it is the history of.
    """

    spent: Spent | None
    head: ChainHead | None
    elsewhere: bool = False
    kind: str = "run"

    @classmethod
    def from_register(cls, register: RegisterView, plan: Reserved) -> "History":
        """As the register knows it now."""
        elsewhere = bool(register.others_of(plan.data))
        return cls(register.spent_by(plan.id), register.head, elsewhere, plan.kind)

    @property
    def line(self) -> str:
        """In a sentence."""
        if self.spent is None:
            return f"unknown: the register in which this {self.kind} was entered is not here"
        spent, several = self.spent, len(self.spent.experiments)
        runs = (
            f"this {self.kind} alone"
            if several == 1
            else f"all {several} experiments on these records together"
        )
        figures = f"(eps={round_up(spent.epsilon)}, delta={short_number(spent.delta)})-DP"
        limit = spent.lifetime
        of = "" if limit is None else f", of a lifetime budget of {limit.epsilon:g}"
        weak = "".join(f"; {label}" for label in spent.weak)
        beside = "; what was charged in other registers is not counted" if self.elsewhere else ""
        return f"{runs}: {figures} for one {spent.basis.unit}, {spent.basis.adjacency}{of}{weak}{beside}"

    def to_json(self) -> dict[str, Any]:
        found = self.spent
        return {
            "total_epsilon": None if found is None else number_to_json(found.epsilon),
            "delta": None if found is None else found.delta,
            "unit": None if found is None else found.basis.unit.value,
            "adjacency": None if found is None else found.basis.adjacency.value,
            "experiments": None if found is None else len(found.experiments),
            "lifetime_epsilon": None if found is None or found.lifetime is None else found.lifetime.epsilon,
            "register": None if self.head is None else self.head.to_json(),
            "text": self.line,
        }


def history_of(files: RunFolder, lines: int | None = None) -> History | None:
    """What the records of a run have paid by now; None where the register does not count them.

    Args:
        lines: as it was when the register had so many.
    """
    if not files.register.exists():
        return None
    kept, register = read_json(files.register), RegisterView.read(lines=lines)
    if register is None or kept.get("register") != register.id:
        return History(None, None)
    plan = register.reserved.get(str(kept.get("reservation")))
    if plan is None:
        return History(None, register.head)
    head = register.head
    if lines is not None:
        LedgerError.when(
            not 1 <= lines <= head.count,
            f"{register.path}: line {lines} is missing: {files.path} has seen it",
        )
        head = ChainHead(lines, register.hashes[lines - 1])
    return replace(History.from_register(register, plan), head=head)
