"""What a page claims, inside the page: the plan that proves it, the ledger's head, a hash of the page.

The claim is one JSON object in a comment before the end of the page. It is enough to count the epsilon again
without the run's folder. Its last entry is the hash of the whole page with that entry left empty, so a page
of which one byte was changed is found.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import CoterieError, LedgerError
from coterie.experiment.proven import ProvenPlan
from coterie.experiment.recorded import RecordedRun
from coterie.experiment.recount import close_to
from coterie.files import digest_bytes
from coterie.privacy import ChainHead
from coterie.privacy.plain import Plain

FORMAT = 1
_BLOCK = re.compile(rb"<!-- coterie-claim (\{.*\}) -->\n")
_OURS = re.compile(rb"coterie (run|comparison)</title>|<!-- coterie-claim ")


@dataclass(frozen=True)
class RunClaim(Plain):
    """What a page says about one run.

    Args:
        epsilon: as the page prints it.
        basis: what it follows from; None before the ledger was opened.
        ledger: where the ledger stood when the page was written.
    """

    called = "claim"
    mistake = LedgerError
    epsilon: float
    finished: bool
    basis: ProvenPlan | None
    ledger: ChainHead | None

    @classmethod
    def of(cls, path: Path) -> "RunClaim":
        """The claim that a run folder supports as it is now."""
        run = RecordedRun.of_this_version(path)
        begun = run.files.ledger.exists()
        proven, head = (run.proven, run.ledger.head) if begun else (None, None)
        return cls(run.guarantee.epsilon, run.files.finished, proven, head)

    def recounted(self) -> float | None:
        """Epsilon as it follows from what the page embeds."""
        return None if self.basis is None else self.basis.prove().epsilon

    def check(self, where: str) -> None:
        """Refuse an epsilon that does not follow from what is embedded beside it."""
        counted = self.recounted()
        if counted is not None and not close_to(self.epsilon, counted):
            raise LedgerError(f"{where}: claims epsilon {self.epsilon}; counted again it is {counted}")

    def check_against(self, where: str, run: RecordedRun) -> None:
        """Refuse a page that is not about the run folder beside it."""
        stated = run.guarantee.epsilon
        if not close_to(self.epsilon, stated):
            raise LedgerError(
                f"{where}: claims epsilon {self.epsilon}, {run.files.guarantee} states {stated}"
            )
        if self.finished and not run.files.finished:
            raise LedgerError(f"{where}: is the page of a finished run, {run.files.result} is missing")
        if self.basis is not None and self.basis.plan.digest() != run.plan.digest():
            raise LedgerError(f"{where}: its plan is not {run.files.plan}")
        if self.ledger is not None:
            run.ledger.check_seen(self.ledger, where)


def with_claim(page: str, runs: Mapping[str, RunClaim]) -> str:
    """The page with the claims that it makes about runs, by their names, and its own hash inside."""
    content = {"claim": FORMAT, "runs": {name: run.to_json() for name, run in runs.items()}, "page": ""}
    # Inside a comment nothing may look like its end.
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")
    body, end, rest = page.rpartition("</body>")
    if not end:
        raise ValueError("a page ends with its body")
    whole = f"{body}<!-- coterie-claim {text} -->\n{end}{rest}"
    return whole.replace('"page":""} -->', f'"page":"{digest_bytes(whole.encode())}"}} -->')


def is_page(path: Path) -> bool:
    """Whether a file is a page of ours, whatever became of it."""
    return path.is_file() and _OURS.search(path.read_bytes()) is not None


def read_claim(path: Path) -> dict[str, RunClaim]:
    """The claims of a page, by the names of its runs.

    Raises:
        LedgerError: a byte of the page was changed, or it has no claim.
    """
    content = path.read_bytes()
    blocks = list(_BLOCK.finditer(content))
    if len(blocks) != 1:
        raise LedgerError(f"{path}: embeds no claim; it was changed, or written by an earlier version")
    try:
        data = json.loads(blocks[0][1])
        version, digest = data["claim"], data["page"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise LedgerError(f"{path}: its claim is not readable; the page was changed") from None
    entry = f'"page":"{digest}"}} -->'.encode()
    empty = content.replace(entry, b'"page":""} -->')
    if content.count(entry) != 1 or digest_bytes(empty) != digest:
        raise LedgerError(f"{path}: changed since it was written; its hash does not fit")
    if version != FORMAT:
        raise LedgerError(f"{path}: its claim is of another version (format {version}, ours is {FORMAT})")
    try:
        return {str(name): RunClaim.read(run) for name, run in data["runs"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, CoterieError) as mistake:
        raise LedgerError(f"{path}: its claim is not one of this version ({mistake!r})") from None
