"""What algorithms share whose unit is a whole client: the plan, the local training and the server's step.

In a round every client is sampled by its own coin, trains without noise from what it was sent, and its whole
update is clipped. The trusted server sums updates, adds noise, divides by a public number and takes a step.
"""

import math

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from coterie.algorithms.protocol import Algorithm, LocalTraining, PublicFacts, S
from coterie.algorithms.settings import AlgorithmSettings, PrivacySettings
from coterie.errors import InputError
from coterie.privacy import (
    POPULATION,
    Mechanism,
    NoiseRule,
    PlannedRelease,
    PrivacyPlan,
    SampledSum,
    ThreatModel,
    Unit,
    UnitPlan,
)

SUMS = "sums"
"""The one release of a round."""
TRUSTED_SERVER = ThreatModel(
    observers="whoever sees the models", sees="every model of every round", trusted="the server"
)
TUNING = "hyper-parameters chosen by trying them on private data are not accounted for"


class ClientLevelSettings(AlgorithmSettings):
    """Options of every algorithm whose unit is a client."""

    rate: float = Field(0.1, gt=0, le=1, description="probability that a client takes part in a round")
    server_step: float = Field(1.0, gt=0, allow_inf_nan=False, description="step size of the server")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of a client's local steps")


class ClientLevel(Algorithm[S]):
    """An algorithm that asks for sums of a sample of clients."""

    unit = Unit.CLIENT
    settings: ClientLevelSettings

    def local_training(self) -> LocalTraining:
        schedule = self.schedule
        return LocalTraining(
            schedule.epochs, schedule.batch, schedule.lr, self.settings.momentum, self.proximal()
        )

    def proximal(self) -> float:
        """Weight of the pull towards the start of a round."""
        return 0.0

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        return client_plan(facts, self.privacy, self.release(facts), self.schedule.rounds)

    def release(self, facts: PublicFacts) -> Mechanism:
        """What one round releases."""
        return sampled_sum(self.privacy, self.settings.rate)

    def expected(self, clients: int) -> float:
        """How many clients a round is expected to sample: a public number."""
        return self.settings.rate * clients


def sampled_sum(privacy: PrivacySettings, rate: float) -> SampledSum:
    """Sums of a Poisson sample, with the plan's free noise multiplier."""
    return SampledSum(
        clip=privacy.clip, noise_multiplier=NoiseRule.SHARED, rate=rate, adjacency=privacy.adjacency
    )


def client_plan(facts: PublicFacts, privacy: PrivacySettings, release: Mechanism, rounds: int) -> PrivacyPlan:
    """One plan for every client: all are sampled alike, so all are charged alike, in one entry a round."""
    if privacy.budgets:
        raise InputError(
            f"privacy.budgets: {min(privacy.budgets)} has one of its own, but clients who are sampled alike "
            "spend alike; allowed for unit client: privacy.epsilon and privacy.delta"
        )
    unit = UnitPlan(POPULATION, (PlannedRelease(SUMS, release, rounds),))
    return PrivacyPlan(
        unit=Unit.CLIENT, adjacency=privacy.adjacency, threat=TRUSTED_SERVER, units=(unit,), caveats=(TUNING,)
    )


def cohort_size(rate: float, clients: int) -> int:
    """A share that is no whole number of clients is rounded up: more are sampled, and charged."""
    return math.ceil(rate * clients - 1e-9)


def last_layer(facts: PublicFacts) -> NDArray[np.bool_]:
    """Which parameters belong to the model's last layer."""
    names = list(facts.layout)
    prefix = names[-1].rpartition(".")[0]
    masks = [np.full(size, name.rpartition(".")[0] == prefix) for name, size in facts.layout.items()]
    return np.concatenate(masks)


def stepped(
    models: NDArray[np.float32],
    sums: NDArray[np.float64],
    divisors: NDArray[np.float64],
    step: float,
) -> NDArray[np.float32]:
    """Models moved by noisy sums over public divisors (that broadcast over them)."""
    moved: NDArray[np.float32] = (models + step * sums / divisors).astype(np.float32)
    return moved
