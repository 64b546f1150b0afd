"""Who works with whom: groups that may overlap, public and fixed for a whole run."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import shortest_path

from coterie.errors import InputError
from coterie.privacy.ranges import CLIENTS, GROUPS

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LABEL_CAVEAT = "the groups were formed from labels and tell which a worker holds; that is not covered"


@dataclass(frozen=True)
class Structure:
    """Groups of workers; workers and groups are numbered from 0, and may have names.

    Example:
        >>> Structure("mine", ((0, 1), (1, 2)), 3)
        Structure(mine: 3 workers in 2 groups, 1 of them in several)
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    workers: int
    names: tuple[str, ...] = ()
    group_names: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.groups:
            raise InputError("groups: none was given, at least 1 is needed")
        if self.names and (len(self.names) != self.workers or len(set(self.names)) != self.workers):
            raise InputError(f"workers: {self.workers} different names are needed, one for each")
        if self.group_names and len(self.group_names) != len(self.groups):
            raise InputError(f"groups: {len(self.groups)} names are needed, one for each")
        for number, members in enumerate(self.groups):
            if not members:
                raise InputError(f"groups[{number}]: empty, at least 1 worker is needed")
            if self.workers < 1:
                raise InputError(f"workers: {self.workers} is not allowed, at least 1 is")
            for worker in members:
                if not 0 <= worker < self.workers:
                    raise InputError(
                        f"groups[{number}]: worker {worker} is unknown, 0 to {self.workers - 1} are allowed"
                    )
            if len(set(members)) != len(members):
                twice, _ = Counter(members).most_common(1)[0]
                raise InputError(f"groups[{number}]: worker {self.name(twice)} is listed twice")
        grouped = set(chain.from_iterable(self.groups))
        alone = self.workers - len(grouped)
        if alone:
            # Before there is any table: so few in groups may stand beside a number with many digits.
            some = islice((worker for worker in range(self.workers) if worker not in grouped), 5)
            listed = ", ".join(self.name(worker) for worker in some) + (", ..." if alone > 5 else "")
            raise InputError(f"groups: {alone} of {self.workers} workers are in no group ({listed})")

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Structure({self.summary})"

    @property
    def summary(self) -> str:
        """The structure in a few words."""
        several = int((self.membership.sum(axis=1) > 1).sum())
        groups = f"{len(self.groups)} group{'s' if len(self.groups) > 1 else ''}"
        return f"{self.kind}: {self.workers} workers in {groups}, {several} of them in several"

    def name(self, worker: int) -> str:
        """How a person calls this worker."""
        return self.names[worker] if self.names else str(worker)

    def group_name(self, group: int) -> str:
        """How a person calls this group."""
        return self.group_names[group] if self.group_names else str(group)

    def worker(self, text: str) -> int:
        """The number of the worker that a person calls so."""
        if text in self.names:
            return self.names.index(text)
        if text.isdecimal() and len(text) <= 20 and int(text) < self.workers:
            return int(text)
        raise InputError(
            f"worker: {text!r} is unknown, a number from 0 to {self.workers - 1} or a name is allowed"
        )

    def groups_of(self, *workers: int) -> frozenset[int]:
        """All groups that any of these workers is in."""
        return frozenset(np.flatnonzero(self.membership[list(workers)].any(axis=0)).tolist())

    @cached_property
    def _hash(self) -> int:
        # Once: what is known about a structure is cached by it.
        return hash((self.kind, self.groups, self.workers, self.names))

    @cached_property
    def membership(self) -> Bools:
        """[worker, group]: is the worker in the group."""
        table = np.zeros((self.workers, len(self.groups)), dtype=np.bool_)
        for number, members in enumerate(self.groups):
            table[list(members), number] = True
        return table

    @cached_property
    def classes(self) -> Bools:
        """[class, group]: the different sets of groups that workers are in; all else follows from them."""
        return self._classes[0]

    @cached_property
    def class_of(self) -> Ints:
        """The class of every worker."""
        return self._classes[1]

    @cached_property
    def class_sizes(self) -> Ints:
        """How many workers each class has."""
        return np.bincount(self.class_of)

    @cached_property
    def _classes(self) -> tuple[Bools, Ints]:
        table, numbers = np.unique(self.membership, axis=0, return_inverse=True)
        return table, numbers.reshape(-1).astype(np.int64)

    @cached_property
    def shared(self) -> Ints:
        """[group, group]: how many workers are in both."""
        table = self.classes.astype(np.float64)
        return np.asarray((table.T * self.class_sizes) @ table, dtype=np.int64)

    @cached_property
    def overlap(self) -> Bools:
        """[group, group]: do they share a worker; every group shares one with itself."""
        return self.shared > 0

    @cached_property
    def distances(self) -> Floats:
        """[group, group]: hops between groups that share a worker, infinite where no path leads."""
        return hops(self.overlap)

    @cached_property
    def class_hops(self) -> tuple[Floats, Floats]:
        """From the nearest group of each class: hops to every group, and to the nearest of every class."""
        to_groups = np.stack([self.distances[member].min(axis=0) for member in self.classes])
        return to_groups, np.stack([to_groups[:, member].min(axis=1) for member in self.classes])


