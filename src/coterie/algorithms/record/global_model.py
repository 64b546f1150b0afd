"""`global`: everyone trains the same model and the server averages (DP-FedAvg; Noble et al., 2022)."""

from dataclasses import dataclass, replace

import numpy as np

from coterie.algorithms.averaging import step_clusters
from coterie.algorithms.protocol import (
    Algorithm,
    Assignment,
    PublicFacts,
    Rounds,
    State,
    TrainJob,
    Vector,
    train,
)
from coterie.algorithms.record.planning import training_plan
from coterie.algorithms.registry import register
from coterie.privacy import PrivacyPlan, Unit


@dataclass(frozen=True)
class GlobalState(State):
    model: Vector


@register
class Global(Algorithm[GlobalState]):
    name = "global"
    unit = Unit.RECORD
    state_type = GlobalState

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        return training_plan(facts, self.schedule, self.privacy)

    def start(self, facts: PublicFacts, rng: np.random.Generator) -> GlobalState:
        seed = int(rng.integers(2**31))
        return GlobalState(round=0, clients=facts.clients, seed=seed, model=facts.initialise(seed))

    def round(self, state: GlobalState) -> Rounds[GlobalState]:
        updates = yield from train("training", [TrainJob(client, state.model) for client in state.clients])
        together = dict.fromkeys(state.clients, 0)
        return replace(
            state, round=state.round + 1, model=step_clusters(state.model[None], together, updates)[0]
        )

    def models(self, state: GlobalState) -> Assignment:
        return Assignment(state.model[None], dict.fromkeys(state.clients, 0))
