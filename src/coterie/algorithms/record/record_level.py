"""What algorithms share whose unit is one record, or one person's records at a client: plans and training.

Every client trains the model that it is assigned, and a model moves by the mean update of its clients. Where
that is fixed before the first round, it is the whole algorithm (`global`, `local`, `oracle`); others say who
is assigned which model, and what is released to find out.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np

from coterie.algorithms.clusters import ClusterSettings, check_clusters, step_clusters
from coterie.algorithms.protocol import (
    Algorithm,
    Assignment,
    Floats,
    Models,
    PublicFacts,
    Rounds,
    S,
    State,
    TrainJob,
    train,
)
from coterie.clustering.mixture import Mixture, draw_labels
from coterie.errors import InputError
from coterie.privacy import PlannedRelease, PrivacyPlan, Unit
from coterie.privacy.plans import TRAINING, RecordReleases, plan_of


class RecordLevel(Algorithm[S]):
    """Everyone trains in every round, from the model that `models` assigns."""

    unit = Unit.RECORD
    caveats: ClassVar[tuple[str, ...]] = ()

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        self.privacy.check_budgets(facts.clients)
        releases = {client: self.releases(facts, client) for client in facts.clients}
        privacy = self.privacy
        return plan_of(privacy.unit, privacy.adjacency, releases, self.caveats, persons=privacy.persons)

    def releases(self, facts: PublicFacts, client: str) -> list[PlannedRelease]:
        """All that a client releases in the whole run: by default what it learns in every round."""
        return [self.training(facts.records[client], self.schedule.rounds)]

    def about(self, records: int) -> RecordReleases:
        """What may be released about so many records."""
        privacy = self.privacy
        return RecordReleases(records, self.schedule.epochs, privacy.clip, privacy.adjacency, privacy.mode)

    def training(self, records: int, rounds: int) -> PlannedRelease:
        """DP-SGD over Poisson batches, released once a round, with the plan's free noise multiplier."""
        batch = self.schedule.batch
        if batch > records:
            raise InputError(
                f"schedule.batch: {batch} is more than the {records} {self.privacy.unit}s of a client; "
                f"allowed: 1 to {records}"
            )
        return self.about(records).steps(TRAINING, rounds, batch)

    @abstractmethod
    def models(self, state: S) -> Assignment: ...

    @abstractmethod
    def moved(self, state: S, models: Models) -> S:
        """The state after a round that left these models."""

    def jobs(self, state: S) -> list[TrainJob]:
        """What is asked of the clients in a round of training."""
        now = self.models(state)
        return [TrainJob(client, now.model_of(client)) for client in state.clients]

    def round(self, state: S) -> Rounds[S]:
        updates = yield from train(TRAINING, self.jobs(state))
        now = self.models(state)
        rule = self.schedule.aggregation
        return self.moved(state, step_clusters(now.models, now.cluster_of, updates, rule))


@dataclass(frozen=True)
class RecordClustersState(State):
    models: Models
    """Cluster models, one per row."""
    cluster_of: Mapping[str, int]

    def check(self) -> None:
        self.check_clusters("cluster_of", {client: (own,) for client, own in self.cluster_of.items()})

    def check_clusters(self, name: str, chosen: Mapping[str, Sequence[int]]) -> None:
        """Refuse choices of others than the clients, and of models that there are not."""
        if chosen.keys() != set(self.clients):
            raise ValueError(f"{name} is not of the run's clients")
        if not all(0 <= cluster < len(self.models) for own in chosen.values() for cluster in own):
            raise ValueError(f"{name} names a model beyond the {len(self.models)} that there are")


@dataclass(frozen=True)
class MixtureState(RecordClustersState):
    """Where a mixture groups the clients by what they release first: r-dpcfl and its preprint."""

    responsibilities: Floats
    """Probability of each cluster (column) for each client (row), from the mixture."""

    def drawn(self) -> dict[str, int]:
        """A cluster for each client, drawn at the mixture's odds."""
        labels = draw_labels(self.responsibilities, self.rng())
        return dict(zip(self.clients, labels.tolist(), strict=True))

    def rows_of(self, clients: Sequence[str]) -> list[int]:
        """The places of these clients among all."""
        return [self.clients.index(client) for client in clients]

    def odds(self, present: Sequence[str], mixture: Mixture) -> Floats:
        """The mixture's probabilities for those who answered; who did not may belong anywhere."""
        table = np.full((len(self.clients), mixture.clusters), 1.0 / mixture.clusters)
        table[self.rows_of(present)] = mixture.responsibilities
        return table


C = TypeVar("C", bound=RecordClustersState)


class RecordClusters(RecordLevel[C]):
    """One model for each cluster, and a cluster for each client."""

    def models(self, state: C) -> Assignment:
        return Assignment(state.models, state.cluster_of)

    def moved(self, state: C, models: Models) -> C:
        return replace(state, round=state.round + 1, models=models)


class GivenClusters(RecordClusters[C]):
    """As many clusters as the settings say."""

    settings: ClusterSettings

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        check_clusters(self.settings.clusters, len(facts.clients))
        return super().plan(facts)