def hops(overlap: Bools, sources: Sequence[int] | None = None) -> Floats:
    """Hops from every source group (by default from all) to every group."""
    return np.asarray(shortest_path(csr_array(overlap), method="D", unweighted=True, indices=sources))


def global_structure(workers: int) -> Structure:
    """Everyone in one group: ordinary federated learning."""
    return _consecutive("global", workers, 1, 1, range)


def ring(workers: int, groups: int) -> Structure:
    """Groups in a circle; each shares one worker with the next and has workers/groups + 1 of them."""
    return _consecutive(
        "ring", workers, groups, groups, lambda start, end: {one % workers for one in range(start, end + 1)}
    )


def string(workers: int, groups: int) -> Structure:
    """A ring cut open between its last group and its first."""
    least = groups + 1 if groups > 1 else 1
    return _consecutive(
        "string", workers, groups, least, lambda start, end: range(start, min(end, workers - 1) + 1)
    )


def clustered(workers: int, groups: int) -> Structure:
    """Groups of equal size that share nobody."""
    return _consecutive("clustered", workers, groups, groups, range)


def label(labels: Sequence[Collection[int]], groups: int) -> Structure:
    """Workers that hold label y are in group y mod `groups`.

    Args:
        labels: the labels that each worker holds.
        groups: how many groups there are.
    """
    _check_counts(len(labels), groups, least=1)
    members: list[list[int]] = [[] for _ in range(groups)]
    for worker, held in enumerate(labels):
        for group in sorted({y % groups for y in held}):
            members[group].append(worker)
    return Structure("label", tuple(tuple(group) for group in members), len(labels), caveats=(LABEL_CAVEAT,))


def drawn_labels(workers: int, seed: int) -> list[frozenset[int]]:
    """Labels that workers of 600 records hold if mixtures of 10 labels come from a Dirichlet distribution."""
    rng = np.random.default_rng(seed)
    mixtures = rng.dirichlet([0.1] * 10, workers)
    return [frozenset(np.flatnonzero(rng.multinomial(600, mixture)).tolist()) for mixture in mixtures]


def _check_counts(workers: int, groups: int, least: int) -> None:
    GROUPS.check("groups", groups)
    CLIENTS.check("workers", workers)
    if workers < least:
        raise InputError(f"workers: {workers} is not allowed, {groups} groups need at least {least}")


def _consecutive(
    kind: str, workers: int, groups: int, least: int, members: Callable[[int, int], Iterable[int]]
) -> Structure:
    """Groups of `members` between the ends of so many equal parts of all workers, who must be enough."""
    _check_counts(workers, groups, least)
    ends = pairwise(number * workers // groups for number in range(groups + 1))
    return Structure(kind, tuple(tuple(sorted(members(start, end))) for start, end in ends), workers)
