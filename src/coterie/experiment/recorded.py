"""A run folder as it lies on the disk: what it says, whether it is as the run left it, what follows from it.

A run folder states its epsilon several times: in the guarantee, in the result, in each round's line. All of
them follow from the plan and from the ledger, so they are computed again from these two and compared.
"""

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from coterie import __version__
from coterie.algorithms.protocol import PublicFacts, Vector
from coterie.engines.secret import SEEDED, RunSecret
from coterie.errors import CoterieError, InputError, LedgerError, PlanError
from coterie.experiment import checkpoint
from coterie.experiment.calibrated import HELD_OUT, build_algorithm
from coterie.experiment.checkpoint import SavedRound
from coterie.experiment.experiment_file import read_recorded
from coterie.experiment.folder import RunFolder
from coterie.experiment.own_code import own_caveats, own_parts
from coterie.experiment.proven import ProvenPlan
from coterie.experiment.schema import EvaluationKind, Experiment
from coterie.experiment.seal import METRICS, NAME, ChainedLines, Check, Seal, require
from coterie.files import read_json
from coterie.groups import Observer, Structure
from coterie.privacy import Custody, Guarantee, LedgerView, PrivacyPlan
from coterie.privacy.units import number_from_json, round_up

P = TypeVar("P", PrivacyPlan, Guarantee)
TOLERANCE = 1e-6
"""Relative; other versions of the numerical libraries differ by less, a rounded or edited figure by more."""


