"""`local`: no federation; every client trains a model of its own under the same promise."""

from dataclasses import dataclass, replace

from coterie.algorithms.clusters import equal_starts
from coterie.algorithms.protocol import Assignment, Models, PublicFacts, Rng, State
from coterie.algorithms.record.record_level import RecordLevel


@dataclass(frozen=True)
class LocalState(State):
    models: Models
    """One row per client, in the order of `clients`."""


class Local(RecordLevel[LocalState]):
    name = "local"

    def start(self, facts: PublicFacts, rng: Rng) -> LocalState:
        return LocalState(0, facts.clients, *equal_starts(facts, rng, len(facts.clients)))

    def models(self, state: LocalState) -> Assignment:
        return Assignment(state.models, {client: row for row, client in enumerate(state.clients)})

    def moved(self, state: LocalState, models: Models) -> LocalState:
        return replace(state, round=state.round + 1, models=models)
