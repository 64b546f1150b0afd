"""`local`: no federation; every client trains a model of its own under the same promise."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coterie.algorithms.averaging import each_alone, step_clusters
from coterie.algorithms.protocol import (
    Algorithm,
    Assignment,
    PublicFacts,
    Rounds,
    State,
    TrainJob,
    train,
)
from coterie.algorithms.record.planning import training_plan
from coterie.algorithms.registry import register
from coterie.privacy import PrivacyPlan, Unit


@dataclass(frozen=True)
class LocalState(State):
    models: NDArray[np.float32]
    """One row per client, in the order of `clients`."""


@register
class Local(Algorithm[LocalState]):
    name = "local"
    unit = Unit.RECORD
    state_type = LocalState

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        return training_plan(facts, self.schedule, self.privacy)

    def start(self, facts: PublicFacts, rng: np.random.Generator) -> LocalState:
        seed = int(rng.integers(2**31))
        models = np.tile(facts.initialise(seed), (len(facts.clients), 1))
        return LocalState(round=0, clients=facts.clients, seed=seed, models=models)

    def round(self, state: LocalState) -> Rounds[LocalState]:
        updates = yield from train("training", self.jobs(state))
        return replace(
            state,
            round=state.round + 1,
            models=step_clusters(state.models, each_alone(state.clients), updates),
        )

    def models(self, state: LocalState) -> Assignment:
        return Assignment(state.models, each_alone(state.clients))

    def jobs(self, state: LocalState) -> list[TrainJob]:
        """What every client is asked in this round."""
        return [TrainJob(client, model) for client, model in zip(state.clients, state.models, strict=True)]
