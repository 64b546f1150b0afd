"""`half`: like `global`, but the server asks a random share of the clients in each round."""

from pydantic import Field

from coterie.algorithms.protocol import TrainJob
from coterie.algorithms.record.global_model import Global, GlobalState
from coterie.algorithms.settings import AlgorithmSettings


class HalfSettings(AlgorithmSettings):
    """Options of an experiment's `algorithm` section."""

    share: float = Field(0.5, gt=0, le=1, description="share of the clients that is asked in a round")


class Half(Global):
    """The plan is inherited: it charges every client for every round, which is more than is asked for."""

    settings: HalfSettings

    def jobs(self, state: GlobalState) -> list[TrainJob]:
        count = max(1, round(self.settings.share * len(state.clients)))
        asked = state.rng().choice(state.clients, size=count, replace=False)
        return [job for job in super().jobs(state) if job.client in asked]
