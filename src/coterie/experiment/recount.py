"""The books of a run counted once more: does what the folder promises follow from what was charged?

A run folder states its epsilon several times: in the guarantee, in the result, in each round's line. All of
them follow from the plan and from the ledger, so they are computed again from these two and compared.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

from coterie import __version__
from coterie.algorithms.protocol import PublicFacts, Vector
from coterie.engines.secret import SEEDED
from coterie.errors import InputError, LedgerError, PlanError
from coterie.experiment.calibrated import build_algorithm
from coterie.experiment.evaluation import HELD_OUT
from coterie.experiment.files import read_experiment
from coterie.experiment.folder import Json, RunFolder, read_json
from coterie.experiment.integrity import Integrity
from coterie.experiment.proven import ProvenPlan
from coterie.experiment.schema import EvaluationKind, Experiment
from coterie.experiment.seal import Check
from coterie.groups import Observer, Structure
from coterie.models import code_caveats
from coterie.privacy import (
    ClientCost,
    Custody,
    Guarantee,
    Meaning,
    PlannedRelease,
    PrivacyPlan,
    ReleaseCost,
    Unit,
)
from coterie.privacy.guarantee import PerClient
from coterie.privacy.plain import MalformedError, codec
from coterie.privacy.units import number_from_json, round_up

TOLERANCE = 1e-6
"""Relative; other versions of the numerical libraries differ by less, a rounded or edited figure by more."""


@dataclass(frozen=True)
class Recount:
    """What the books of a run say when they are counted again."""

    releases: int
    lines: int
    spent: float
    promised: float

    def __str__(self) -> str:
        return (
            f"{self.releases:,} releases charged in {self.lines:,} lines of an unbroken chain; counted "
            f"again, they spent epsilon {round_up(self.spent)} of {round_up(self.promised)}"
        )


@dataclass(frozen=True)
class Account:
    """A run folder and what follows from its plan and its ledger, each part computed when it is asked for."""

    files: RunFolder
    integrity: Integrity

    @classmethod
    def of(cls, path: Path) -> "Account":
        """The account of a folder; an InputError where another version wrote it, and nobody changed it since.

        Sentences are made again from figures and compared, and other versions may have other words.
        """
        files = RunFolder(path)
        found = cls(files, Integrity(files))
        version = found.integrity.version
        if version not in (None, __version__):
            raise InputError(
                f"{path}: written by coterie {version}, this is {__version__}; a run is counted again by the "
                "version that wrote it"
            )
        return found

    @cached_property
    def stored(self) -> Guarantee:
        """The guarantee that the folder states."""
        content = read_json(self.files.guarantee)
        try:
            stored = Guarantee.from_json(content)
        except PlanError as mistake:
            raise LedgerError(f"{self.files.guarantee}: {mistake}") from None
        for form in ("line", "text"):
            if content.get(form) != getattr(stored, form):
                raise LedgerError(
                    f"{self.files.guarantee}: its {form} does not say what its figures do: {stored.line}"
                )
        return stored

    @cached_property
    def proven(self) -> ProvenPlan:
        """The plan, with all that its epsilon follows from."""
        plan, ledger, observer = self.integrity.plan, self.integrity.ledger, None
        held_by = _held_by(self.files, plan, self.stored)
        if self.files.leakage.exists():
            observer = _observer_in(self.files, plan)
        return ProvenPlan(plan, ledger.budgets, ledger.accountant, self.stored.mode, held_by, observer)

    @cached_property
    def spent(self) -> float:
        """Epsilon of what was charged."""
        return self.proven.spent(self.integrity.ledger)

    def checks(self) -> Iterator[Check]:
        """Whether every figure of the folder follows from its plan and its ledger."""
        yield self.integrity.check_ledger
        yield lambda: _check_guarantee(self.files.guarantee, self.stored, self.proven)
        yield lambda: _check_leakage(self.files.leakage, self.proven)
        yield lambda: _check_said(self.files, self.stored)
        yield self._check_spent
        yield lambda: _check_rounds(self.files, self.integrity.metrics.bodies, self.spent)
        if self.files.finished:
            yield lambda: _check_result(self.files.result, read_json(self.files.result), self.stored)

    def _check_spent(self) -> None:
        if not _within(self.spent, self.stored.epsilon):
            raise LedgerError(
                f"{self.files.ledger}: what was charged costs epsilon {self.spent}, "
                f"{self.files.guarantee.name} promises {self.stored.epsilon}"
            )


def recount(path: Path) -> Recount | None:
    """Count the books of a run folder again; None where its ledger was never opened.

    Raises:
        LedgerError: the chain is broken, or a figure in the folder does not follow from plan and ledger.
    """
    account = Account.of(path)
    if not account.integrity.begun:
        return None
    for check in account.checks():
        check()
    ledger = account.integrity.ledger
    releases = sum(sum(counts.values()) for counts in ledger.counts.values())
    return Recount(releases, ledger.head.count, account.spent, account.stored.epsilon)


def _observer_in(files: RunFolder, plan: PrivacyPlan) -> Observer | None:
    """Who sees what, where workers observe each other, from the groups that the folder names."""
    content, federation = read_json(files.leakage), read_json(files.federation)
    try:
        names = tuple(str(name) for name in content["workers"])
        groups = {str(name): tuple(members) for name, members in content["groups"].items()}
        kind = str(content["structure"]).partition(":")[0]
        structure = Structure(kind, tuple(groups.values()), len(names), names, tuple(groups))
        records = {str(client["name"]): int(client["records"]) for client in federation["clients"]}
        facts = PublicFacts(names, records, int(federation["parameters"]), _no_model, structure=structure)
    except (KeyError, TypeError, ValueError, AttributeError, InputError) as mistake:
        raise LedgerError(f"{files.leakage}: does not say who is in which group ({mistake!r})") from None
    algorithm = build_algorithm(read_experiment(files.experiment), None)
    drafted = {unit.subject: _times(unit.releases) for unit in algorithm.plan(facts).units}
    if drafted != {unit.subject: _times(unit.releases) for unit in plan.units}:
        raise LedgerError(f"{files.leakage}: its groups are not those of {files.plan.name}")
    return algorithm.watched(facts, plan)


def _times(releases: tuple[PlannedRelease, ...]) -> dict[str, int]:
    return {release.name: release.times for release in releases}


def _no_model(seed: int) -> Vector:
    raise AssertionError("a recount starts no model")


def _held_by(files: RunFolder, plan: PrivacyPlan, stored: Guarantee) -> Custody:
    """Who held records and noise key; sites may have been simulated, which claims less than real ones do."""
    if not files.sites.exists() or stored.held_by is Custody.ONE_PROCESS:
        return Custody.ONE_PROCESS
    return Custody.EACH_SITE if plan.unit is Unit.RECORD else Custody.TRUSTED_SERVER


def _check_guarantee(path: Path, stored: Guarantee, basis: ProvenPlan) -> None:
    proven = basis.prove(stored.caveats)
    figures = ("epsilon", "epsilon_replace_one", "published_epsilon", "delta")
    words = (
        "unit",
        "subject",
        "adjacency",
        "threat",
        "held_by",
        "accountant",
        "mode",
        "event",
        "most_exposed",
    )
    for name in (*figures, *words, "meaning", "releases", "per_client"):
        says, follows = getattr(stored, name), getattr(proven, name)
        if not _alike(says, follows):
            raise LedgerError(
                f"{path}: {name} is {_shown(says)}; counted again from the plan and the ledger it is "
                f"{_shown(follows)}"
            )
    for caveat in proven.caveats:
        if caveat not in stored.caveats:
            raise LedgerError(f"{path}: the caveat '{_shown(caveat)}' of the plan is missing")


def _check_said(files: RunFolder, stored: Guarantee) -> None:
    """What the experiment alone shows to weaken the guarantee, or to lie outside it, must be said in it."""
    for caveat in _weaknesses(read_experiment(files.experiment), between_sites=files.sites.exists()):
        if caveat not in stored.caveats:
            raise LedgerError(
                f"{files.guarantee}: the caveat '{_shown(caveat)}' of the experiment is missing"
            )


def _weaknesses(experiment: Experiment, *, between_sites: bool) -> Iterator[str]:
    yield from code_caveats(experiment.model)
    if between_sites:
        return  # whose noise had a seed is theirs to say, and no score is exact
    if experiment.seeds.noise is not None:
        yield SEEDED
    if experiment.evaluation_kind is EvaluationKind.EXACT:
        yield HELD_OUT


def _check_leakage(path: Path, proven: ProvenPlan) -> None:
    """Each worker's epsilon, where workers observe each other."""
    counted = proven.per_worker()
    if counted is None:
        return
    stored = read_json(path).get("per_worker")
    for worker, follows in counted.items():
        says = stored.get(worker) if isinstance(stored, dict) else None
        if not close_to(says, follows):
            raise LedgerError(f"{path}: epsilon of {worker} is {says}; counted again it is {follows}")


