"""Found clusters beside the true ones: names, matching colours, who was placed where."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from scipy.optimize import linear_sum_assignment

from coterie.privacy import Unit
from coterie.report.drawing import chip
from coterie.report.record import RunRecord


@dataclass(frozen=True)
class Group:
    """Clients that the report shows together."""

    name: str
    series: int
    clients: tuple[str, ...]


@dataclass(frozen=True)
class Clusters:
    """The clusters of a run as the report speaks of them."""

    run: RunRecord

    @cached_property
    def found(self) -> list[int]:
        return sorted(set(self.run.clusters.values()))

    @cached_property
    def true(self) -> list[int]:
        return sorted(set(self.run.truth.values())) if self.run.truth else []

    @property
    def looked_for(self) -> bool:
        """Whether the run put clients into clusters of its own choice."""
        if self.run.findings is not None:
            return bool(self.run.clusters)
        if self.run.experiment.privacy.unit is Unit.WORKER:
            return False
        return 1 < len(self.found) < len(self.run.clients) and not self.run.knows_truth

    @cached_property
    def groups(self) -> list[Group]:
        """By true cluster where it is known, else by the clusters found, else all clients together."""
        truth = self.run.truth
        if truth is not None:
            return [Group(self.true_name(k), self.true_series(k), _members(truth, k)) for k in self.true]
        if self.looked_for:
            clusters = self.run.clusters
            return [Group(f"cluster {k}", self.found_series[k], _members(clusters, k)) for k in self.found]
        return [Group("all clients", 0, tuple(client.name for client in self.run.clients))]

    def true_name(self, cluster: int) -> str:
        told = {"rotation": f"{cluster}, turned {90 * cluster}°", "label": f"{cluster}, labels +{cluster}"}
        return told.get(getattr(self.run.experiment.federation, "shift", ""), str(cluster))

    def true_chip(self, cluster: int) -> str:
        return chip(self.true_name(cluster), self.true_series(cluster))

    def true_series(self, cluster: int) -> int:
        return self.true.index(cluster)

    @cached_property
    def found_series(self) -> dict[int, int]:
        """Colour of the true cluster that a found one stands for; a further one gets a further colour."""
        stands_for = {found: self.true_series(true) for found, true in self.matching.items()}
        further = (cluster for cluster in self._drawn if cluster not in stands_for)
        return stands_for | {cluster: place for place, cluster in enumerate(further, len(self.true))}

    @cached_property
    def _drawn(self) -> list[int]:
        """Found clusters and the components of round 1, also those that nobody is in any more."""
        components = len(self.run.findings.centres) if self.run.findings else 0
        return sorted({*self.found, *range(components)})

    @cached_property
    def counts(self) -> Counter[tuple[int, int]]:
        """Clients by true and found cluster."""
        truth = self.run.truth or {}
        return Counter((truth[name], found) for name, found in self.run.clusters.items() if name in truth)

    @cached_property
    def matching(self) -> dict[int, int]:
        """The true cluster of each found one, such that most clients are where they belong.

        Between equals, and for clusters that were left, round 1 decides.
        """
        truth, findings, first = self.run.truth, self.run.findings, Counter[tuple[int, int]]()
        if truth is None or not self._drawn:
            return {}
        if findings is not None:
            labels = first_round_labels(findings.responsibilities)
            first.update((truth[name], own) for name, own in zip(findings.clients, labels, strict=True))
        weights = [
            [self.counts[true, found] + first[true, found] / 1000 for true in self.true]
            for found in self._drawn
        ]
        pairs = zip(*linear_sum_assignment(weights, maximize=True), strict=True)
        return {self._drawn[row]: self.true[column] for row, column in pairs}

    @property
    def placed(self) -> int:
        """Clients that are in the found cluster that stands for their true one."""
        return sum(self.counts[true, found] for found, true in self.matching.items())


def _members(clusters: Mapping[str, int], cluster: int) -> tuple[str, ...]:
    return tuple(client for client, own in clusters.items() if own == cluster)


def first_round_labels(responsibilities: Sequence[Sequence[float]]) -> list[int]:
    """The component that each point of round 1 most likely came from."""
    return [max(range(len(row)), key=row.__getitem__) for row in responsibilities]
