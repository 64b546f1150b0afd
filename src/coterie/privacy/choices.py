"""Private choices among models on one's own records, as many as one likes, each charged before it is made.

The ledger of a run enforces a plan that was proven beforehand. Here nobody knows how often a holder of
records will choose, so nothing is planned: every choice is one line of a chain beside the records, and the
guarantee is that of all lines so far, composed. The chain only grows, by one process at a time, and its owner
alone reads it.

A choice is the exponential mechanism on counts. For every model the score of each record, between 0 and 1, is
added up; a record that counts for nothing (zero-out) lowers each sum by at most 1, and raises none. With
Gumbel noise of scale 1 / epsilon on every sum, the logarithms of the probabilities of all outcomes move
within an interval of length epsilon: a choice is epsilon-DP. If any other record may take its place, one sum
may rise while another falls, and it is 2 epsilon.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from coterie.privacy.chain import HashChain, WritableChain
from coterie.privacy.errors import LedgerError, PrivacyInputError
from coterie.privacy.guarantee import Guarantee, guarantee
from coterie.privacy.locked_file import create, explained, open_locked
from coterie.privacy.plain import MalformedError, Plain
from coterie.privacy.plan import PlannedRelease, PrivacyPlan, UnitPlan
from coterie.privacy.selections import PrivateSelection
from coterie.privacy.units import Adjacency, Custody, ThreatModel, Unit, round_up

_FORMAT = 1
_OWNER_ALONE = 0o600
THREAT = ThreatModel(observers="whoever is told the cluster", sees="every choice that was made here")


@dataclass(frozen=True)
class ChargedChoice(Plain):
    """One choice that was, or is about to be, made.

    Args:
        models: a digest of those that were chosen from.
        candidates: how many.
        records: how many took part: a public number.
    """

    called = "choice"
    mistake = LedgerError
    epsilon: float
    models: str
    candidates: int
    records: int

    @property
    def selection(self) -> PrivateSelection:
        """The mechanism that makes it."""
        return PrivateSelection(self.epsilon, Adjacency.ZERO_OUT)


class ChoiceLedger(WritableChain):
    """All choices on the records of one folder, open for this process alone.

    Example:
        with ChoiceLedger.open(path) as ledger:
            ledger.charge(ChargedChoice(0.5, digest, candidates=4, records=1000))
            print(ledger.guarantee("north", delta=1e-4).line)
    """

    def __init__(self, path: Path, content: bytes) -> None:
        """Check the whole chain and what it says."""
        super().__init__(path)
        self.choices: list[ChargedChoice] = []
        bodies = self.follow(content)
        if next(bodies, None) != {"choices": _FORMAT}:
            raise LedgerError(f"{path}: line 1 is not the header of a ledger of choices (format {_FORMAT})")
        for number, body in enumerate(bodies, start=2):
            try:
                choice = ChargedChoice.read(body.get("choice"))
                _ = choice.selection
            except (MalformedError, LedgerError, PrivacyInputError):
                raise LedgerError(f"{path}: line {number} is not a choice") from None
            self.choices.append(choice)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Begin the ledger in a file, or read it back and check every line; its folder exists."""
        with explained(path):
            first = HashChain(path).link({"choices": _FORMAT})[0]
            file = create(path, first, mode=_OWNER_ALONE) or open_locked(path)
            return cls._held(file, lambda content: cls(path, content), mode=_OWNER_ALONE)

    def charge(self, choice: ChargedChoice) -> None:
        """Write a choice that is about to be made; when this returns, it survives any crash."""
        _ = choice.selection  # what no mechanism makes is refused before it is written
        self.write({"choice": choice.to_json()})
        self.choices.append(choice)

    def guarantee(self, holder: str, delta: float, caveats: Sequence[str] = ()) -> Guarantee:
        """What holds of all choices so far together, for one record of the holder's."""
        return composed_choices(self.choices, holder, delta, caveats)


def composed_choices(
    choices: Sequence[ChargedChoice], holder: str, delta: float, caveats: Sequence[str] = ()
) -> Guarantee:
    """What several choices on the same records promise together."""
    kinds = Counter(choice.selection for choice in choices)
    releases = tuple(
        PlannedRelease(f"choice at epsilon {round_up(kind.epsilon)} ({place})", kind, times)
        for place, (kind, times) in enumerate(kinds.items(), start=1)
    )
    plan = PrivacyPlan(Unit.RECORD, Adjacency.ZERO_OUT, THREAT, (UnitPlan(holder, releases),))
    return guarantee(plan, delta=delta, caveats=caveats, held_by=Custody.EACH_SITE)
