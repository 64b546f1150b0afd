"""Is a run folder as the run left it? Every file on which a claim rests, every chain, every head.

Nothing is computed again here: that what the files say follows from what was charged is for `recount`.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from coterie.engines.secret import RunSecret
from coterie.errors import CoterieError, InputError, LedgerError, PlanError
from coterie.experiment import checkpoint
from coterie.experiment.checkpoint import Stored
from coterie.experiment.folder import Json, RunFolder, read_json
from coterie.experiment.seal import NAME, ChainedLines, Check, Seal
from coterie.privacy import ChainHead, LedgerView, PrivacyPlan

METRICS = "file of metrics"


@dataclass(frozen=True)
class Integrity:
    """The parts of a run folder, each read and checked when it is asked for."""

    files: RunFolder

    @cached_property
    def checkpoint(self) -> Stored | None:
        return checkpoint.stored(self.files.checkpoint)

    @cached_property
    def plan(self) -> PrivacyPlan:
        try:
            return PrivacyPlan.from_json(read_json(self.files.plan))
        except PlanError as mistake:
            raise LedgerError(f"{self.files.plan}: {mistake}") from None

    @cached_property
    def ledger(self) -> LedgerView:
        return LedgerView.read(self.files.ledger, self.plan)

    @cached_property
    def metrics(self) -> ChainedLines:
        return ChainedLines(self.files.metrics, METRICS)

    @cached_property
    def seal(self) -> Seal:
        return Seal(self.files.path)

    @property
    def version(self) -> str | None:
        """The version that wrote the folder; None where the file that tells is not as it was sealed."""
        with suppress(CoterieError):
            self.seal.check(self.files.federation.name)
            return str(read_json(self.files.federation).get("coterie"))
        return None

    @property
    def begun(self) -> bool:
        """Whether there must be a ledger: something was charged, or stands in it."""
        known = self.checkpoint is not None or self.seal.ledger() is not None
        return known or any(
            path.exists() for path in (self.files.ledger, self.files.metrics, self.files.result)
        )

    def checks(self) -> Iterator[Check]:
        """Every check of the folder: files, the heads that were saved, then the chains, which only grow."""
        yield self._check_seal
        with suppress(CoterieError):  # said by the check before
            yield from self.seal.checks()
        yield self._check_secret
        yield self._check_checkpoint
        yield self.check_ledger
        yield self._check_metrics
        yield self._check_sealed_by_checkpoint

    def _check_secret(self) -> None:
        """The noise key, for whoever may read it: whole, and the one that the run was begun with."""
        if os.access(self.files.secret, os.R_OK):
            RunSecret.load(self.files.secret, self.seal.key)

    def _check_checkpoint(self) -> None:
        saved = self.checkpoint
        if saved is None or not self.files.result.exists():
            return
        for line in self.seal.lines.bodies:
            if "checkpoint" in line and line["checkpoint"]["digest"] != saved.digest:
                where = self.files.checkpoint / f"round-{saved.round:06d}" / checkpoint.STATE
                raise LedgerError(f"{where}: not the checkpoint that was sealed with the result")

    def check_models(self) -> None:
        """Of a finished run: whoever sends its figures without its models says so by leaving them out."""
        sealed = any("checkpoint" in line for line in self.seal.lines.bodies)
        if sealed and self.files.finished and self.checkpoint is None:
            raise LedgerError(f"{self.files.checkpoint}: missing; the result was sealed with its models")

    def check_ledger(self) -> None:
        if not self.begun:
            return
        if self.checkpoint is not None:
            self.ledger.check_seen(self.checkpoint.heads["ledger"], "the checkpoint")
        for head in self.seal.heads("ledger"):
            self.ledger.check_seen(head, NAME)

    def _check_metrics(self) -> None:
        saved, lines = self.checkpoint, self.metrics
        if saved is not None:
            lines.check_seen(saved.heads["metrics"], "the checkpoint")
        for head in self.seal.heads("metrics") if self.files.finished else ():
            lines.check_seen(head, NAME)
        # A crash comes at most between a round's line and its checkpoint.
        known = saved.heads["metrics"].count if saved is not None else 0
        if not self.files.finished and lines.head.count > known + 1:
            raise LedgerError(
                f"{self.files.checkpoint}: a checkpoint is missing: {self.files.metrics.name} tells of "
                f"{lines.head.count} rounds, the checkpoint of {known}"
            )

    def _check_seal(self) -> None:
        Seal(self.files.path)

    def _check_sealed_by_checkpoint(self) -> None:
        if self.checkpoint is not None:
            self.seal.lines.check_seen(self.checkpoint.heads["seal"], "the checkpoint")


def check_folder(files: RunFolder) -> None:
    """Raise an error that names the first file that is not as the run left it."""
    for check in Integrity(files).checks():
        check()


def seal_result(files: RunFolder, seal: Seal, result: Json, ledger: ChainHead, metrics: ChainHead) -> None:
    """Write the result of a run, sealed with the books, the metrics and the models that it tells of."""
    saved = checkpoint.stored(files.checkpoint)
    heads = {"ledger": ledger.to_json(), "metrics": metrics.to_json()}
    if saved is not None:
        heads["checkpoint"] = {"digest": saved.digest}
    seal.write_json(files.result, result, **heads)


def keep_metrics(files: RunFolder, rounds: int) -> ChainedLines:
    """The metrics of so many rounds, to be gone on with: later ones will run again."""
    lines = ChainedLines(files.metrics, METRICS)
    lines.cut(sum(_round_of(files, body) <= rounds for body in lines.bodies))
    return lines


def _round_of(files: RunFolder, body: object) -> int:
    try:
        return int(body["round"])  # type: ignore[index]
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{files.metrics}: a line without the number of its round") from None