def _check_rounds(files: RunFolder, lines: Sequence[Json], spent: float) -> None:
    """No round may state more than was charged by now, nor less than the one before it."""
    before = 0.0
    for line in lines:
        stated = number_from_json(line["epsilon"])
        if not (_within(before, stated) and _within(stated, spent)):
            raise LedgerError(
                f"{files.metrics}: round {line['round']} states epsilon {stated}; counted again, "
                f"{before} to {spent} was spent by then"
            )
        before = stated
    if files.finished and not close_to(before, spent):
        raise LedgerError(
            f"{files.metrics}: the last round states epsilon {before}; counted again it is {spent}"
        )


def _check_result(path: Path, result: Json, stored: Guarantee) -> None:
    for key, follows in (("guarantee", stored.line), ("guarantee_text", stored.text)):
        if result.get(key) != follows:
            raise LedgerError(f"{path}: its {key} is not the one of the run's plan: {stored.line}")
    if not _alike(_clients(result.get("per_client")), stored.per_client):
        raise LedgerError(f"{path}: per_client is not what every client spends by the run's plan")
    for name in ("epsilon", "delta"):
        says, follows = result.get(name), getattr(stored, name)
        if says is None or not close_to(number_from_json(says), follows):
            raise LedgerError(f"{path}: {name} is {says!r}; the guarantee says {follows!r}")


def _clients(content: object) -> tuple[ClientCost, ...] | None:
    try:
        return cast(tuple[ClientCost, ...], codec(PerClient).read(content))
    except MalformedError:
        return None


def close_to(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or math.isclose(one, other, rel_tol=TOLERANCE)


def _alike(one: object, other: object) -> bool:
    """Equal, but for figures inside, which may differ in the last digits."""
    if isinstance(one, float) and isinstance(other, float):
        return close_to(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, Meaning | ReleaseCost | ClientCost) and type(one) is type(other):
        return all(
            _alike(getattr(one, part.name), getattr(other, part.name)) for part in dataclasses.fields(one)
        )
    return one == other


def _within(less: float, more: float) -> bool:
    return less <= more or close_to(less, more)


def _shown(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
