"""The seal of a folder: which bytes its files had when they were written, so that later edits are found.

`seal.jsonl` is a chain like the ledger. A file's digest is written down before the file itself appears or is
replaced, and that it was afterwards: a crash in between leaves the file as it was sealed last, or as it was
before, and nothing else is accepted. Where the ledger stood is kept as soon as there is one, and again with
the result.

A comparison remembers its runs: one that has begun counts for ever, and is never begun anew. As soon as a run
has opened its ledger, the comparison's seal holds where the run's own seal stood, and again whenever the
comparison ends. A folder that was deleted is missed, and so is one that was deleted and run again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from coterie.errors import LedgerError
from coterie.experiment.folder import RunFolder
from coterie.files import Json, digest_bytes, digest_file, finite, regular, sync, write_text, writing
from coterie.privacy.chain import ChainHead, HashChain

NAME = "seal.jsonl"
METRICS = "file of metrics"
SEALED = {
    *("experiment.yaml", "federation.json", "sites.json", "plan.json", "guarantee.json", "leakage.json"),
    *(
        "code.json",
        "findings.json",
        "task.json",
        "result.json",
        "register.json",
        "sweep.yaml",
        "table.csv",
        "table.md",
    ),
}
"""Files on which claims rest. Chains hold together by themselves; wall-clock times are no claim."""
FORMAT = 1
DROPPED = "dropped"
"""The entry of a run's seal once its models were removed on purpose."""
RUNS = "runs"
"""That of a comparison: the head of each run's own seal, by the run's name; null where that is damaged."""
Check = Callable[[], object]
"""Returns where something is as it was, raises an error that names the file where it is not."""


def require(holds: object, path: Path, problem: str) -> None:
    """Name the file and the problem where something does not hold that must."""
    if not holds:
        raise LedgerError(f"{path}: {problem}")


class ChainedLines(HashChain):
    """A chain in a file of its own, and what its lines say."""

    def __init__(self, path: Path, what: str) -> None:
        """Read what is there, without a line torn by a crash; a LedgerError where a line does not follow."""
        super().__init__(path, what, sort=False)
        self.bodies: list[Json] = list(self.follow(regular(path).read_bytes() if path.exists() else b""))

    def append(self, body: Json) -> None:
        """Write a line; when this returns, it survives any crash."""
        line, digest = self.link(finite(body))
        made = not self.path.exists()
        with writing(self.path):
            with self.path.open("ab") as handle:
                handle.truncate(self.ends[-1])  # what a crash left of a line
                handle.write(line)
            sync(self.path)
            if made:
                sync(self.path.parent)
        self.bodies.append(body)
        self.add(len(line), digest)

    def cut(self, count: int) -> None:
        """Keep so many lines: what the others tell of will happen again."""
        if not self.path.exists():
            return
        del self.bodies[count:], self.hashes[count:], self.ends[count + 1 :]
        with writing(self.path):
            with self.path.open("ab") as handle:
                handle.truncate(self.ends[-1])
            sync(self.path)


