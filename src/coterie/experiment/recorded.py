"""A run folder as it lies on the disk: what it says, whether it is as the run left it, what follows from it.

Whether what it says is also what follows from plan and ledger is for `recount`.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from coterie import __version__
from coterie.algorithms.protocol import PublicFacts, Vector
from coterie.engines.secret import RunSecret
from coterie.errors import CoterieError, InputError, LedgerError, PlanError
from coterie.experiment import checkpoint
from coterie.experiment.calibrated import build_algorithm
from coterie.experiment.checkpoint import SavedRound
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.folder import RunFolder
from coterie.experiment.proven import ProvenPlan
from coterie.experiment.schema import Experiment
from coterie.experiment.seal import METRICS, NAME, ChainedLines, Check, Seal
from coterie.files import read_json
from coterie.groups import Observer, Structure
from coterie.privacy import Custody, Guarantee, LedgerView, PrivacyPlan, Unit

P = TypeVar("P", PrivacyPlan, Guarantee)


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
        return read_experiment(self.files.experiment)

    @cached_property
    def plan(self) -> PrivacyPlan:
        return self._read(PrivacyPlan, self.files.plan)

    @cached_property
    def guarantee(self) -> Guarantee:
        """The guarantee that the folder states, in words that say what its figures do."""
        path = self.files.guarantee
        stored, content = self._read(Guarantee, path), read_json(path)
        for form in ("line", "text"):
            if content.get(form) != getattr(stored, form):
                raise LedgerError(f"{path}: its {form} does not say what its figures do: {stored.line}")
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
        known = self.checkpoint is not None or self.seal.ledger() is not None
        return known or any(
            path.exists() for path in (self.files.ledger, self.files.metrics, self.files.result)
        )

    # --- what follows from plan and ledger --------------------------------------------------------------

    @cached_property
    def proven(self) -> ProvenPlan:
        """The plan, with all that its epsilon follows from."""
        held_by = Custody.EACH_SITE if self.plan.unit is Unit.RECORD else Custody.TRUSTED_SERVER
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
        algorithm = build_algorithm(self.experiment, None)
        if _times(algorithm.plan(facts)) != _times(self.plan):
            raise LedgerError(f"{files.leakage}: its groups are not those of {files.plan.name}")
        return algorithm.observer(facts, self.plan)

    # --- is every file, every chain and every head as the run left it? ----------------------------------

    def checks(self) -> Iterator[Check]:
        """Every check of the folder: files, the heads that were saved, then the chains, which only grow."""
        yield lambda: Seal(self.files.path)
        with suppress(CoterieError):  # said by the check before
            yield from self.seal.checks()
        yield self._check_secret
        yield self._check_checkpoint
        yield self.check_ledger
        yield self._check_metrics
        yield lambda: self._check_heads("seal", self.seal.lines, sealed=False)

    def _check_secret(self) -> None:
        """The noise key, for whoever may read it: whole, and the one that the run was begun with."""
        if os.access(self.files.secret, os.R_OK):
            RunSecret.load(self.files.secret, self.seal.key)

    def _check_checkpoint(self) -> None:
        saved = self.checkpoint
        if saved is None or not self.files.finished:
            return
        for line in self.seal.lines.bodies:
            if "checkpoint" in line and line["checkpoint"]["digest"] != saved.digest:
                where = self.files.checkpoint / f"round-{saved.round:06d}" / checkpoint.STATE
                raise LedgerError(f"{where}: not the checkpoint that was sealed with the result")

    def check_models(self) -> None:
        """Of a finished run: its models are there, or its seal says that they were dropped on purpose."""
        sealed = any("checkpoint" in line for line in self.seal.lines.bodies)
        if sealed and not self.seal.models_dropped and self.files.finished and self.checkpoint is None:
            raise LedgerError(f"{self.files.checkpoint}: missing; the result was sealed with its models")

    def check_ledger(self) -> None:
        if not self.begun:
            return
        self._check_heads("ledger", self.ledger)

    def _check_metrics(self) -> None:
        saved, lines = self.checkpoint, self.metrics
        self._check_heads("metrics", lines, sealed=self.files.finished)
        # A crash comes at most between a round's line and its checkpoint.
        known = saved.heads["metrics"].count if saved is not None else 0
        if not self.files.finished and lines.head.count > known + 1:
            raise LedgerError(
                f"{self.files.checkpoint}: a checkpoint is missing: {self.files.metrics.name} tells of "
                f"{lines.head.count} rounds, the checkpoint of {known}"
            )

    def _check_heads(self, name: str, chain: ChainedLines | LedgerView, *, sealed: bool = True) -> None:
        """Whether a chain still has every line that checkpoint and seal have seen."""
        if self.checkpoint is not None:
            chain.check_seen(self.checkpoint.heads[name], "the checkpoint")
        for head in self.seal.heads(name) if sealed else ():
            chain.check_seen(head, NAME)


def check_folder(files: RunFolder) -> None:
    """Raise an error that names the first file that is not as the run left it."""
    for check in RecordedRun(files).checks():
        check()


def _times(plan: PrivacyPlan) -> dict[str, dict[str, int]]:
    """How often each release is planned, by unit."""
    return {unit.subject: {one.name: one.times for one in unit.releases} for unit in plan.units}


def _no_model(seed: int) -> Vector:
    raise AssertionError("a recount starts no model")
