"""`global`: everyone trains the same model and the server averages (DP-FedAvg; Noble et al., 2022)."""

from dataclasses import dataclass, replace

from coterie.algorithms.clusters import equal_starts
from coterie.algorithms.protocol import Assignment, Models, PublicFacts, Rng, State, Vector
from coterie.algorithms.record.record_level import RecordLevel


@dataclass(frozen=True)
class GlobalState(State):
    model: Vector


class Global(RecordLevel[GlobalState]):
    name = "global"

    def start(self, facts: PublicFacts, rng: Rng) -> GlobalState:
        seed, models = equal_starts(facts, rng, 1)
        return GlobalState(0, facts.clients, seed, models[0])

    def models(self, state: GlobalState) -> Assignment:
        return Assignment(state.model[None], dict.fromkeys(state.clients, 0))

    def moved(self, state: GlobalState, models: Models) -> GlobalState:
        return replace(state, round=state.round + 1, model=models[0])
