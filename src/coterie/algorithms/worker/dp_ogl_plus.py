"""`dp-ogl-plus`: one release for each group and block of S epochs, in which workers train alone.

Nothing is exchanged inside a block, so a block is one local training of S times the length, from the merged
models at its start, with the clip sqrt(S) c. Models change at the end of a block only.

As published (`privacy.mode: paper` alone) members exchange models inside a block, neither clipped nor noisy:
one worker then moves what all of them send. The guarantee of such a run says what that leaves.
"""

from coterie.algorithms.settings import PrivacySettings, Schedule
from coterie.algorithms.worker.dp_ogl import DPOGL, OGLSettings
from coterie.errors import InputError
from coterie.groups import GroupAlgorithm
from coterie.privacy import Mode


class DPOGLPlus(DPOGL):
    name = "dp-ogl-plus"
    rule = GroupAlgorithm.DP_OGL_PLUS

    def __init__(self, settings: OGLSettings, schedule: Schedule, privacy: PrivacySettings) -> None:
        super().__init__(settings, schedule, privacy)
        if schedule.rounds < settings.period:
            raise InputError(
                f"algorithm.period: {settings.period} is longer than the run; allowed: 1 to {schedule.rounds}"
            )
        self.block = settings.period
        self.drafts = settings.period if privacy.mode is Mode.PAPER else 1