@dataclass(frozen=True)
class RecordedRun:
    """The parts of a run folder, each read and checked when it is asked for."""

    files: RunFolder

    @classmethod
    def of_this_version(cls, path: Path) -> "RecordedRun":
        """The run in a folder; an InputError where another version wrote it, and nobody changed it since.

        Sentences are made again from figures and compared, and other versions may have other words.
        """
        found = cls(RunFolder(path))
        with suppress(LedgerError):
            found.seal.check(found.files.federation.name)
            version = str(read_json(found.files.federation).get("coterie"))
            if version != __version__:
                raise InputError(
                    f"{path}: written by coterie {version}, this is {__version__}; a run is counted again by "
                    "the version that wrote it"
                )
        return found

    @cached_property
    def experiment(self) -> Experiment:
        return read_recorded(self.files.experiment)

    @cached_property
    def plan(self) -> PrivacyPlan:
        return self._read(PrivacyPlan, self.files.plan)

    @cached_property
    def guarantee(self) -> Guarantee:
        """The guarantee that the folder states, in words that say what its figures do."""
        path = self.files.guarantee
        stored, content = self._read(Guarantee, path), read_json(path)
        for form in ("line", "text"):
            same = content.get(form) == getattr(stored, form)
            require(same, path, f"its {form} does not say what its figures do: {stored.line}")
        return stored

    def _read(self, kind: type[P], path: Path) -> P:
        try:
            return kind.from_json(read_json(path))
        except PlanError as mistake:
            raise LedgerError(f"{path}: {mistake}") from None

    @cached_property
    def ledger(self) -> LedgerView:
        return LedgerView.read(self.files.ledger, self.plan)

    @cached_property
    def metrics(self) -> ChainedLines:
        return ChainedLines(self.files.metrics, METRICS)

    @cached_property
    def seal(self) -> Seal:
        return Seal(self.files.path)

    @cached_property
    def checkpoint(self) -> SavedRound | None:
        return checkpoint.stored(self.files.checkpoint)

    @property
    def begun(self) -> bool:
        """Whether there must be a ledger: something was charged, or stands in it."""
        traces = (self.files.ledger, self.files.metrics, self.files.result)
        known = self.checkpoint is not None or self.seal.ledger() is not None
        return known or any(path.exists() for path in traces)

    # --- what follows from plan and ledger --------------------------------------------------------------

    @cached_property
    def proven(self) -> ProvenPlan:
        """The plan, with all that its epsilon follows from."""
        held_by = Custody.EACH_SITE if self.plan.unit.within_client else Custody.TRUSTED_SERVER
        # Sites may have been simulated, which claims less than real ones do.
        if not self.files.sites.exists() or self.guarantee.held_by is Custody.ONE_PROCESS:
            held_by = Custody.ONE_PROCESS
        observer = self._observer() if self.files.leakage.exists() else None
        ledger, mode = self.ledger, self.guarantee.mode
        return ProvenPlan(self.plan, ledger.budgets, ledger.accountant, mode, held_by, observer)

    @cached_property
    def spent(self) -> float:
        """Epsilon of what was charged."""
        return self.proven.spent(self.ledger)

    def _observer(self) -> Observer | None:
        """Who sees what, where workers observe each other, from the groups that the folder names."""
        files = self.files
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
        problem = "says who sees what of an algorithm that is the user's own code; no proof says that"
        require(not self.experiment.own_algorithm, files.leakage, problem)
        algorithm = build_algorithm(self.experiment, None)
        same = _times(algorithm.plan(facts)) == _times(self.plan)
        require(same, files.leakage, f"its groups are not those of {files.plan.name}")
        return algorithm.observer(facts, self.plan)

    # --- is every file, every chain and every head as the run left it? ----------------------------------

    def checks(self) -> list[Check]:
        """Every check of the folder: files, the heads that were saved, then the chains, which only grow."""
        sealed: list[Check] = []
        with suppress(CoterieError):  # said by the first check
            sealed += self.seal.checks()
        chains = [self._check_checkpoint, self.check_ledger, self._check_metrics, self._check_seal]
        return [lambda: Seal(self.files.path), *sealed, self._check_secret, *chains]

    def _check_seal(self) -> None:
        self._check_heads("seal", self.seal.lines, sealed=False)

    def _check_secret(self) -> None:
        """The noise key, for whoever may read it: whole, and the one that the run was begun with."""
        if os.access(self.files.secret, os.R_OK):
            RunSecret.load(self.files.secret, self.seal.key)

    def _check_checkpoint(self) -> None:
        saved, parameters = self.checkpoint, read_json(self.files.federation).get("parameters")
        if saved is not None and isinstance(parameters, int):
            checkpoint.check_size(self.files.checkpoint, parameters)
        if saved is None or not self.files.finished:
            return
        where = self.files.checkpoint / f"round-{saved.round:06d}" / checkpoint.STATE
        sealed = (line["checkpoint"] for line in self.seal.lines.bodies if "checkpoint" in line)
        same = all(each["digest"] == saved.digest for each in sealed)
        require(same, where, "not the checkpoint that was sealed with the result")

    def check_models(self) -> None:
        """Of a finished run: its models are there, or its seal says that they were dropped on purpose."""
        sealed = any("checkpoint" in line for line in self.seal.lines.bodies)
        kept = self.seal.models_dropped or not self.files.finished or self.checkpoint is not None
        require(kept or not sealed, self.files.checkpoint, "missing; the result was sealed with its models")

    def check_ledger(self) -> None:
        if self.begun:
            self._check_heads("ledger", self.ledger)

    def _check_metrics(self) -> None:
        saved, files = self.checkpoint, self.files
        self._check_heads("metrics", self.metrics, sealed=files.finished)
        # A crash comes at most between a round's line and its checkpoint.
        told, known = self.metrics.head.count, saved.heads["metrics"].count if saved is not None else 0
        problem = f"{files.metrics.name} tells of {told} rounds, the checkpoint of {known}"
        whole = files.finished or told <= known + 1
        require(whole, files.checkpoint, f"a checkpoint is missing: {problem}")

    def _check_heads(self, name: str, chain: ChainedLines | LedgerView, *, sealed: bool = True) -> None:
        """Whether a chain still has every line that checkpoint and seal have seen."""
        if self.checkpoint is not None:
            chain.check_seen(self.checkpoint.heads[name], "the checkpoint")
        for head in self.seal.heads(name) if sealed else ():
            chain.check_seen(head, NAME)

    # --- does every figure follow from plan and ledger? -------------------------------------------------

    def recount_checks(self) -> list[Check]:
        """Whether every figure of the folder follows from its plan and its ledger."""
        figures = [
            self._check_guarantee,
            self._check_leakage,
            self._check_said,
            self._check_code,
            self._check_spent,
        ]
        last = [self._check_result] if self.files.finished else []
        return [self.check_ledger, *figures, self._check_rounds, *last]

    def _check_guarantee(self) -> None:
        path, stored, proven = self.files.guarantee, self.guarantee, self.proven.prove(self.guarantee.caveats)
        says, follows = stored.to_json(), proven.to_json()
        for name in (name for name in {**follows, **says} if name not in ("caveats", "line", "text")):
            one, other = says.get(name), follows.get(name)  # some figures are there only where they apply
            # What is accounted for is written, not computed.
            same = one == other if name == "event" else alike(one, other)
            counted = f"counted again from the plan and the ledger it is {_shown(other)}"
            require(same, path, f"{name} is {_shown(one)}; {counted}")
        agrees = self.plan.persons == self.experiment.privacy.persons
        require(agrees, self.files.plan, f"bounds persons otherwise than {self.files.experiment.name}")
        for caveat in proven.caveats:
            problem = f"the caveat '{_shown(caveat)}' of the plan is missing"
            require(caveat in stored.caveats, path, problem)

    def _check_said(self) -> None:
        """What the experiment shows to weaken the guarantee, or to lie outside it, must be said in it."""
        here = not self.files.sites.exists()  # there noise keys are others', and no score is exact
        must = {
            **dict.fromkeys(own_caveats(self.experiment, served=not here), True),
            **dict.fromkeys(self._declared_caveats(), True),
            SEEDED: here and self.experiment.seeds.noise is not None,
            HELD_OUT: here and self.experiment.evaluation_kind is EvaluationKind.EXACT,
        }
        for caveat, wanted in must.items():
            said = not wanted or caveat in self.guarantee.caveats
            problem = f"the caveat '{_shown(caveat)}' of the experiment is missing"
            require(said, self.files.guarantee, problem)

    def _declared_caveats(self) -> list[str]:
        """What the records' declaration adds to a guarantee, as it was written down before a round."""
        stored = read_json(self.files.federation).get("caveats", [])
        readable = isinstance(stored, list) and all(isinstance(caveat, str) for caveat in stored)
        require(readable, self.files.federation, "caveats should be a list of texts")
        return list(stored)

    def _check_code(self) -> None:
        """Which code ran must be written down, where it was not ours."""
        path, served = self.files.code, self.files.sites.exists()
        known = read_json(path) if path.exists() else {}
        for kind, name in own_parts(self.experiment, served=served):
            entry = known.get(kind.key)
            said = isinstance(entry, dict) and entry.get("name") == name
            require(said, path, f"does not say which code {kind.key} {name} was")

    def _check_leakage(self) -> None:
        """Each worker's epsilon, where workers observe each other."""
        counted = self.proven.per_worker()
        if counted is None:
            return
        stored = read_json(self.files.leakage).get("per_worker")
        for worker, follows in counted.items():
            says = stored.get(worker) if isinstance(stored, dict) else None
            problem = f"epsilon of {worker} is {says}; counted again it is {follows}"
            require(close_to(says, follows), self.files.leakage, problem)

    def _check_spent(self) -> None:
        stated = f"{self.files.guarantee.name} promises {self.guarantee.epsilon}"
        problem = f"what was charged costs epsilon {self.spent}, {stated}"
        require(_within(self.spent, self.guarantee.epsilon), self.files.ledger, problem)

    def _check_rounds(self) -> None:
        """No round may state more than was charged by now, nor less than the one before it."""
        path, spent, before = self.files.metrics, self.spent, 0.0
        for line in self.metrics.bodies:
            stated = number_from_json(line["epsilon"])
            counted = f"counted again, {before} to {spent} was spent by then"
            possible = _within(before, stated) and _within(stated, spent)
            require(possible, path, f"round {line['round']} states epsilon {stated}; {counted}")
            before = stated
        problem = f"the last round states epsilon {before}; counted again it is {spent}"
        require(not self.files.finished or close_to(before, spent), path, problem)

    def _check_result(self) -> None:
        path, result, stored = self.files.result, read_json(self.files.result), self.guarantee
        for key, follows in (("guarantee", stored.line), ("guarantee_text", stored.text)):
            problem = f"its {key} is not the one of the run's plan: {stored.line}"
            require(result.get(key) == follows, path, problem)
        same = alike(result.get("per_client"), stored.per_client_json())
        require(same, path, "per_client is not what every client spends by the run's plan")
        for name, figure in (("epsilon", stored.epsilon), ("delta", stored.delta)):
            says = result.get(name)
            same = says is not None and close_to(number_from_json(says), figure)
            require(same, path, f"{name} is {says!r}; the guarantee says {figure!r}")


