"""`dp-ogl-plus`: one release for each group and block of S epochs, in which workers train alone.

Nothing is exchanged inside a block, so a block is one local training of S times the length, from the merged
models at its start, with the clip sqrt(S) c. Models change at the end of a block only.

As published (`privacy.mode: paper` alone) members exchange models inside a block, neither clipped nor noisy:
one worker then moves what all of them send. The guarantee of such a run says what that leaves.
"""

import math
from dataclasses import replace

from coterie.algorithms.protocol import LocalTraining, Rounds
from coterie.algorithms.registry import register
from coterie.algorithms.settings import PrivacySettings, Schedule
from coterie.algorithms.worker.dp_ogl import DPOGL, OGLSettings
from coterie.algorithms.worker.worker_level import WorkerLevelState
from coterie.errors import InputError
from coterie.groups import GroupAlgorithm
from coterie.privacy import CohortSums, Mode, NoiseRule
from coterie.privacy.plans import CohortReleases


@register
class DPOGLPlus(DPOGL):
    name = "dp-ogl-plus"
    rule = GroupAlgorithm.DP_OGL_PLUS

    def __init__(self, settings: OGLSettings, schedule: Schedule, privacy: PrivacySettings) -> None:
        super().__init__(settings, schedule, privacy)
        if schedule.rounds < settings.period:
            raise InputError(
                f"algorithm.period: {settings.period} is longer than the run; allowed: 1 to {schedule.rounds}"
            )
        self.releases = schedule.rounds // settings.period
        self.drafts = settings.period if privacy.mode is Mode.PAPER else 1

    def group_sum(self, rate: float, clip: float, noise: float | NoiseRule) -> CohortSums:
        about = CohortReleases(rate, math.sqrt(self.period) * clip, self.privacy.adjacency)
        return about.sums(noise, drafted=self.drafts > 1)

    def round(self, state: WorkerLevelState) -> Rounds[WorkerLevelState]:
        if (state.round + 1) % self.period:
            return replace(state, round=state.round + 1)
        return (yield from self.epoch(state, True))

    def local_training(self) -> LocalTraining:
        return self.epochs(self.period // self.drafts)
