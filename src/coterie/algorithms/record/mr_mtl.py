"""`mr-mtl`: one model per client, pulled towards the mean of all (mean-regularised multi-task learning).

Liu, Hu, Wu and Smith, "On Privacy and Personalization in Cross-Silo Federated Learning", NeurIPS 2022,
Algorithm A1. Client i descends f_i(theta_i) + pull / 2 * norm(theta_i - mean)^2, where the mean is that of
the models at the start of the round. The second term involves no record: its gradient joins each step
after clipping and noise and costs nothing. With `pull: 0` this is `local`, to the last bit.
"""

from dataclasses import replace

import numpy as np
from pydantic import Field

from coterie.algorithms.protocol import TrainJob
from coterie.algorithms.record.local import Local, LocalState
from coterie.algorithms.settings import AlgorithmSettings, PrivacySettings, Pull, Schedule
from coterie.errors import InputError


class MRMTLSettings(AlgorithmSettings):
    """Options of mr-mtl."""

    pull: Pull = Field(0.003, description="weight of the pull towards the mean model (lambda)")


class MRMTL(Local):
    name = "mr-mtl"
    settings: MRMTLSettings

    def __init__(self, settings: MRMTLSettings, schedule: Schedule, privacy: PrivacySettings) -> None:
        super().__init__(settings, schedule, privacy)
        if settings.pull * schedule.lr > 1:
            raise InputError(
                f"algorithm.pull: {settings.pull:g} with schedule.lr {schedule.lr:g} steps beyond the mean; "
                f"allowed: 0 to {1 / schedule.lr:g}"
            )

    def jobs(self, state: LocalState) -> list[TrainJob]:
        alone = super().jobs(state)
        if self.settings.pull == 0:
            return alone
        mean = state.models.mean(axis=0, dtype=np.float64).astype(np.float32)
        return [replace(job, anchor=mean, anchor_weight=self.settings.pull) for job in alone]
