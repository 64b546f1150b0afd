"""`mr-mtl`: one model per client, pulled towards the mean of all (mean-regularised multi-task learning).

Liu, Hu, Wu and Smith, "On Privacy and Personalization in Cross-Silo Federated Learning", NeurIPS 2022,
Algorithm A1. Client i descends f_i(theta_i) + pull / 2 * norm(theta_i - mean)^2, where the mean is that of
the models at the start of the round. The second term involves no record: its gradient joins each step
after clipping and noise and costs nothing. With `pull: 0` this is `local`, to the last bit.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from coterie.algorithms.averaging import each_alone, step_clusters
from coterie.algorithms.planning import training_plan
from coterie.algorithms.protocol import (
    Algorithm,
    Asking,
    Assignment,
    PublicFacts,
    State,
    TrainJob,
    train,
)
from coterie.algorithms.registry import register
from coterie.algorithms.settings import AlgorithmSettings, PrivacySettings, Schedule
from coterie.errors import InputError
from coterie.privacy import PrivacyPlan, Unit


class MRMTLSettings(AlgorithmSettings):
    """Options of mr-mtl."""

    pull: float = Field(
        0.003, ge=0, allow_inf_nan=False, description="weight of the pull towards the mean model (lambda)"
    )


@dataclass(frozen=True)
class MRMTLState(State):
    models: NDArray[np.float32]
    """One row per client, in the order of `clients`."""


@register
class MRMTL(Algorithm[MRMTLState]):
    name = "mr-mtl"
    unit = Unit.RECORD
    settings_type = MRMTLSettings
    state_type = MRMTLState
    settings: MRMTLSettings

    def __init__(self, settings: MRMTLSettings, schedule: Schedule, privacy: PrivacySettings) -> None:
        super().__init__(settings, schedule, privacy)
        if settings.pull * schedule.lr > 1:
            raise InputError(
                f"algorithm.pull: {settings.pull:g} with schedule.lr {schedule.lr:g} steps beyond the mean; "
                f"allowed: 0 to {1 / schedule.lr:g}"
            )

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        return training_plan(facts, self.schedule, self.privacy)

    def start(self, facts: PublicFacts, rng: np.random.Generator) -> MRMTLState:
        seed = int(rng.integers(2**31))
        models = np.tile(facts.initialise(seed), (len(facts.clients), 1))
        return MRMTLState(round=0, clients=facts.clients, seed=seed, models=models)

    def round(self, state: MRMTLState) -> Asking[MRMTLState]:
        updates = yield from train("training", self._jobs(state))
        return replace(
            state,
            round=state.round + 1,
            models=step_clusters(state.models, each_alone(state.clients), updates),
        )

    def models(self, state: MRMTLState) -> Assignment:
        return Assignment(state.models, each_alone(state.clients))

    def _jobs(self, state: MRMTLState) -> list[TrainJob]:
        own = list(zip(state.clients, state.models, strict=True))
        if self.settings.pull == 0:
            return [TrainJob(client, model) for client, model in own]
        mean = state.models.mean(axis=0, dtype=np.float64).astype(np.float32)
        return [TrainJob(client, model, mean, self.settings.pull) for client, model in own]
