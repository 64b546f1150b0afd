"""What a comparison remembers of its runs: one that has begun counts for ever, and is never begun anew.

As soon as a run has opened its ledger, the comparison's seal holds where the run's own seal stood, and again
whenever the comparison ends. A folder that was deleted is missed, and so is one that was deleted and run
again.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from coterie.errors import LedgerError
from coterie.experiment.folder import RunFolder
from coterie.experiment.seal import Check, Seal
from coterie.files import Json
from coterie.privacy import ChainHead

RUNS = "runs"
"""The entry of the seal: the head of each run's own seal, by the run's name; null where that is damaged."""


class RunMemory:
    """The runs in the seal of a comparison."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal

    def checks(self) -> Iterator[Check]:
        """One for each run that is remembered: it must be there, and be the same."""
        for name, heads in self._known().items():
            yield partial(self._check, self._seal.folder / "cells" / name, heads)

    def _check(self, run: Path, heads: list[ChainHead]) -> None:
        for path in (run, RunFolder(run).ledger):
            if not path.exists():
                raise LedgerError(
                    f"{path}: missing; {self._seal.lines.path} tells of this run, and what it spent counts. "
                    "Put it back, or begin another comparison"
                )
        for head in heads:
            Seal(run).lines.check_seen(head, str(self._seal.lines.path))

    def _known(self) -> dict[str, list[ChainHead]]:
        known: dict[str, list[ChainHead]] = {}
        for body in self._seal.lines.bodies:
            for name in body.get("cells", ()):  # those that the table tells of
                known.setdefault(name, [])
            for name, head in body.get(RUNS, {}).items():
                known.setdefault(name, []).extend([ChainHead.from_json(head)] if head else [])
        return known

    def note(self, runs: Iterable[Path], *, running: bool) -> None:
        """Remember how far each run that has begun has come.

        Args:
            running: some may be going on; then of those that are new the first line is read, which stays.
        """
        known, heads = self._known(), dict[str, Json | None]()
        for run in runs:
            if not RunFolder(run).ledger.exists() or (running and run.name in known):
                continue
            try:
                hashes = Seal(run).lines.hashes[: 1 if running else None]
            except LedgerError:  # the run itself says so, and other runs go on
                if run.name not in known:
                    heads[run.name] = None
                continue
            head = ChainHead(len(hashes), hashes[-1])
            if head not in known.get(run.name, ()):
                heads[run.name] = head.to_json()
        if heads:
            self._seal.lines.append({RUNS: heads})
