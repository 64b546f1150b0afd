"""`dp-ogl`: workers learn in overlapping groups, one release for each group and epoch."""

from pydantic import Field

from coterie.algorithms.settings import PrivacySettings, Schedule
from coterie.algorithms.worker.worker_level import WorkerLevel, WorkerLevelSettings
from coterie.privacy.ranges import ROUNDS


class OGLSettings(WorkerLevelSettings):
    """Options of training in overlapping groups."""

    period: int = Field(
        10, ge=1, le=ROUNDS.most, description="epochs from one merge of models to the next (S)"
    )


class DPOGL(WorkerLevel):
    name = "dp-ogl"
    settings: OGLSettings

    def __init__(self, settings: OGLSettings, schedule: Schedule, privacy: PrivacySettings) -> None:
        super().__init__(settings, schedule, privacy)
        self.period = settings.period
