"""`oracle`: the true clusters are known; what clustering could reach at best under the same promise.

Its plan has no first round for clustering and no selections, so all of the budget goes into training.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coterie.algorithms.averaging import step_clusters
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
from coterie.algorithms.settings import AlgorithmSettings, PrivacySettings, Schedule
from coterie.privacy import PrivacyPlan, Unit


@dataclass(frozen=True)
class OracleState(State):
    models: NDArray[np.float32]
    cluster_of: Mapping[str, int]


@register
class Oracle(Algorithm[OracleState]):
    name = "oracle"
    unit = Unit.RECORD
    state_type = OracleState
    needs_truth = True

    def __init__(
        self,
        settings: AlgorithmSettings,
        schedule: Schedule,
        privacy: PrivacySettings,
        *,
        truth: Mapping[str, int],
    ) -> None:
        super().__init__(settings, schedule, privacy)
        self.truth = truth

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        return training_plan(
            facts,
            self.schedule,
            self.privacy,
            caveats=("the true clusters were handed to the algorithm",),
        )

    def start(self, facts: PublicFacts, rng: np.random.Generator) -> OracleState:
        seed = int(rng.integers(2**31))
        clusters = len(set(self.truth.values()))
        return OracleState(
            round=0,
            clients=facts.clients,
            seed=seed,
            models=np.tile(facts.initialise(seed), (clusters, 1)),
            cluster_of=dict(self.truth),
        )

    def round(self, state: OracleState) -> Rounds[OracleState]:
        jobs = [TrainJob(client, state.models[state.cluster_of[client]]) for client in state.clients]
        updates = yield from train("training", jobs)
        return replace(
            state, round=state.round + 1, models=step_clusters(state.models, state.cluster_of, updates)
        )

    def models(self, state: OracleState) -> Assignment:
        return Assignment(state.models, state.cluster_of)