class Seal:
    """What is sealed in a folder, and how to seal more.

    Attributes:
        key: fingerprint of the noise key that the folder was begun with, where it has one.
    """

    def __init__(self, folder: Path) -> None:
        """Read the seal of a folder; a LedgerError where it is missing, of another version, or broken."""
        self.folder = folder
        path = folder / NAME
        lost = "missing; the folder was written by an earlier version, or lost what seals its files"
        require(path.exists(), path, lost)
        self.lines = ChainedLines(path, "seal")
        first = next(iter(self.lines.bodies), {})
        require(first.get("seal") == FORMAT, path, f"not a seal of this version (format {FORMAT})")
        self.key: str | None = first.get("key")

    @staticmethod
    def create(folder: Path, key: str | None = None) -> None:
        """Seal the files of a new folder.

        Args:
            key: fingerprint of the noise key, where the folder has one.
        """
        found = {path.name: digest_file(path) for path in sorted(folder.iterdir()) if path.name in SEALED}
        known = {} if key is None else {"key": key}
        ChainedLines(folder / NAME, "seal").append({"seal": FORMAT, "files": found, **known})

    @property
    def models_dropped(self) -> bool:
        """Whether somebody removed the models of the run on purpose, and said so."""
        return any(DROPPED in line for line in self.lines.bodies)

    def sealed(self) -> dict[str, tuple[str | None, ...]]:
        """Which digests each file may have, the last that was sealed first; None stands for a missing file.

        Where nothing was sealed since, a crash may have come before the file was replaced.
        """
        digests: dict[str, list[str | None]] = {}
        newest: Mapping[str, Any] = {}
        for body in self.lines.bodies:
            newest = body.get("files", {})
            for name, digest in newest.items():
                digests.setdefault(name, [None]).append(digest)
        return {name: tuple(found[: -3 if name in newest else -2 : -1]) for name, found in digests.items()}

    def heads(self, chain: str) -> Iterator[ChainHead]:
        """Where a chain (ledger, metrics) stood whenever that was sealed."""
        return (ChainHead.from_json(body[chain]) for body in self.lines.bodies if chain in body)

    def ledger(self) -> ChainHead | None:
        """The latest head of the ledger that was sealed."""
        return max(self.heads("ledger"), key=lambda head: head.count, default=None)

    def write_text(self, path: Path, text: str, **heads: object) -> None:
        """Seal what a file will hold, and let it hold it."""
        digest = digest_bytes(text.encode())
        if self.sealed().get(path.name, ("",))[0] == digest and path.exists() and not heads:
            return
        self.lines.append({"files": {path.name: digest}, **heads})
        write_text(path, text)
        sync(path.parent)
        self.lines.append({"written": path.name})  # what was there before is no longer accepted

    def settle(self) -> None:
        """After a crash between the seal of a file and the file itself: the file as it is counts."""
        for name, allowed in self.sealed().items():
            if (found := self._found(name)) in allowed[1:] and found != allowed[0]:
                self.lines.append({"files": {name: found}})

    def checks(self) -> Iterator[Check]:
        """One for each file that is sealed, or should be, and for each run that a comparison remembers."""
        names = {path.name for path in self.folder.iterdir() if path.name in SEALED}
        for name in sorted(names | set(self.sealed())):
            yield partial(self.check, name)
        for name, heads in self._runs().items():
            yield partial(self._check_run, self.folder / "cells" / name, heads)

    def check(self, name: str) -> None:
        """Refuse a file that is not as it was sealed."""
        path, allowed, found = self.folder / name, self.sealed().get(name), self._found(name)
        require(allowed, path, "was never sealed; no run of this version wrote it")
        changed = f"changed since it was written; {NAME} has another digest"
        problem = f"missing; {NAME} has its digest" if found is None else changed
        require(found in (allowed or ()), path, problem)

    def _found(self, name: str) -> str | None:
        path = self.folder / name
        return digest_file(path) if path.exists() else None

    # --- the runs of a comparison -----------------------------------------------------------------------

    def _runs(self) -> dict[str, list[ChainHead]]:
        known: dict[str, list[ChainHead]] = {}
        for body in self.lines.bodies:
            for name in body.get("cells", ()):  # those that the table tells of
                known.setdefault(name, [])
            for name, head in body.get(RUNS, {}).items():
                known.setdefault(name, []).extend([ChainHead.from_json(head)] if head else [])
        return known

    def _check_run(self, run: Path, heads: Iterable[ChainHead]) -> None:
        """A run that is remembered must be there, and be the same."""
        ours = str(self.lines.path)
        lost = f"missing; {ours} tells of this run, and what it spent counts. "
        lost += "Put it back, or begin another comparison"
        for path in (run, RunFolder(run).ledger):
            require(path.exists(), path, lost)
        for head in heads:
            Seal(run).lines.check_seen(head, ours)

    def remember(self, runs: Iterable[Path], *, running: bool) -> None:
        """Keep how far each run that has begun has come.

        Args:
            running: some may be going on; then of those that are new the first line is read, which stays.
        """
        known, heads = self._runs(), dict[str, Json | None]()
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
            self.lines.append({RUNS: heads})