def check_folder(files: RunFolder) -> None:
    """Raise an error that names the first file that is not as the run left it."""
    for check in RecordedRun(files).checks():
        check()


@dataclass(frozen=True)
class Recount:
    """What the ledger of a run says when it is counted again."""

    releases: int
    lines: int
    spent: float
    promised: float

    def __str__(self) -> str:
        return (
            f"{self.releases:,} releases charged in {self.lines:,} lines of an unbroken chain; counted "
            f"again, they spent epsilon {round_up(self.spent)} of {round_up(self.promised)}"
        )


def recount(path: Path) -> Recount | None:
    """Count the ledger of a run folder again; None where it was never opened.

    A LedgerError: the chain is broken, or a figure in the folder does not follow from plan and ledger.
    """
    run = RecordedRun.of_this_version(path)
    if not run.begun:
        return None
    for check in run.recount_checks():
        check()
    releases = sum(sum(counts.values()) for counts in run.ledger.counts.values())
    return Recount(releases, run.ledger.head.count, run.spent, run.guarantee.epsilon)


def _times(plan: PrivacyPlan) -> dict[str, dict[str, int]]:
    """How often each release is planned, by unit."""
    return {unit.subject: {one.name: one.times for one in unit.releases} for unit in plan.units}


def _no_model(seed: int) -> Vector:
    raise AssertionError("a recount starts no model")


def close_to(one: float | None, other: float | None) -> bool:
    """Whether two figures, or their absence, are the same but for the last digits."""
    if one is None or other is None:
        return one is other
    return one == other or math.isclose(one, other, rel_tol=TOLERANCE)


def alike(one: object, other: object) -> bool:
    """Equal plain data, but for figures inside, which may differ in the last digits."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return close_to(one, other)
    return one == other


def _within(less: float, more: float) -> bool:
    return less <= more or close_to(less, more)


def _shown(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
