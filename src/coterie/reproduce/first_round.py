"""What batch sizes do to the noise of round 1, from the accountant alone.

One noise multiplier z hides every step of a run, as in Figures 3, 4 and 14 (right) of Malekmohammadi, Taik
and Farnadi (TMLR 2025): batches of `first` records in round 1, of `later` records in the rounds after it.
"""

from dataclasses import dataclass
from functools import cache

from coterie.privacy import Adjacency, Budget, PoissonSteps, Unit, calibrate
from coterie.privacy.plans import FIRST_ROUND, TRAINING, RecordReleases, noise_of, plan_of


@dataclass(frozen=True)
class NoiseExample:
    """A client and its budget; the defaults are the setting of the publication's Figures 3 and 4."""

    records: int = 6600
    epsilon: float = 5.0
    delta: float = 1e-4
    rounds: int = 200
    clip: float = 3.0
    parameters: int = 11_181_642
    lr: float = 5e-4


@cache
def noise_multiplier(client: NoiseExample, first: int, later: int) -> float:
    """The z that fits the budget with these batches in round 1 and afterwards."""
    own = RecordReleases(client.records, clip=client.clip)
    batches = {FIRST_ROUND: (first, 1), TRAINING: (later, client.rounds - 1)}
    releases = [
        own.steps(name, times, None if batch == client.records else batch)
        for name, (batch, times) in batches.items()
    ]
    plan = plan_of(Unit.RECORD, Adjacency.ZERO_OUT, {"client": releases})
    noise = noise_of(calibrate(plan, Budget(client.epsilon, client.delta)), FIRST_ROUND)
    assert noise is not None
    return noise


def update_variance(client: NoiseExample, first: int, later: int, *, in_round_1: bool) -> float:
    """Variance of the noise in a client's update of one round, summed over its coordinates."""
    noise, batch = noise_multiplier(client, first, later), first if in_round_1 else later
    steps = PoissonSteps(client.clip, noise, client.records, batch, 1, Adjacency.ZERO_OUT)
    return client.parameters * steps.noise_in_release(client.lr, pull=0.0) ** 2
