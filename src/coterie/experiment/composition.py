"""What several runs on the same records spend together.

Whoever sees two runs learns what both tell, also of the one that is thrown away afterwards. Renyi divergences
of adaptive releases add up, so a record that is in the same client in all runs spends the sum of that
client's divergences, run by run. Where runs deal records otherwise (another seed, another federation), a
record may be with anybody in each of them: of every such group of runs the largest divergence of all clients
counts at each order, and these add up. Runs on other published data touch other records; of several data the
largest total counts. What a folder holds nobody can tell by its path (two spellings, a link, a copy, some of
the same people): runs on folders count as runs on the same records, each folder dealt in its own way.

The whole plan of a run counts as soon as it has begun. Workers are charged as if everybody saw every release,
which is more than one other worker learns. Where units or neighbours differ between runs, the total is that
of the smallest unit replaced by any other: every coarser promise covers it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coterie.experiment.folder import RunFolder
from coterie.experiment.own_code import own_parts
from coterie.experiment.recorded import RecordedRun
from coterie.files import Json, read_json
from coterie.plugins import DATA, FEDERATION
from coterie.privacy import Adjacency, PlannedRelease, Unit
from coterie.privacy.divergences import ORDERS, Floats
from coterie.privacy.events import composed
from coterie.privacy.rdp import RdpAccountant, epsilon_from_rdp
from coterie.privacy.units import number_to_json, round_up, short_number
from coterie.privacy.wording import weaknesses

ALONE = (
    "Each guarantee is that of one run alone; whoever sees several runs on the same records composes them."
)
FOLDERS = "Folders with different paths count as the same records, since they may hold them."

_SIZES = (Unit.RECORD, Unit.PERSON, Unit.WORKER, Unit.CLIENT)
"""From the smallest: a record is one of a person's, whose records at a client are some of that client's."""


@dataclass(frozen=True)
class Total:
    """What holds of several runs at once.

    Args:
        delta: the largest of theirs.
        weak: what voids or weakens the promise of one of them.
        folders: paths of folders whose records were taken to be the same.
    """

    runs: int
    epsilon: float
    delta: float
    unit: Unit
    adjacency: Adjacency
    weak: tuple[str, ...] = ()
    folders: int = 0

    @property
    def line(self) -> str:
        """What all of them spend together."""
        spent = f"(eps={round_up(self.epsilon)}, delta={short_number(self.delta)})-DP"
        if np.isinf(self.epsilon):
            spent = "no privacy (eps=inf)"
        weak = "".join(f"; {label}" for label in self.weak)
        whom = "one person's records at one client" if self.unit is Unit.PERSON else f"one {self.unit}"
        return f"all {self.runs} runs together: {spent} for {whom}, {self.adjacency}{weak}"

    @property
    def text(self) -> str:
        """The line, and what it means."""
        if self.runs == 1:
            return "This is one run; others on the same data would add to it."
        same = f" {FOLDERS}" if self.folders > 1 else ""
        return (
            f"Runs on the same data add up, also those whose models nobody uses; {self.line}.{same} {ALONE}"
        )

    def to_json(self) -> Json:
        return {
            "runs": self.runs,
            "epsilon": number_to_json(self.epsilon),
            "delta": self.delta,
            "unit": self.unit.value,
            "adjacency": self.adjacency.value,
            "text": self.text,
        }


def _dealt(run: RecordedRun) -> str:
    """What decides which records each client has, trained on and held out."""
    chosen, clients = run.experiment, None
    if chosen.own_records and run.files.federation.exists():
        # The files of a folder may have changed between two runs.
        clients = read_json(run.files.federation).get("clients")
    if _reads_anything(run):
        return str(run.files.path)  # nobody knows whether a user's own code deals twice alike
    return repr((chosen.data, chosen.federation, chosen.seeds.simulation, clients, run.plan.persons))


def _reads_anything(run: RecordedRun) -> bool:
    """Whether the user's own code made or dealt the records: it may read those of any other name, too."""
    return any(kind in (DATA, FEDERATION) for kind, _ in own_parts(run.experiment))


def total_of(paths: Iterable[Path]) -> Total | None:
    """What the runs in these folders spend together on any record; None where none has begun."""
    runs = [RecordedRun(RunFolder(path)) for path in paths]
    begun = [run for run in runs if run.files.ledger.exists()]
    if not begun:
        return None
    weak = tuple(dict.fromkeys(label for run in begun for label in weaknesses(run.guarantee.caveats)))
    delta = max(run.guarantee.delta for run in begun)
    if len(begun) == 1:
        only = begun[0].guarantee
        return Total(1, only.epsilon, delta, only.unit, only.adjacency, weak)
    unit = min((run.plan.unit for run in begun), key=_SIZES.index)
    kinds = {(run.plan.unit, run.plan.adjacency) for run in begun}
    adjacency = begun[0].plan.adjacency if len(kinds) == 1 else Adjacency.REPLACE_ONE
    by_data: dict[str, dict[str, list[RecordedRun]]] = {}
    anything = any(map(_reads_anything, begun))
    for run in begun:
        # Whatever else the settings say of data of this name (a path, a split) may lead to the same records.
        by_data.setdefault("" if anything else run.experiment.data.name, {}).setdefault(
            _dealt(run), []
        ).append(run)
    curves = [
        np.sum([_largest(runs, adjacency) for runs in groups.values()], axis=0) for groups in by_data.values()
    ]
    # Never less than one of them alone, whose own proof may be the better one.
    epsilon = max(
        *(epsilon_from_rdp(ORDERS, curve, delta) for curve in curves),
        *(run.guarantee.epsilon for run in begun),
    )
    folders = len({getattr(run.experiment.data, "path", None) for run in begun if run.experiment.own_records})
    return Total(len(begun), epsilon, delta, unit, adjacency, weak, folders)


def _largest(runs: Sequence[RecordedRun], adjacency: Adjacency) -> Floats:
    """Divergence of runs that deal records alike: at each order that of the client with the most."""
    releases: dict[str, list[tuple[PlannedRelease, ...]]] = {}
    everyone: list[tuple[PlannedRelease, ...]] = []
    for run in runs:
        if len(run.plan.units) == 1 and not run.plan.unit.within_client:
            everyone.append(run.plan.units[0].releases)  # a population: each of its clients
            continue
        for unit in run.plan.units:
            releases.setdefault(unit.subject, []).append(unit.releases)
    kinds = {tuple(own) for own in releases.values()} or {()}
    accounts = [
        RdpAccountant(composed([each.event for part in (*everyone, *own) for each in part]), adjacency)
        for own in kinds
    ]
    largest: Floats = np.max([each.divergences for each in accounts], axis=0)
    return largest
